"""A device pool and a host pool in shared memory, full of random blocks, and scattered slots to copy between them."""

from __future__ import annotations

import ctypes
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Final

import msgspec

from kvcached.core.messages import Span
from kvcached.memory.progress import ProgressPage
from kvcached.memory.sealed import PRETOUCH_BYTES_MAX, SharedMemory, sealed_memfd
from kvcached.worker.messages import Load, Store
from kvcached.worker.pool_memory import CpuMemory
from kvcached.worker.probe import DevicePool
from kvcached.worker.shard import WorkerTransfers
from kvcached_client.blocks.copy import CopyPlan, MemoryCopier, copy_all
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import KvGroup, Layout, PageOrder
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.blocks.transfers import BlockTransfers

LAYERS: Final = 32
BLOCK_BYTES: Final = 512 << 10

_SLAB_BYTES: Final = 64 << 20
_SHARD: Final = 0
_PROGRESS_ENTRY: Final = 0


class TimedProgress(ProgressPage):
    """A progress page that notes when the first layer of a load could be read.

    Attributes:
        first_layer_at: by `perf_counter`; None before.
    """

    first_layer_at: float | None = None

    def begin(self, entry: int, transfer: int) -> None:
        """See `ProgressPage.begin`."""
        self.first_layer_at = None
        super().begin(entry, transfer)

    def advance(self, entry: int) -> None:
        """See `ProgressPage.advance`."""
        super().advance(entry)
        if self.first_layer_at is None:
            self.first_layer_at = perf_counter()


