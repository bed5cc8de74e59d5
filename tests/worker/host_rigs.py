"""A shard with a tiny device pool and a tiny host pool, in this process."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

from kvcached.core.messages import Span
from kvcached.memory.progress import ProgressPage
from kvcached.memory.sealed import SharedMemory, sealed_memfd
from kvcached.worker.messages import Load, Store
from kvcached.worker.pool_memory import CpuMemory
from kvcached.worker.probe import DevicePool
from kvcached.worker.shard import WorkerTransfers
from kvcached_client.blocks.copy import CopyPlan, MemoryCopier
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import Layout, PageOrder
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.blocks.transfers import BlockTransfers
from tests.worker.groups import SLOTS, pages_of, read_block, tiny_layout

SHARDS = 2
SHARD = 1
BLOCK_BYTES = 544
#: Two pages: one of headers, and 7 blocks in the other.
PART_BYTES = 8192
SLOTS_PER_SLAB = 7
HOST = HostGeometry(slabs=3, slab_bytes=SHARDS * PART_BYTES, shards=SHARDS, block_bytes=BLOCK_BYTES)
NAMESPACE = b"namespace-namesp"
FINGERPRINT = b"fingerprint-fing"
GENERATION = 5

Ranges = Sequence[tuple[int, int]]


def header_place(slot: int) -> int:
    """Where a header of shard `SHARD` is, reckoned from the description and not by the code."""
    slab, index = divmod(slot, SLOTS_PER_SLAB)
    return slab * SHARDS * PART_BYTES + SHARD * PART_BYTES + index * 128


def block_place(slot: int) -> int:
    """Where a block of shard `SHARD` is, reckoned in the same way."""
    slab, index = divmod(slot, SLOTS_PER_SLAB)
    return slab * SHARDS * PART_BYTES + SHARD * PART_BYTES + 4096 + index * BLOCK_BYTES


def key_of(number: int) -> bytes:
    """Some key."""
    return number.to_bytes(16, "little")


def span_of(device: Ranges, host: Ranges, *, depth: int = 0) -> Span:
    """Blocks of the one chain whose keys are 1, 2, 3, …, from `depth` on."""
    blocks = sum(count for _, count in host)
    return Span(
        depth=depth,
        parent=key_of(depth) if depth else b"",
        keys=b"".join(key_of(depth + index + 1) for index in range(blocks)),
        device=array("i", chain.from_iterable(device)),
        host=array("i", chain.from_iterable(host)),
    )


def store_of(*spans: Span, transfer: int = 1, urgent: bool = False) -> Store:
    """A store of this generation."""
    return Store(transfer=transfer, epoch=3, generation=GENERATION, spans=spans, urgent=urgent)


def load_of(*spans: Span, transfer: int = 2, progress: int = 4, verify: bool = True) -> Load:
    """A load of this generation."""
    return Load(transfer=transfer, generation=GENERATION, spans=spans, progress=progress, verify=verify)


def put_block(pool: memoryview, layout: Layout, slot: int, block: bytes) -> None:
    """Overwrite a block of a device pool."""
    start = 0
    for offset, size in pages_of(layout, SLOTS, slot):
        pool[offset : offset + size] = block[start : start + size]
        start += size


def made_memory(size_bytes: int) -> SharedMemory:
    """New memory, mapped."""
    descriptor = sealed_memfd("kvcached-test", size_bytes)
    try:
        return SharedMemory(descriptor, size_bytes)
    finally:
        os.close(descriptor)


@dataclass
class HostRig:
    """All that transfers take, and a look at the bytes."""

    layout: Layout
    device: SharedMemory
    host: SharedMemory
    pool: DevicePool
    copier: MemoryCopier
    progress: ProgressPage
    transfers: WorkerTransfers

    @property
    def plan(self) -> CopyPlan:
        """Of copies between the two pools."""
        return CopyPlan(pool_geometry(self.layout, SLOTS).at(self.device.address).layers, self.host.address)

    def device_blocks(self) -> list[bytes]:
        """Every block of the device pool."""
        content = ctypes.string_at(self.device.address, self.device.size_bytes)
        return [read_block(content, self.layout, SLOTS, slot) for slot in range(SLOTS)]

    def write_device(self, slot: int, block: bytes) -> None:
        """Overwrite a block of the device pool."""
        content = (ctypes.c_ubyte * self.device.size_bytes).from_address(self.device.address)
        put_block(memoryview(content).cast("B"), self.layout, slot, block)

    def host_block(self, slot: int) -> bytes:
        """A block of the host pool."""
        return bytes(self.host.view[block_place(slot) : block_place(slot) + BLOCK_BYTES])

    def header(self, slot: int) -> bytes:
        """A header of the host pool."""
        return bytes(self.host.view[header_place(slot) : header_place(slot) + 128])

    def entry(self, index: int = 4) -> tuple[int, int, int]:
        """Transfer, layers done and state of an entry of the progress page, as a reader sees them."""
        transfer, layers_done, state = struct.unpack("<QII", os.pread(self.progress.descriptor, 16, index * 64))
        return transfer, layers_done, state


@contextmanager
def host_rig(order: PageOrder, copier: type[MemoryCopier] = MemoryCopier) -> Iterator[HostRig]:
    """A rig whose pools are full of random bytes, apart from the headers."""
    layout = tiny_layout(order, SHARDS)
    geometry = pool_geometry(layout, SLOTS)
    with ExitStack() as made:
        device = made_memory(geometry.size_bytes)
        made.callback(device.close)
        host = made_memory(HOST.size_bytes)
        made.callback(host.close)
        progress = ProgressPage.make("test-progress")
        made.callback(progress.close)
        ctypes.memmove(device.address, random.Random(1).randbytes(device.size_bytes), device.size_bytes)
        for slot in range(HOST.slots):
            host.view[block_place(slot) : block_place(slot) + BLOCK_BYTES] = random.Random(slot).randbytes(BLOCK_BYTES)
        pool, mover = DevicePool(geometry, CpuMemory(device)), copier()
        transfers = BlockTransfers(
            geometry.at(device.address),
            HOST,
            SHARD,
            host.view,
            namespace=NAMESPACE,
            fingerprint=FINGERPRINT,
            copier=mover,
        )
        yield HostRig(layout, device, host, pool, mover, progress, WorkerTransfers(transfers, progress))
