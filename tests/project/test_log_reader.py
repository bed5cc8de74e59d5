"""A log whose reader has stopped reading, or has gone, in each kind of stream that stderr may be."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached import log
from kvcached.log import WAITING_BYTES_MAX, set_up_logging
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

pytestmark = pytest.mark.timeout(60)  # without what is tested here, a line waits for ever

_STOP, _GO_ON = b"\x13", b"\x11"  # Ctrl-S and Ctrl-Q
_TEXT = "x" * 1000
_LINES = 3000
#: More than these wait in no stream of the kernel's.
_IN_STREAM_MAX = 1 << 20


class Stream(NamedTuple):
    """Where a log goes, and its reader's end.

    Attributes:
        written: descriptor of the log.
        read: descriptor of its reader.
        go_on: what the reader does before it reads.
    """

    written: int
    read: int
    go_on: Callable[[], object] = bool


@contextmanager
def pipe() -> Iterator[Stream]:
    read, written = os.pipe()
    yield Stream(written, read)
    os.close(read)
    os.close(written)


@contextmanager
def terminal() -> Iterator[Stream]:
    read, written = os.openpty()
    os.write(read, _STOP)
    yield Stream(written, read, lambda: os.write(read, _GO_ON))
    os.close(read)
    os.close(written)


@contextmanager
def stalled_terminal() -> Iterator[Stream]:
    read, written = os.openpty()
    yield Stream(written, read)
    os.close(read)
    os.close(written)


@contextmanager
def connection() -> Iterator[Stream]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Stream(ours.fileno(), theirs.fileno())


def refuse(*_: object) -> int:
    raise PermissionError(errno.EACCES, "it is another user's")


def lines_to(descriptor: int) -> log._Lines:
    handler = log._Lines(descriptor)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


def say(handler: logging.Handler, text: str) -> None:
    handler.handle(logging.LogRecord("test", logging.INFO, __file__, 0, text, None, None))


def fill(descriptor: int) -> None:
    """Write until nothing more has room, through a description of this function's own."""
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        try:
            while True:
                os.write(again, b"-" * size)
        except BlockingIOError:
            continue
    os.close(again)


def read_until(descriptor: int, end: bytes) -> bytes:
    read = b""
    while not read.replace(b"\r", b"").endswith(end):  # a terminal puts it before each line break
        read += os.read(descriptor, 1 << 16)
    return read


