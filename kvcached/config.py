"""The configuration: what a daemon serves, and every limit with its unit and its reason.

A value comes from a command-line option, else from an environment variable ``KVCACHED_<KEY>``, else from the TOML file,
else from the default here. `docs/configuration.md` is the same in words. Rules:

* Everything is checked before anything is started, and mistakes are reported together, each with its fix. Rules between
  keys come last: they need tables whose keys are right by themselves.
* No coercion, no unknown key, in the file and in the environment alike: a typing error must not become a default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from kvcached.config_environment import overlay_environment
from kvcached.config_error import ConfigError, Problem, mistake, problems_of
from kvcached.config_host import AttachedConfig, HostConfig
from kvcached.config_layout import SLOTS_MAX, GroupConfig, Table, layout_of_model
from kvcached.config_policy import EvictionPolicyName, WritePolicyName, check_policies
from kvcached.config_storage import StorageConfig
from kvcached_client.keys import KeyAlgorithm, namespace_root
from kvcached_client.layout import POOL_SIZE_BYTES_MAX, DType, KvGroup, Layout, PageOrder
from kvcached_client.rundir import SOCKET_PATH_BYTES_MAX, default_run_dir

#: One worker process per shard: more than a node has accelerators is a mistake.
SHARDS_MAX: Final = 64
REPLICAS_MAX: Final = 64
#: The name is part of socket names, and a socket's path has 107 bytes in all.
REPLICA_NAME_LENGTH_MAX: Final = 32
#: Stands beside the names of replicas wherever tiers are told apart.
HOST_TIER_NAME: Final = "host"
#: Keys of a replica that speak of the host tier.
HOST_KEYS: Final = ("free_watermark_percent", "load_threshold_blocks", "load_quota_blocks", "write_policy")
#: Fewer beats than this in a session's lifetime, and one late thread ends a healthy session.
HEARTBEATS_PER_TTL_MIN: Final = 3

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["plain", "json"]


def _cpu_only(device: str) -> str:
    if device == "cuda":
        raise mistake("this version keeps pools in CPU memory only", 'use device = "cpu"')
    return device


def _not_reserved(name: str) -> str:
    if name == HOST_TIER_NAME:
        raise mistake("is what reports call the host pool", "choose another name")
    return name


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise mistake("is no absolute path", "start it with /, for daemon and engines start in different directories")
    return path


def _not_too_many(replicas: tuple[ReplicaConfig, ...]) -> tuple[ReplicaConfig, ...]:
    if len(replicas) > REPLICAS_MAX:
        raise mistake(f"there are {len(replicas)} replicas", f"name {REPLICAS_MAX} at most, each as [[replica]]")
    return replicas


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) else value


_FilePath = Annotated[Path, BeforeValidator(_path)]


class ReplicaConfig(Table):
    """``[[replica]]``: one engine's device pool, the same slots on each of its shards.

    Attributes:
        layout: the shape of a block, from the groups or from the model's config.json.
        slot_count: slots of the pool, as named or as many as the budget holds.
    """

    name: Annotated[str, AfterValidator(_not_reserved)] = Field(
        pattern=r"^[a-z0-9-]+$",
        min_length=1,
        max_length=REPLICA_NAME_LENGTH_MAX,
        description="What engines ask for. Sockets and logs of the workers are named after it.",
    )
    device: Annotated[Literal["cpu", "cuda"], AfterValidator(_cpu_only)] = Field(
        default="cpu", description='Where the pool lies. Only "cpu" in this version: shared memory.'
    )
    model: str = Field(
        min_length=1,
        max_length=256,
        description="Identity of the weights. With `revision` and the layout it roots all keys: pools that agree in"
        " them share prefixes.",
    )
    revision: str = Field(default="", max_length=256, description="Version of the weights.")
    key_algorithm: KeyAlgorithm = Field(
        default="blake3",
        description="How blocks are named. xxh3 is faster and can be forged: for nodes with a single tenant.",
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens per block.")
    shards: int = Field(
        default=1,
        ge=1,
        le=SHARDS_MAX,
        description="Positions that hold a part of each block: the tensor-parallel degree.",
    )
    page_order: PageOrder = Field(
        default="layer_first",
        description="layer_first keeps a layer contiguous, as attention kernels expect it; block_first keeps a block"
        " contiguous, for large copies.",
    )
    slots: int | None = Field(
        default=None, ge=1, le=SLOTS_MAX, description="Blocks that the pool holds. Either this or `pool_bytes`."
    )
    pool_bytes: int | None = Field(
        default=None,
        ge=1,
        le=POOL_SIZE_BYTES_MAX,
        description="Memory of the pool on each shard; as many blocks as fit. Either this or `slots`.",
    )
    model_config_path: _FilePath | None = Field(
        default=None,
        alias="model_config",
        description="The model's config.json, to take the layout from; a relative path starts at this file's folder."
        " Either this or `group`.",
    )
    kv_dtype: DType | None = Field(
        default=None, description="Element type of the cache, where it is not the model's. Only with `model_config`."
    )
    free_watermark_percent: int = Field(
        default=2,
        ge=0,
        le=50,
        description="Part of the pool that is kept free ahead of need, while blocks with a copy in the host pool can"
        " make room. Only with `[host]`.",
    )
    load_threshold_blocks: int = Field(
        default=2,
        ge=1,
        le=SLOTS_MAX,
        description="Shorter hits in the host pool are computed again instead of loaded. Only with `[host]`.",
    )
    load_quota_blocks: int | None = Field(
        default=None,
        ge=1,
        le=SLOTS_MAX,
        description="Blocks that loads may be writing at once; a longer hit is cut. Default: half the pool,"
        " or the threshold where that is more. Only with"
        " `[host]`.",
    )
    write_policy: WritePolicyName = Field(
        default="write_through",
        description="When blocks are copied to the host pool: docs/policies.md. The same for replicas that share their"
        " prefixes. Only with `[host]`.",
    )
    eviction_policy: EvictionPolicyName = Field(
        default="lru", description="Which blocks leave the pool first when others need room: docs/policies.md."
    )
    group: tuple[GroupConfig, ...] = Field(
        default=(),
        max_length=16,
        strict=False,
        description="The layout in groups of layers. Either this or `model_config`.",
    )
    _layout: Layout = PrivateAttr()

    @property
    def layout(self) -> Layout:
        """The shape of a block on one shard."""
        return self._layout

    @property
    def slot_count(self) -> int:
        """Slots of the pool, the same on every shard."""
        return self.slots if self.slots is not None else self._layout.blocks_per_budget(self.pool_bytes or 0)

    @property
    def watermark_slots(self) -> int:
        """Slots to keep free ahead of need."""
        return self.slot_count * self.free_watermark_percent // 100

    def namespace(self, generation: int, weights_version: str = "") -> bytes:
        """The 32-byte root of its keys: replicas that share it share their prefixes.

        A `weights_version` stands in place of `revision`.
        """
        return namespace_root(
            model=self.model,
            revision=weights_version or self.revision,
            layout_fingerprint=self._layout.fingerprint(),
            block_size=self.block_size,
            shards=self.shards,
            algorithm=self.key_algorithm,
            generation=generation,
        )

    @model_validator(mode="after")
    def _check_choices(self, info: ValidationInfo) -> Self:
        if self.slots is None and self.pool_bytes is None:
            raise mistake("is missing, and so is pool_bytes", "name one of the two", ("slots",))
        if self.slots is not None and self.pool_bytes is not None:
            raise mistake("stands beside pool_bytes", "name one of the two", ("slots",), self.slots)
        if self.model_config_path is None and not self.group:
            raise mistake(
                "is missing, and so is group", "name one of the two: the layout comes from it", ("model_config",)
            )
        if self.model_config_path is not None and self.group:
            path = str(self.model_config_path)
            raise mistake(
                "stands beside group", "name one of the two: the layout comes from it", ("model_config",), path
            )
        if self.group and self.kv_dtype is not None:
            raise mistake("stands beside group", "write the dtype into each group", ("kv_dtype",), self.kv_dtype)
        if self.load_quota_blocks is not None and self.load_quota_blocks < self.load_threshold_blocks:
            raise mistake(
                f"is less than load_threshold_blocks ({self.load_threshold_blocks}): nothing would ever be loaded",
                "use a larger quota, or a smaller threshold",
                ("load_quota_blocks",),
                self.load_quota_blocks,
            )
        directory = (info.context or {}).get("directory", Path())
        self._layout = self._layout_of_groups() if self.group else self._layout_of_model(directory)
        self._check_size()
        return self

    def _layout_of_groups(self) -> Layout:
        groups = tuple(KvGroup(**group.model_dump()) for group in self.group)
        return Layout(block_size=self.block_size, shards=self.shards, groups=groups, order=self.page_order)

    def _layout_of_model(self, directory: Path) -> Layout:
        return layout_of_model(
            directory / (self.model_config_path or ""),
            block_size=self.block_size,
            shards=self.shards,
            kv_dtype=self.kv_dtype,
            order=self.page_order,
        )

    def _check_size(self) -> None:
        at: Final = (("pool_bytes",), self.pool_bytes) if self.slots is None else (("slots",), self.slots)
        bytes_per_block = self._layout.bytes_per_block()
        size_bytes = self._layout.pool_bytes(self.slot_count)
        if not size_bytes:
            raise mistake(f"holds no block: one takes {bytes_per_block} bytes", "give the pool more memory", *at)
        if self.slot_count > SLOTS_MAX:
            raise mistake(f"holds {self.slot_count} blocks, {SLOTS_MAX} are possible", "use a larger block_size", *at)
        if size_bytes > POOL_SIZE_BYTES_MAX:
            limit = f"{POOL_SIZE_BYTES_MAX} are possible"
            raise mistake(f"{bytes_per_block} bytes each make {size_bytes}, {limit}", "use fewer slots", *at)


class Config(Table):
    """The whole configuration of one daemon."""

    run_dir: Annotated[_FilePath, AfterValidator(_absolute)] = Field(
        default_factory=default_run_dir,
        description="Folder of the sockets and of the workers' logs. Default: the first that is set of"
        " $KVCACHED_RUN_DIR, $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvcached, /tmp/kvcached-<uid>.",
    )
    log_level: LogLevel = Field(default="info", description="Least important messages to log.")
    log_format: LogFormat = Field(default="plain", description="plain for people, json for one object per line.")
    heartbeat_interval_ms: int = Field(
        default=2000,
        ge=100,
        le=60_000,
        description="Pause between a session's heartbeats. They find a stopped or wedged process only: death is noticed"
        " at once.",
    )
    session_ttl_ms: int = Field(
        default=30_000,
        ge=300,
        le=3_600_000,
        description="A session that is silent for longer expires: its slots are set aside until its processes are dead."
        " Longer than an engine compiles or collects garbage.",
    )
    worker_ready_deadline_ms: int = Field(
        default=30_000,
        ge=1000,
        le=600_000,
        description="All workers are ready by then or the start fails. Touching memory takes about 0.7 s per GiB, up to"
        " 1 GiB.",
    )
    worker_grace_ms: int = Field(
        default=30_000,
        ge=0,
        le=600_000,
        description="Workers keep device pools for so long after the death of a daemon that was not stopped in order,"
        " for the next one to take over. 0: they end at once.",
    )
    shutdown_deadline_ms: int = Field(
        default=5000,
        ge=100,
        le=60_000,
        description="On a clean stop engines have this long to give back what they hold; workers that have not ended by"
        " then, or a second later, are killed. Below the 10 s that container runtimes grant.",
    )
    replies_kept_per_session: int = Field(
        default=1024,
        ge=16,
        le=65_536,
        description="Answers kept for retries of the same request id. A client has a handful of requests in flight.",
    )
    pin_quota_percent: int = Field(
        default=25, ge=0, le=90, description="Part of a pool, and of a namespace's host slots, that may be pinned."
    )
    host: HostConfig | None = Field(default=None, description="The host tier; without this table there is none.")
    attached: AttachedConfig | None = Field(
        default=None,
        description="Engines that keep their own device memory, as vLLM does, share the host pool; without this table"
        " there are none.",
    )
    storage: StorageConfig | None = Field(
        default=None, description="A tier below the host pool; without this table there is none."
    )
    replica: Annotated[tuple[ReplicaConfig, ...], AfterValidator(_not_too_many)] = Field(
        default=(),
        strict=False,
        description="The device pools to serve. One or more, or `[attached]`, or both.",
    )

    @model_validator(mode="after")
    def _check_there_is_something(self) -> Self:
        if not self.replica and self.attached is None:
            raise mistake(
                "is missing, and so is [attached]",
                "name the pools to serve, each as [[replica]], or add [attached]",
                ("replica",),
            )
        if self.attached is not None and self.host is None:
            raise mistake("does nothing without [host]", "add [host], or remove it", ("attached",))
        if self.storage is not None and self.host is None:
            raise mistake("does nothing without [host]", "add [host], or remove it", ("storage",))
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        shortest_ms = HEARTBEATS_PER_TTL_MIN * self.heartbeat_interval_ms
        if self.session_ttl_ms < shortest_ms:
            raise mistake(
                f"is less than {HEARTBEATS_PER_TTL_MIN} times heartbeat_interval_ms ({self.heartbeat_interval_ms})",
                f"use {shortest_ms} or more, or a shorter heartbeat_interval_ms",
                ("session_ttl_ms",),
                self.session_ttl_ms,
            )
        names = [replica.name for replica in self.replica]
        for index, name in enumerate(names):
            if name in names[:index]:
                at = ("replica", index, "name")
                raise mistake("names an earlier replica, too", "give each a name of its own", at, name)
        for replica in self.replica:
            longest = f"{self.run_dir}/worker-{replica.name}-{replica.shards - 1}.sock"
            if (size_bytes := len(os.fsencode(longest))) > SOCKET_PATH_BYTES_MAX:
                raise mistake(
                    f"makes a socket path of {size_bytes} bytes, {SOCKET_PATH_BYTES_MAX} are possible ({longest})",
                    "use a shorter run_dir or replica name",
                    ("run_dir",),
                    str(self.run_dir),
                )
        if self.host is None:
            for index, replica in enumerate(self.replica):
                for name in HOST_KEYS:
                    value = getattr(replica, name)
                    if value != ReplicaConfig.model_fields[name].default:
                        at = ("replica", index, name)
                        raise mistake("does nothing without [host]", "add [host], or remove it", at, value)
        else:
            layouts = {replica.name: replica.layout for replica in self.replica}
            check_policies([(replica.name, replica.namespace(0), replica.write_policy) for replica in self.replica])
            namespaces = {replica.namespace(0) for replica in self.replica}
            self.host.check(layouts, namespaces=len(namespaces) + (self.attached is not None))
        return self


def load_config(
    path: Path, *, options: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """The configuration of a file, the environment over it, the options over both.

    Args:
        path: a TOML file.
        options: values of command-line options by key; these win.
        environment: variables; default: the process's own.

    Raises:
        ConfigError: the file cannot be read, or anything in the three is wrong. Every mistake is in it; only those
            between keys are looked for last, once each key is right by itself.
    """
    try:
        text = path.read_text(encoding="utf-8")
        settings = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError([Problem(str(path), "file", "", f"cannot be read: {what}", "name a TOML file")]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            [Problem(str(path), "file", "", f"is no TOML: {error}", "see configs/ for examples")]
        ) from None
    overlays = overlay_environment(settings, os.environ if environment is None else environment)
    for key, value in (options or {}).items():
        overlays[key,] = f"option --{key.replace('_', '-')}"
        settings[key] = value
    try:
        return Config.model_validate(settings, context={"directory": path.parent})
    except ValidationError as error:
        raise ConfigError(problems_of(error, Config, str(path), text, overlays)) from None
