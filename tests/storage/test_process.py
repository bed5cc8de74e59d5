"""The storage process from the daemon's side: real processes, but other programs than ours."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcached.storage import process
from kvcached.storage.messages import StorageConfig
from kvcached.storage.process import StorageProcess

CONFIG = StorageConfig(backend="fake", settings={}, faults={}, key_file="", lock_path="", timeout_s=1.0)


def when_dead(started: StorageProcess, then: Callable[[StorageProcess], None]) -> None:
    """Nothing happens in the event loop meanwhile."""
    os.waitid(os.P_PID, started._child.pid, os.WEXITED | os.WNOWAIT)
    then(started)


def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, then: Callable[[StorageProcess], None]) -> str:
    """Start a program as the storage process, wait until it is dead, do something, and return why it ended."""
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", program))

    async def start() -> str:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with (tmp_path / "memory").open("wb") as memory:
            started = StorageProcess(
                CONFIG,
                memory.fileno(),
                str(tmp_path / "log"),
                on_opened=lambda _: None,
                on_reply=lambda _: None,
                on_exit=ended.set_result,
            )
        when_dead(started, then)
        async with asyncio.timeout(10):
            return await ended

    return asyncio.run(start())


def test_death_is_noticed_before_the_end_of_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two the loop sees first: why it ended is told, once, and nobody else is killed."""
    ending = play(tmp_path, monkeypatch, "raise SystemExit(3)", StorageProcess._on_dead)

    assert ending.startswith("ended with status 3")


def test_reason_is_the_last_line_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot open its backend says why in its log, and whoever reads the status need not look there."""
    ending = play(tmp_path, monkeypatch, "print('no such device'); raise SystemExit(3)", lambda _: None)

    assert ending.endswith(": no such device")


def test_missing_log_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that somebody has taken away does not keep the daemon from noticing the death."""
    ending = play(tmp_path, monkeypatch, "raise SystemExit(3)", lambda started: Path(started._log_path).unlink())

    assert ending.startswith("ended with status 3")
