"""The copier of pools in shared memory. ctypes gives up the interpreter lock during a call: copies hold up nobody."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence

from kvcached.worker.copier import SlotRun, byte_runs, check_runs
from kvcached.worker.geometry import PoolGeometry

_CHECKSUM_SIZE_BYTES = 16


class HostCopier:
    """A `Copier` on mapped memory that stays mapped as long as this object is used."""

    def __init__(self, geometry: PoolGeometry, address: int) -> None:
        self._geometry = geometry
        self._address = address

    def copy(self, runs: Sequence[SlotRun]) -> None:
        """See `Copier.copy`."""
        check_runs(runs, self._geometry.slots)
        base, move = self._address, ctypes.memmove
        for source, target, size in byte_runs(self._geometry, runs):
            move(base + target, base + source, size)

    def fill(self, slot: int, data: bytes) -> None:
        """See `Copier.fill`."""
        if len(data) != self._geometry.slot_bytes:
            raise ValueError(f"{len(data)} bytes for a block of {self._geometry.slot_bytes}")
        start = 0
        for address, size in self._pages(slot):
            ctypes.memmove(address, data[start : start + size], size)
            start += size

    def zero(self, slot: int) -> None:
        """See `Copier.zero`."""
        for address, size in self._pages(slot):
            ctypes.memset(address, 0, size)

    def checksum(self, slot: int) -> bytes:
        """See `Copier.checksum`."""
        digest = hashlib.blake2b(digest_size=_CHECKSUM_SIZE_BYTES)
        for address, size in self._pages(slot):
            digest.update((ctypes.c_ubyte * size).from_address(address))
        return digest.digest()

    def _pages(self, slot: int) -> Iterator[tuple[int, int]]:
        if not 0 <= slot < self._geometry.slots:
            raise ValueError(f"slot {slot} is not in a pool of {self._geometry.slots}")
        for strip in self._geometry.strips:
            yield self._address + strip.offset_bytes + slot * strip.page_bytes, strip.page_bytes
