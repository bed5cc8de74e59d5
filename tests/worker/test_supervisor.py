from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from kvcached.worker.messages import COMMANDS_IN_FLIGHT_MAX, Copy, Probe
from kvcached.worker.supervisor import ReplicaPool, WorkerGroup
from kvcached_client.errors import BadRequest, DaemonFailure, ErrorCode, NoCapacity, RequestError
from kvcached_client.layout import PageOrder
from kvcached_client.types import ShardIndex, pack_ranges
from tests.worker.groups import (
    SLOTS,
    Losses,
    RunLoop,
    mapped,
    names_in,
    open_descriptors,
    process_exists,
    read_block,
    running,
    tiny_pool,
    write_block,
)

SHARD_0, SHARD_1 = ShardIndex(0), ShardIndex(1)
COMMAND = "kvcached.worker.process.WORKER_COMMAND"
COPY = Copy(sources=pack_ranges([(0, 1)]), targets=pack_ranges([(1, 1)]))
#: Many small ranges: a few of these fill the socket's buffer.
LONG_COPY = Copy(
    sources=pack_ranges([(2 * index, 1) for index in range(7000)]),
    targets=pack_ranges([(2 * index + 1, 1) for index in range(7000)]),
)


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
def test_group_copies_on_every_shard(run: RunLoop, run_dir: str, order: PageOrder) -> None:
    """A copy moves the named blocks in the memory of every shard, as a process sees it that has mapped them."""

    async def main() -> None:
        pool = tiny_pool(2, order=order)
        async with running(pool, run_dir) as (group, _):
            for shard in range(2):
                with mapped(group, pool, shard) as memory:
                    block = random.Random(shard).randbytes(pool.layout.bytes_per_block())
                    write_block(memory, pool.layout, SLOTS, 5, block)
                    await group.submit(Copy(sources=pack_ranges([(4, 2)]), targets=pack_ranges([(9, 1), (12, 1)])))

                    assert read_block(memory, pool.layout, SLOTS, 12) == block
                    assert read_block(memory, pool.layout, SLOTS, 9) == bytes(len(block))

    run(main())


def test_group_probe_proves_every_shard(run: RunLoop, run_dir: str) -> None:
    """A probe of working shards passes; one of slots that do not exist fails with the reason of each shard."""

    async def main() -> None:
        async with running(tiny_pool(2), run_dir) as (group, _):
            await group.submit(Probe(source=0, target=1, seed=7))

            with pytest.raises(DaemonFailure, match="shard 0: ValueError: slot") as caught:
                await group.submit(Probe(source=0, target=SLOTS, seed=7))
            assert "shard 1: ValueError: slot" in caught.value.message

    run(main())


def test_group_command_fails_with_the_workers_reason(run: RunLoop, run_dir: str) -> None:
    """A command that a shard cannot carry out fails with that shard's reason, and the group goes on."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (group, losses):
            with pytest.raises(
                DaemonFailure, match=r"shard 0: ValueError: slots \[16, 17\) are not in a pool"
            ) as caught:
                await group.submit(Copy(sources=pack_ranges([(0, 1)]), targets=pack_ranges([(SLOTS, 1)])))
            await group.submit(COPY)

            assert caught.value.code is ErrorCode.INTERNAL
            assert not losses.reasons

    run(main())


def test_group_tells_of_a_killed_worker(run: RunLoop, run_dir: str) -> None:
    """A worker that is SIGKILLed is reported within a second, with the end of its log, and its commands fail."""

    async def main() -> None:
        async with running(tiny_pool(2), run_dir) as (group, losses):
            os.kill(group.pid(SHARD_1), signal.SIGSTOP)
            under_way = group.submit(COPY)
            os.kill(group.pid(SHARD_1), signal.SIGKILL)
            await asyncio.wait_for(losses.happened.wait(), 1)

            assert list(losses.reasons) == [1]
            assert "worker default/1 was ended by SIGKILL" in losses.reasons[1]
            assert "INFO worker default/1: pool of" in losses.reasons[1]
            with pytest.raises(DaemonFailure, match="default/1 was ended by SIGKILL") as caught:
                await under_way
            assert caught.value.code is ErrorCode.WORKER_LOST
            with pytest.raises(DaemonFailure, match="default/1 was ended by SIGKILL"):
                group.submit(COPY)

    run(main())


def test_group_kills_a_worker_that_misses_a_deadline(run: RunLoop, run_dir: str) -> None:
    """A command fails for lateness only once the late worker is dead, so that nobody writes to its slots any more."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (group, losses):
            os.kill(group.pid(SHARD_0), signal.SIGSTOP)
            with pytest.raises(DaemonFailure, match=r"was killed: it had not acknowledged command 1 after 0\.1 s"):
                await group.submit(COPY, deadline_s=0.1)

            assert "had not acknowledged" in losses.reasons[0]
            assert not process_exists(group.pid(SHARD_0))

    run(main())


