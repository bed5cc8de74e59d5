"""Signal handlers that raise, forked children and wrong calls: no order counts as done that is not, nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvcached.recovery.supervise import serve_command
from kvcached.storage.process import COMMAND
from kvcached.worker.group import WORKER_COMMAND
from kvcached_client.copy_process.start import started as copy_process_started
from kvcached_client.errors import BadRequest, DaemonUnreachable
from kvcached_client.offload_shard import STORES_PER_REPORT_MAX
from tests.copy_process.engine import CONFIG, Engine
from tests.daemon.conftest import started
from tests.daemon.offload_process import job_of

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Interrupt(BaseException):
    """Out of a signal handler."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with started(tmp_path, CONFIG) as running, Engine(running.run_dir) as made:
        yield made


def interrupt_once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, *, after: bool) -> None:
    """Raise in the next call of a method, before or after what it does."""
    whole = getattr(place, name)

    def interrupted(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(place, name, whole)
        if after:
            whole(*arguments, **named)
        raise Interrupt

    monkeypatch.setattr(place, name, interrupted)


def exit_status_of_child(call: Any) -> int:
    """What a forked child that calls something ends with; 0 = the call was refused as that of a child."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(BaseException):
        with pytest.raises(RuntimeError, match="a forked child"):
            call()
        os._exit(0)
    os._exit(1)


def test_interrupted_order_gives_no_other_order_its_number(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception after an order was sent kills the process, and what the next order hears is about itself."""
    order = engine.scheduler.prepare_store("a", 4)[1]
    interrupt_once(monkeypatch, engine.copies._stream, "send", after=True)
    with pytest.raises(Interrupt):
        engine.copies.store([job_of(order)])
    with suppress(DaemonUnreachable):
        assert engine.copies.store([job_of(order)]) == 2
    engine.copies._process.wait()
    while not engine.copies.is_over:
        engine.copies.outcomes()
    assert engine.copies.was_killed


def test_interrupted_close_is_no_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nobody has seen the process dead, it does not count as dead; the next close waits for its death."""
    interrupt_once(monkeypatch, engine.copies._process, "wait", after=False)
    with pytest.raises(Interrupt):
        engine.copies.close()
    assert not engine.copies.is_over
    engine.copies.close()
    assert (engine.copies.is_over, engine.copies._process.returncode) == (True, 0)


def test_forked_child_cannot_order(engine: Engine) -> None:
    """An order of a child would have the number of its parent's next one: it is refused."""
    job = job_of(engine.scheduler.prepare_store("a", 4)[1])
    for call in (lambda: engine.copies.store([job]), lambda: engine.copies.load(job), engine.copies.outcomes):
        assert exit_status_of_child(call) == 0
    assert engine.store("b", 4) == ""


def test_child_that_closes_ends_nothing(engine: Engine) -> None:
    """A child may close what it has inherited, and the parent goes on."""
    child = os.fork()
    if not child:
        engine.copies.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.store("a", 4) == ""


def test_process_ends_by_itself_though_a_forked_child_lives(engine: Engine) -> None:
    """A child has the connection as well; the process hears all the same that its engine closes, and is not killed."""
    child = engine.fork()
    try:
        engine.copies.close()
        assert (engine.copies._process.returncode, engine.copies.was_killed) == (0, False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("number", [0, STORES_PER_REPORT_MAX + 1])
def test_wrong_number_of_stores_is_refused(engine: Engine, number: int) -> None:
    """No stores, and more than a report tells of, are the caller's error: nothing is copied, and the process lives."""
    order = engine.scheduler.prepare_store("a", 2)[1]
    with pytest.raises(BadRequest, match=f"{number} stores in one call"):
        engine.copies.store([job_of(order)] * number)
    assert engine.store("b", 4) == ""


def test_copy_process_imports_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write where an engine was started does not run code in its copy process."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    started = copy_process_started(())
    started.stream.close()
    assert started.process.wait() == 0
    assert started.take_last_words() == ""


def test_no_process_of_the_daemon_imports_from_the_current_directory() -> None:
    """Workers, storage and the daemon under its supervisor leave the current directory out."""
    for command in (WORKER_COMMAND, COMMAND, serve_command([])):
        assert "-P" in command[: command.index("-m")]
