"""Workers that outlive their daemon, and the next daemon that takes them over, or does not."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest

from kvcached.ledger import ProcessIdentity, identity_of, open_process
from kvcached.worker import supervisor
from kvcached.worker.adoption import Adoptable, end_workers
from kvcached.worker.commands import ShardResult
from kvcached.worker.host_memory import HostMemory, create_host_memory
from kvcached.worker.lifecycle import BackOff
from kvcached.worker.messages import Load, Probe
from kvcached.worker.progress import DONE, FAILED, RUNNING
from kvcached.worker.restart import ReplicaGroups
from kvcached.worker.supervisor import ReplicaPool, WorkerGroup
from kvcached_client.attach import AttachConnection
from kvcached_client.errors import LoadFailed
from kvcached_client.progress import ProgressReader
from kvcached_client.protocol import LoadTicket
from kvcached_client.types import ShardIndex
from tests.worker.groups import (
    PATIENCE_S,
    SLOTS,
    SOON,
    Losses,
    RunLoop,
    Story,
    Told,
    mapped,
    names_in,
    open_descriptors,
    read_block,
    tiny_layout,
    tiny_pool,
    write_block,
)
from tests.worker.host_rigs import BLOCK_BYTES, HOST, load_of, span_of, store_of
from tests.worker.orphans import Gate, Mortal, end_all, is_alive, is_dead_within, mortal

SHARD_0, SHARD_1 = ShardIndex(0), ShardIndex(1)
PROBE = Probe(source=0, target=1, seed=3)
GRACE_MS = 30_000
LAYOUT = tiny_layout(shards=2)


@pytest.fixture
def host() -> Iterator[HostMemory]:
    """A host pool for two shards, as it is kept over the daemon's death."""
    memory = create_host_memory(HOST.slabs, HOST.slab_bytes)
    yield memory
    memory.close()


def block_of(number: int) -> bytes:
    """Some block."""
    return bytes([number]) * BLOCK_BYTES


def pool_of(shards: int = 1, host: HostMemory | None = None) -> ReplicaPool:
    """What the next daemon is configured to serve, as the one before it."""
    return tiny_pool(shards, host=host, grace_ms=GRACE_MS)


def alive(processes: Adoptable) -> list[bool]:
    """Which of them live."""
    return [is_alive(process) for process in processes.values()]


async def adopting(daemon: Mortal, pool: ReplicaPool, run_dir: str) -> WorkerGroup:
    """The next daemon's group."""
    group = WorkerGroup(pool, run_dir, Losses().note)
    await group.start(daemon.adoptable)
    return group


def content(group: WorkerGroup, pool: ReplicaPool, slot: int, shard: int = 0) -> bytes:
    """A block as the next daemon's engines see it."""
    with mapped(group, pool, shard) as memory:
        return read_block(memory, pool.layout, SLOTS, slot)


def test_workers_are_adopted_with_their_memory(run: RunLoop, run_dir: str) -> None:
    """After SIGKILL of the daemon the next one has the same workers, their bytes, and what engines write meanwhile."""

    async def main() -> None:
        pool = pool_of(2)
        with mortal(run_dir, 2) as daemon, daemon.memory(0) as engine_0, daemon.memory(1) as engine_1:
            write_block(engine_0, LAYOUT, SLOTS, 3, block_of(1))
            write_block(engine_1, LAYOUT, SLOTS, 3, block_of(2))
            daemon.kill()
            write_block(engine_1, LAYOUT, SLOTS, 4, block_of(3))
            before = open_descriptors()
            group = await adopting(daemon, pool, run_dir)
            write_block(engine_0, LAYOUT, SLOTS, 5, block_of(4))

            assert group.adopted
            assert group.processes == daemon.adoptable
            assert [content(group, pool, slot, 0) for slot in (3, 5)] == [block_of(1), block_of(4)]
            assert [content(group, pool, slot, 1) for slot in (3, 4)] == [block_of(2), block_of(3)]
            await group.submit(PROBE)
            await group.stop()
            assert not any(alive(daemon.adoptable))
            assert open_descriptors() == before
        assert names_in(run_dir) == ["worker-default-0.log", "worker-default-1.log"]

    run(main())