def test_group_bounds_commands_in_flight(run: RunLoop, run_dir: str) -> None:
    """Commands beyond the limit are refused; all those taken are carried out once the worker goes on."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (group, _):
            os.kill(group.pid(SHARD_0), signal.SIGSTOP)
            taken = [group.submit(COPY) for _ in range(COMMANDS_IN_FLIGHT_MAX)]
            with pytest.raises(NoCapacity):
                group.submit(COPY)
            os.kill(group.pid(SHARD_0), signal.SIGCONT)
            await asyncio.gather(*taken)
            await group.submit(COPY)

    run(main())


def test_group_keeps_what_the_socket_cannot_hold(run: RunLoop, run_dir: str) -> None:
    """Commands larger than the socket's buffer in all arrive in order once the worker reads."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (group, _):
            os.kill(group.pid(SHARD_0), signal.SIGSTOP)
            taken = [group.submit(work) for work in (LONG_COPY, LONG_COPY, LONG_COPY, COPY)]
            os.kill(group.pid(SHARD_0), signal.SIGCONT)
            results = await asyncio.gather(*taken, return_exceptions=True)

            assert ["are not in a pool" in str(result) for result in results] == [True, True, True, False]
            assert results[3] is None

    run(main())


def test_group_refuses_a_command_too_large_for_a_message(run: RunLoop, run_dir: str) -> None:
    """A command that no message can hold is refused here, and the next one is served."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (group, _):
            with pytest.raises(RequestError, match="a command of") as caught:
                group.submit(Copy(sources=LONG_COPY.sources * 2, targets=LONG_COPY.targets * 2))
            await group.submit(COPY)

            assert caught.value.code is ErrorCode.LIMIT

    run(main())


def test_group_cancelled_command_harms_nobody(run: RunLoop, run_dir: str) -> None:
    """A caller that no longer waits for a command does not disturb the next one."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (group, losses):
            group.submit(COPY).cancel()
            await group.submit(COPY)

            assert not losses.reasons

    run(main())


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_start_fails_when_a_worker_is_never_ready(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that says nothing is a start failure after the deadline, and the message ends with its log."""
    monkeypatch.setattr(
        COMMAND,
        program(
            "import sys; print('pondering', flush=True); sys.stdin = open(0); input_fd = int"
            "(sys.argv[1]); import signal; signal.pause()"
        ),
    )

    async def main() -> None:
        group = WorkerGroup(tiny_pool(ready_deadline_s=1), run_dir, Losses().note)
        with pytest.raises(DaemonFailure) as caught:
            await group.start()

        assert caught.value.code is ErrorCode.DEADLINE
        assert "worker default/0 was not ready within 1 s" in caught.value.message
        assert caught.value.message.endswith("ends:\npondering")

    run(main())


def test_start_fails_when_a_worker_ends(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends before it is ready is a start failure at once, with its status and 20 lines of log."""
    monkeypatch.setattr(COMMAND, program("[print('line', i) for i in range(50)]; raise SystemExit(7)"))

    async def main() -> None:
        group = WorkerGroup(tiny_pool(), run_dir, Losses().note)
        with pytest.raises(DaemonFailure, match="default/0 ended with status 7 before it was ready") as caught:
            await group.start()

        assert caught.value.message.splitlines()[1:] == [f"line {number}" for number in range(30, 50)]

    run(main())


def test_start_failure_tells_nothing_of_earlier_runs(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is appended to, but an error shows what this run wrote."""
    Path(f"{run_dir}/worker-default-0.log").write_text("an old story\n")
    monkeypatch.setattr(COMMAND, program("raise SystemExit(7)"))

    async def main() -> None:
        group = WorkerGroup(tiny_pool(), run_dir, Losses().note)
        with pytest.raises(DaemonFailure, match="is empty"):
            await group.start()

    run(main())
    assert Path(f"{run_dir}/worker-default-0.log").read_text() == "an old story\n"


def test_start_failure_of_one_ends_the_others(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one of several workers cannot start, none is left: no process, no socket, no descriptor."""
    # The second worker finds its socket's place taken by a directory.
    Path(f"{run_dir}/worker-default-1.sock").mkdir()
    before = open_descriptors()
    losses = Losses()

    async def main() -> None:
        within = open_descriptors()
        group = WorkerGroup(tiny_pool(2), run_dir, losses.note)
        with pytest.raises(DaemonFailure, match="default/1 ended with status 3 before it was ready"):
            await group.start()

        assert open_descriptors() == within
        for shard in (SHARD_0, SHARD_1):
            assert not process_exists(group.pid(shard))

    run(main())
    assert open_descriptors() == before
    assert not losses.reasons
    assert names_in(run_dir) == ["worker-default-0.log", "worker-default-1.log", "worker-default-1.sock"]


def test_start_refuses_more_memory_than_there_is(run: RunLoop, run_dir: str) -> None:
    """The memory of all shards together is checked before any process is started."""

    async def main() -> None:
        pool = ReplicaPool("default", tiny_pool(2).layout, 1 << 36)
        with pytest.raises(DaemonFailure, match=r"replica default \(2 shards\) needs \d+ bytes, but"):
            await WorkerGroup(pool, run_dir, Losses().note).start()

    run(main())
    assert names_in(run_dir) == []


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden", "a" * 65, "a b"])
def test_start_refuses_names_that_are_no_file_names(run: RunLoop, run_dir: str, name: str) -> None:
    """A replica's name becomes part of paths, so that only plain names are taken."""

    async def main() -> None:
        with pytest.raises(BadRequest, match="replica name"):
            await WorkerGroup(ReplicaPool(name, tiny_pool().layout, SLOTS), run_dir, Losses().note).start()

    run(main())


def test_stop_leaves_logs_only(run: RunLoop, run_dir: str) -> None:
    """After a stop no process, socket or descriptor is left, no loss is told, and a second stop does nothing."""
    losses = Losses()

    async def main() -> None:
        before = open_descriptors()
        group = WorkerGroup(tiny_pool(2), run_dir, losses.note)
        await group.start()
        under_way = group.submit(COPY)
        await group.stop()
        await group.stop()

        assert under_way.done()
        assert under_way.exception() is None
        assert open_descriptors() == before
        with pytest.raises(DaemonFailure):
            group.submit(COPY)
        with pytest.raises(DaemonFailure):
            group.memory_fd(SHARD_0)

    run(main())
    assert not losses.reasons
    assert names_in(run_dir) == ["worker-default-0.log", "worker-default-1.log"]


def test_stop_kills_a_worker_that_does_not_react(run: RunLoop, run_dir: str) -> None:
    """A stopped process ignores messages and SIGTERM; the stop ends it all the same and fails what it had not done."""

    async def main() -> None:
        group = WorkerGroup(tiny_pool(), run_dir, Losses().note)
        await group.start()
        os.kill(group.pid(SHARD_0), signal.SIGSTOP)
        under_way = group.submit(COPY)
        await group.stop(0.2)

        assert not process_exists(group.pid(SHARD_0))
        with pytest.raises(DaemonFailure):
            await under_way

    run(main())


def test_group_workers_have_a_session_of_their_own(run: RunLoop, run_dir: str) -> None:
    """A Ctrl-C at the daemon's terminal does not reach the workers."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (group, _):
            assert os.getsid(group.pid(SHARD_0)) == group.pid(SHARD_0)

    run(main())
