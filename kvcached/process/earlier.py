"""Child processes of an earlier daemon: each holds a lock while it lives, so that its death can be waited for.

Until then such a process may write into memory that has outlived its daemon.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvcached.process.identity import PID_MAX, arguments_of, pidfd_of
from kvcached.process.readable import readable

#: How much of a lock file is read: more than a process id takes.
_LOCK_BYTES_MAX: Final = 20
#: What a lock file holds: a process id, or zeros where the machine has crashed.
_LOCK: Final = re.compile(rb"[\d\s\0]*")
#: A killed process is dead within milliseconds. One that is not is named in the log after so long, ...
_NAMED_AFTER_S: Final = 5.0
#: ... and again at this interval.
_NAMED_EVERY_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


def take_lock(path: str) -> int:
    """A descriptor with a lock on a file, which is held until every process that inherits the descriptor has ended.

    Raises:
        OSError: another process holds it, or the file is somebody's who does not lock with it.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(lock, path)
        os.ftruncate(lock, 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _lock(lock: int, path: str) -> None:
    """Lock a file that holds nothing but a lock's contents.

    Raises:
        OSError: another process holds it, or it holds something else.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OSError(error.errno, f"{path} is locked by another process") from error
    content = os.pread(lock, _LOCK_BYTES_MAX + 1, 0)
    if len(content) > _LOCK_BYTES_MAX or not _LOCK.fullmatch(content):
        what = "is there, and holds something else than a process id; move it away, or name another place"
        raise OSError(errno.EEXIST, f"{path} {what}")


def name_holder(lock: int, pid: int) -> None:
    """Write down which process holds a lock."""
    os.pwrite(lock, f"{pid}\n".encode(), 0)


async def end_earlier(path: Path, module: str) -> None:
    """Kill the process that holds a lock, if there is one, and wait until it is dead.

    There is no deadline: a start that failed would be one of those after which the manager gives up, and drops the
    memory. Nothing but a reboot ends a process that waits in the kernel for a disk or a device that hangs.

    Args:
        path: the lock.
        module: what such a process runs; nothing else is killed.

    Raises:
        OSError: another program holds the lock, or a process that cannot be seen from here.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await _end_holder(lock, path.name, module)
    finally:
        os.close(lock)


async def _end_holder(lock: int, name: str, module: str) -> None:
    """End the process that wrote its id into a file and holds a lock on it."""
    text = os.pread(lock, _LOCK_BYTES_MAX, 0).strip()
    pid = int(text) if text.isdigit() else 0
    if not 0 < pid <= PID_MAX:
        raise OSError(f"the process of an earlier daemon that holds {name} starts or ends right now; start again")
    pidfd = pidfd_of(pid)
    if pidfd is None:
        _check_released(lock, name, pid)
        return
    try:
        arguments = arguments_of(pid)
        if arguments and module.encode() not in arguments:
            raise OSError(f"a process holds {name} in the run directory, and it is not {pid}, as written there")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await _await_death(pidfd, pid, name)
    finally:
        os.close(pidfd)


async def _await_death(pidfd: int, pid: int, name: str) -> None:
    """Wait until a process is dead that was killed, and say now and then what is waited for."""
    loop = asyncio.get_running_loop()
    killed_s, patience_s = loop.time(), _NAMED_AFTER_S
    while True:
        try:
            async with asyncio.timeout(patience_s):
                return await readable(pidfd)
        except TimeoutError:
            patience_s = _NAMED_EVERY_S
        _log.error(
            "the start waits for the end of process %(process)d of an earlier daemon, which holds %(lock)s and may "
            "still write into memory that was kept. It was killed %(seconds).0f s ago, and does not end while the disk "
            "or the device hangs that it waits for: mend that, or reboot the machine",
            {"process": pid, "lock": name, "seconds": loop.time() - killed_s},
        )


def _check_released(lock: int, name: str, pid: int) -> None:
    """A process that is not there has let go of its lock, unless it lives where it cannot be seen."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        where = "and is not visible in this pid namespace; end its container"
        raise OSError(f"process {pid} of an earlier daemon holds {name}, {where}") from None