def test_workers_are_adopted_again_and_again(run_dir: str) -> None:
    """A daemon that adopted its workers may be killed, too: they wait for the one after it."""

    async def main() -> None:
        with mortal(run_dir) as first, first.memory() as engine:
            write_block(engine, LAYOUT, SLOTS, 3, block_of(1))
            first.kill()
            with mortal(run_dir, adoptable=first.adoptable) as second:
                second.kill()
                group = await adopting(second, pool_of(), run_dir)

                assert second.adopted
                assert group.adopted
                assert group.processes == first.adoptable
                assert content(group, pool_of(), 3) == block_of(1)
                await group.stop()

    asyncio.run(main())


@contextmanager
def with_blocks(run_dir: str, host: HostMemory) -> Iterator[Mortal]:
    """A daemon with two workers, into whose slots 0, 1, 2, … engines have written the blocks 1, 2, 3, …."""
    with mortal(run_dir, 2, host=host, gated=True) as daemon:
        for shard in (0, 1):
            with daemon.memory(shard) as engine:
                for slot in range(SLOTS):
                    write_block(engine, LAYOUT, SLOTS, slot, block_of(slot + 1))
        yield daemon


def test_daemon_killed_in_the_middle_of_a_store(run_dir: str, host: HostMemory) -> None:
    """The copy under way is finished and whole, and only then is the worker adopted; what waited is not begun."""

    async def main() -> None:
        pool = pool_of(2, host)
        with with_blocks(run_dir, host) as daemon:
            gate = Gate(run_dir)
            daemon.order(
                store_of(span_of([(3, 1)], [(0, 1)]), transfer=1),
                store_of(span_of([(4, 1)], [(5, 1)], depth=7), transfer=2),
            )
            held = gate.wait_entered()
            daemon.kill()
            group = WorkerGroup(pool, run_dir, Losses().note)
            adoption = asyncio.ensure_future(group.start(daemon.adoptable))
            assert not (await asyncio.wait([adoption], timeout=0.3))[0]
            gate.release()
            await adoption

            assert group.adopted
            assert await corrupt_blocks(group, load_of(span_of([(8, 1)], [(0, 1)]), progress=1), held) == ()
            assert content(group, pool, 8, held) == block_of(4)
            assert await corrupt_blocks(group, load_of(span_of([(9, 1)], [(5, 1)], depth=7), progress=2), held) == (0,)
            await group.stop()

    asyncio.run(main())


async def corrupt_blocks(group: WorkerGroup, work: Load, shard: ShardIndex) -> tuple[int, ...]:
    """What a shard says of a load."""
    results: Told[ShardResult] = Told()
    group.order(work, results.append)
    await results.until(2)
    assert not any(result.error for result in results)
    return next(result.corrupt for result in results if result.shard == shard)


def test_daemon_killed_in_the_middle_of_a_load(run_dir: str, host: HostMemory) -> None:
    """The load under way is finished; the one behind it fails at once and is never done; no trace of them is left."""

    async def main() -> None:
        pool = pool_of(2, host)
        span = span_of([(3, 1)], [(0, 1)])
        with with_blocks(run_dir, host) as daemon:
            daemon.order(store_of(span), wait=True)
            gate = Gate(run_dir)
            daemon.order(
                load_of(span_of([(8, 1)], [(0, 1)]), transfer=70, progress=5),
                load_of(span_of([(9, 1)], [(0, 1)]), transfer=71, progress=6),
            )
            held = gate.wait_entered()
            assert (daemon.entry(5, held), daemon.entry(6, held)) == ((70, RUNNING), (0, 0))
            daemon.kill()
            assert select.select([daemon.descriptors[held][2 + 6]], [], [], PATIENCE_S)[0]
            assert (daemon.entry(5, held), daemon.entry(6, held)) == ((70, RUNNING), (71, FAILED))
            gate.release()
            group = await adopting(daemon, pool, run_dir)

            assert group.adopted
            assert [daemon.entry(index, held) for index in (5, 6)] == [(0, 0), (0, 0)]
            assert [content(group, pool, slot, held) for slot in (8, 9)] == [block_of(4), block_of(10)]
            await group.submit(load_of(span_of([(10, 1)], [(0, 1)]), transfer=1, progress=5))
            assert daemon.entry(5, held) == (1, DONE)
            await group.stop()

    asyncio.run(main())


