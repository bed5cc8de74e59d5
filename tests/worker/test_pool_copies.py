"""Stores and loads through real workers, ordered as the service orders them."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvcached.core.messages import AbandonLoad, HurryTransfer, Span, StartTransfer, TransferKind
from kvcached.core.slots.ranges import one_range
from kvcached.memory.host_pool import HostMemory, create_host_memory
from kvcached.worker.client import WorkerPool
from kvcached.worker.group import ReplicaPool
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import PageOrder
from kvcached_client.errors import DaemonFailure
from kvcached_client.types import ShardIndex, TransferId
from tests.worker.groups import (
    SLOTS,
    RunLoop,
    Story,
    Told,
    kept_running,
    mapped,
    read_block,
    tiny_layout,
    tiny_pool,
    write_block,
)

SHARDS = 2
SLABS, SLAB_BYTES = 2, 16384
SHARD_0, SHARD_1 = ShardIndex(0), ShardIndex(1)
#: Crosses from one slab to the next: a part of 8192 bytes holds seven headers and blocks of 544 bytes.
BLOCKS, DEVICE_SLOT, HOST_SLOT = 4, 2, 5
KEYS = bytes(range(16 * BLOCKS))
GEOMETRY = HostGeometry(slabs=SLABS, slab_bytes=SLAB_BYTES, shards=SHARDS, block_bytes=tiny_layout().bytes_per_block())

Result = tuple[ShardIndex, str, tuple[int, ...]]


class Place:
    """Workers of two shards, the host pool, and what was told of transfers."""

    def __init__(self, pool: ReplicaPool, workers: WorkerPool, story: Story, host: HostMemory) -> None:
        self.pool = pool
        self.workers = workers
        self.story = story
        self.host = mmap.mmap(host.descriptor, SLABS * SLAB_BYTES)
        self.results: Told[Result] = Told()
        self._transfers = 0

    def start(self, kind: TransferKind, *, keys: bytes = KEYS, device_slot: int = DEVICE_SLOT) -> None:
        """Order a copy of `BLOCKS` blocks, or of as many as there are keys."""
        self._transfers += 1
        count = len(keys) // 16
        span = Span(0, b"", keys, one_range(HOST_SLOT, count), one_range(device_slot, count))
        transfer = StartTransfer(TransferId(self._transfers), "default", kind, (span,), urgent=True, progress=0)
        self.workers.start(transfer, lambda *result: self.results.append(result))

    async def finish(self, kind: TransferKind, *, device_slot: int = DEVICE_SLOT) -> list[Result]:
        """Order a copy and wait for both shards."""
        self.results.clear()
        self.start(kind, device_slot=device_slot)
        await self.results.until(SHARDS)
        return sorted(self.results)

    def in_host(self, slot: int, shard: int) -> bytes:
        """A block in the host pool."""
        start = GEOMETRY.block_offset(slot, shard)
        return self.host[start : start + GEOMETRY.block_bytes]

    def write(self, shard: int) -> list[bytes]:
        """Random blocks in the device slots that are stored."""
        blocks = [random.Random(shard * 100 + index).randbytes(GEOMETRY.block_bytes) for index in range(BLOCKS)]
        with mapped(self.pool, shard) as memory:
            for index, block in enumerate(blocks):
                write_block(memory, tiny_layout(), SLOTS, DEVICE_SLOT + index, block)
        return blocks

    def read(self, shard: int, device_slot: int) -> list[bytes]:
        """The blocks in device slots from `device_slot` on."""
        with mapped(self.pool, shard) as memory:
            return [read_block(memory, tiny_layout(), SLOTS, device_slot + index) for index in range(BLOCKS)]


@asynccontextmanager
async def place(run_dir: str, order: PageOrder = "layer_first") -> AsyncIterator[Place]:
    host = create_host_memory(SLABS, SLAB_BYTES)
    try:
        pool = tiny_pool(SHARDS, order=order, host=host)
        async with kept_running(pool, run_dir, deadline_s=0.5) as (workers, story):
            yield Place(pool, workers, story, host)
    finally:
        host.close()


DONE = [(SHARD_0, "", ()), (SHARD_1, "", ())]


def test_store_and_load_bring_every_byte_back(run: RunLoop, run_dir: str) -> None:
    """What is stored lies in the host pool block by block, in each shard's part, and a load brings it back."""

    async def main() -> None:
        async with place(run_dir) as at:
            written = [at.write(shard) for shard in range(SHARDS)]
            assert await at.finish(TransferKind.STORE) == DONE
            stored = [[at.in_host(HOST_SLOT + index, shard) for index in range(BLOCKS)] for shard in range(SHARDS)]
            assert stored == written

            assert await at.finish(TransferKind.LOAD, device_slot=10) == DONE
            assert [at.read(shard, 10) for shard in range(SHARDS)] == written

    run(main())


def test_blocks_of_an_earlier_generation_are_not_loaded(run: RunLoop, run_dir: str) -> None:
    """Orders carry the generation of their time: what was stored under an earlier one is not found under the next."""

    async def main() -> None:
        async with place(run_dir) as at:
            for shard in range(SHARDS):
                at.write(shard)
            assert await at.finish(TransferKind.STORE) == DONE
            at.workers.generation = 2
            all_of_them = tuple(range(BLOCKS))

            assert await at.finish(TransferKind.LOAD, device_slot=10) == [
                (SHARD_0, "", all_of_them), (SHARD_1, "", all_of_them)
            ]  # fmt: skip
            assert await at.finish(TransferKind.STORE) == DONE
            assert await at.finish(TransferKind.LOAD, device_slot=10) == DONE

    run(main())


