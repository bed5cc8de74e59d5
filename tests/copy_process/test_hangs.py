"""Copy processes that hang, cannot start or come to nothing: waits end, and what to do is said."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process import shards as copy_shards
from kvcached_client.copy_process import start as copy_start
from kvcached_client.copy_process.client import CopyProcess
from kvcached_client.copy_process.messages import Outcome
from kvcached_client.copy_process.pauses import PAUSE_S_MAX, PAUSE_S_MIN, Pauses
from kvcached_client.copy_process.shards import KILLS_MAX, CopiesPaused, ProcessShard, Shards
from kvcached_client.cuda.marks import MARKS_MAX, MarkWriter
from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, DeviceError, Stale
from tests.client.offload_rig import layer
from tests.copy_process.engine import CONFIG, PATIENCE_S, Engine
from tests.daemon.conftest import started
from tests.daemon.offload_process import job_of
from tests.daemon.test_offload import nothing_held, seconds_until

JOB: Any = None  #: what stands for a copy process looks at no job


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with started(tmp_path, CONFIG) as running, Engine(running.run_dir) as made:
        yield made


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does nothing is late at once."""
    monkeypatch.setattr(copy_shards, "PROGRESS_DEADLINE_S", 0.05)


class Held:
    """Stands for a copy process whose mark is reached when it has been asked for some times; its orders never end."""

    def __init__(self, reached_at: int) -> None:
        self.asked = 0
        self.ends: list[str] = []
        self.device_has_failed = False
        self.is_over = False
        self._reached_at = reached_at
        self._ours, self._theirs = os.pipe()

    def load(self, _: object, *, after: int | None) -> int:
        return 1

    def fileno(self) -> int:
        return self._ours

    def outcomes(self) -> list[Outcome]:
        return [Outcome(1)]

    def say(self) -> None:
        os.write(self._theirs, b"x")

    def has_reached(self, _: int | None) -> bool:
        self.asked += 1
        return self.asked >= self._reached_at

    def abort(self) -> None:
        self.ends.append("abort")

    def close(self) -> None:
        self.ends.append("close")
        os.close(self._ours)
        os.close(self._theirs)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["load", "store"])
def test_stopped_process_is_killed_and_its_session_is_over(engine: Engine, kind: str) -> None:
    """An order to a process that is stopped ends at a deadline, as one to a dead process; the next one copies."""
    assert engine.store("a", 8) == ""
    load, store = engine.scheduler.prepare_load("a", 8), engine.scheduler.prepare_store("b", 8)[1]
    engine.compute(store)
    shard = ProcessShard(engine.copies, deadline_ms=1)
    os.kill(engine.copies.pid, signal.SIGSTOP)
    with pytest.raises(Stale, match=r"was killed, because it had not carried out an order within 0\.052 s"):
        shard.load(job_of(load), after=None) if kind == "load" else shard.store_all([job_of(store)], after=None)
    assert (engine.copies.is_over, engine.copies.was_killed, shard.has_failed) == (True, True, True)
    assert not Path(f"/proc/{engine.copies.pid}").exists()

    engine.reconnect()
    assert seconds_until(engine.run_dir, nothing_held) <= 1
    assert engine.load("a", 8) == "8 True"


@pytest.mark.usefixtures("soon")
def test_process_that_waits_for_its_mark_is_not_late() -> None:
    """However often the deadline passes before the device comes to the mark; from then on there is one deadline."""
    held: Any = Held(reached_at=4)
    shard = ProcessShard(held, deadline_ms=1)
    with pytest.raises(Stale, match="was killed"):
        shard.load(JOB, after=7)
    assert (held.asked, held.ends) == (4, ["abort", "close"])

    held = Held(reached_at=1_000_000)
    reached = held.has_reached

    def say_at_the_fifth(mark: int) -> bool:
        if held.asked == 4:
            held.say()
        return bool(reached(mark))

    held.has_reached = say_at_the_fifth
    assert ProcessShard(held, deadline_ms=1).load(JOB, after=7) == []
    assert (held.asked, held.ends) == (5, [])
    held.close()


def test_reports_have_deadlines_of_their_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a daemon that says nothing is not late before its report is."""
    monkeypatch.setattr(copy_shards, "PROGRESS_DEADLINE_S", 0)
    _, order = engine.scheduler.prepare_store("a", 8)
    engine.compute(order)
    shard = ProcessShard(engine.copies, deadline_ms=PATIENCE_S * 1000)
    shard.store_all([job_of(order)], after=None)
    assert shard.has_copied


@pytest.mark.parametrize("number", [1, MARKS_MAX - 1, MARKS_MAX, (1 << 32) - 1, 1 << 32, (5 << 32) + 3])
def test_mark_is_reached_from_when_the_device_writes_it_or_a_later_one(number: int) -> None:
    """A word of the page stands for a mark, for the ones before it, and for none after it, over the end of numbers."""
    words = [0] * MARKS_MAX
    writer: Any = object.__new__(MarkWriter)
    writer._page = SimpleNamespace(words=words)
    for written, is_reached in ((number - MARKS_MAX, False), (number, True), (number + MARKS_MAX, True)):
        words[number % MARKS_MAX] = written % (1 << 32)
        assert writer.is_reached(number) == is_reached


def test_process_that_does_not_die_is_told_of_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until a killed process is dead it may write the engine's memory: the wait goes on, and the log says so."""
    monkeypatch.setattr(copy_start, "_KILL_S_MAX", 0.01)
    waits: list[float | None] = []

    def wait(timeout: float | None = None) -> None:
        waits.append(timeout)
        if timeout is not None:
            raise subprocess.TimeoutExpired("copy process", timeout)

    process: Any = SimpleNamespace(pid=7, kill=lambda: None, wait=wait)
    copy_start.kill(process)
    assert waits == [0.01, None]
    assert "the copy process 7 is not dead 0.01 s after SIGKILL" in caplog.text