def test_engines_do_not_wait_for_a_load_that_was_dropped(run_dir: str, host: HostMemory) -> None:
    """Who waits for a layer of a load that its worker will not begin any more hears of it, with any deadline."""
    with with_blocks(run_dir, host) as daemon, ExitStack() as stack:
        daemon.order(store_of(span_of([(3, 1)], [(0, 1)])), wait=True)
        gate = Gate(run_dir)
        daemon.order(
            load_of(span_of([(8, 1)], [(0, 1)]), transfer=70, progress=5),
            load_of(span_of([(9, 1)], [(0, 1)]), transfer=71, progress=6),
        )
        _, page, *events = daemon.descriptors[gate.wait_entered()]
        # It stays open: the page alone has to tell.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        stack.enter_context(theirs)
        reader = ProgressReader(page, tuple(os.dup(event) for event in events), AttachConnection(ours))
        with ThreadPoolExecutor() as threads:
            dropped = threads.submit(reader.wait_layer, [LoadTicket(71, 6)], 0, deadline_ms=3_600_000)
            daemon.kill()
            assert isinstance(dropped.exception(PATIENCE_S), LoadFailed)
            under_way = threads.submit(reader.wait_layer, [LoadTicket(70, 5)], 4, deadline_ms=3_600_000)
            gate.release()
            assert under_way.result(PATIENCE_S) is None


@dataclass
class Misfit:
    """Something else than what the workers hold, and what they say to it."""

    pool: ReplicaPool
    says: str
    shards: int = 1


