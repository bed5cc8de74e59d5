"""A configuration as people read it: the effective values as TOML, and what they come to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from kvcached.config import Config


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
    return "\n".join(_table(effective(config), "")) + "\n"


def _table(values: dict[str, object], path: str) -> Iterator[str]:
    """The lines of a table: plain keys first, for a key after a table's header would belong to that one."""
    for key, value in values.items():
        if not isinstance(value, dict | list):
            # What JSON writes for text, integers and booleans is TOML as well.
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"\n[{path}{key}]"
            yield from _table(value, f"{path}{key}.")
        for table in value if isinstance(value, list) else []:
            yield f"\n[[{path}{key}]]"
            yield from _table(table, f"{path}{key}.")
