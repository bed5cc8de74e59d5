"""Tiny pools and the workers that hold them."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcached.worker.supervisor import ReplicaPool, WorkerGroup
from kvcached_client.layout import KvGroup, Layout, PageOrder
from kvcached_client.types import ShardIndex

RunLoop = Callable[[Coroutine[Any, Any, None]], None]

SLOTS = 16


def tiny_layout(order: PageOrder = "layer_first", shards: int = 1) -> Layout:
    """Two groups that differ in everything; 544 bytes a block."""
    groups = (
        KvGroup(layers=2, kv_heads=1, head_dim=4, v_head_dim=4, dtype="float16", scale_bytes=16),
        KvGroup(layers=3, kv_heads=1, head_dim=8, v_head_dim=0, dtype="float32"),
    )
    return Layout(block_size=4, shards=shards, groups=groups, order=order)


def tiny_pool(shards: int = 1, *, order: PageOrder = "layer_first", ready_deadline_s: float = 20) -> ReplicaPool:
    """A replica with a pool of `SLOTS` tiny blocks per shard."""
    return ReplicaPool("default", tiny_layout(order, shards), SLOTS, ready_deadline_s=ready_deadline_s)


@dataclass
class Losses:
    """What a group told about its lost workers."""

    reasons: dict[int, str] = field(default_factory=dict)
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, shard: ShardIndex, reason: str) -> None:
        """The group's `on_lost`."""
        assert shard not in self.reasons
        self.reasons[shard] = reason
        self.happened.set()


@asynccontextmanager
async def running(pool: ReplicaPool, run_dir: str) -> AsyncIterator[tuple[WorkerGroup, Losses]]:
    """A started group, stopped at the end."""
    losses = Losses()
    group = WorkerGroup(pool, run_dir, losses.note)
    await group.start()
    try:
        yield group, losses
    finally:
        await group.stop()


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def names_in(directory: str) -> list[str]:
    """What a directory holds."""
    return sorted(path.name for path in Path(directory).iterdir())


def process_exists(pid: int) -> bool:
    """Whether there is such a process, be it a zombie."""
    return Path(f"/proc/{pid}").exists()


def mapped(group: WorkerGroup, pool: ReplicaPool, shard: int = 0) -> mmap.mmap:
    """A shard's memory, mapped as an engine would."""
    return mmap.mmap(group.memory_fd(ShardIndex(shard)), pool.layout.pool_bytes(pool.slots))


def pages_of(layout: Layout, slots: int, slot: int) -> list[tuple[int, int]]:
    """(offset, size) of every page of a slot, straight from the layout."""
    return [
        (
            layout.page_offset(slots, index, layer) + slot * layout.slot_stride_bytes(index),
            group.page_bytes(layout.block_size),
        )
        for index, group in enumerate(layout.groups)
        for layer in range(group.layers)
    ]


def read_block(memory: mmap.mmap | bytes, layout: Layout, slots: int, slot: int) -> bytes:
    """A block's bytes, page after page."""
    return b"".join(memory[offset : offset + size] for offset, size in pages_of(layout, slots, slot))


def write_block(memory: mmap.mmap, layout: Layout, slots: int, slot: int, data: bytes) -> None:
    """The inverse of `read_block`."""
    start = 0
    for offset, size in pages_of(layout, slots, slot):
        memory[offset : offset + size] = data[start : start + size]
        start += size
