from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from kvcached.process.backoff import BackOff
from kvcached.worker.exits import DEVICE_LOST, MEMORY_GONE
from kvcached.worker.lifecycle import GONE_AFTER, Lifecycle, WorkersState, restart_pauses
from kvcached.worker.messages import Probe
from kvcached.worker.results import ShardResult
from kvcached_client.errors import DaemonFailure, ErrorCode, RequestError, request_error
from kvcached_client.types import ShardIndex
from tests.virtual_time import VirtualTimeLoop
from tests.worker.groups import (
    PATIENCE_S,
    SLOTS,
    SOON,
    RunLoop,
    Story,
    Told,
    kept_running,
    mapped,
    names_in,
    open_descriptors,
    process_exists,
    read_block,
    tiny_pool,
    workers_of,
    write_block,
)

OnLost = Callable[[ShardIndex, str], None]
SHARD_0, SHARD_1 = ShardIndex(0), ShardIndex(1)
COMMAND = "kvcached.worker.group.WORKER_COMMAND"
PROBE = Probe(source=0, target=1, seed=3)


def fails(words: str, status: int) -> tuple[str, ...]:
    """The command of a worker that says something and ends."""
    return sys.executable, "-c", f"print({words!r}, flush=True); raise SystemExit({status})"


FAILS = fails("no luck", 7)


def test_lost_group_is_replaced_on_the_same_memory(run: RunLoop, run_dir: str) -> None:
    """After the loss of one worker every shard gets a new process and what its pool had, and the loss is told once."""

    async def main() -> None:
        pool = tiny_pool(2)
        async with kept_running(pool, run_dir) as (workers, story):
            before = open_descriptors()
            old = [workers.pid(shard) for shard in (SHARD_0, SHARD_1)]
            with mapped(pool, 0) as memory:
                write_block(memory, pool.layout, SLOTS, 3, b"\7" * pool.layout.bytes_per_block())
            os.kill(old[1], signal.SIGKILL)
            await story.until(2)

            assert story == ["lost 1", "restored"]
            assert not any(process_exists(pid) for pid in old)
            assert not {workers.pid(shard) for shard in (SHARD_0, SHARD_1)} & set(old)
            with mapped(pool, 0) as memory:
                assert read_block(memory, pool.layout, SLOTS, 3) == b"\7" * pool.layout.bytes_per_block()
            await workers.submit(PROBE)
            assert open_descriptors() == before

    run(main())


def test_every_order_is_settled_before_the_restart_is_told(run: RunLoop, run_dir: str) -> None:
    """What the lost workers had been ordered is over on every shard before anybody hears of new ones."""

    async def main() -> None:
        async with kept_running(tiny_pool(2), run_dir) as (workers, story):

            def note(result: ShardResult) -> None:
                story.append(f"settled {result.shard} {'lost' if result.is_lost else 'done'}")

            for shard in (SHARD_0, SHARD_1):
                os.kill(workers.pid(shard), signal.SIGSTOP)
            workers.order(PROBE, note)
            os.kill(workers.pid(SHARD_0), signal.SIGKILL)
            await story.until(4)

            assert story == ["lost 0", "settled 0 lost", "settled 1 lost", "restored"]

    run(main())


def test_stopped_worker_is_killed_and_replaced(run: RunLoop, run_dir: str) -> None:
    """A worker that does not get on with a command until its deadline is killed; its group comes back."""

    async def main() -> None:
        async with kept_running(tiny_pool(), run_dir) as (workers, story):
            os.kill(workers.pid(SHARD_0), signal.SIGSTOP)
            workers.order(PROBE, lambda result: story.append(f"settled {result.error}"), deadline_s=0.1)
            await story.until(3)

            assert [story[0], story[2]] == ["lost 0", "restored"]
            assert "was killed: it had not acknowledged command 1 after 0.1 s" in story[1]
            await workers.submit(PROBE)

    run(main())


