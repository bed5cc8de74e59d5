"""A device pool on a CUDA device, a host pool that the device reaches, and scattered slots to copy between them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter
from typing import Final

import numpy as np

from benchmarks.copy_rig import host_geometry, resident_memory
from kvcached_client.blocks.copy import Batch, CopyPlan
from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.cuda.copier import CudaCopier
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Addresses, Stream
from kvcached_client.types import KEY_SIZE_BYTES, TransferId

_SHARD: Final = 0
_BLOCKS_MIN: Final = 2


class CudaRig:
    """One shard on a device, with what its worker copies with.

    Loads copy `blocks` scattered slots of the host pool to scattered slots of the device pool, stores copy other slots
    of the device pool to other slots of the host pool. The host pool is resident and registered throughout. Large
    copies, to compare with, have memory of their own behind the host pool.

    Args:
        device: current to this thread.
        layout: of one shard.
        size_bytes: that each copy moves, in whole blocks.
        parts: takes what has to be closed.

    Attributes:
        size_bytes: that each copy moves.
        layers: batches of a load that goes layer by layer.
    """

    def __init__(self, device: Device, layout: Layout, size_bytes: int, parts: ExitStack) -> None:
        block_bytes = layout.bytes_per_block()
        blocks = max(_BLOCKS_MIN, size_bytes // block_bytes)
        self.size_bytes = blocks * block_bytes
        slots = 2 * blocks
        geometry, host = pool_geometry(layout, slots), host_geometry(slots, block_bytes)
        self._pool = parts.enter_context(device.make_memory(geometry.size_bytes))
        self._memory = resident_memory(host.size_bytes + self.size_bytes)
        parts.callback(self._memory.close)
        reached = range(self._memory.address, self._memory.address + self._memory.size_bytes)
        parts.callback(device.register(reached.start, len(reached)).close)
        self._stream = device.make_stream()
        self._storing, self._loading = (CudaCopier(device, reached) for _ in range(2))
        for each in (self._stream, self._storing, self._loading):
            parts.callback(each.close)
        self._thread = parts.enter_context(ThreadPoolExecutor(1, "stores", initializer=device.use))

        pages = geometry.at(self._pool.address)
        self.layers = len(pages.layers)
        self._plan = CopyPlan(pages.layers, reached.start)
        self._groups = self._plan.layer_groups(self._loading, blocks)
        self._transfers = BlockTransfers(
            pages, host, _SHARD, self._memory.view, namespace=bytes(16), fingerprint=bytes(16), copier=self._loading
        )
        generator = random.Random("cuda")
        shuffled, host_slots = (generator.sample(range(slots), slots) for _ in range(2))
        self._sources, self._targets = shuffled[:blocks], shuffled[blocks:]
        self._loaded_slots, self._stored_slots = host_slots[:blocks], host_slots[blocks:]
        _, self._loaded_places = host.places(self._loaded_slots, _SHARD)
        _, self._stored_places = host.places(self._stored_slots, _SHARD)
        self._keys = generator.randbytes(KEY_SIZE_BYTES * blocks)
        self._apart = host.size_bytes  #: offset of the memory behind the host pool
        self._memory.view[self._apart :] = np.random.default_rng(0).bytes(self.size_bytes)
        self._whole_to_device = one_copy(self._pool.address, reached.start + self._apart, self.size_bytes)
        self._whole_to_host = one_copy(reached.start + self._apart, self._pool.address, self.size_bytes)

    # --- what a worker does -----------------------------------------------------------------------------------------

    def copy_to_host(self) -> None:
        """The copies of a store, from its slots to its last byte, without headers and checksums."""
        _carry_out(self._storing, self._plan.by_block(self._sources, self._stored_places, to_host=True))

    def copy_to_device(self) -> None:
        """The copies of a load, layer by layer."""
        _carry_out(self._loading, self._plan.by_layer(self._targets, self._loaded_places, self._groups))

    def copy_to_device_in_bulk(self) -> None:
        """The copies of a load, block by block."""
        _carry_out(self._loading, self._plan.by_block(self._targets, self._loaded_places, to_host=False))

    def copy_both_ways(self) -> None:
        """The copies of a store and of a load at once, each by a thread of its own."""
        storing = self._thread.submit(self.copy_to_host)
        self.copy_to_device()
        storing.result()

    def load(self, *, verify: bool = False) -> float:
        """A whole load, layer by layer, with headers; returns the seconds until its first layer could be read."""
        arrivals: list[float] = []
        start = perf_counter()
        bad = self._transfers.load_by_layer(
            self._job(self._targets), verify=verify, bad_max=1, layer_done=lambda: arrivals.append(perf_counter())
        )
        assert not bad
        return arrivals[0] - start

    def store(self) -> None:
        """A whole store, with checksums and headers."""
        self._transfers.store(self._job(self._sources), epoch=1)

    def check(self) -> None:
        """Refuse to report times of copies that do not arrive: store, load elsewhere, compare every block."""
        _carry_out(self._storing, self._plan.by_block(self._sources, self._places_apart(), to_host=False))
        self.store()
        self.load(verify=True)
        assert self._content(self._sources) == self._content(self._targets)
        self.copy_to_host()

    # --- what it is compared with -----------------------------------------------------------------------------------

    def one_copy_to_host(self) -> None:
        """One copy of as many bytes, in the same direction."""
        self._copy(self._whole_to_host)

    def one_copy_to_device(self) -> None:
        """The same in the other direction."""
        self._copy(self._whole_to_device)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _copy(self, arrays: tuple[Addresses, Addresses, Addresses]) -> None:
        self._stream.copy(*arrays)
        self._stream.synchronize()

    def _content(self, blocks: list[int]) -> bytes:
        """Bytes of blocks of the device pool, by way of the memory behind the host pool."""
        _carry_out(self._storing, self._plan.by_block(blocks, self._places_apart(), to_host=True))
        return bytes(self._memory.view[self._apart :])

    def _places_apart(self) -> list[int]:
        """Room for the blocks of one copy, behind the host pool."""
        blocks = len(self._sources)
        return [self._apart + index * (self.size_bytes // blocks) for index in range(blocks)]

    def _job(self, blocks: list[int]) -> BlockJob:
        span = JobSpan(0, b"", self._keys, array("q", blocks), array("q", self._loaded_slots))
        return BlockJob(TransferId(1), 0, (span,))


class DeviceCopies:
    """An engine without torch: kernels that do nothing but read and write memory of the device, on a stream.

    Args:
        device: current to this thread.
        size_bytes: that each of them reads, and writes.
        parts: takes what has to be closed.
    """

    def __init__(self, device: Device, size_bytes: int, parts: ExitStack) -> None:
        memory = parts.enter_context(device.make_memory(2 * size_bytes))
        self._stream: Stream = device.make_stream()
        parts.callback(self._stream.close)
        self._arrays = one_copy(memory.address + size_bytes, memory.address, size_bytes)

    def run(self, kernels: int) -> None:
        """So many of them, one after the other, until all are done."""
        for _ in range(kernels):
            self._stream.copy(*self._arrays)
        self._stream.synchronize()


def one_copy(destination: int, source: int, size_bytes: int) -> tuple[Addresses, Addresses, Addresses]:
    """The arrays that `Stream.copy` takes, for one piece."""
    destinations, sources, sizes = (np.array([each], np.uint64) for each in (destination, source, size_bytes))
    return destinations, sources, sizes


def _carry_out(copier: CudaCopier, batches: Iterable[Batch]) -> None:
    for _ in copier.copy(batches):
        pass
