"""The storage process from the daemon's side: real processes, but other programs than ours."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcached.storage import process
from kvcached.storage.messages import NotOpened, StorageConfig, encode
from kvcached.storage.process import StorageProcess
from tests.unkillable import unkillable

#: Waits, between the end of its connection and its own, until the daemon has seen the first.
_CLOSES_FIRST = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])
os.close(int(sys.argv[1]))
signal.sigwait([signal.SIGCONT])
print("the reason", flush=True)
os._exit(7)
"""
CONFIG = StorageConfig(backend="fake", settings={}, key_file="", timeout_s=1.0, host_bytes=1 << 20)


def when_dead(started: StorageProcess, then: Callable[[StorageProcess], None]) -> None:
    """Nothing happens in the event loop meanwhile."""
    os.waitid(os.P_PID, started.child.pid, os.WEXITED | os.WNOWAIT)
    then(started)


def start(tmp_path: Path) -> tuple[StorageProcess, asyncio.Future[str]]:
    """A storage process, and why it ends."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with (tmp_path / "memory").open("wb") as memory:
        started = StorageProcess(
            CONFIG,
            (memory.fileno(), memory.fileno()),
            tmp_path,
            on_opened=lambda _: None,
            on_reply=lambda _: None,
            on_exit=ended.set_result,
        )
    return started, ended


def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, then: Callable[[StorageProcess], None]) -> str:
    """Start a program as the storage process, wait until it is dead, do something, and return why it ended."""
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", program))

    async def run() -> str:
        started, ended = start(tmp_path)
        when_dead(started, then)
        async with asyncio.timeout(10):
            return await ended

    return asyncio.run(run())


def test_death_is_noticed_before_the_end_of_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two the loop sees first: why it ended is told, once, and nobody else is killed."""
    ending = play(tmp_path, monkeypatch, "raise SystemExit(3)", lambda started: started.child._on_dead())

    assert ending.startswith("ended with status 3")


def test_reason_is_the_last_line_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot open its backend says why in its log, and whoever reads the status need not look there."""
    ending = play(tmp_path, monkeypatch, "print('no such device'); raise SystemExit(3)", lambda _: None)

    assert ending.endswith(": no such device")


def test_reason_that_a_process_tells_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the backend cannot be opened is what is told: not a signal, and not what else is in the log."""
    refusal = encode(NotOpened(reason="no such device", is_misconfigured=False))
    say = f"fd = int(sys.argv[1]); os.read(fd, 1 << 16); os.write(fd, {refusal!r})"
    program = f"import os, sys; {say}; print('something else'); raise SystemExit(3)"
    ending = play(tmp_path, monkeypatch, program, lambda _: None)

    assert ending == "cannot open its backend: no such device"


def test_process_that_ends_by_itself_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose connection closes some time before its end is let end, and its status is told."""
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", _CLOSES_FIRST))

    async def start() -> str:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()
        with (tmp_path / "memory").open("wb") as memory:
            started = StorageProcess(
                CONFIG,
                (memory.fileno(), memory.fileno()),
                tmp_path,
                on_opened=lambda _: None,
                on_reply=lambda _: None,
                on_exit=ended.set_result,
            )

        on_disconnected = started.child._on_disconnected

        def see_the_end_of_its_connection() -> None:
            started.child._on_disconnected = on_disconnected  # type: ignore[method-assign]
            on_disconnected()
            os.kill(started.child.pid, signal.SIGCONT)

        started.child._on_disconnected = see_the_end_of_its_connection  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            return await ended

    ending = asyncio.run(start())

    assert ending == "ended with status 7: the reason"


def test_process_that_cannot_be_killed_is_waited_for_as_long_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that ends leaves it to the next one, and says so; one that goes on waits until it is dead."""
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(1000)"))

    async def play() -> str:
        started, ended = start(tmp_path)
        async with asyncio.timeout(10):
            with unkillable(started.child.pid):
                await started.stop(0.05, 0.05)
                assert f"storage process {started.child.pid} did not end" in caplog.text
                stopping = asyncio.create_task(started.stop(0.05, None))
                await asyncio.sleep(0.5)
                assert (stopping.done(), started.child.is_alive) == (False, True)
            await stopping
            return await ended

    assert asyncio.run(play()) == "was killed: it did not end (it was stopped)"


def test_missing_log_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that somebody has taken away does not keep the daemon from noticing the death."""
    ending = play(tmp_path, monkeypatch, "raise SystemExit(3)", lambda started: Path(started.child._log_path).unlink())

    assert ending.startswith("ended with status 3")
