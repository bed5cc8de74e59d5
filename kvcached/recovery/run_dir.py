"""The run directory: locked by one daemon at a time, owned by its user, and not reached through another user's link."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Final

from kvcached.recovery.state_file import LEDGER_NAME, read_ledger
from kvcached_client.transport.run_dir import ATTACH_SOCKET_NAME, LOCK_NAME, RPC_SOCKET_NAME

#: An epoch is the time of a start in milliseconds; where the clock was set back, that of the start before plus the time
#: since then. No clock reaches this one.
EPOCH_MAX: Final = 1 << 48
_MODE: Final = 0o750
_ROOT: Final = 0
#: How long a start tries to get a lock that processes share which look at it. Each does so for some microseconds.
_LOOKED_AT_S: Final = 1.0
#: How much of the lock file is read: more than an epoch and a time take.
_LOCK_BYTES_MAX: Final = 64
#: What is in it: the epoch, and when that was, in milliseconds since the boot.
_LOCK: Final = re.compile(rb"(\d*)(?: +(\d+))?")
#: Where it is not known how long the daemon before has lived, and the clock was set back.
_LONG_LIFE_MS: Final = 24 * 60 * 60 * 1000

_log: Final = logging.getLogger(__name__)


class RunDirUnusable(Exception):
    """The run directory cannot be used; the message says why, and what to do."""


def claim_run_dir(run_dir: Path) -> tuple[int, AbstractContextManager[object]]:
    """Lock the run directory for this daemon.

    Returns:
        The epoch of this start, larger than any before it in this directory, and a context that unlocks the directory.

    Raises:
        RunDirUnusable: another daemon has locked it, another user owns it, or one of its files is not as expected.
    """
    with ExitStack() as held:
        try:
            run_dir.mkdir(mode=_MODE, parents=True, exist_ok=True)
            directory = _open_directory(run_dir)
            held.callback(os.close, directory)
            lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
            held.callback(os.close, lock)
            _lock(lock, run_dir)
            _check_sockets(run_dir)
            epoch = _next_epoch(lock, run_dir)
            os.pwrite(lock, f"{f'{epoch} {_since_boot_ms()}':<{_LOCK_BYTES_MAX}}".encode(), 0)
        except OSError as error:
            raise _unusable(run_dir, error) from None
        return epoch, held.pop_all()


def _unusable(run_dir: Path, error: OSError) -> RunDirUnusable:
    is_named = error.filename and Path(error.filename) != run_dir
    what = f"{error.strerror}: {error.filename}" if is_named else error.strerror
    return RunDirUnusable(f"run directory {run_dir}: {what}; mend that, or choose another run_dir")


def check_run_dir(run_dir: Path, predecessor: int = 0) -> None:
    """Refuse what `claim_run_dir` would refuse. Makes nothing, and keeps no daemon from its lock.

    Args:
        run_dir: the run directory.
        predecessor: the daemon that ends before the next one starts, so that its lock is no reason; 0: nobody's is.

    Raises:
        RunDirUnusable: as `claim_run_dir`.
    """
    try:
        if not os.path.lexists(run_dir):
            _check_can_be_made(run_dir)
            return
        directory = _open_directory(run_dir)
        try:
            _check_lock_file(directory, run_dir, predecessor)
        finally:
            os.close(directory)
        _check_sockets(run_dir)
    except OSError as error:
        raise _unusable(run_dir, error) from None


def _check_can_be_made(path: Path) -> None:
    there = next(part for part in path.parents if os.path.lexists(part))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    _check_is_writable(there)


def _check_is_writable(directory: Path) -> None:
    """Refuse where the kernel would, in its order: no user writes to a file system that may only be read."""
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(directory))
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def is_made_by_manager(run_dir: Path) -> bool:
    """Whether it is not there, and this user may not make it: a service manager may make it at each start."""
    if os.geteuid() == _ROOT or os.path.lexists(run_dir):
        return False
    try:
        _check_can_be_made(run_dir)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _check_lock_file(directory: int, run_dir: Path, predecessor: int) -> None:
    try:
        lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        _check_is_writable(run_dir)
        return
    try:
        status = os.fstat(lock)
        if not stat.S_ISREG(status.st_mode):
            raise _no_lock_file(run_dir)
        is_locked = predecessor != 0 and _is_locked(lock)
    finally:
        os.close(lock)
    if is_locked and not _has_open(predecessor, status):
        raise _locked(run_dir)


def _is_locked(lock: int) -> bool:
    """Whether a daemon has locked the file, also one of another pid namespace, which /proc/locks leaves out.

    If none has, this process shares the lock for a moment. A daemon that starts just then tries again (`_lock`).
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def _has_open(process: int, file: os.stat_result) -> bool:
    """Whether a process has this file open; True also where nobody can see, as of a process that has just ended."""
    try:
        descriptors = list(Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return True
    for descriptor in descriptors:
        with suppress(OSError):  # it is closed by now
            if os.path.samestat(descriptor.stat(), file):
                return True
    return False


def is_claimed(run_dir: Path) -> bool:
    """Whether a daemon has locked the run directory; False also where this user may not look."""
    try:
        lock = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return _is_locked(lock)
    except OSError:
        return True
    finally:
        os.close(lock)


def _open_directory(run_dir: Path) -> int:
    """Open the directory; from then on no other user can replace it."""
    found = run_dir.lstat()
    is_link = stat.S_ISLNK(found.st_mode)
    if is_link and found.st_uid not in {_ROOT, os.geteuid()}:
        raise RunDirUnusable(f"{run_dir} is a link that user {found.st_uid} made; remove it, or choose another run_dir")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if is_link else os.O_NOFOLLOW)
    directory = os.open(run_dir, flags)
    status = os.fstat(directory)
    fault = ""
    if status.st_uid != os.geteuid():
        own = os.geteuid()
        what = f"{run_dir} belongs to user {status.st_uid}, and this is user {own}"
        fault = f"{what}; run this as the daemon's user, or choose another run_dir"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fault = f"others may write into {run_dir}, and so replace its sockets; chmod go-w it"
    if fault:
        os.close(directory)
        raise RunDirUnusable(fault)
    return directory