MISFITS = {
    "slots": Misfit(replace(pool_of(), slots=SLOTS - 1), "it refuses: not the same: geometry"),
    "more shards": Misfit(pool_of(2), "not one for each of 2 shards lives"),
    "fewer shards": Misfit(pool_of(1), "not one for each of 1 shards lives", shards=2),
    "namespace": Misfit(replace(pool_of(), namespace=bytes(32)), "it refuses: not the same: namespace"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_workers_of_another_configuration_are_replaced(
    run_dir: str, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Workers that hold something else than what is configured are dead before others are started in their place."""

    async def main() -> None:
        with mortal(run_dir, MISFITS[what].shards) as daemon, daemon.memory() as engine:
            write_block(engine, LAYOUT, SLOTS, 3, block_of(1))
            daemon.kill()
            pool = MISFITS[what].pool
            before = open_descriptors()
            group = await adopting(daemon, pool, run_dir)

            assert not group.adopted
            assert not any(alive(daemon.adoptable))
            assert MISFITS[what].says in caplog.text
            assert not any(content(group, pool, 3))
            await group.submit(PROBE)
            await group.stop()
            assert open_descriptors() == before

    asyncio.run(main())


def test_group_is_adopted_as_a_whole_or_not_at_all(run_dir: str) -> None:
    """Where one worker of a replica has died the others are of no use: all are replaced."""

    async def main() -> None:
        with mortal(run_dir, 2) as daemon:
            daemon.kill()
            end_all([daemon.adoptable[SHARD_1]])
            assert alive(daemon.adoptable) == [True, False]
            group = await adopting(daemon, pool_of(2), run_dir)

            assert not group.adopted
            assert not any(alive(daemon.adoptable))
            await group.submit(PROBE)
            await group.stop()

    asyncio.run(main())


def test_stopped_worker_is_not_adopted(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not answer until the deadline is killed with its group, and new ones start."""
    monkeypatch.setattr(supervisor, "ADOPTION_DEADLINE_S", 0.3)

    async def main() -> None:
        with mortal(run_dir, 2) as daemon:
            os.kill(daemon.adoptable[SHARD_0].pid, signal.SIGSTOP)
            daemon.kill()
            group = await adopting(daemon, pool_of(2), run_dir)

            assert not group.adopted
            assert not any(alive(daemon.adoptable))
            await group.submit(PROBE)
            await group.stop()

    asyncio.run(main())


def test_process_that_took_a_dead_workers_id_is_left_alone(run_dir: str) -> None:
    """A process whose start time is another is nobody that was written down: it is neither adopted nor ended."""
    own = identity_of(os.getpid())
    assert own is not None
    stranger = {SHARD_0: ProcessIdentity(own.pid, own.started + 1)}

    async def main() -> None:
        group = WorkerGroup(pool_of(), run_dir, Losses().note)
        await group.start(stranger)  # this process lives on

        assert not group.adopted
        await group.stop()

    asyncio.run(main())


@contextmanager
def living() -> Iterator[ProcessIdentity]:
    """A process that does nothing but live."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identity_of(process.pid)
        assert identity is not None
        yield identity
        process.kill()


def test_worker_that_another_process_passes_for_is_not_adopted(run_dir: str) -> None:
    """What was written down and who listens have to be one process, whose death can be seen; else both are ended."""

    async def main() -> None:
        with (
            mortal(run_dir) as daemon,
            living() as other,
        ):
            daemon.kill()
            group = WorkerGroup(pool_of(), run_dir, Losses().note)
            await group.start({SHARD_0: other})

            assert not group.adopted
            assert not is_alive(other)
            assert not any(alive(daemon.adoptable))
            await group.stop()

    asyncio.run(main())


def test_workers_that_nobody_wrote_down_are_ended(run_dir: str) -> None:
    """Workers whose daemon died before it could write them down are dead before others start in their place."""

    async def main() -> None:
        with mortal(run_dir, 2) as daemon:
            daemon.kill()
            group = WorkerGroup(pool_of(2), run_dir, Losses().note)
            await group.start()

            assert not group.adopted
            assert not any(alive(daemon.adoptable))
            await group.submit(PROBE)
            await group.stop()

    asyncio.run(main())


def test_workers_of_a_replica_that_is_gone_are_ended(run_dir: str) -> None:
    """`end_workers` returns when every worker is dead, and takes their sockets away."""
    with mortal(run_dir, 2) as daemon:
        daemon.kill()
        asyncio.run(end_workers(run_dir, "default", daemon.adoptable))

        assert not any(alive(daemon.adoptable))
    assert names_in(run_dir) == ["worker-default-0.log", "worker-default-1.log"]


def test_nothing_is_left_after_the_grace_period(run_dir: str) -> None:
    """Where no other daemon comes every worker ends by itself, whatever it was doing, and its socket is gone."""
    with mortal(run_dir, 2, grace_ms=300) as daemon:
        pidfds = [open_process(process.pid, process.started) for process in daemon.adoptable.values()]
        daemon.kill()
        for pidfd in pidfds:
            assert pidfd is not None
            assert is_dead_within(pidfd, PATIENCE_S)
            os.close(pidfd)
    assert names_in(run_dir) == ["worker-default-0.log", "worker-default-1.log"]


def test_nothing_is_left_after_the_grace_period_of_a_worker_that_copies(run_dir: str, host: HostMemory) -> None:
    """A worker whose copy does not get on ends in the middle of it when its time is over."""
    with mortal(run_dir, 2, host=host, grace_ms=300, gated=True) as daemon:
        gate = Gate(run_dir)
        daemon.order(store_of(span_of([(3, 1)], [(0, 1)])))
        process = daemon.adoptable[gate.wait_entered()]
        pidfd = open_process(process.pid, process.started)
        assert pidfd is not None
        daemon.kill()
        assert is_dead_within(pidfd, PATIENCE_S)
        os.close(pidfd)


def test_adopted_worker_that_dies_is_lost_and_replaced(run: RunLoop, run_dir: str) -> None:
    """The loss of a worker that is no child is told once, like any other, and its group is replaced by a new one."""

    async def main() -> None:
        with mortal(run_dir, 2) as daemon:
            daemon.kill()
            story = Story()
            groups = ReplicaGroups(pool_of(2), run_dir, story.note_lost, story.note_restored, BackOff(**SOON))
            await groups.start(daemon.adoptable)
            assert groups.adopted
            assert groups.processes == daemon.adoptable
            before = open_descriptors()
            os.kill(daemon.adoptable[SHARD_1].pid, signal.SIGKILL)
            await story.until(2)

            assert story == ["lost 1", "restored"]
            assert not groups.adopted
            assert not any(alive(daemon.adoptable))
            assert all(alive(groups.processes))
            assert open_descriptors() == before
            await groups.current.submit(PROBE)
            await groups.stop()

    run(main())


def test_start_that_is_called_off_leaves_nothing(run: RunLoop, run_dir: str) -> None:
    """A daemon that is stopped while it waits for a worker that does not answer leaves no worker, nor a descriptor."""

    async def main() -> None:
        with mortal(run_dir, 2) as daemon:
            os.kill(daemon.adoptable[SHARD_0].pid, signal.SIGSTOP)
            daemon.kill()
            before = open_descriptors()
            start = asyncio.ensure_future(adopting(daemon, pool_of(2), run_dir))
            await asyncio.wait([start], timeout=0.2)
            start.cancel()
            await asyncio.wait([start])

            assert start.cancelled()
            assert not any(alive(daemon.adoptable))
            assert open_descriptors() == before

    run(main())
