"""The worker's part of the health check: a pattern goes through two slots of the device pool and is read back."""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from itertools import accumulate, chain

import xxhash

from kvcached.worker.messages import Probe
from kvcached.worker.pool_memory import PoolMemory
from kvcached_client.blocks.copy import Batch
from kvcached_client.blocks.pages import PoolGeometry


class DevicePool:
    """A device pool in mapped memory, which stays mapped as long as this object is used.

    Every method raises ValueError on slots that the pool does not have, before it touches anything.

    Args:
        geometry: of the device pool.
        memory: of it.
    """

    def __init__(self, geometry: PoolGeometry, memory: PoolMemory) -> None:
        self._geometry = geometry
        self._memory = memory

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""
        return self._geometry.slot_bytes

    def duplicate(self, source: int, target: int) -> None:
        """Copy a block to another slot. Raises ValueError where the slots are one."""
        if source == target:
            raise ValueError(f"slot {source} is source and target")
        self._move(self._pages(target), self._pages(source))

    def fill(self, slot: int, data: bytes) -> None:
        """Overwrite one block with `data`, `slot_bytes` long, strip after strip. Raises ValueError on another size."""
        if len(data) != self._geometry.slot_bytes:
            raise ValueError(f"{len(data)} bytes for a block of {self._geometry.slot_bytes}")
        block = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self._move(self._pages(slot), self._packed(ctypes.addressof(block)))

    def zero(self, slot: int) -> None:
        """Overwrite one block with zeros."""
        self.fill(slot, bytes(self.slot_bytes))

    def checksum(self, slot: int) -> bytes:
        """xxh3_128 of one block's bytes, strip after strip: equal for equal blocks, whatever holds them."""
        block = (ctypes.c_ubyte * self.slot_bytes)()
        self._move(self._packed(ctypes.addressof(block)), self._pages(slot))
        return xxhash.xxh3_128_digest(block)

    def _move(self, targets: list[int], sources: list[int]) -> None:
        sizes = [strip.page_bytes for strip in self._geometry.strips]
        self._memory.move(Batch(array("q", chain(*zip(targets, sources, sizes, strict=True))), 0, 0))

    def _pages(self, slot: int) -> list[int]:
        """Addresses of a block's pages."""
        if not 0 <= slot < self._geometry.slots:
            raise ValueError(f"slot {slot} is not in a pool of {self._geometry.slots}")
        return [self._memory.address + strip.offset_bytes + slot * strip.page_bytes for strip in self._geometry.strips]

    def _packed(self, address: int) -> list[int]:
        """The same for pages back to back."""
        return list(accumulate((strip.page_bytes for strip in self._geometry.strips[:-1]), initial=address))


class CorruptCopy(Exception):
    """A probe read back other bytes than it wrote."""


def probe(pool: DevicePool, work: Probe) -> None:
    """Write a pattern into one slot, copy it to another and compare both with it. Both slots are zero afterwards.

    Raises:
        CorruptCopy: a slot reads differently.
        ValueError: a slot is not in the pool, or both are the same.
    """
    pattern = hashlib.shake_128(b"kvcached probe" + work.seed.to_bytes(8, "little")).digest(pool.slot_bytes)
    expected = xxhash.xxh3_128_digest(pattern)
    try:
        pool.fill(work.source, pattern)
        pool.duplicate(work.source, work.target)
        for slot in (work.source, work.target):
            if (found := pool.checksum(slot)) != expected:
                raise CorruptCopy(
                    f"probe {work.source} → {work.target}, seed {work.seed}: slot {slot} has checksum {found.hex()}, "
                    f"expected {expected.hex()}"
                )
    finally:
        pool.zero(work.source)
        pool.zero(work.target)
