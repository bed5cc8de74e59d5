"""The watchdog's two ends on virtual time: who pings when, and which silence is noticed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from kvcached.process.notify import notify_now
from kvcached.recovery.watchdog import (
    EXTENSION_INTERVAL_S,
    EXTENSION_S,
    UNSENT_INTERVAL_S,
    Pings,
    Watch,
    silence_allowed_s,
)
from tests.virtual_time import VirtualTimeLoop

ALIVE = {"WATCHDOG": "1"}
START_S, SILENCE_S = 90, 30


def played(story: Callable[[VirtualTimeLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(story(cast("VirtualTimeLoop", runner.get_loop())))


def watch() -> tuple[Watch, list[float]]:
    """A watch that has begun, and the silences that it told."""
    told: list[float] = []
    watch = Watch(START_S, SILENCE_S, told.append)
    watch.begin()
    return watch, told


def test_pinging_process_is_left_alone() -> None:
    """A process that pings twice in the time that it may be silent is never taken for hung."""

    async def story(_: VirtualTimeLoop) -> None:
        watched, told = watch()
        watched.hear({"READY": "1"})
        for _ping in range(1000):
            await asyncio.sleep(SILENCE_S / 2)
            watched.hear(ALIVE)
        watched.end()
        assert told == []

    played(story)


def test_silent_process_is_told_once() -> None:
    """Silence is told when it has lasted as long as allowed and an eighth at most, once, and not after the end."""

    async def story(_: VirtualTimeLoop) -> None:
        watched, told = watch()
        watched.hear({"READY": "1"})
        await asyncio.sleep(10 * SILENCE_S)
        assert len(told) == 1
        assert SILENCE_S <= told[0] <= SILENCE_S * 9 / 8
        watched.begin()
        watched.end()
        await asyncio.sleep(10 * START_S)
        assert len(told) == 1

    played(story)


def test_start_has_its_own_time_and_may_ask_for_more() -> None:
    """Before it is ready a process need not ping; one that asks for more time gets it, one that does not is told."""

    async def story(_: VirtualTimeLoop) -> None:
        watched, told = watch()
        for _ask in range(20):
            await asyncio.sleep(EXTENSION_INTERVAL_S)
            watched.hear({"EXTEND_TIMEOUT_USEC": "60000000"})
        assert told == []
        await asyncio.sleep(EXTENSION_S * 9 / 8)
        assert len(told) == 1
        assert told[0] >= EXTENSION_S

    played(story)


def test_sleep_of_the_watcher_is_nobodys_silence() -> None:
    """After SIGSTOP of the supervisor, or a suspended machine, the daemon has its whole time again."""

    async def story(loop: VirtualTimeLoop) -> None:
        watched, told = watch()
        watched.hear({"READY": "1"})
        await asyncio.sleep(SILENCE_S - 1)
        loop.stand_still(10_000)
        await asyncio.sleep(SILENCE_S - 1)
        assert told == []
        await asyncio.sleep(SILENCE_S)
        assert len(told) == 1

    played(story)


def test_process_asks_for_time_then_pings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that takes long asks for more time; a ready process pings twice in the time that it may be silent."""
    monkeypatch.setenv("WATCHDOG_USEC", str(SILENCE_S * 1_000_000))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)

    async def story(loop: VirtualTimeLoop) -> None:
        with manager(tmp_path, monkeypatch) as heard:
            pings = Pings()
            await asyncio.sleep(EXTENSION_INTERVAL_S * 2.5)
            assert read(heard) == [b"EXTEND_TIMEOUT_USEC=60000000"] * 2
            pings.ready()
            await asyncio.sleep(SILENCE_S * 2 + 1)
            assert read(heard) == [b"READY=1", *[b"WATCHDOG=1"] * 5]
            loop.stand_still(1000)  # a loop that hangs says nothing meanwhile
            assert read(heard) == []
            pings.close()
            await asyncio.sleep(1000)
            assert read(heard) == []

    played(story)


def test_manager_that_reads_nothing_keeps_no_loop_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings to a manager that is stopped, and whose queue is full, are dropped at once."""
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)

    async def story(_: VirtualTimeLoop) -> None:
        with manager(tmp_path, monkeypatch) as heard:
            pings = Pings()
            pings.ready()
            await asyncio.sleep(2000)
            assert read(heard)[:2] == [b"READY=1", b"WATCHDOG=1"]
            pings.close()

    played(story)


@pytest.mark.parametrize("is_watched", [True, False])
def test_readiness_that_was_not_heard_is_told_again(
    is_watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that takes nothing when the process is ready hears of it once, when it reads again."""
    monkeypatch.setattr("kvcached.process.notify.WAIT_S", 0.01)
    monkeypatch.setenv("WATCHDOG_USEC", str(SILENCE_S * 1_000_000) if is_watched else "")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)

    async def story(_: VirtualTimeLoop) -> None:
        with manager(tmp_path, monkeypatch) as heard:
            while notify_now("X=1"):
                pass
            pings = Pings()
            pings.ready()
            await asyncio.sleep(SILENCE_S)
            assert b"READY=1" not in read(heard)
            await asyncio.sleep(UNSENT_INTERVAL_S * 1.5)
            assert read(heard) == [b"READY=1", *[b"WATCHDOG=1"] * is_watched]
            await asyncio.sleep(SILENCE_S)
            assert b"READY=1" not in read(heard)
            pings.close()

    played(story)


@pytest.mark.parametrize(
    ("microseconds", "pid", "allowed_s"),
    [
        ("30000000", None, 30),
        ("30000000", "own", 30),
        ("30000000", "1", None),
        ("", None, None),
        ("0", None, None),
        ("-5", None, None),
        ("x", None, None),
        ("9" * 5000, None, None),
    ],
)
def test_process_believes_what_its_manager_says(microseconds: str, pid: str | None, allowed_s: float | None) -> None:
    """The time is that of `$WATCHDOG_USEC` where it is a number meant for this process; otherwise nobody watches."""
    environment = {"WATCHDOG_USEC": microseconds}
    if pid is not None:
        environment["WATCHDOG_PID"] = str(os.getpid()) if pid == "own" else pid

    assert silence_allowed_s(environment) == allowed_s


def manager(directory: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The socket of whoever started this process."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    receiver.bind(str(directory / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
    return receiver


def read(receiver: socket.socket) -> list[bytes]:
    """What has come since the last time."""
    heard = []
    while True:
        try:
            heard.append(receiver.recv(100))
        except BlockingIOError:
            return heard