@pytest.mark.parametrize(
    ("kind", "may_open"),
    [(pipe, True), (pipe, False), (terminal, True), (terminal, False), (stalled_terminal, True), (connection, True)],
    ids=["pipe", "pipe of another user", "Ctrl-S", "Ctrl-S, terminal of another user", "stalled terminal", "socket"],
)
def test_stopped_reader_stops_nobody(
    kind: Callable[[], AbstractContextManager[Stream]], may_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a reader who has stopped. Later, the reader gets what was kept, and how many lines were not.

    Lines are whole and in order, and writes by others to the same stream wait as before.
    """
    with kind() as stream:
        with monkeypatch.context() as patch:
            if not may_open:
                patch.setattr(os, "open", refuse)
            handler = lines_to(stream.written)
        for number in range(_LINES):
            say(handler, f"{number} {_TEXT}")
        stream.go_on()
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(read_until(stream.read, b"last\n")))
        reader.start()
        for line in ("", "last"):
            if line:
                say(handler, line)
            while handler._waiting:
                handler.flush()
        reader.join()

        assert not fcntl.fcntl(stream.written, fcntl.F_GETFL) & os.O_NONBLOCK
        *lines, last = read[0].decode().splitlines()
        following, kept = 0, 0
        for line in lines:
            if dropped := re.match(r"(\d+) lines were dropped here", line):
                following += int(dropped[1])
            else:
                assert line == f"{following} {_TEXT}"
                following, kept = following + 1, kept + 1
        assert (following, last) == (_LINES, "last")
        assert WAITING_BYTES_MAX - 1100 <= kept * len(f"1000 {_TEXT}\n") <= WAITING_BYTES_MAX + _IN_STREAM_MAX


def test_kept_lines_come_without_another_line() -> None:
    """In an event loop, what was kept is written soon after there is room, though nothing else is logged."""

    async def scenario(stream: Stream) -> None:
        handler = lines_to(stream.written)
        fill(stream.written)
        say(handler, "kept")
        say(handler, "last")
        there = await asyncio.to_thread(read_until, stream.read, b"last\n")
        assert there.endswith(b"-kept\nlast\n")

    with pipe() as stream:
        asyncio.run(scenario(stream))


def test_lines_go_on_behind_lines_that_were_dropped() -> None:
    """The line that says how many are missing stands where they would."""
    with pipe() as stream:
        handler = lines_to(stream.written)
        fill(stream.written)
        for number in range(_LINES):
            say(handler, f"{number} {_TEXT}")
        os.read(stream.read, 1 << 16)
        while handler._waiting_bytes > WAITING_BYTES_MAX // 2:  # there is room for more lines, and still some wait
            say(handler, "behind")
            os.read(stream.read, 1 << 16)
        waiting = [line.decode().split(" ", 1) for line, _ in handler._waiting]

        first = next(place for place, words in enumerate(waiting) if words[-1].startswith("lines were dropped here"))
        assert {words[-1] for words in waiting[1:first]} == {f"{_TEXT}\n"}
        assert {words[0] for words in waiting[first + 1 :]} == {"behind\n"}


@pytest.mark.parametrize("kind", [pipe, connection])
def test_reader_that_has_gone_ends_nobody(
    kind: Callable[[], AbstractContextManager[Stream]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines for a reader that has gone are dropped, and no more is kept of them than of others."""
    with kind() as stream, Path(os.devnull).open() as nothing:
        handler = lines_to(stream.written)
        os.dup2(nothing.fileno(), stream.read)
        for _ in range(3):
            say(handler, _TEXT)

        assert (handler._waiting_bytes, handler._dropped) == (0, 3)
    assert capfd.readouterr() == ("", "")


def test_full_disk_costs_lines_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    """What a full disk has no room for is dropped and counted."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        handler = lines_to(full.fileno())
        say(handler, "a")
        say(handler, "b")

        assert (handler._waiting_bytes, handler._dropped) == (0, 2)
    assert capfd.readouterr() == ("", "")


def test_line_that_a_full_disk_has_cut_ends_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one, which says how many are missing, could be read as little as the cut one."""
    room, written = 20, b""

    def write(line: bytes) -> int:
        nonlocal written
        part = line[: room - len(written)]
        if not part:
            raise OSError(errno.ENOSPC, "the disk is full")
        written += part
        return len(part)

    with pipe() as stream:
        handler = lines_to(stream.written)
        monkeypatch.setattr(handler, "_write", write)
        for text in ("a" * 15, "b" * 15, "c"):
            say(handler, text)
        room = 1000
        say(handler, "d")

    head, notice, last = written.decode().splitlines()[1:]
    assert (head, last) == ("b" * 4, "d")
    assert notice.startswith("2 lines were dropped here")


def test_end_waits_for_a_reader_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process, what was kept is still written where somebody reads."""
    monkeypatch.setattr(log, "_FLUSH_S_MAX", 50.0)
    with pipe() as stream:
        handler = lines_to(stream.written)
        fill(stream.written)
        say(handler, "last")
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(read_until(stream.read, b"last\n")))
        reader.start()
        handler.flush()
        reader.join()

        assert read[0].endswith(b"-last\n")


@pytest.mark.full
def test_process_ends_without_a_reader() -> None:
    """A process whose log nobody reads ends in order, a moment later."""
    program = "from kvcached.log import set_up_logging, logging; set_up_logging('info', 'plain')"
    program += "; logging.getLogger('kvcached').error('unread')"
    with pipe() as stream:
        fill(stream.written)
        begun_s = time.monotonic()
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stderr=stream.written) as process:
            try:
                assert process.wait(30) == 0
            finally:
                process.kill()
        assert time.monotonic() - begun_s > log._FLUSH_S_MAX
        assert b"unread" not in os.read(stream.read, 1 << 20)
        assert not select.select([stream.read], [], [], 0)[0]


def test_what_the_event_loop_says_is_a_line_as_others(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that asyncio tells of are lines of the same log, and never wait for a reader either."""
    monkeypatch.setattr(logging, "lastResort", None)
    for name in ("kvcached", "kvcached_client"):
        for attribute in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logging.getLogger(name), attribute, getattr(logging.getLogger(name), attribute))
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    set_up_logging("info", "plain")

    logging.getLogger("asyncio").error("a task failed: %s", "\x1b[2J")

    assert capfd.readouterr().err.endswith(" ERROR asyncio: a task failed: \\x1b[2J\n")
