"""The copier of device pools in shared memory. It gives up the interpreter lock while it copies: it holds up nobody."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import xxhash

from kvcached.worker.copier import StripCopies
from kvcached.worker.geometry import PoolGeometry
from kvcached_client.batch_copy import copy_all


class HostCopier:
    """A `Copier` on mapped memory that stays mapped as long as this object is used.

    Args:
        geometry: of the device pool.
        address: where it is mapped.
        host_address: where the host pool is mapped; 0 where there is none.
    """

    def __init__(self, geometry: PoolGeometry, address: int, host_address: int = 0) -> None:
        self._geometry = geometry
        self._address = address
        self._host_address = host_address

    def to_host(self, strip: StripCopies) -> None:
        """See `Copier.to_host`."""
        copy_all(strip.pieces, self._host_address + strip.host_bytes, self._address + strip.device_bytes)

    def to_device(self, strip: StripCopies) -> None:
        """See `Copier.to_device`."""
        copy_all(strip.pieces, self._address + strip.device_bytes, self._host_address + strip.host_bytes)

    def duplicate(self, source: int, target: int) -> None:
        """See `Copier.duplicate`."""
        if source == target:
            raise ValueError(f"slot {source} is source and target")
        for (origin, size), (destination, _) in zip(list(self._pages(source)), self._pages(target), strict=True):
            ctypes.memmove(destination, origin, size)

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
        digest = xxhash.xxh3_128()
        for address, size in self._pages(slot):
            digest.update((ctypes.c_ubyte * size).from_address(address))
        return digest.digest()

    def _pages(self, slot: int) -> Iterator[tuple[int, int]]:
        if not 0 <= slot < self._geometry.slots:
            raise ValueError(f"slot {slot} is not in a pool of {self._geometry.slots}")
        for strip in self._geometry.strips:
            yield self._address + strip.offset_bytes + slot * strip.page_bytes, strip.page_bytes
