"""Logging of the daemon: to stderr, which systemd and container runtimes keep. Stdout carries data only.

Messages hold names that peers chose. Characters that could forge a line or drive a terminal are escaped. A message that
names its arguments, as in ``"session %(session)d ended"``, has them as fields where the format is JSON.

Nobody waits for whoever reads the log, who may have stopped reading: lines are kept meanwhile, and dropped in the end.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import stat
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kvcached_client.types import LogLevel

if TYPE_CHECKING:
    import asyncio

_LEVELS: Final[dict[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_STDERR: Final = 2
#: Of a file with the output of other processes, when one starts: more than people read. Run directories are in memory.
OUTPUT_BYTES_MAX: Final = 8 << 20
#: What is kept of a log that nobody reads, until somebody does: about 7,000 lines.
WAITING_BYTES_MAX: Final = 1 << 20
#: Between two tries to write what is kept, where nothing is logged meanwhile.
_RETRY_S: Final = 0.1
#: How long the end of a process waits for the reader of its log.
_FLUSH_S_MAX: Final = 1.0
_LOGGERS: Final = ("kvcached", "kvcached_client")
#: systemd sets it to device and inode of the stream that it has given to a process: the journal's.
_JOURNAL_VARIABLE: Final = "JOURNAL_STREAM"
#: Priorities of syslog, by the level that they begin with.
_PRIORITIES: Final = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}
_DEBUG_PRIORITY: Final = 7


def set_up_logging(level: LogLevel, log_format: Literal["plain", "json"]) -> None:
    """Send what `kvcached` and `kvcached_client` log to stderr. Called again, it replaces the earlier settings."""
    handler = _Lines(_STDERR)
    formatter = _JsonFormatter() if log_format == "json" else _PlainFormatter()
    handler.setFormatter(_JournalFormatter(formatter) if _is_journal(_STDERR) else formatter)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.lastResort = handler  # for what asyncio says: Python's own would wait for a reader
    set_level(level)


def set_level(level: LogLevel) -> LogLevel:
    """Log messages of this level and above from now on; returns the level of before."""
    before = logging.getLogger(_LOGGERS[0]).getEffectiveLevel()
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(_LEVELS[level])
    return next((known for known, number in _LEVELS.items() if number >= before), "error")


def log_at_every_level(logger: logging.Logger, words: str, fields: Mapping[str, object]) -> None:
    """Log a message of level info, also where messages of that level are not logged."""
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, words, (fields,), None)
    logger.handle(record)  # which does not look at the level


def open_log(path: str) -> int:
    """A descriptor, the caller's to close, for the output of another process: appended to a file.

    A file that has grown long is put aside first, over the one that was put aside before it.

    Raises:
        OSError: it cannot be opened, or is no file: to open a pipe would wait for its reader.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        log = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _no_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(log).st_mode):
        os.close(log)
        raise _no_file(path)
    if os.fstat(log).st_size < OUTPUT_BYTES_MAX:
        return log
    try:
        Path(path).replace(f"{path}.1")
    except OSError:  # as where something else has that name: better a long file than no process
        return log
    os.close(log)
    return open_log(path)


def _no_file(path: str) -> OSError:
    return OSError(errno.EINVAL, f"{path} is no file; remove it")


