"""Deaths around a copy process: orders fail, nobody gets memory that it may still write, and no byte is ever wrong."""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvcached_client import Admin, DaemonUnreachable, Stale
from kvcached_client.copy_process.client import CopyProcess, Outcome
from kvcached_client.copy_process.main import check_alive
from kvcached_client.copy_process.shards import ProcessShard, Shards
from kvcached_client.errors import BadRequest, DeviceError, KvcachedError
from kvcached_client.failpoints import LOG_VARIABLE, VARIABLE
from tests.copy_process.engine import CONFIG, PATIENCE_S, Engine
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import DEADLINE_MS, job_of
from tests.daemon.supervised import supervised
from tests.daemon.test_offload import host, is_sound, nothing_held, seconds_until
from tests.line_process import LineProcess

#: Where a process that stores, and then loads, may die.
PLACES = (
    "blocks.store.cleared",
    "blocks.copy",
    "blocks.store.copied",
    "blocks.store.header@3",
    "offload.store.written",
    "blocks.copy@2",
    "offload.load.copied",
)

KILLED = "the copy process has ended with status -9"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with started(tmp_path, CONFIG) as running:
        yield running


@pytest.fixture
def engine(daemon: RunningDaemon) -> Iterator[Engine]:
    with Engine(daemon.run_dir) as made:
        yield made


@pytest.fixture
def engine_process(daemon: RunningDaemon, tmp_path: Path) -> Iterator[LineProcess]:
    """An engine whose copy process is stopped when it has copied the bytes of its first store, and no header."""
    stop = {VARIABLE: "blocks.store.copied=stop", LOG_VARIABLE: str(tmp_path / "reached")}
    process = LineProcess("tests.copy_process.engine", str(daemon.run_dir), environment={**os.environ, **stop})
    try:
        assert process.hear() == "ready"
        yield process
    finally:
        process.end()


def is_pool_used(run_dir: Path) -> bool:
    with Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        return admin.stats().engine_pools[0].used


def wait_until(reached: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not reached():
        assert time.monotonic() - start < PATIENCE_S
        time.sleep(0.01)


def is_stopped(pid: int) -> bool:
    return "State:\tT" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize("place", PLACES)
def test_killed_copy_process_fails_its_order_and_leaves_no_wrong_byte(
    daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """SIGKILL anywhere: the order's outcome says so, the engine connects again, and all that it then hits is right."""
    name, _, at = place.partition("@")
    monkeypatch.setenv(VARIABLE, f"{name}=kill@{at or 1}")
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "reached"))
    with Engine(daemon.run_dir) as engine:
        ends = [engine.store("a", 8)]
        if not ends[0]:
            ends.append(engine.load("a", 8))
        assert ends[-1] == KILLED
        assert (tmp_path / "reached").read_text().split() == [name]

        engine.reconnect()
        assert seconds_until(daemon.run_dir, nothing_held) <= 1
        hit = engine.scheduler.hit("a", 8)
        assert hit == (8 if len(ends) > 1 else 0)
        if not hit:
            assert engine.store("a", 8) == ""
        assert engine.load("a", 8) == "8 True"
    assert is_sound(daemon)


def test_dead_engine_s_memory_and_slots_wait_for_the_death_of_its_copy_process(
    daemon: RunningDaemon, engine_process: LineProcess
) -> None:
    """While a stopped copy process could go on, nobody gets its host slots, nor the device memory that it maps."""
    pid = int(engine_process.ask("pid"))
    assert engine_process.ask("begin_store a 8") == "1"
    try:
        wait_until(lambda: is_stopped(pid))
        engine_process.end()
        seconds_until(daemon.run_dir, lambda stats: stats.states["quarantined"] == 8)
        assert is_pool_used(daemon.run_dir)
    finally:
        os.kill(pid, signal.SIGCONT)  # it finds that the engine is dead, and ends
    assert seconds_until(daemon.run_dir, nothing_held) <= PATIENCE_S
    wait_until(lambda: not is_pool_used(daemon.run_dir))
    with Engine(daemon.run_dir) as engine:
        assert engine.scheduler.hit("a", 8) in {0, 8}
        assert engine.store("b", 8) == ""
        assert engine.load("b", 8) == "8 True"
    assert is_sound(daemon)


@pytest.mark.parametrize("process_of", ["pid", "prepare"])
def test_idle_copy_process_ends_with_its_engine(daemon: RunningDaemon, process_of: str) -> None:
    """SIGKILL of the engine ends the process, though a forked child has its connection and the daemon says nothing.

    So does it end the process that has no session yet.
    """
    process = LineProcess("tests.copy_process.engine", str(daemon.run_dir))
    try:
        assert process.hear() == "ready"
        pid = int(process.ask(process_of))
        copies = os.pidfd_open(pid)
        child = int(process.ask("fork"))
        assert process.ask("store a 8") == ""
        wait_until(lambda: "kvcached-engine" in Path(f"/proc/{pid}/maps").read_text())  # it has started
        daemon.process.send_signal(signal.SIGSTOP)
    finally:
        process.end()
    try:
        assert select.select([copies], [], [], PATIENCE_S)[0]
    finally:
        os.close(copies)
        os.kill(child, signal.SIGKILL)
        daemon.process.send_signal(signal.SIGCONT)
    assert seconds_until(daemon.run_dir, nothing_held) <= 1
    with Engine(daemon.run_dir) as engine:
        assert engine.load("a", 8) == "8 True"


