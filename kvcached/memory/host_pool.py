"""The host pool's memory: one sealed memfd of the daemon's, handed to every worker.

It belongs to no worker, so that no worker's death loses it, and its descriptor is kept by the service manager
(`kvcached.recovery.fd_store`), so that the daemon's own death does not either. The daemon maps it for the headers
beside the blocks, and never touches a block.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvcached.memory.header_table import HeaderTable
from kvcached.memory.sealed import give_back_behind, memory_fault, sealed_memfd
from kvcached_client.blocks.host_layout import HEADER_BYTES, HostGeometry, header_area_bytes
from kvcached_client.blocks.layout import POOL_SIZE_BYTES_MAX
from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.types import KEY_SIZE_BYTES

_log: Final = logging.getLogger(__name__)


class MemoryIdentity(NamedTuple):
    """What tells a memfd from every other one of the same boot."""

    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Of the memory behind a descriptor."""
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino)

    def among(self, descriptors: Sequence[int]) -> int:
        """The first of these descriptors that is of this memory, or if none is, the first one."""
        return next((each for each in descriptors if MemoryIdentity.of(each) == self), descriptors[0])


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
        return MemoryIdentity.of(self.descriptor)

    def open_read_only(self) -> int:
        """Another descriptor of the memory, close-on-exec, through which nobody can map it to write.

        A process of another user cannot make it writable either: the memory's mode is that of its owner alone.

        Raises:
            OSError: the kernel refused one of the steps.
        """
        with contextlib.suppress(PermissionError):  # made by an earlier daemon that ran as another user
            os.fchmod(self.descriptor, 0o600)
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def trim(self) -> None:
        """Give back what lies behind the last slab: slabs of a larger pool before, or what somebody has written there.

        Raises:
            OSError: the kernel refused.
        """
        give_back_behind(self.descriptor, self.slabs * self.slab_bytes)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last process that has it ends."""
        os.close(self.descriptor)


def create_host_memory(slabs: int, slab_bytes: int) -> HostMemory:
    """Make a host pool, all zero. It takes up memory only where it is written.

    The file is as long as the largest pool that can be configured, so that the next daemon may use more slabs of it.

    Raises:
        OSError: the kernel refused one of the steps.
    """
    try:
        descriptor = sealed_memfd("kvcached-host", POOL_SIZE_BYTES_MAX)
    except OSError:  # the length of files is limited (ulimit -f): the pool cannot grow
        descriptor = sealed_memfd("kvcached-host", slabs * slab_bytes)
    return HostMemory(descriptor, slabs, slab_bytes)


def adopt_host_memory(descriptor: int, slabs: int, slab_bytes: int) -> HostMemory | None:
    """The host pool behind a descriptor that was kept, or None, with a log line, where it is no such pool.

    The descriptor belongs to what is returned; where that is None, it stays the caller's to close.
    """
    if (fault := memory_fault(descriptor, slabs * slab_bytes, may_be_longer=True)) is not None:
        _log.warning("the host pool that was kept cannot be used, and its blocks are lost: %s", fault)
        return None
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - takes no keyword
    return HostMemory(descriptor, slabs, slab_bytes)


class HostHeaders:
    """The headers of a host pool, mapped so that no forked child has them. Used by one thread.

    All of the pool is mapped, and only the pages of headers are ever touched.

    Attributes:
        table: the headers, for who reads many of them.
    """

    def __init__(self, memory: HostMemory) -> None:
        """Map it. The descriptor stays the caller's, who closes it after this is no longer used.

        The mapping goes with the last reference to this or to `table`.

        Raises:
            DaemonFailure: the kernel refused to map it.
        """
        size_bytes = memory.slabs * memory.slab_bytes
        self._memory = memory
        self._mapped = memoryview(map_sealed(memory.descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE))
        self.table = HeaderTable(self._mapped)

    def trim(self) -> None:
        """Give back what a process that is dead now has written behind the last slab; a refusal is logged."""
        try:
            self._memory.trim()
        except OSError as error:
            _log.warning("memory behind the end of the host pool stays taken: %s", error)

    def clear_slab(self, slab: int, geometry: HostGeometry) -> None:
        """Zero the headers of a slab that is allocated, in all its parts: nothing is left of those who had it before.

        Raises:
            ValueError: there is no such slab.
        """
        size_bytes = header_area_bytes(geometry.slots_per_slab)
        for part in range(geometry.parts):
            self.table.clear(geometry.header_offset(slab * geometry.slots_per_slab, part), size_bytes)

    def try_end(self, slab: int, size_bytes: int) -> str:
        """Write random bytes to the end of a slab, read them back another way, and put back what was there.

        Args:
            slab: whose last `size_bytes`, or all where it has fewer, belong to nobody while this runs.
            size_bytes: how many.

        Returns:
            What was wrong; "" for nothing.
        """
        descriptor, slab_bytes = self._memory.descriptor, self._memory.slab_bytes
        size_bytes, end = min(size_bytes, slab_bytes), (slab + 1) * slab_bytes
        start, written = end - size_bytes, os.urandom(size_bytes)
        try:
            before = os.pread(descriptor, size_bytes, start)
            os.pwrite(descriptor, written, start)
            is_same = self._mapped.cast("B")[start:end] == written  # as engines and workers see it
            os.pwrite(descriptor, before, start)
        except OSError as error:
            return f"cannot be written: {error.strerror}"
        return "" if is_same else "what was read is not what was written"

    def claim(self, slots: npt.NDArray[np.int64], geometry: HostGeometry, epoch: int, session: int) -> None:
        """Write who may be writing these slots into all their headers, before the reply that gives them.

        Raises:
            ValueError: one of the slots does not exist; nothing was touched.
        """
        for places in _places(slots, geometry):
            self.table.claim(places, epoch, session)

    def find(self, keys: bytes, geometry: HostGeometry, slabs: Iterable[int]) -> npt.NDArray[np.int64]:
        """The slots of some slabs whose headers name blocks with these keys, whether the slots hold them or not.

        A header with half a key of one of them counts, too. All headers of the slabs are looked at: for what is rare.
        """
        halves = np.unique(np.frombuffer(keys, "<u8")[:: KEY_SIZE_BYTES // 8])
        if not len(halves):
            return np.zeros(0, np.int64)
        per_slab = geometry.slots_per_slab
        firsts = [slab * per_slab for slab in slabs]
        found = [first + self.table.find(geometry.header_offset(first, 0), per_slab, halves) for first in firsts]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def forget(self, slots: npt.NDArray[np.int64], geometry: HostGeometry) -> None:
        """Clear all headers of slots that nobody has: no later daemon finds there what they held."""
        for places in _places(slots, geometry):
            self.table.clear_places(places)


def _places(slots: npt.NDArray[np.int64], geometry: HostGeometry) -> list[npt.NDArray[np.int64]]:
    """Where the headers of some slots are in each part of their slabs.

    Raises:
        ValueError: one of the slots does not exist.
    """
    if not len(slots):
        return []
    for end in (int(slots.min()), int(slots.max())):
        geometry.header_offset(end, 0)
    slabs, index = np.divmod(slots, geometry.slots_per_slab)
    places = slabs * geometry.slab_bytes + index * HEADER_BYTES
    return [places + geometry.header_offset(0, part) for part in range(geometry.parts)]
