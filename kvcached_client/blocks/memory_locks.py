"""Locks of shared memory that the kernel drops when their process is dead, when it no longer writes the memory.

Each engine process locks the memory that it writes. So whoever gets the lock knows that no earlier process writes
there, whatever has become of the daemon meanwhile. They are locks of open file descriptions (F_OFD_SETLK).

Memory of a CUDA device cannot be locked. Its processes lock a place behind the end of the pool's table instead, each
rank its own. The kernel may drop such a lock before the driver has stopped the process's kernels: that the process is
dead is known by its pidfd only, to the daemon.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from typing import Final

_F_OFD_GETLK: Final = 36
_F_OFD_SETLK: Final = 37
_F_OFD_SETLKW: Final = 38
#: struct flock: type, whence, start, length (0 = all), pid (0).
_FLOCK: Final = struct.Struct("@hhqqi4x")
#: Where the places of ranks begin: behind any memory.
_RANKS_AT: Final = 1 << 62


def lock_memory(descriptor: int, wait_s: float, rank: int | None = None) -> int | None:
    """Lock memory for this process; the lock holds until the result is closed, or the process is dead.

    Args:
        descriptor: of the memory. The lock belongs to a description of its own, because this one is shared.
        wait_s: how long to wait for the death of a process that has the lock.
        rank: lock the memory of a rank on a CUDA device, by its place in the pool's table, which `descriptor` is of.

    Returns:
        A descriptor; None if another process still has the lock.

    Raises:
        OSError: the kernel refused one of the steps.
    """
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        wanted = _flock(0, _RANKS_AT) if rank is None else _flock(_RANKS_AT + rank, 1)
        if _try(own, wanted) or (wait_s > 0 and _Wait(own, wanted).for_lock(wait_s)):
            return own
    except OSError:
        os.close(own)
        raise
    if wait_s <= 0:
        os.close(own)
    return None


def is_locked(descriptor: int) -> bool:
    """Whether a process has locked the memory, or the place of a rank. Takes no lock itself.

    Raises:
        OSError: the kernel refused to tell.
    """
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = _FLOCK.unpack(fcntl.fcntl(own, _F_OFD_GETLK, _flock(0, 0)))
    finally:
        os.close(own)
    return bool(found[0] != fcntl.F_UNLCK)


def _flock(start: int, length: int) -> bytes:
    """For the bytes from `start` on; a length of 0 is all of them."""
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)


def _try(own: int, wanted: bytes) -> bool:
    try:
        fcntl.fcntl(own, _F_OFD_SETLK, wanted)
    except OSError as error:
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            raise
        return False
    return True


class _Wait:
    """Waits for a lock in a thread, because the kernel's call has no deadline. The thread closes what comes late."""

    def __init__(self, own: int, wanted: bytes) -> None:
        self._own = own
        self._wanted = wanted
        self._lock = threading.Lock()
        self._is_locked = self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="kvcached-lock", daemon=True)

    def for_lock(self, wait_s: float) -> bool:
        """Whether the lock came in time."""
        self._thread.start()
        self._thread.join(wait_s)
        with self._lock:
            self._is_given_up = not self._is_locked
            return self._is_locked

    def _run(self) -> None:
        try:
            fcntl.fcntl(self._own, _F_OFD_SETLKW, self._wanted)
        except OSError:
            os.close(self._own)
            return
        with self._lock:
            self._is_locked = not self._is_given_up
            if self._is_given_up:
                os.close(self._own)