def _lock(lock: int, run_dir: Path) -> None:
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        raise _no_lock_file(run_dir)
    ends_s = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _is_locked(lock) or time.monotonic() >= ends_s:
                raise _locked(run_dir) from None
        else:
            return
        os.sched_yield()


def _no_lock_file(run_dir: Path) -> RunDirUnusable:
    return RunDirUnusable(f"{run_dir / LOCK_NAME} is no file; remove it")


def _locked(run_dir: Path) -> RunDirUnusable:
    return RunDirUnusable(f"another daemon runs in {run_dir}; stop it, or choose another run_dir")


def _check_sockets(run_dir: Path) -> None:
    """Refuse files that have a socket's name. Sockets of an earlier daemon are removed later, other files are not."""
    for path in (run_dir / ATTACH_SOCKET_NAME, run_dir / RPC_SOCKET_NAME):
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            raise RunDirUnusable(f"{path} is there, and is no socket; remove it, or choose another run_dir")


def _next_epoch(lock: int, run_dir: Path) -> int:
    """An epoch larger than any before it. If the lock file has none, the clock and the ledger ensure that.

    It is larger by the time since the start before, whatever the clock says: a daemon gives numbers, as those of its
    events, that begin with its epoch and grow no faster than time.
    """
    text = os.pread(lock, _LOCK_BYTES_MAX + 1, 0).strip()
    found = _LOCK.fullmatch(text) if len(text) <= _LOCK_BYTES_MAX else None
    before, started_ms = (EPOCH_MAX, -1) if found is None else (int(found[1] or 0), int(found[2] or -1))
    if not 0 < before < EPOCH_MAX:
        if text:
            _log.warning("%s is damaged: it begins with %r, which is not an epoch", run_dir / LOCK_NAME, text[:20])
        before, started_ms = _epoch_of_the_ledger(run_dir), -1
    now_ms, since_boot_ms = time.time_ns() // 1_000_000, _since_boot_ms()
    if 0 <= started_ms <= since_boot_ms:
        return max(before + 1 + since_boot_ms - started_ms, now_ms)
    return now_ms if now_ms > before else before + _LONG_LIFE_MS


def _epoch_of_the_ledger(run_dir: Path) -> int:
    """The epoch of the daemon that wrote the ledger, whose claims must not be taken for this daemon's; 0 without one.

    Somebody may have removed or emptied the lock file alone.
    """
    path = run_dir / LEDGER_NAME
    ledger = read_ledger(path) if os.path.lexists(path) else None
    return 0 if ledger is None or ledger.epoch >= EPOCH_MAX else ledger.epoch


def _since_boot_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
