"""Tiny pools and the workers that hold them."""

from __future__ import annotations

import asyncio
import gc
import mmap
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import HostMemory
from kvcached.process.backoff import BackOff
from kvcached.worker.client import WorkerPool
from kvcached.worker.group import ReplicaPool
from kvcached_client.blocks.layout import KvGroup, Layout, PageOrder
from kvcached_client.types import ShardIndex, Verify

T = TypeVar("T")
RunLoop = Callable[[Coroutine[Any, Any, None]], None]

SLOTS = 16
#: The memory of all pools of a test, closed when it is over.
MADE: list[ShardMemory] = []
PATIENCE_S = 20
NAMESPACE = bytes(range(32))
#: Tests that restart workers do not wait for them longer than they must.
SOON: dict[str, Any] = {"first_s": 0.01, "longest_s": 0.04, "healthy_after_s": 60.0}
#: So long that nothing is started again during a test.
NEVER: dict[str, Any] = {"first_s": 600.0, "longest_s": 600.0, "healthy_after_s": 600.0}


def tiny_layout(order: PageOrder = "layer_first", shards: int = 1) -> Layout:
    """Two groups that differ in everything; 544 bytes a block."""
    groups = (
        KvGroup(layers=2, kv_heads=1, head_dim=4, v_head_dim=4, dtype="float16", scale_bytes=16),
        KvGroup(layers=3, kv_heads=1, head_dim=8, v_head_dim=0, dtype="float32"),
    )
    return Layout(block_size=4, shards=shards, groups=groups, order=order)


def tiny_pool(
    shards: int = 1,
    *,
    order: PageOrder = "layer_first",
    ready_deadline_s: float = 20,
    host: HostMemory | None = None,
) -> ReplicaPool:
    """A replica with a pool of `SLOTS` tiny blocks per shard."""
    layout = tiny_layout(order, shards)
    memory = tuple(ShardMemory.make(f"test-{shard}", layout.pool_bytes(SLOTS)) for shard in range(shards))
    MADE.extend(memory)
    return ReplicaPool("default", layout, SLOTS, NAMESPACE, memory, host, ready_deadline_s=ready_deadline_s)


class Told(list[T]):
    """What was told, in order; its growth can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._grown = asyncio.Event()

    def append(self, item: T) -> None:
        super().append(item)
        self._grown.set()

    async def until(self, count: int) -> None:
        """Wait for so many items, and no more."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self) < count:
                self._grown.clear()
                await self._grown.wait()
        assert len(self) == count


@dataclass
class Losses:
    """What was told about a loss, which may happen once."""

    reasons: dict[int, str] = field(default_factory=dict)
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, shard: ShardIndex, reason: str) -> None:
        """The pool's `on_lost`."""
        assert not self.reasons
        self.reasons[shard] = reason
        self.happened.set()


class Story(Told[str]):
    """What a `WorkerPool` told, in order: "lost 1", "restored", and whatever a test adds."""

    def note_lost(self, shard: ShardIndex, reason: str) -> None:
        """The pool's `on_lost`."""
        self.append(f"lost {shard}")

    def note_restored(self) -> None:
        """The pool's `on_restored`."""
        self.append("restored")


def workers_of(
    pool: ReplicaPool,
    run_dir: str,
    on_lost: Callable[[ShardIndex, str], None],
    on_restored: Callable[[], None] = lambda: None,
    back_off: BackOff | None = None,
    deadline_s: float = 30,
) -> WorkerPool:
    """Workers of a replica, not started yet. Lost ones are not replaced, unless `back_off` says otherwise."""
    return WorkerPool(
        pool, run_dir, on_lost, on_restored, epoch=9, generation=1, verify=Verify.ALWAYS, deadline_s=deadline_s,
        back_off=back_off or BackOff(**NEVER),
    )  # fmt: skip


@asynccontextmanager
async def running(pool: ReplicaPool, run_dir: str) -> AsyncIterator[tuple[WorkerPool, Losses]]:
    """Started workers, stopped at the end, and not replaced."""
    losses = Losses()
    workers = workers_of(pool, run_dir, losses.note)
    await workers.open()
    try:
        yield workers, losses
    finally:
        await workers.close()


@asynccontextmanager
async def kept_running(
    pool: ReplicaPool, run_dir: str, back_off: BackOff | None = None, deadline_s: float = 30
) -> AsyncIterator[tuple[WorkerPool, Story]]:
    """Workers of a replica, started, replaced when they die, stopped at the end."""
    story = Story()
    workers = workers_of(pool, run_dir, story.note_lost, story.note_restored, back_off or BackOff(**SOON), deadline_s)
    await workers.open()
    try:
        yield workers, story
    finally:
        await workers.close()


def odd_worker(how: str) -> tuple[str, ...]:
    """The command of a worker that behaves in a way that `odd_worker.py` knows."""
    return (sys.executable, str(Path(__file__).with_name("odd_worker.py")), how)


def open_descriptors() -> int:
    """How many descriptors this process has open, without those that only garbage of earlier tests holds."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def names_in(directory: str) -> list[str]:
    """What a directory holds."""
    return sorted(path.name for path in Path(directory).iterdir())


def process_exists(pid: int) -> bool:
    """Whether there is such a process, be it a zombie."""
    return Path(f"/proc/{pid}").exists()


def mapped(pool: ReplicaPool, shard: int = 0) -> mmap.mmap:
    """A shard's memory, mapped as an engine would."""
    return mmap.mmap(pool.memory[shard].descriptor, pool.layout.pool_bytes(pool.slots))


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
