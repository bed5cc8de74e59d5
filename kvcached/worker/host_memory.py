"""The host pool's memory: one sealed memfd of the daemon's, handed to every worker.

It belongs to no worker, so that no worker's death loses it, and its descriptor is kept by the service manager
(`kvcached.descriptor_store`), so that the daemon's own death does not either. The daemon maps it for the headers beside
the blocks, and never touches a block.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached.worker.memory import sealed_memfd
from kvcached_client.header_table import HeaderTable
from kvcached_client.host_geometry import HostGeometry
from kvcached_client.mapping import map_sealed
from kvcached_client.slabs import HEADER_BYTES, header_area_bytes

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WRITE_SEALS: Final = fcntl.F_SEAL_WRITE | 0x0010  # F_SEAL_FUTURE_WRITE

_log: Final = logging.getLogger(__name__)


class MemoryIdentity(NamedTuple):
    """What tells a memfd from every other one of the same boot."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of a host pool of `slabs` slabs.

    Attributes:
        descriptor: the memfd, close-on-exec. Whoever made this closes it, after the workers.
    """

    descriptor: int
    slabs: int
    slab_bytes: int

    @property
    def identity(self) -> MemoryIdentity:
        """Which memory it is, as long as somebody holds it."""
        status = os.fstat(self.descriptor)
        return MemoryIdentity(status.st_dev, status.st_ino)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last process that has it ends."""
        os.close(self.descriptor)


def create_host_memory(slabs: int, slab_bytes: int) -> HostMemory:
    """Make a host pool, all zero. It takes up memory only where it is written.

    Raises:
        OSError: the kernel refused one of the steps.
    """
    return HostMemory(sealed_memfd("kvcached-host", slabs * slab_bytes), slabs, slab_bytes)


def adopt_host_memory(descriptor: int, slabs: int, slab_bytes: int) -> HostMemory | None:
    """The host pool behind a descriptor that was kept, or None, with a log line, where it is no such pool.

    The descriptor belongs to what is returned; where that is None, it stays the caller's to close.
    """
    if (fault := _fault(descriptor, slabs * slab_bytes)) is not None:
        _log.warning("the host pool that was kept cannot be used, and its blocks are lost: %s", fault)
        return None
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - takes no keyword
    return HostMemory(descriptor, slabs, slab_bytes)


def _fault(descriptor: int, size_bytes: int) -> str | None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        found = os.fstat(descriptor).st_size
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        return f"descriptor {descriptor} is no memfd ({error.strerror})"
    if seals & _SEALS != _SEALS:
        return f"its seals {seals:#x} lack some of {_SEALS:#x}"
    if seals & _WRITE_SEALS or access != os.O_RDWR:
        return "it cannot be written"
    if found != size_bytes:
        return f"it has {found} bytes, and the configuration asks for {size_bytes}"
    return None


class HostHeaders:
    """The headers of a host pool, mapped so that no forked child has them. Used by one thread.

    All of the pool is mapped, and only the pages of headers are ever touched.

    Attributes:
        table: the headers, for who reads many of them.
    """

    def __init__(self, memory: HostMemory) -> None:
        """Map it. The descriptor stays the caller's and is not needed any more.

        The mapping goes with the last reference to this or to `table`.

        Raises:
            DaemonFailure: the kernel refused to map it.
        """
        size_bytes = memory.slabs * memory.slab_bytes
        self.table = HeaderTable(
            memoryview(map_sealed(memory.descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE))
        )

    def clear_slab(self, slab: int, geometry: HostGeometry) -> None:
        """Zero the headers of a slab that is lent, in all its parts: nothing is left of those who had it before.

        Raises:
            ValueError: there is no such slab.
        """
        size_bytes = header_area_bytes(geometry.slots_per_slab)
        for part in range(geometry.parts):
            self.table.clear(geometry.header_offset(slab * geometry.slots_per_slab, part), size_bytes)

    def claim(self, slots: npt.NDArray[np.int64], geometry: HostGeometry, epoch: int, session: int) -> None:
        """Write who may be writing these slots into all their headers, before the reply that gives them.

        Raises:
            ValueError: one of the slots does not exist; nothing was touched.
        """
        if not len(slots):
            return
        for end in (int(slots.min()), int(slots.max())):
            geometry.header_offset(end, 0)
        slabs, index = np.divmod(slots, geometry.slots_per_slab)
        places = slabs * geometry.slab_bytes + index * HEADER_BYTES
        for part in range(geometry.parts):
            self.table.claim(places + geometry.header_offset(0, part), epoch, session)
