"""The memory of pools: nameless, sealed, mapped once and for as long as the worker lives.

Seals keep every holder of the descriptor from changing its size: shrinking would kill the others with SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

from kvcached.worker.available import check_available

#: Touching costs 0.7 s per GiB, and the daemon is to be ready within two; the rest becomes resident when first used.
PRETOUCH_BYTES_MAX: Final = 1 << 30

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 0x0008
_MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class PoolMemory:
    """A sealed memfd, mapped readable and writable, all zero at first.

    Mapped by hand, because Python's `mmap` unmaps at the interpreter's end, when a copy may still run in a thread.

    Attributes:
        descriptor: the memfd, close-on-exec.
        address: where it is mapped.
        size_bytes: its size.
    """

    def __init__(self, name: str, size_bytes: int, pretouch_bytes: int = 0) -> None:
        """Allocate, seal, map, and make the first `pretouch_bytes` (of at most 1 GiB) resident.

        Args:
            name: shows in /proc/<pid>/maps.
            size_bytes: size of the memory.
            pretouch_bytes: how much of it takes up memory at once.

        Raises:
            NotEnoughMemory: the machine or the cgroup cannot give as much; nothing was allocated.
            OSError: the kernel refused one of the steps.
        """
        check_available(size_bytes, f"pool {name}")
        self.size_bytes = size_bytes
        self.descriptor = sealed_memfd(name, size_bytes)
        self.address = 0
        try:
            self.address = _map(self.descriptor, size_bytes)
            _pretouch(self.address, min(size_bytes, pretouch_bytes, PRETOUCH_BYTES_MAX))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap and close. Nothing may use the address any more. Does nothing the second time."""
        if self.address:
            _libc.munmap(self.address, self.size_bytes)
            self.address = 0
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedMemory:
    """Sealed memory that somebody else made, mapped readable and writable.

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
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(descriptor: int, size_bytes: int) -> int:
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _MAP_FAILED:
        raise _last_error(f"mmap of {size_bytes} bytes")
    # KV of a prompt tells the prompt: it must not end up in a core dump.
    if _libc.madvise(address, size_bytes, mmap.MADV_DONTDUMP):
        failed = _last_error("MADV_DONTDUMP")
        _libc.munmap(address, size_bytes)
        raise failed
    return int(address)


def _pretouch(address: int, size_bytes: int) -> None:
    if size_bytes and _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE):
        # Kernels before 5.14 do not know the advice. Nobody else has the memory yet, so that writing it is harmless.
        ctypes.memset(address, 0, size_bytes)


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