class CopyRig:
    """One shard, with blocks of 512 KiB in 32 layers: a model of 8 B parameters on four shards.

    Stores copy `blocks` scattered slots of the device pool to scattered slots of the host pool, loads copy these to
    other slots of the device pool. Slots that follow each other in a transfer are neighbours by chance only.

    Args:
        order: of the pages in the device pool.
        blocks: that each copy moves.

    Attributes:
        size_bytes: of these blocks.
        progress: where loads tell how far they are.
    """

    def __init__(self, order: PageOrder, blocks: int) -> None:
        group = KvGroup(layers=LAYERS, kv_heads=2, head_dim=128, v_head_dim=128, dtype="bfloat16")
        layout = Layout(block_size=16, shards=1, groups=(group,), order=order)
        assert layout.bytes_per_block() == BLOCK_BYTES
        self.size_bytes = blocks * BLOCK_BYTES
        slots = 2 * blocks
        geometry = pool_geometry(layout, slots)
        self._host = host_geometry(slots, BLOCK_BYTES)
        with ExitStack() as made:
            self._device = resident_memory(geometry.size_bytes)
            self._device.pretouch(PRETOUCH_BYTES_MAX)
            made.callback(self._device.close)
            self._memory = resident_memory(self._host.size_bytes)
            made.callback(self._memory.close)
            self.progress = TimedProgress.make("benchmark-progress")
            made.callback(self.progress.close)
            self._made = made.pop_all()
        generator = random.Random("copy")
        ctypes.memmove(self._device.address, generator.randbytes(self.size_bytes), self.size_bytes)
        shuffled = generator.sample(range(slots), slots)
        self._sources, self._targets = shuffled[:blocks], shuffled[blocks:]
        self._host_slots = generator.sample(range(self._host.slots), blocks)
        self._keys = generator.randbytes(16 * blocks)
        pages = geometry.at(self._device.address)
        self._pool = DevicePool(geometry, CpuMemory(self._device))
        self._copier = MemoryCopier()
        self._plan = CopyPlan(pages.layers, self._memory.address)
        transfers = BlockTransfers(
            pages, self._host, _SHARD, self._memory.view, namespace=bytes(16), fingerprint=bytes(16)
        )
        self._transfers = WorkerTransfers(transfers, self.progress)
        self._transfer = 0

    def close(self) -> None:
        """Unmap everything."""
        self._made.close()

    # --- what a worker does -----------------------------------------------------------------------------------------

    def copy_to_host(self) -> None:
        """The copies of a store, from its slots to its last byte, without headers and checksums."""
        for _ in self._copier.copy(self._plan.by_block(self._sources, self._places(), to_host=True)):
            pass

    def copy_to_device(self) -> None:
        """The copies of a load."""
        for _ in self._copier.copy(self._plan.by_layer(self._targets, self._places())):
            pass

    def store(self) -> None:
        """A whole store: copies, checksums, headers."""
        self._transfer += 1
        span = self._span(self._sources)
        self._transfers.store(Store(transfer=self._transfer, epoch=1, generation=0, spans=(span,), urgent=False))

    def load(self, *, verify: bool) -> None:
        """A whole load, layer by layer: headers, checksums if they are to be compared, copies, progress."""
        self._transfer += 1
        span = self._span(self._targets)
        bad = self._transfers.load(
            Load(transfer=self._transfer, generation=0, spans=(span,), progress=_PROGRESS_ENTRY, verify=verify)
        )
        assert not bad

    def check(self) -> None:
        """Refuse to report times of copies that do not arrive: store, load elsewhere, compare every block."""
        self.store()
        self.load(verify=True)
        self.compare()

    def compare(self) -> None:
        """Refuse loaded blocks that are not those that were stored."""
        for source, target in zip(self._sources, self._targets, strict=True):
            assert self._pool.checksum(source) == self._pool.checksum(target)

    def clear_targets(self) -> None:
        """Forget what was loaded."""
        for target in self._targets:
            self._pool.zero(target)

    # --- what it is compared with -----------------------------------------------------------------------------------

    def memcpy_to_host(self) -> None:
        """One copy of as many bytes, in the same direction."""
        ctypes.memmove(self._memory.address, self._device.address, self.size_bytes)

    def memcpy_to_device(self) -> None:
        """The same in the other direction."""
        ctypes.memmove(self._device.address, self._memory.address, self.size_bytes)

    def pieces(self, *, to_host: bool) -> array[int]:
        """The copies of all batches as offsets from the starts of the pools, in order, as the worker does."""
        batches = (
            self._plan.by_block(self._sources, self._places(), to_host=True)
            if to_host
            else self._plan.by_layer(self._targets, self._places())
        )
        device, host = self.addresses
        starts = (host, device) if to_host else (device, host)
        every = array("q")
        for batch in batches:
            for destination, source, size in _triples(batch.pieces):
                every.extend((destination + batch.destination - starts[0], source + batch.source - starts[1], size))
        return every

    def block_by_block(self) -> array[int]:
        """The same copies of a load, but each block whole before the next: the order of the host pool's bytes."""
        ordered = sorted(_triples(self.pieces(to_host=False)), key=lambda piece: piece[1])
        return array("q", [number for piece in ordered for number in piece])

    def bulk_load(self, pieces: array[int]) -> None:
        """Carry out copies to the device pool in one call."""
        copy_all(pieces, self._device.address, self._memory.address)

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the device pool and the host pool are."""
        return self._device.address, self._memory.address

    # --- steps ------------------------------------------------------------------------------------------------------

    def _places(self) -> list[int]:
        _, blocks = self._host.places(self._host_slots, _SHARD)
        return blocks

    def _span(self, device: Sequence[int]) -> Span:
        return Span(
            depth=0,
            parent=b"",
            keys=self._keys,
            device=array("i", [number for slot in device for number in (slot, 1)]),
            host=array("i", [number for slot in self._host_slots for number in (slot, 1)]),
        )


def host_geometry(slots: int, block_bytes: int) -> HostGeometry:
    """The fewest slabs with room for so many blocks of one shard."""
    one = HostGeometry(slabs=1, slab_bytes=_SLAB_BYTES, shards=1, block_bytes=block_bytes)
    return msgspec.structs.replace(one, slabs=-(-slots // one.slots_per_slab))


def resident_memory(size_bytes: int) -> SharedMemory:
    """Shared memory as that of a pool, resident throughout."""
    descriptor = sealed_memfd("benchmark-host", size_bytes)
    try:
        memory = SharedMemory(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    ctypes.memset(memory.address, 0, size_bytes)
    return memory


def _triples(pieces: array[int]) -> Iterator[tuple[int, int, int]]:
    numbers = iter(pieces)
    return zip(numbers, numbers, numbers, strict=True)