def test_flipped_bit_is_named_by_its_shard(run: RunLoop, run_dir: str) -> None:
    """A load tells which block of which shard is not what was stored."""

    async def main() -> None:
        async with place(run_dir) as at:
            for shard in range(SHARDS):
                at.write(shard)
            await at.finish(TransferKind.STORE)
            at.host[GEOMETRY.block_offset(HOST_SLOT + 2, 1)] ^= 1

            assert await at.finish(TransferKind.LOAD, device_slot=10) == [(SHARD_0, "", ()), (SHARD_1, "", (2,))]

    run(main())


def test_host_copies_outlive_their_workers(run: RunLoop, run_dir: str) -> None:
    """After SIGKILL of a worker the new ones load what the old ones stored, and the device pool is as it was."""

    async def main() -> None:
        async with place(run_dir) as at:
            written = [at.write(shard) for shard in range(SHARDS)]
            await at.finish(TransferKind.STORE)
            os.kill(at.workers.pid(SHARD_1), signal.SIGKILL)
            await at.story.until(2)

            assert [at.read(shard, DEVICE_SLOT) for shard in range(SHARDS)] == written
            assert await at.finish(TransferKind.LOAD, device_slot=10) == DONE
            assert [at.read(shard, 10) for shard in range(SHARDS)] == written

    run(main())


def test_store_that_is_cut_off_leaves_no_block_that_is_believed(run: RunLoop, run_dir: str) -> None:
    """A worker that is stopped and killed under a store settles as failed, and its blocks are known as bad."""

    async def main() -> None:
        async with place(run_dir) as at:
            for shard in range(SHARDS):
                at.write(shard)
            os.kill(at.workers.pid(SHARD_1), signal.SIGSTOP)
            at.start(TransferKind.STORE)
            await at.results.until(1)
            assert at.results == [(SHARD_0, "", ())]
            os.kill(at.workers.pid(SHARD_1), signal.SIGKILL)
            await at.story.until(2)

            assert at.results[1:] == [(SHARD_1, "worker default/1 was ended by SIGKILL", ())]
            loaded = await at.finish(TransferKind.LOAD, device_slot=10)
            assert loaded == [(SHARD_0, "", ()), (SHARD_1, "", (0, 1, 2, 3))]

    run(main())


def test_stopped_worker_settles_its_transfers_at_the_deadline(run: RunLoop, run_dir: str) -> None:
    """A worker that stops in the middle of transfers is killed; each settles once per shard, and the pool is back."""

    async def main() -> None:
        async with place(run_dir) as at:
            os.kill(at.workers.pid(SHARD_1), signal.SIGSTOP)
            for _ in range(3):
                at.start(TransferKind.STORE)
            await at.story.until(2)
            await at.results.until(6)

            assert sorted(shard for shard, _, _ in at.results) == [0, 0, 0, 1, 1, 1]
            assert all("had not acknowledged" in error for shard, error, _ in at.results if shard == SHARD_1)
            assert await at.finish(TransferKind.STORE) == DONE

    run(main())


def test_transfer_too_large_for_a_message_is_settled_as_failed(run: RunLoop, run_dir: str) -> None:
    """A transfer that no message can hold fails on every shard, after the order has returned."""

    async def main() -> None:
        async with place(run_dir) as at:
            at.start(TransferKind.STORE, keys=bytes(16 * 9000))
            assert at.results == []
            await at.results.until(SHARDS)

            assert [shard for shard, _, _ in at.results] == [0, 1]
            assert all("a command of" in error for _, error, _ in at.results)

    run(main())


def test_transfers_between_two_groups_are_settled_as_failed(run: RunLoop, run_dir: str) -> None:
    """Where no worker runs a transfer fails on every shard, and orders that nobody hears of are let go."""

    async def main() -> None:
        async with place(run_dir) as at:
            os.kill(at.workers.pid(SHARD_0), signal.SIGKILL)
            await at.story.until(1)
            at.start(TransferKind.STORE)
            at.workers.hurry(HurryTransfer(TransferId(1), "default"))
            at.workers.abandon(AbandonLoad(TransferId(1), "default", 0))
            with pytest.raises(DaemonFailure):
                at.workers.probe(0, 1)
            await at.results.until(SHARDS)

            assert [shard for shard, _, _ in at.results] == [0, 1]
            assert all("was ended by SIGKILL" in error for _, error, _ in at.results)

    run(main())


def test_abandoned_load_is_told_on_every_progress_page(run: RunLoop, run_dir: str) -> None:
    """A load that failed before it was ordered is shown as failed to those who wait on any shard."""

    async def main() -> None:
        async with place(run_dir) as at:
            at.workers.abandon(AbandonLoad(TransferId(77), "default", 3))
            at.workers.hurry(HurryTransfer(TransferId(78), "default"))
            await at.workers.probe(0, 1)
            for shard in (SHARD_0, SHARD_1):
                _, progress, *events = at.workers.descriptors(shard)
                await readable(events[3])
                entry = os.pread(progress, 64, 3 * 64)
                assert (int.from_bytes(entry[:8], "little"), int.from_bytes(entry[12:16], "little")) == (77, 2)

    run(main())


async def readable(descriptor: int) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    await event.wait()
    loop.remove_reader(descriptor)
