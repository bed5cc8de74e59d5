"""How an engine starts its copy process: a process of this interpreter that has one end of a connection."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from kvcached_client.copy_process.messages import MessageStream
from kvcached_client.errors import DeviceError

MODULE: Final = "kvcached_client.copy_process"
_STDERR: Final = 2
_SAID_BYTES_MAX: Final = 16 * 1024
#: A process that is not dead so long after SIGKILL is told of.
_KILL_S_MAX: Final = 5.0

_log: Final = logging.getLogger(__name__)


class Started(NamedTuple):
    """A copy process.

    Attributes:
        process: the process.
        stream: the connection to it.
        said: descriptor of memory with what its interpreter writes to stderr until it has imported the client; from
            then on, the process writes to the engine's own stderr.
    """

    process: subprocess.Popen[bytes]
    stream: MessageStream
    said: int

    def take_last_words(self) -> str:
        """The last line that was written before the client was imported, if there is one; the memory is closed."""
        size = os.fstat(self.said).st_size
        data = os.pread(self.said, _SAID_BYTES_MAX, max(0, size - _SAID_BYTES_MAX))
        os.close(self.said)
        lines = data.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def started(descriptors: Sequence[int]) -> Started:
    """A copy process that inherits descriptors.

    Raises:
        OSError: it cannot be started.
    """
    with ExitStack() as until_started, ExitStack() as until_failed:
        _fill_standard(until_started)
        errors = os.dup(_STDERR)  # of nothing, where this process has none
        until_started.callback(os.close, errors)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        until_failed.enter_context(ours)
        until_started.enter_context(theirs)
        said = os.memfd_create("kvcached-copies-say", os.MFD_CLOEXEC)
        until_failed.callback(os.close, said)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *map(str, (theirs.fileno(), os.getpid(), errors))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=(theirs.fileno(), errors, *descriptors),
            start_new_session=True,  # Ctrl-C at the terminal is for the engine
        )
        until_failed.pop_all()
    return Started(process, MessageStream(ours), said)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a copy process, and wait until it is dead, however long that takes: it may write the engine's memory."""
    process.kill()
    try:
        process.wait(_KILL_S_MAX)
    except subprocess.TimeoutExpired:
        words = "the copy process %d is not dead %g s after SIGKILL: it waits in the kernel, and copies wait for it"
        _log.error(words, process.pid, _KILL_S_MAX)
        process.wait()


def unjoined(process: subprocess.Popen[bytes], ending: str, last_words: str) -> Exception:
    """The error for a process that has ended, and has said nothing to the engine."""
    if process.returncode < 0:
        return DeviceError(f"{ending}, and had not joined")
    reason = last_words or "its traceback is in this process's stderr"
    fix = f"{sys.executable} must be able to import kvcached_client: install it there, or name its place in PYTHONPATH"
    return ChildProcessError(f"{ending}, and had not joined: {reason}{f' ({fix})' if last_words else ''}")


def _fill_standard(until_started: ExitStack) -> None:
    """Open /dev/null in place of stdin, stdout and stderr where this process has closed them.

    Otherwise the connection would take such a place, and what is meant for stderr would be written into it.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        until_started.callback(os.close, descriptor)
        if descriptor > _STDERR:
            return
