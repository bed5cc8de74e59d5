"""Logging of the daemon: to stderr, which systemd and container runtimes keep. Stdout carries data only.

Messages hold names that peers chose. Characters that could forge a line or drive a terminal are escaped. A message that
names its arguments, as in ``"session %(session)d ended"``, has them as fields where the format is JSON.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from kvcached_client.types import LogLevel

_LEVELS: Final[dict[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_STDERR: Final = 2
#: Of a file with the output of other processes, when one starts: more than people read. Run directories are in memory.
OUTPUT_BYTES_MAX: Final = 8 << 20
_LOGGERS: Final = ("kvcached", "kvcached_client")
#: systemd sets it to device and inode of the stream that it has given to a process: the journal's.
_JOURNAL_VARIABLE: Final = "JOURNAL_STREAM"
#: Priorities of syslog, by the level that they begin with.
_PRIORITIES: Final = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}
_DEBUG_PRIORITY: Final = 7


def set_up_logging(level: LogLevel, log_format: Literal["plain", "json"]) -> None:
    """Send what `kvcached` and `kvcached_client` log to stderr. Called again, it replaces the earlier settings."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = _JsonFormatter() if log_format == "json" else _PlainFormatter()
    handler.setFormatter(_JournalFormatter(formatter) if _is_journal(_STDERR) else formatter)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
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


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _PlainFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z INFO kvcached.daemon: message``, and below it the traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {escaped(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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