def test_outcome_is_told_though_the_process_has_ended_since(engine: Engine) -> None:
    """What was done comes before the end of the session, which the next call tells."""
    number = engine.begin_store("a", 8)
    assert select.select([engine.copies.fileno()], [], [], PATIENCE_S)[0]
    dead = os.pidfd_open(engine.copies.pid)
    engine.copies.abort()
    assert select.select([dead], [], [], PATIENCE_S)[0]
    os.close(dead)

    assert engine.copies.outcomes() == [Outcome(number)]
    assert (engine.copies.is_over, engine.copies.fileno() >= 0) == (False, True)
    assert engine.copies.outcomes() == []
    assert engine.copies.is_over


def test_shard_whose_process_has_ended_is_stale(engine: Engine) -> None:
    """An order of it fails with its session, and so does the question for its descriptor: nobody waits for more."""
    shard = ProcessShard(engine.copies, deadline_ms=DEADLINE_MS)
    job = engine.scheduler.prepare_store("a", 8)[1]
    engine.compute(job)
    engine.copies.abort()
    with pytest.raises(Stale, match="the copy process"):
        shard.store_all([job_of(job)], after=None)
    shard.close()
    with pytest.raises(Stale, match="has ended with status -9"):
        shard.fileno()


def test_refused_order_fails_alone(engine: Engine) -> None:
    """What the process refuses is refused as by a thread that copies; the next order is carried out."""
    shard = ProcessShard(engine.copies, deadline_ms=DEADLINE_MS)
    job = engine.scheduler.prepare_store("a", 8)[1]
    engine.compute(job)
    wrong = job_of(job)
    wrong.spans[0].blocks[0] = 1000  # type: ignore[index]
    with pytest.raises(BadRequest, match="blocks of the shard"):
        shard.store_all([wrong], after=None)
    assert engine.store("a", 8) == ""
    assert engine.load("a", 8) == "8 True"


def test_process_that_cannot_be_started_is_not_one_that_was_killed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the last session's process has ended: where none can be started, a thread copies."""
    shards: Any = Shards(
        engine.pages, 0, lambda _: 0, deadline_ms=1000, in_process=True, log=logging.getLogger(__name__)
    )
    shards._marks = SimpleNamespace(close=lambda **_: None)
    shards._under_way = SimpleNamespace(was_killed=True)
    monkeypatch.setattr(CopyProcess, "prepare", mock.Mock(side_effect=OSError("no process")))
    with pytest.raises(DaemonUnreachable, match="no process"):
        shards.join(engine.scheduler.client.session)
    assert shards._marks is None


def test_process_that_cannot_go_on_says_why_though_it_has_ended(engine: Engine) -> None:
    """A refusal is heard by who joins later, when the process is long gone."""
    unwritable = os.open(f"/proc/self/fd/{engine.memory.descriptor}", os.O_RDONLY)
    prepared = CopyProcess.prepare(0, engine.pages, engine.memory._replace(descriptor=unwritable))
    os.close(unwritable)
    dead = os.pidfd_open(prepared.pid)
    assert select.select([dead], [], [], PATIENCE_S)[0]
    os.close(dead)
    with pytest.raises(KvcachedError, match=r"memory: .* Permission denied"):
        prepared.join(engine.scheduler.client.session)

    killed = CopyProcess.prepare(0, engine.pages, engine.memory)
    killed.abort()
    with pytest.raises(DeviceError, match="has ended with status -9, and had not joined"):
        killed.join(engine.scheduler.client.session)


def test_copy_process_ends_with_the_daemon_and_the_engine_goes_on_with_the_next_one(tmp_path: Path) -> None:
    """SIGKILL of the daemon: the descriptor becomes readable; after a reconnect the blocks are there and are right."""
    with supervised(tmp_path, CONFIG) as daemon, Engine(daemon.run_dir) as engine:
        assert engine.store("a", 8) == ""
        daemon.kill_and_wait()
        wait_until(lambda: not (engine.copies.outcomes() or _is_alive(engine)))

        engine.reconnect()
        assert engine.load("a", 8) == "8 True"
        assert engine.store("b", 8) == ""
        assert host(daemon.run_dir).states["cached"] == 16


def test_bytes_of_a_dead_engine_are_doubted() -> None:
    """A copy out of memory that an engine has lent counts only if the engine is alive when it is over."""
    with subprocess.Popen(["sleep", "60"]) as engine:  # noqa: S607
        descriptor = os.pidfd_open(engine.pid)
        try:
            check_alive(descriptor)
            engine.kill()
            engine.wait()
            with pytest.raises(DeviceError, match="has died"):
                check_alive(descriptor)
        finally:
            os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_byte_is_wrong_whenever_copy_processes_are_killed(daemon: RunningDaemon, seed: int) -> None:
    """SIGKILL at random instants of copies, 20 times: every order ends, and every block that is hit is right."""
    chance = random.Random(seed)
    with Engine(daemon.run_dir) as engine:
        for _ in range(20):
            name, pid = chance.choice("abcd"), engine.copies.pid
            killer = threading.Timer(chance.random() / 50, os.kill, (pid, signal.SIGKILL))
            killer.start()
            for _ in range(10):
                assert_right(engine, name)
                name = chance.choice("abcd")
                if not _is_alive(engine):
                    break
            killer.join()
            engine.reconnect()
        for name in "abcd":
            assert_right(engine, name)
    assert is_sound(daemon)


def assert_right(engine: Engine, name: str) -> None:
    """Load a prompt if it is there, else store it. The copy process may die meanwhile."""
    try:
        if engine.scheduler.hit(name, 8):
            assert engine.load(name, 8) in {"8 True", KILLED}
        else:
            assert engine.store(name, 8) in {"", KILLED}
    except (Stale, DaemonUnreachable):
        pass


def _is_alive(engine: Engine) -> bool:
    try:
        engine.copies.fileno()
    except DaemonUnreachable:
        return False
    return True
