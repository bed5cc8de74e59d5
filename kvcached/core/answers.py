"""What the cache is made from, and what its requests answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcached_client.types import LeaseId, TransferId, WritePolicy


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A device pool to be: pools of one `namespace` share a tree, and with it the host slots.

    Attributes:
        host_slots_per_slab: blocks of this layout in a slab of the host pool; the same for a whole namespace.
        watermark, load_threshold, load_quota: see `DevicePool`.
        write_policy: the same for a whole namespace.
        eviction_policy: of this pool; see `kvcached.core.eviction`.
    """

    name: str
    namespace: bytes
    block_size: int
    slots: int
    shards: int = 1
    host_slots_per_slab: int = 0
    watermark: int = 0
    load_threshold: int = 1
    load_quota: int | None = None
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction_policy: str = "lru"


class Grant(NamedTuple):
    """Answer to acquire: `hit` blocks to read at `hit_ranges`, the rest to compute into `ranges` (both packed).

    Of the hit, `ready` blocks can be read now, the others when `loads` have ended: transfers, each with its entry in
    the progress pages.
    """

    lease: LeaseId
    hit: int
    ready: int
    loads: tuple[tuple[TransferId, int], ...]
    hit_ranges: bytes
    ranges: bytes


class Loaded(NamedTuple):
    """A lease's loads have ended: the hit as it is now, and slots for the blocks that are missing from it (packed)."""

    hit: int
    ranges: bytes


class Commitment(NamedTuple):
    """Answer to commit: the lease's new depth, and how many of the first blocks were there already."""

    depth: int
    adopted: int
    duplicates: int