def test_interpreter_without_the_client_says_why(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine has this package and its copy process has not: the start says so, and that is no error of a device."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(bare))
    prepared = CopyProcess.prepare(0, engine.pages, engine.memory)
    with pytest.raises(ChildProcessError, match="No module named 'kvcached_client'") as caught:
        prepared.join(engine.scheduler.client.session)
    assert "ended with status 1, and had not joined" in str(caught.value)
    assert f"{bare} must be able to import kvcached_client" in str(caught.value)
    assert prepared.is_over


def test_process_writes_to_the_engine_s_stderr(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    """What a copy process logs is found where its engine logs."""
    prepared = CopyProcess.prepare(0, engine.pages, engine.memory)
    prepared._stream._socket.sendall((3).to_bytes(4, "little") + b"\xc1no")  # where a session is expected
    dead = os.pidfd_open(prepared.pid)
    assert select.select([dead], [], [], PATIENCE_S)[0]
    os.close(dead)
    with pytest.raises(ChildProcessError, match="its traceback is in this process's stderr"):
        prepared.join(engine.scheduler.client.session)
    assert "DecodeError" in capfd.readouterr().err


def test_process_that_has_not_joined_in_time_names_what_to_do(engine: Engine) -> None:
    """A stopped process is killed at the deadline of the start, and the error says how to allow more time."""
    prepared = CopyProcess.prepare(0, engine.pages, engine.memory)
    os.kill(prepared.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=r"within 10 ms \(allow more by `start_ms`.*doctor --cuda"):
        prepared.join(engine.scheduler.client.session, start_ms=10)
    assert prepared.was_killed


def test_pauses_double_until_a_process_copies() -> None:
    """The second process comes at once, each further one after twice the pause; what to do is said once."""
    now, log = 100.0, mock.Mock()
    pauses = Pauses(log, lambda: now)
    assert pauses.left_s() <= 0
    waited = []
    for _ in range(7):
        pauses.add("it failed")
        waited.append(max(0.0, pauses.left_s()))
        now += waited[-1]
        assert pauses.left_s() <= 0
    assert waited == [0, PAUSE_S_MIN, 2 * PAUSE_S_MIN, 4 * PAUSE_S_MIN, 8 * PAUSE_S_MIN, PAUSE_S_MAX, PAUSE_S_MAX]
    assert log.error.call_count == 1
    assert "doctor --cuda" in log.error.call_args.args[0]
    pauses.end()
    pauses.add("it failed")
    assert pauses.left_s() <= 0


class Rig:
    """`Shards` whose processes are what a test says; no device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pages = EnginePages.of_tensors({"layer 0": layer(8, 64)})
        self.shards: Any = Shards(
            pages, 0, lambda _: 0, deadline_ms=1000, in_process=True, log=logging.getLogger(__name__)
        )
        marks: Any = SimpleNamespace(close=lambda **_: None)
        self.shards._marks = marks
        self.started = 0
        self.error: Exception | None = None
        self.was_killed = False
        self.device_has_failed = False
        monkeypatch.setattr(CopyProcess, "prepare", self._prepared)

    def _prepared(self, *_: object, **__: object) -> Any:
        self.started += 1
        return SimpleNamespace(
            join=mock.Mock(side_effect=self.error),
            close=lambda: None,
            abort=lambda: None,
            was_killed=self.was_killed,
            device_has_failed=self.device_has_failed,
        )

    def join(self) -> Any:
        return self.shards.join(None)


def test_processes_whose_device_fails_at_once_are_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the second in a row no session is joined for a while, and no thread copies; a good copy ends the count."""
    rig = Rig(monkeypatch)
    rig.device_has_failed = True
    for _ in range(2):
        rig.join()
    with pytest.raises(CopiesPaused) as caught:
        rig.join()
    assert 0 < caught.value.seconds <= PAUSE_S_MIN
    assert (rig.started, rig.shards._marks is not None) == (2, True)

    rig.shards._pauses._until_s = 0  # later
    rig.join().has_copied = True
    for _ in range(2):
        rig.join()
    assert rig.started == 5


def test_kills_are_counted_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are killed while they join, with good joins between them, never end copies by a process."""
    rig = Rig(monkeypatch)
    for _ in range(KILLS_MAX + 1):
        rig.error, rig.was_killed = DeviceError("killed"), True
        for _ in range(KILLS_MAX):
            with pytest.raises(DaemonUnreachable, match="killed"):
                rig.join()
        rig.error, rig.was_killed = None, False
        assert isinstance(rig.join(), ProcessShard)


def test_late_join_is_no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that joins too slowly is tried again, after pauses, with one that is started meanwhile."""
    rig = Rig(monkeypatch)
    rig.error, rig.was_killed = DeadlineExceeded("late"), True
    for _ in range(KILLS_MAX + 2):
        rig.shards._pauses._until_s = 0
        with pytest.raises(DeadlineExceeded, match="late"):
            rig.join()
        assert rig.shards._prepared is not None
        rig.shards._prepared.was_killed = False
    assert rig.shards._marks is not None
    rig.shards._pauses._until_s = 0
    rig.shards._prepared.join = lambda *_, **__: None
    assert isinstance(rig.join(), ProcessShard)
