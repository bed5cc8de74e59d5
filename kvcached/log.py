"""Logging of the daemon: to stderr, which systemd and container runtimes keep. Stdout carries data only.

Messages hold names that peers chose. Characters that could forge a line or drive a terminal are escaped.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import sys
from datetime import UTC, datetime
from typing import Final, Literal

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def set_up_logging(level: Literal["debug", "info", "warning", "error"], log_format: Literal["plain", "json"]) -> None:
    """Send what `kvcached` and `kvcached_client` log to stderr. Called again, it replaces the earlier settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _PlainFormatter())
    for name in ("kvcached", "kvcached_client"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(_LEVELS[level])
        logger.propagate = False


def open_log(path: str) -> int:
    """A descriptor, the caller's to close, for the output of another process: appended to a file.

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
    return log


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
    """One JSON object per line: time, level, logger, message[, traceback]."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)