def test_groups_refuse_between_two(run: RunLoop, run_dir: str) -> None:
    """From the loss until new workers run, orders are refused as the daemon's failure."""

    async def main() -> None:
        async with kept_running(tiny_pool(), run_dir) as (workers, story):
            os.kill(workers.pid(SHARD_0), signal.SIGKILL)
            await story.until(1)

            with pytest.raises(DaemonFailure, match="default/0 was ended by SIGKILL"):
                workers.submit(PROBE)
            await story.until(2)
            await workers.submit(PROBE)

    run(main())


def test_failed_restarts_are_tried_again(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails is tried again after longer and longer pauses, each said in the log, until one succeeds."""

    async def main() -> None:
        async with kept_running(tiny_pool(), run_dir) as (workers, story):
            before = open_descriptors()
            with log_lines() as lines:
                with monkeypatch.context() as broken:
                    broken.setattr(COMMAND, FAILS)
                    os.kill(workers.pid(SHARD_0), signal.SIGKILL)
                    await lines.until(4)
                await story.until(2)

            assert story == ["lost 0", "restored"]
            assert open_descriptors() == before
            assert lines[0] == "replica default: all workers are dead; they are started again in 0.01 s"
            for line, pause in zip(lines[1:4], ("0.02", "0.04", "0.04"), strict=True):
                assert line.startswith(f"replica default: no workers, the next try is in {pause} s: worker_lost: ")
                assert "no luck" in line
            assert "workers run again" in lines[-1]

    run(main())


@pytest.mark.parametrize("status", [DEVICE_LOST, 3])
def test_first_start_that_fails_may_be_tried_again(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Where the device is lost, or the pool has served before: the loss is told, then why, and workers come later."""

    async def main() -> None:
        story = Story()
        workers = workers_of(tiny_pool(), run_dir, story.note_lost, story.note_restored, BackOff(**SOON))
        with monkeypatch.context() as broken:
            broken.setattr(COMMAND, fails(f"0 ERROR no luck; {status}", status))
            await workers.open(retries=status != DEVICE_LOST)
            assert (story, workers.failed_starts.why) == (["lost 0"], f"no luck; {status}")
        await story.until(2)
        assert (story, workers.failed_starts.why) == (["lost 0", "restored"], "")
        await workers.submit(PROBE)
        await workers.close()

    run(main())


def test_memory_that_is_gone_is_told_once(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only after some starts in a row at which the device did not know it; workers are tried again meanwhile."""

    async def main() -> None:
        told: Told[str] = Told()
        workers = workers_of(tiny_pool(), run_dir, Story().note_lost, back_off=BackOff(**SOON))
        workers._on_memory_gone = lambda: told.append("gone")
        monkeypatch.setattr(COMMAND, fails("who is that?", MEMORY_GONE))
        with log_lines() as lines:
            await workers.open(retries=True)
            await lines.until(GONE_AFTER - 1)
            assert told == []
            await told.until(1)
            await lines.until(GONE_AFTER + 3)
        assert told == ["gone"]
        await workers.close()

    run(main())


def test_crash_loop_degrades_a_replica_until_its_workers_live(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After five short lives in a row pauses are the longest; then workers are on probation until they have lived."""
    back_off = BackOff(first_s=0, longest_s=0.2, healthy_after_s=2)

    async def main() -> None:
        states: Told[WorkersState] = Told()
        go = Lifecycle.go

        def note(self: Lifecycle, state: WorkersState) -> None:
            go(self, state)
            states.append(state)

        monkeypatch.setattr(Lifecycle, "go", note)
        async with kept_running(tiny_pool(), run_dir, back_off) as (workers, story):
            with log_lines() as lines:
                for lives in range(1, 6):
                    assert (workers.state, workers.is_degraded) == (WorkersState.RUNNING, False)
                    os.kill(workers.pid(SHARD_0), signal.SIGKILL)
                    await story.until(2 * lives)
                assert (workers.state, workers.is_degraded) == (WorkersState.PROBATION, True)
                assert workers.last_loss.startswith("worker default/0 was ended by SIGKILL; its log ")
                await workers.submit(PROBE)
                await states.until(2 + 4 * 5 + 1)
            assert (workers.state, workers.is_degraded, workers.restarts) == (WorkersState.RUNNING, False, 5)

        assert [state.value for state in states] == [
            "starting", "running",
            *["lost", "waiting", "starting", "running"] * 4,
            "lost", "degraded", "starting", "probation", "running",
            "stopping", "stopped",
        ]  # fmt: skip
        assert [line.rpartition(" in ")[2] for line in lines if "started again" in line] == ["0 s"] * 4 + ["0.2 s"]
        assert "replica default is degraded: its workers have died again and again" in lines

    asyncio.run(main())


def test_loss_on_probation_is_waited_out_the_longest(run_dir: str) -> None:
    """A degraded replica whose workers die again stays degraded, and its probation begins anew."""
    back_off = BackOff(first_s=0, longest_s=1.2, healthy_after_s=1)

    async def main() -> None:
        async with kept_running(tiny_pool(), run_dir, back_off) as (workers, story):
            with log_lines() as lines:
                for lives in range(1, 7):
                    os.kill(workers.pid(SHARD_0), signal.SIGKILL)
                    await story.until(2 * lives)
            assert (workers.state, workers.is_degraded) == (WorkersState.PROBATION, True)
            assert sum("started again in 1.2 s" in line for line in lines) == 2

    asyncio.run(main())


def test_failed_starts_degrade_a_replica(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss and four starts that fail are five short lives in a row."""
    back_off = BackOff(first_s=0, longest_s=60, healthy_after_s=60)

    async def main() -> None:
        async with kept_running(tiny_pool(), run_dir, back_off) as (workers, _):
            with log_lines() as lines:
                monkeypatch.setattr(COMMAND, FAILS)
                os.kill(workers.pid(SHARD_0), signal.SIGKILL)
                await lines.until(6)
            assert workers.state is WorkersState.DEGRADED
            assert lines[4] == "replica default is degraded: its workers have died again and again"
            assert lines[5].startswith("replica default: no workers, the next try is in 60 s: worker_lost: ")

    asyncio.run(main())


def test_replica_is_back_soon_after_the_last_of_many_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of thirty deaths, eight seconds of life apart, a replica is without workers for 4 s at most."""
    monkeypatch.setattr("kvcached.worker.client.WorkerGroup", PlayedGroup)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        story = Story()
        workers = workers_of(tiny_pool(), "", story.note_lost, story.note_restored, restart_pauses())
        await workers.open()
        down_s = []
        for lives in range(1, 31):
            await asyncio.sleep(8)
            lost_s = loop.time()
            cast("PlayedGroup", workers._group).lose()
            await story.until(2 * lives)
            down_s.append(loop.time() - lost_s)
        await workers.close()
        assert max(down_s) <= 4.1
        assert workers.restarts == 30

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_worker_that_died_by_chance_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause follows the first death or a healthy minute; repeated deaths have longer and longer pauses."""
    monkeypatch.setattr("kvcached.worker.client.WorkerGroup", PlayedGroup)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        story = Story()
        workers = workers_of(tiny_pool(), "", story.note_lost, story.note_restored, restart_pauses())
        await workers.open()
        down_s = []
        for deaths, lived_s in enumerate((1, 1, 1, 60, 1, 3600, 60), start=1):
            await asyncio.sleep(lived_s)
            lost_s = loop.time()
            cast("PlayedGroup", workers._group).lose()
            await story.until(2 * deaths)
            down_s.append(round(loop.time() - lost_s, 3))
        await workers.close()
        assert down_s == [0, 0.5, 1, 0, 0.5, 0, 0]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


class PlayedGroup:
    """`WorkerGroup` without processes."""

    is_running = True

    def __init__(self, pool: object, run_dir: str, on_report: object, on_dead: object, on_lost: OnLost) -> None:
        self._on_lost = on_lost

    def lose(self) -> None:
        self._on_lost(SHARD_0, "killed")

    async def start(self) -> None:
        """It starts at once."""

    async def bury(self) -> None:
        """It is dead at once."""

    async def end(self) -> None:
        """It ends at once."""

    def refusal(self) -> RequestError:
        """It takes no requests."""
        return request_error(ErrorCode.WORKER_LOST, "played", "")


@pytest.mark.parametrize("end", ["the stop in order", "at once"])
def test_killed_groups_leave_nothing_for_the_next_daemon(run: RunLoop, run_dir: str, end: str) -> None:
    """A daemon that ends takes its workers along: with `stop`, or at once with `kill`."""

    async def main() -> None:
        story = Story()
        workers = workers_of(tiny_pool(2), run_dir, story.note_lost, story.note_restored)
        await workers.open()
        pidfds = [os.pidfd_open(workers.pid(shard)) for shard in (SHARD_0, SHARD_1)]
        if end == "at once":
            workers.kill()
        else:
            await workers.close()
        assert all(select.select([pidfd], [], [], PATIENCE_S)[0] for pidfd in pidfds)
        for pidfd in pidfds:
            os.close(pidfd)
        await workers.close()

    run(main())


@pytest.mark.parametrize("moment", ["burying", "pause", "start"])
def test_stop_while_a_group_is_replaced(
    run: RunLoop, run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A stop between loss and restart leaves no process and no descriptor, and nothing starts afterwards."""

    async def main() -> None:
        pool, story = tiny_pool(2), Story()
        before = open_descriptors()
        pause_s = 60 if moment == "pause" else 0
        back_off = BackOff(first_s=pause_s, longest_s=pause_s, healthy_after_s=60)
        workers = workers_of(pool, run_dir, story.note_lost, story.note_restored, back_off)
        await workers.open()
        lost = workers._group
        with log_lines() as lines, hanging_workers(tmp_path, monkeypatch) as started:
            os.kill(lost.workers[SHARD_0].pid, signal.SIGKILL)
            await story.until(1)
            if moment == "pause":
                await lines.until(1)
            if moment == "start":
                await started.until(2)
            replacing = workers._group
            await workers.close()
            await workers.close()

        assert (replacing is lost) is (moment != "start")
        assert workers._pause is None or workers._pause.cancelled() or moment == "start"
        assert not any(
            process_exists(group.workers[shard].pid) for group in (lost, replacing) for shard in (SHARD_0, SHARD_1)
        )
        assert story == ["lost 0"]
        assert open_descriptors() == before
        assert {Path(name).suffix for name in names_in(run_dir)} == {".lock", ".log"}

    run(main())


@contextmanager
def log_lines() -> Iterator[Told[str]]:
    """What `kvcached.worker.client` logs."""
    lines: Told[str] = Told()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, collector = logging.getLogger("kvcached.worker.client"), Collector()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(collector)
    yield lines
    logger.removeHandler(collector)
    logger.setLevel(level)


@contextmanager
def hanging_workers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told[bytes]]:
    """From here on workers hang at their start, and each that has begun is told."""
    path = directory / "began"
    os.mkfifo(path)
    program = f"import os, signal; os.write(os.open({str(path)!r}, os.O_WRONLY), b'x'); signal.pause()"
    began: Told[bytes] = Told()
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)  # without one the pipe would end
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe, lambda: began.append(os.read(pipe, 1)))
    with monkeypatch.context() as hanging:
        hanging.setattr(COMMAND, (sys.executable, "-c", program))
        yield began
    loop.remove_reader(pipe)
    os.close(pipe)
    os.close(writer)
