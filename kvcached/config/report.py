"""What a configuration comes to: every key with its value, and how many blocks and tokens it holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, time
from typing import Final, cast

from kvcached.config.replica import ReplicaConfig
from kvcached.config.schema import Config

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
#: Enough of a namespace's root to tell it from others, as in `kvcached stats`.
_NAMESPACE_SHOWN_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """What one replica has room for.

    Attributes:
        replica: its name.
        namespace: first 16 hex digits; replicas with the same one share their prefixes and their host slots.
        bytes_per_block: of all shards.
        device_slots, device_tokens, device_bytes: of its own pool, with all shards.
        host_slots_per_slab: blocks in a slab of the host pool; 0 without a host tier.
        host_slots, host_tokens: if the namespace had every slab.
    """

    replica: str
    namespace: str
    bytes_per_block: int
    device_slots: int
    device_tokens: int
    device_bytes: int
    host_slots_per_slab: int
    host_slots: int
    host_tokens: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a daemon has room for.

    Attributes:
        replicas: one by one.
        host_slabs, slab_bytes: of the host pool; 0 without a host tier.
        device_bytes, host_bytes, total_bytes: memory of the device pools, of the host pool, and of both.
    """

    replicas: tuple[ReplicaCapacity, ...]
    host_slabs: int
    slab_bytes: int
    device_bytes: int
    host_bytes: int
    total_bytes: int


def capacity_of(config: Config) -> Capacity:
    """The room that a configuration makes."""
    replicas = tuple(_replica_capacity(config, replica) for replica in config.replica)
    slabs, slab_bytes = (config.host.slabs, config.host.slab_bytes) if config.host is not None else (0, 0)
    device_bytes = sum(replica.device_bytes for replica in replicas)
    return Capacity(
        replicas=replicas,
        host_slabs=slabs,
        slab_bytes=slab_bytes,
        device_bytes=device_bytes,
        host_bytes=slabs * slab_bytes,
        total_bytes=device_bytes + slabs * slab_bytes,
    )


def _replica_capacity(config: Config, replica: ReplicaConfig) -> ReplicaCapacity:
    layout, slots = replica.layout, replica.slot_count
    per_slab = config.host.slots_per_slab(layout) if config.host is not None else 0
    host_slots = per_slab * config.host.slabs if config.host is not None else 0
    return ReplicaCapacity(
        replica=replica.name,
        namespace=replica.namespace(0)[:_NAMESPACE_SHOWN_BYTES].hex(),
        bytes_per_block=layout.bytes_per_block() * layout.shards,
        device_slots=slots,
        device_tokens=slots * layout.block_size,
        device_bytes=layout.pool_bytes(slots) * layout.shards,
        host_slots_per_slab=per_slab,
        host_slots=host_slots,
        host_tokens=host_slots * layout.block_size,
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """What a replica's configuration comes to.

    Attributes:
        replica: its name.
        shards: worker processes.
        slots: blocks that the pool holds, the same on each shard.
        bytes_per_block: of one shard.
        pool_bytes_per_shard: memory of one shard's pool.
        pool_bytes: memory of all shards' pools.
        tokens: that the pool holds.
        layout_fingerprint: engines with the same one can use the pool.
    """

    replica: str
    shards: int
    slots: int
    bytes_per_block: int
    pool_bytes_per_shard: int
    pool_bytes: int
    tokens: int
    layout_fingerprint: str


def figures_of(config: Config) -> list[Figures]:
    """The figures of each replica."""
    return [
        Figures(
            replica=replica.name,
            shards=replica.shards,
            slots=replica.slot_count,
            bytes_per_block=replica.layout.bytes_per_block(),
            pool_bytes_per_shard=replica.layout.pool_bytes(replica.slot_count),
            pool_bytes=replica.layout.pool_bytes(replica.slot_count) * replica.shards,
            tokens=replica.slot_count * replica.block_size,
            layout_fingerprint=replica.layout.fingerprint(),
        )
        for replica in config.replica
    ]


def effective(config: Config) -> dict[str, object]:
    """Every value in effect, defaults included, as JSON types under the names of the file."""
    return config.model_dump(mode="json", by_alias=True, exclude_none=True)


def as_toml(config: Config) -> str:
    """The effective configuration as a file that loads to the same one. A relative `model_config` stays relative."""
    values = effective(config)
    if (storage := config.storage) is not None:  # in JSON, a backend's dates would be text, and infinity nothing
        raw = {"settings": storage.settings, "local_disk": storage.local_disk}
        plain = cast("dict[str, object]", values["storage"])
        values["storage"] = {**plain, **{name: table for name, table in raw.items() if table is not None}}
    return "\n".join(_table(values, "")) + "\n"


def _table(values: dict[str, object], path: str) -> Iterator[str]:
    """The lines of a table: plain keys first, for a key after a table's header would belong to that one."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict) or _is_tables(value)}
    for key, value in values.items():
        if key not in tables:
            yield f"{_key(key)} = {toml_value(value)}"
    for key, value in tables.items():
        inside = f"{path}{_key(key)}"
        if isinstance(value, dict):
            yield f"\n[{inside}]"
            yield from _table(value, f"{inside}.")
            continue
        for table in cast("list[dict[str, object]]", value):
            yield f"\n[[{inside}]]"
            yield from _table(table, f"{inside}.")


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def toml_value(value: object) -> str:
    """A value as TOML has it behind a key."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {toml_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # What JSON writes for text, numbers and booleans is TOML as well, but for one character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
