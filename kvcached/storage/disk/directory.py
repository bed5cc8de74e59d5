"""The directory of a disk backend: its owner's alone, and one daemon's at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from kvcached.storage.backend import StorageUnusable

_LOCK_NAME: Final = "lock"
_MODE: Final = 0o700


def take_directory(path: Path) -> int:
    """Make the directory where there is none, and take it; returns a descriptor that holds it until it is closed.

    Raises:
        StorageUnusable: another process has it, it belongs to somebody else, or it has files that are not ours.
        OSError: it cannot be made or opened.
    """
    path.mkdir(mode=_MODE, parents=True, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(directory)
        if state.st_uid != os.geteuid():
            raise StorageUnusable(f"disk storage: {path} belongs to user {state.st_uid}; name another directory")
        names = [each.name for each in path.iterdir()]
        if names and _LOCK_NAME not in names:
            raise StorageUnusable(f"disk storage: {path} holds other files, as {names[0]}; name an empty directory")
        lock = _lock(directory, path)
        if stat.S_IMODE(state.st_mode) != _MODE:
            os.fchmod(directory, _MODE)
        return lock
    finally:
        os.close(directory)


def refusal(path: Path) -> tuple[str, str] | None:
    """Why `take_directory` would refuse, and what to do; None where it would not. Changes nothing.

    A directory that another process uses just now is not refused here.
    """
    there = existing_part(path)
    if there != path:
        is_makeable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        why = f"cannot be made: {there} cannot be written by user {os.geteuid()}"
        return None if is_makeable else (why, f"make it, for user {os.geteuid()}, or name another directory")
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode):
        return "is no directory", "name a directory"
    if state.st_uid != os.geteuid():
        what = f"belongs to user {state.st_uid}, and this is user {os.geteuid()}"
        return what, "run this as the daemon's user, or name another directory"
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return "cannot be written", "make it writable for its owner, or name another directory"
    names = [each.name for each in path.iterdir()]
    if names and _LOCK_NAME not in names:
        return f"holds other files, as {names[0]}", "name an empty directory"
    return None


def existing_part(path: Path) -> Path:
    """The path, or what of it is there."""
    return next(part for part in (path, *path.parents) if os.path.lexists(part))


def _lock(directory: int, path: Path) -> int:
    lock = os.open(_LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise StorageUnusable(
            f"disk storage: another process uses {path}; stop it, or name another directory"
        ) from error
    return lock
