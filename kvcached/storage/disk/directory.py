"""The directory of a disk backend: its settings, its owner, and the lock that only one process holds at a time."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvcached.config.tables import SIZE
from kvcached.storage.backend import StorageUnusable
from kvcached.storage.settings import AbsolutePath, checked

_LOCK_NAME: Final = "lock"
INDEX_NAME: Final = "index.db"
PROBE_NAME: Final = "probe"
#: What mke2fs makes at the root of a file system: a directory of root's, which only root may look into.
_LOST_AND_FOUND: Final = "lost+found"
#: Names of files of a directory that was used, where a process was killed while there was no index.
_OWN: Final = re.compile(rf"{_LOCK_NAME}|{re.escape(INDEX_NAME)}.*|.*\.slots|{PROBE_NAME}|generations\.json(\.new)?")
_MODE: Final = 0o700
#: The smallest `capacity_bytes`. A file system that the floor leaves less of never takes a block.
CAPACITY_BYTES_MIN: Final = 4 << 20


class DiskSettings(BaseModel):
    """Settings of one directory, which one daemon uses."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: AbsolutePath = Field(
        description="Where the files are. Created if it does not exist; an existing one must be empty, apart from"
        " the lost+found of a file system, or created by this backend."
    )
    capacity_bytes: Annotated[int, Field(ge=CAPACITY_BYTES_MIN, le=1 << 50), SIZE] = Field(
        description="Space of all files on the file system, index included. The least recently used blocks are evicted"
        " to stay below it.",
    )
    free_space_floor_bytes: Annotated[int, Field(ge=0, le=1 << 50), SIZE] = Field(
        default=1 << 30,
        description="Free space that is left to other users of the file system. Below it, the backend deletes files"
        " and stores nothing.",
    )
    threads: int = Field(default=4, ge=1, le=64, description="Concurrent reads and writes: the device's queue depth.")
    ttl_s: int | None = Field(
        default=None, ge=1, le=10 * 365 * 86_400, description="Blocks expire this many seconds after being stored."
    )
    direct_io: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: bypass the page cache, if the file system can and a block's parts are aligned to 4096.",
    )


def validated(settings: dict[str, object]) -> DiskSettings:
    """Settings from a table of the configuration.

    Raises:
        StorageMisconfigured: some settings are unknown, missing or out of range; the message names all of them.
    """
    return checked(DiskSettings, settings, "disk")


class Claim:
    """A directory that was taken.

    Args:
        path: where it was.
        directory: its descriptor. While it is open, no other directory has its number.
        lock: the descriptor that holds the lock.
    """

    def __init__(self, path: Path, directory: int, lock: int) -> None:
        self._path, self._directory, self._held = path, directory, lock
        self._checking = threading.Lock()

    def is_there(self) -> bool:
        """Whether nobody has removed, replaced or emptied the directory, or taken it, since it was taken.

        A lock file that somebody has deleted is made again, so that nobody else takes the directory.

        Raises:
            OSError: it cannot be looked at.
        """
        try:
            now = self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not os.path.samestat(now, os.fstat(self._directory)):
            return False
        with self._checking:
            try:
                lock = os.lstat(_LOCK_NAME, dir_fd=self._directory)
            except FileNotFoundError:
                return self._is_locked_again()
            return os.path.samestat(lock, os.fstat(self._held))

    def close(self) -> None:
        """Let others take it."""
        os.close(self._held)
        os.close(self._directory)

    def _is_locked_again(self) -> bool:
        if not (self._path / INDEX_NAME).exists():
            return False  # it was emptied
        try:
            lock = _lock(self._directory, self._path)
        except StorageUnusable:  # another process was faster
            return False
        os.close(self._held)
        self._held = lock
        return True


def take_directory(path: Path) -> Claim:
    """Create the directory if it does not exist, and lock it until the claim is closed.

    Raises:
        StorageUnusable: another process uses it, it belongs to another user, it has other files, or it is a link.
        OSError: it cannot be created or opened.
    """
    if path.is_symlink():
        raise StorageUnusable(f"disk storage: {path} {'; '.join(_behind_link(path))}")
    path.mkdir(mode=_MODE, parents=True, exist_ok=True)
    with ExitStack() as undo:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        undo.callback(os.close, directory)
        state = os.fstat(directory)
        if state.st_uid != os.geteuid():
            raise StorageUnusable(f"disk storage: {path} belongs to user {state.st_uid}; name another directory")
        if other := _other_file(path):
            raise StorageUnusable(f"disk storage: {path} holds other files, as {other}; name an empty directory")
        lock = _lock(directory, path)
        undo.callback(os.close, lock)
        if stat.S_IMODE(state.st_mode) != _MODE:
            os.fchmod(directory, _MODE)
        undo.pop_all()
    return Claim(path, directory, lock)


def can_take(path: Path) -> bool:
    """Whether `take_directory` takes what is there now; it makes what is missing, as that does."""
    try:
        take_directory(path).close()
    except (StorageUnusable, OSError):
        return False
    return True


def refusal(path: Path) -> tuple[str, str] | None:
    """Why `take_directory` would refuse, and what to do; None where it would not. Changes nothing.

    A directory that another process uses at this moment is not refused here.
    """
    there = existing_part(path)
    if there != path:
        is_makeable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        why = f"cannot be made: {there} cannot be written by user {os.geteuid()}"
        return None if is_makeable else (why, f"make it, for user {os.geteuid()}, or name another directory")
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode):
        return _behind_link(path) if stat.S_ISLNK(state.st_mode) else ("is no directory", "name a directory")
    if state.st_uid != os.geteuid():
        what = f"belongs to user {state.st_uid}, and this is user {os.geteuid()}"
        return what, "run this as the daemon's user, or name another directory"
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return "cannot be written", "make it writable for its owner, or name another directory"
    if other := _other_file(path):
        return f"holds other files, as {other}", "name an empty directory"
    return None


def existing_part(path: Path) -> Path:
    """The path, or the longest part of it that exists."""
    return next(part for part in (path, *path.parents) if os.path.lexists(part))


def _behind_link(path: Path) -> tuple[str, str]:
    """Why a link is not followed: it may name another directory at the next start, without a change of the settings."""
    return "is a symbolic link", f"name what it leads to: {path.resolve()}"


def _other_file(path: Path) -> str:
    """A file in a directory that this backend did not create; empty where there is none, or it has used the directory.

    Others lock directories, too: a lock alone does not make a directory this backend's, as an index beside it does.
    """
    names = {each.name for each in path.iterdir() if not _is_lost_and_found(each)}
    if _LOCK_NAME in names and INDEX_NAME in names:
        return ""
    return min((name for name in names if _LOCK_NAME not in names or not _OWN.fullmatch(name)), default="")


def _is_lost_and_found(path: Path) -> bool:
    if path.name != _LOST_AND_FOUND:
        return False
    state = path.lstat()
    return stat.S_ISDIR(state.st_mode) and state.st_uid == 0


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
