"""Sealed shared memory of another process, mapped into this one so that no child process inherits the mapping.

It uses ctypes, because Python's ``mmap`` keeps a duplicate of the descriptor as long as the mapping lives.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import Final

from kvcached_client.errors import DaemonFailure, ErrorCode, RequestError

#: Seals of memory that several processes map: no process can resize it.
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Linux 5.1; Python has no name for it before 3.13.
F_SEAL_FUTURE_WRITE: Final = 0x0010

#: Whether the kernel gives huge pages to shared memory: ``always within_size advise [never] deny force``.
SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

#: A ctypes array of unsigned bytes over a mapping. Every view refers to it; when it is freed, the memory is unmapped.
Buffer = ctypes.Array[ctypes.c_ubyte]


def map_sealed(descriptor: int, size_bytes: int, protection: int) -> Buffer:
    """Map the first `size_bytes` of sealed memory, shared. The caller may then close the descriptor.

    Args:
        descriptor: descriptor of the memory.
        size_bytes: how much to map, at least 1 and at most the size of the memory, which cannot shrink later.
        protection: ``mmap.PROT_READ``, with or without ``mmap.PROT_WRITE``.

    Raises:
        DaemonFailure: the memory is not sealed, is too small, or cannot be mapped.
    """
    if why := why_unfit(descriptor, size_bytes):
        raise unusable(why)
    return _map_shared(descriptor, size_bytes, protection)


def why_unfit(descriptor: int, size_bytes: int) -> str:
    """Why the first `size_bytes` of memory must not be mapped by several processes; "" where they may."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except (OSError, ValueError):  # a negative descriptor is a ValueError
        return "it cannot carry seals"
    if seals & SEALS != SEALS:
        return f"seals {seals:#x} lack some of {SEALS:#x}"
    actual_bytes = os.fstat(descriptor).st_size
    return "" if actual_bytes >= size_bytes else f"{actual_bytes} bytes, at least {size_bytes} are needed"


def prefer_huge_pages(address: int, size_bytes: int) -> None:
    """Ask for pages of 2 MiB in a mapping: fewer to find in a copy, and fewer to pin for a device.

    The kernel gives them where `huge_pages` is ``advise`` or more. It is ``never`` by default, and then, as on kernels
    that have none, pages stay small.
    """
    _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)


def huge_pages(setting: Path = SHMEM_ENABLED) -> str:
    """Whether the kernel gives huge pages to shared memory, in its own word; ``none`` = it has none."""
    try:
        text = setting.read_text()
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0] or "none"


def unusable(reason: str, fix: str = "the daemon's log says more") -> RequestError:
    """The exception for memory that must not be mapped."""
    return DaemonFailure(ErrorCode.INTERNAL, f"pool memory: {reason}", fix)


def _not_mapped(call: str) -> RequestError:
    """The exception for a call that the kernel has just refused. No page is taken yet: addresses have run out."""
    number = ctypes.get_errno()
    fix = ("raise this process's limit of addresses: ulimit -v",) if number == errno.ENOMEM else ()
    return unusable(f"{call}: {os.strerror(number)}", *fix)


def _map_shared(descriptor: int, size_bytes: int, protection: int) -> Buffer:
    # Unreadable until it is DONTFORK: a child forked by another thread in between gets a mapping that it cannot use.
    address = _libc.mmap(None, size_bytes, 0, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise _not_mapped("mmap")
    if (
        _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK)
        or _libc.madvise(address, size_bytes, mmap.MADV_DONTDUMP)
        or _libc.mprotect(address, size_bytes, protection)
    ):
        refused = _not_mapped("madvise or mprotect")
        _libc.munmap(address, size_bytes)
        raise refused
    buffer = (ctypes.c_ubyte * size_bytes).from_address(address)
    # At exit other threads may still hold views, and the kernel unmaps anyway.
    weakref.finalize(buffer, _unmap, address, size_bytes, os.getpid()).atexit = False
    return buffer


def _unmap(address: int, size_bytes: int, process_id: int) -> None:
    """Unmap memory in the process that has mapped it. In a forked child, other memory may be at the same addresses."""
    if os.getpid() == process_id:
        _libc.munmap(address, size_bytes)