def escaped(text: str) -> str:
    """Text of a peer on one line: what is not printable stands as in Python's strings, so that no line is forged."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


class _Lines(logging.Handler):
    """Writes lines to a stream, in order, and never waits for its reader but at the end of the process."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._write = _writer(descriptor, self)
        self._waiting: deque[tuple[bytes, int]] = deque()  # what is to be written, and how many lines that stands for
        self._waiting_bytes = 0
        self._dropped = 0  # lines since the last one that says so
        self._is_cut = False  # the last line that was written has no end yet
        self._retries_in: asyncio.AbstractEventLoop | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line if there is room; otherwise keep it, or drop it where too much is kept."""
        try:
            line = self._encoded(record)
        except Exception:  # noqa: BLE001 - as every handler does: a message that does not fit its arguments
            self.handleError(record)
            return
        if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
            self._write_out()
        if self._waiting and self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
            self._dropped += 1
        else:
            self._tell_dropped()
            self._add(line, 1)
        if not self._write_out():
            self._retry_later()

    def flush(self) -> None:
        """Write what is kept; wait a moment for the reader. Only the end of the process calls this."""
        room, end_s = select.poll(), time.monotonic() + _FLUSH_S_MAX
        room.register(self._descriptor, select.POLLOUT)
        while not self._write_out() and (left_s := end_s - time.monotonic()) > 0:
            room.poll(left_s * 1000)

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _add(self, line: bytes, lines: int) -> None:
        self._waiting.append((line, lines))
        self._waiting_bytes += len(line)

    def _tell_dropped(self) -> None:
        if not self._dropped:
            return
        fields = {"dropped": self._dropped}
        words = "%(dropped)d lines were dropped here: nobody has read the log for a while, or its disk was full"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, words, (fields,), None)
        self._add(self._encoded(record), self._dropped)
        self._dropped = 0

    def _write_out(self) -> bool:
        """Write what there is room for; whether nothing waits any more."""
        try:
            while self._waiting or self._dropped:
                if not self._waiting:
                    self._tell_dropped()
                line, lines = self._waiting[0]
                written = self._write(line)
                self._waiting_bytes -= written
                self._is_cut = written < len(line)
                if self._is_cut:
                    self._waiting[0] = (line[written:], lines)
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            return False
        except OSError:  # the reader has gone, or the disk is full: the next line is another try
            self._dropped += sum(lines for _, lines in self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            if self._is_cut:
                self._add(b"\n", 0)
        return True

    def _retry_later(self) -> None:
        """Write what is kept once there is room. Outside an event loop the next line does, or the end."""
        import asyncio  # noqa: PLC0415 - quick commands take `escaped` from here; where a loop runs, it is imported

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._retries_in is not loop:
            self._retries_in = loop
            loop.call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self.acquire()
        try:
            self._retries_in = None
            if not self._write_out():
                self._retry_later()
        finally:
            self.release()


def _writer(descriptor: int, owner: object) -> Callable[[bytes], int]:
    """What writes to a stream as much as it takes at once, or raises `BlockingIOError`. It lives as long as its owner.

    Whoever else has the stream, as the shell has a terminal, expects that writes to it wait. So O_NONBLOCK is set for
    what is opened here, and not for what is given.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        ours = socket.socket(fileno=os.dup(descriptor))
        weakref.finalize(owner, ours.close).atexit = False  # the end of the process comes to write, too
        return lambda line: ours.send(line, socket.MSG_DONTWAIT)
    if not (stat.S_ISFIFO(mode) or os.isatty(descriptor)):
        return partial(os.write, descriptor)  # a file, or a device that makes nobody wait
    try:
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # another user's terminal, as under su; or the reader has gone
        return partial(_write_if_room, descriptor)
    weakref.finalize(owner, os.close, again).atexit = False
    return partial(os.write, again)


def _write_if_room(descriptor: int, line: bytes) -> int:
    """Write to a pipe or a terminal that cannot be opened again.

    Where a pipe has room, it has room for PIPE_BUF. A terminal under Ctrl-S has none. One whose window has stalled may
    have less than it seems: the write then waits for that.
    """
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    if not room.poll(0):
        raise BlockingIOError
    return os.write(descriptor, line[: select.PIPE_BUF])


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _PlainFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z INFO kvcached.daemon: message``, and below it the traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {escaped(record.getMessage())}"
        if not record.exc_info:
            return line
        return "\n".join([line, *map(escaped, self.formatException(record.exc_info).split("\n"))])


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the fields that the message names[, traceback]."""

    def format(self, record: logging.LogRecord) -> str:
        fields = record.args if isinstance(record.args, Mapping) else {}
        entry = {
            **fields,
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _JournalFormatter(logging.Formatter):
    """Lines of another format, each behind its priority, which journald takes off and stores."""

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        priority = next((each for level, each in _PRIORITIES.items() if record.levelno >= level), _DEBUG_PRIORITY)
        return "\n".join(f"<{priority}>{line}" for line in self._lines.format(record).split("\n"))


def _is_journal(descriptor: int) -> bool:
    """Whether what is written to a descriptor goes to the journal, as `$JOURNAL_STREAM` says."""
    status = os.fstat(descriptor)
    return os.environ.get(_JOURNAL_VARIABLE) == f"{status.st_dev}:{status.st_ino}"
