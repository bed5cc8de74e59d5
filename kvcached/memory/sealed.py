"""The memory of pools: nameless, sealed, made by the daemon, and mapped by whoever copies.

Seals keep every holder of the descriptor from changing its size: shrinking would kill the others with SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

from kvcached_client.blocks.mapping import F_SEAL_FUTURE_WRITE, SEALS, prefer_huge_pages

#: Touching costs 0.7 s per GiB, and the daemon is to be ready within two; the rest becomes resident when first used.
PRETOUCH_BYTES_MAX: Final = 1 << 30

_WRITE_SEALS: Final = fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE
_MFD_NOEXEC_SEAL: Final = 0x0008
_MADV_POPULATE_WRITE: Final = 23
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class SharedMemory:
    """Sealed memory that somebody else made, mapped readable and writable.

    Mapped by hand, because Python's `mmap` unmaps at the interpreter's end, when a copy may still run in a thread.

    Attributes:
        address: where it is mapped.
        size_bytes: how much of it.
        view: all of it, as bytes. Dead after `close`.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map the first `size_bytes` of a memfd. The descriptor stays the caller's and is not needed any more.

        Raises:
            ValueError: the memory is smaller, or could shrink while it is used.
            OSError: it is no memfd, or the kernel refused to map it.
        """
        if (found := os.fstat(descriptor).st_size) < size_bytes:
            raise ValueError(f"shared memory of {found} bytes, {size_bytes} expected")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("shared memory that is not sealed against shrinking")
        self.size_bytes = size_bytes
        self.address = _map(descriptor, size_bytes)
        self.view = memoryview((ctypes.c_ubyte * size_bytes).from_address(self.address)).cast("B")

    def pretouch(self, size_bytes: int) -> None:
        """Make the first bytes, at most `PRETOUCH_BYTES_MAX`, resident; what is in them stays.

        On kernels before 5.14, which do not know how, they become resident as they are first used.
        """
        _libc.madvise(self.address, min(size_bytes, self.size_bytes, PRETOUCH_BYTES_MAX), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap. Nothing may use address or view any more. Does nothing the second time."""
        if self.address:
            self.view.release()
            _libc.munmap(self.address, self.size_bytes)
            self.address = 0


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A new memfd, all zero, close-on-exec, that nobody can resize. Takes up memory as it is written.

    Raises:
        OSError: the kernel refused one of the steps.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        # Kernels before 6.3 do not know the flag.
        descriptor = os.memfd_create(name, flags)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def give_back_behind(descriptor: int, size_bytes: int) -> None:
    """Free what a memfd has behind its first bytes; its length stays. A look at nothing costs some microseconds.

    Raises:
        OSError: the kernel refused.
    """
    how = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    rest_bytes = os.fstat(descriptor).st_size - size_bytes
    if rest_bytes > 0 and _libc.fallocate(descriptor, how, size_bytes, rest_bytes):
        raise _last_error(f"giving back {rest_bytes} bytes")


def memory_fault(descriptor: int, size_bytes: int, *, may_be_longer: bool = False) -> str | None:
    """What is wrong with a descriptor that is to be sealed, writable memory of this size; None for nothing."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        found = os.fstat(descriptor).st_size
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        return f"descriptor {descriptor} is no memfd ({error.strerror})"
    if seals & SEALS != SEALS:
        return f"its seals {seals:#x} lack some of {SEALS:#x}"
    if seals & _WRITE_SEALS or access != os.O_RDWR:
        return "it cannot be written"
    if found < size_bytes or (found > size_bytes and not may_be_longer):
        return f"it has {found} bytes, and the configuration asks for {size_bytes}"
    return None


def _map(descriptor: int, size_bytes: int) -> int:
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _MAP_FAILED:
        raise _last_error(f"mmap of {size_bytes} bytes")
    # KV of a prompt tells the prompt: it must not end up in a core dump.
    if _libc.madvise(address, size_bytes, mmap.MADV_DONTDUMP):
        failed = _last_error("MADV_DONTDUMP")
        _libc.munmap(address, size_bytes)
        raise failed
    prefer_huge_pages(address, size_bytes)
    return int(address)


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
