"""The tables of a configuration: what all have in common, host pool, offload, storage, http. Replicas: `replica`."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias

from pydantic import (
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.functional_validators import AfterValidator, BeforeValidator

from kvcached.config.base_table import Table
from kvcached.config.problems import mistake
from kvcached.config.quota import QuotaConfig
from kvcached_client.blocks.host_layout import PAGE_BYTES, slots_per_slab, smallest_slab
from kvcached_client.blocks.layout import POOL_SIZE_BYTES_MAX, Layout
from kvcached_client.doctor.memory_bounds import memory_bounds
from kvcached_client.transport.run_dir import SOCKET_PATH_BYTES_MAX

#: Of the file that says which generation of each namespace is the present one.
RECORD_NAME: Final = "generations.json"
_SHARED_BACKENDS: Final = frozenset({"redis", "s3"})
#: Slots travel as int32.
SLOTS_MAX: Final = (1 << 31) - 1
#: The values of `kvcached_client.types.WritePolicy`.
WritePolicyName: TypeAlias = Literal["write_through", "write_through_selective", "write_back", "never"]
#: The names in `kvcached.core.eviction.by_priority`.
EvictionPolicyName: TypeAlias = Literal["lru", "slru"]
#: How storage has blocks of engines in offload mode: as the engines have them, or for any number of shards.
StorageLayout: TypeAlias = Literal["engine", "canonical"]
#: The values of `kvcached_client.types.Verify`.
VerifyName: TypeAlias = Literal["inherited", "always", "never"]

_PARSER: Final = TypeAdapter(ByteSize)


def _parsed(value: object) -> object:
    """The bytes that a text means. Everything else is left to the validators behind this one."""
    if not isinstance(value, str):
        return value
    try:
        return int(_PARSER.validate_python(value))
    except (ValidationError, OverflowError):
        raise mistake("is no size", 'give bytes, or a number with its unit, as "512MiB" or "64GiB"') from None


#: Stands behind the limits of a key: ``Annotated[int, Field(ge=1, le=1 << 40), SIZE]``.
SIZE: Final = BeforeValidator(_parsed)


class HostConfig(Table):
    """``[host]``: one pool of host memory, which all replicas share. Without the table there is no host tier."""

    size_bytes: Annotated[int, Field(ge=1, le=POOL_SIZE_BYTES_MAX), SIZE] | None = Field(
        default=None,
        description="Memory of the host pool, for all shards of all replicas together; it has as many slabs as fit."
        " Set either this or memory_percent.",
    )
    memory_percent: int | None = Field(
        default=None,
        ge=1,
        le=90,
        description="Size of the host pool as a part of the machine's memory, or of the limit of the daemon's cgroup"
        " if that is less.",
    )
    slab_bytes: Annotated[int, Field(ge=PAGE_BYTES, le=POOL_SIZE_BYTES_MAX, multiple_of=PAGE_BYTES), SIZE] = Field(
        default=64 << 20,
        description="Unit in which namespaces get memory. Smaller slabs divide memory more finely, larger slabs"
        " waste less of it at their ends.",
    )
    verify: VerifyName = Field(
        default="inherited",
        description="Which loaded blocks are compared with their stored checksums: those that an earlier daemon has"
        " stored, all, or none. Blocks from storage are compared when they arrive; keys are always compared.",
    )
    eviction_policy: EvictionPolicyName = Field(
        default="lru",
        description="Which blocks of a namespace are evicted from the host pool first: docs/policies.md.",
    )

    quota: QuotaConfig | None = Field(
        default=None,
        description="Floors and caps of namespaces, and of tenants in them. Without it, namespaces in use have equal"
        " shares.",
    )

    _pool_bytes: int = 0

    @model_validator(mode="after")
    def _settle_size(self) -> Self:
        if (self.size_bytes is None) == (self.memory_percent is None):
            what = "is missing, and so is memory_percent" if self.size_bytes is None else "stands beside memory_percent"
            raise mistake(what, "name one of the two", ("size_bytes",), self.size_bytes)
        self._pool_bytes = self.size_bytes or self._part_of_memory()
        return self

    def _part_of_memory(self) -> int:
        limits = [bound.limit_bytes for bound in memory_bounds()]
        if not limits:
            at = ("memory_percent",)
            raise mistake("cannot be told from /proc/meminfo here", "name size_bytes", at, self.memory_percent)
        return min(limits) * (self.memory_percent or 0) // 100

    @property
    def slabs(self) -> int:
        """Slabs of the pool."""
        return self._pool_bytes // self.slab_bytes

    def slots_per_slab(self, layout: Layout) -> int:
        """Blocks of a layout that a slab holds, with all their shards."""
        return slots_per_slab(self.slab_bytes, layout.bytes_per_block(), layout.host_parts)

    def check(self, layouts: Mapping[str, Layout], *, namespaces: int) -> None:
        """Refuse a pool that cannot serve every namespace.

        Raises:
            PydanticCustomError: a slab holds no block of one of them, or there are too few slabs or too many slots.
        """
        by_bytes = self.memory_percent is None
        key = "size_bytes" if by_bytes else "memory_percent"
        value = self.size_bytes if by_bytes else self.memory_percent
        for name, layout in layouts.items():
            block_bytes, parts = layout.bytes_per_block(), layout.host_parts
            per_slab = self.slots_per_slab(layout)
            if not per_slab:
                raise mistake(
                    f"holds no block of replica {name!r}: one takes {parts} x {block_bytes} bytes and as many headers",
                    f"use {smallest_slab(block_bytes, parts)} or more",
                    ("host", "slab_bytes"),
                    self.slab_bytes,
                )
            if per_slab * self.slabs > SLOTS_MAX:
                raise mistake(
                    f"holds {per_slab * self.slabs} blocks of replica {name!r}, {SLOTS_MAX} are possible",
                    f"use a smaller {key}, or a larger block_size",
                    ("host", key),
                    value,
                )
        if self.slabs < namespaces:
            needed = namespaces * self.slab_bytes
            more = f"use {needed} or more" if by_bytes else f"use a larger one: they take {needed} bytes"
            raise mistake(
                f"makes {self.slabs} slabs of {self.slab_bytes} bytes; namespaces, which take one each: {namespaces}",
                f"{more}, or a smaller slab_bytes",
                ("host", key),
                value,
            )


class OffloadConfig(Table):
    """``[offload]``: engines that keep their own device memory may use the host pool. Without the table none may."""

    namespaces_max: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Largest number of namespaces (models with their layouts) at a time. A namespace that no engine"
        " uses any more makes room for the next one.",
    )
    write_policy: WritePolicyName = Field(
        default="write_through",
        description="Which of the blocks that engines offer are copied to the host pool: docs/policies.md."
        " write_back is the same as write_through here.",
    )
    device_memory_bytes: Annotated[int, Field(ge=0, le=POOL_SIZE_BYTES_MAX), SIZE] = Field(
        default=0,
        description="Memory that the daemon keeps for the device blocks of engines, all engines together, so that they"
        ' outlive an engine (`"device_memory": "daemon"`, docs/engines.md): of this machine, or of CUDA devices.'
        " 0: none.",
    )


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) else value


def _beside_file(path: Path, info: ValidationInfo) -> Path:
    directory: Path = (info.context or {}).get("directory", Path())
    return (directory / path).absolute()


#: A file that a relative path names from the folder of the configuration: the daemon may start in any other.
FileBeside: TypeAlias = Annotated[Path, BeforeValidator(_path), AfterValidator(_beside_file)]


class StorageConfig(Table):
    """``[storage]``: a tier below the host pool. Without the table there is none."""

    backend: str = Field(
        default="disk",
        min_length=1,
        max_length=64,
        description='"disk", "redis", "s3", or the name of an installed entry point of the group kvcached.storage.',
    )
    backup: Literal["every", "second_sighting", "on_eviction", "never"] = Field(
        default="every",
        description="Which blocks are written: every block as soon as its host copy is complete, blocks that a later"
        " request has hit, blocks that are about to leave the host pool, or none.",
    )
    watermark_percent: int = Field(
        default=10,
        ge=1,
        le=90,
        description='With backup = "on_eviction": blocks are written when less than this part of the host pool is'
        " free.",
    )
    prefetch_threshold_blocks: int = Field(
        default=4,
        ge=1,
        le=65_536,
        description="Fewer blocks than this are not fetched, because computing them is as fast.",
    )
    prefetch_bytes_per_s: Annotated[int, Field(ge=0, le=1 << 42), SIZE] = Field(
        default=0,
        description="Rate limit of all prefetches together. Prefetches beyond it are refused with this reason. 0: no"
        " limit.",
    )
    prefetch_timeout_ms: int = Field(
        default=1000,
        ge=0,
        le=600_000,
        description='How long a request waits for a prefetch with stop = "timeout", plus the time for each token'
        " (next key).",
    )
    prefetch_timeout_us_per_token: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        description="What each token of the prompt adds to prefetch_timeout_ms, in microseconds.",
    )
    timeout_ms: int = Field(
        default=5000,
        ge=10,
        le=600_000,
        description="Storage is suspended when one call of the backend takes longer. After six times as long, the"
        " storage process is killed and restarted.",
    )
    layout: StorageLayout = Field(
        default="engine",
        description="How blocks of engines in offload mode are stored: as the engine has them, for engines with as many"
        " shards only, or rearranged, so that engines of the same model with any number of shards read them.",
    )
    key_file: FileBeside | None = Field(
        default=None,
        description="Encrypts all stored blocks and their names with the key in this file: 32 bytes, or 64"
        " hexadecimal digits; only its owner may have read permission, and of root's file a group of the daemon. A"
        " relative path starts at this file's directory. Needs kvcached-daemon[encryption].",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="The backend's own table; for disk: directory, capacity_bytes and others, see docs/storage.md.",
    )
    local_disk: dict[str, Any] | None = Field(
        default=None,
        description="A disk of this machine in front of another backend, with the settings of the disk backend: blocks"
        " are written to both, and read from the disk if it has them.",
    )

    @property
    def is_shared(self) -> bool:
        """Whether daemons of several machines share the backend, as far as that is known before it is open."""
        return self.backend in _SHARED_BACKENDS

    @property
    def record_path(self) -> Path | None:
        """Where the record of generations is; None where the backend has no directory for it.

        Settings that the backend will refuse have none either.
        """
        directory = self.settings.get("directory")
        if self.backend != "disk" or not isinstance(directory, str) or not Path(directory).is_absolute():
            return None
        return Path(directory) / RECORD_NAME


class TcpAddress(NamedTuple):
    """An address of this machine and a port."""

    host: str  #: an IP address
    port: int


_UNIX_PREFIX: Final = "unix:"
_PORT_MAX: Final = 65_535
#: 127.0.0.1:9400, [::1]:9400
_HOST_AND_PORT: Final = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<v4>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_LISTEN_FIX: Final = 'give "127.0.0.1:PORT", "[::1]:PORT" or "unix:/PATH"'


def parse_address(listen: str, fix: str) -> tuple[TcpAddress, bool]:
    """An address and a port, and whether only this machine reaches them.

    Raises:
        PydanticCustomError: it is none; `fix` says what would be one.
    """
    found = _HOST_AND_PORT.fullmatch(listen)
    if found is None or not 0 < int(found["port"]) <= _PORT_MAX:
        raise mistake("is no address", fix)
    host = found["v6"] or found["v4"] or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise mistake(f"{host!r} is no IP address; names are not looked up", fix) from None
    return TcpAddress(str(address), int(found["port"])), address.is_loopback


def parse_listen(listen: str) -> TcpAddress | str:
    """The address that `listen` means: of TCP, or the path of a unix socket.

    Raises:
        PydanticCustomError: it is none, or one that other machines reach.
    """
    if listen.startswith(_UNIX_PREFIX):
        path = listen.removeprefix(_UNIX_PREFIX)
        if not path.startswith("/"):
            raise mistake("has no absolute path", _LISTEN_FIX)
        if (size_bytes := len(os.fsencode(path))) > SOCKET_PATH_BYTES_MAX:
            what = f"has a path of {size_bytes} bytes, {SOCKET_PATH_BYTES_MAX} are possible"
            raise mistake(what, "use a shorter path")
        return path
    address, is_loopback = parse_address(listen, _LISTEN_FIX)
    if not is_loopback:
        what = f"{address.host} can be reached from other machines, and nothing here asks who they are"
        raise mistake(what, f"{_LISTEN_FIX}; put a proxy that asks in front of it")
    return address


def _check_listen(listen: str) -> str:
    parse_listen(listen)
    return listen


class HttpConfig(Table):
    """``[http]``: metrics and health over HTTP. Without the table nothing listens."""

    listen: Annotated[str, AfterValidator(_check_listen)] = Field(
        max_length=256,
        description='Where: "127.0.0.1:PORT" or "[::1]:PORT", which every user of this machine can reach, or'
        ' "unix:/PATH", which only those who may look (`[access]`) can reach. Needs kvcached-daemon[metrics].',
    )

    @property
    def address(self) -> TcpAddress | str:
        """A TCP address, or the path of a unix socket."""
        return parse_listen(self.listen)
