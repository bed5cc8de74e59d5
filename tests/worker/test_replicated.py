"""Stores and loads of shards that all hold the same bytes: the host pool has each block once."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from kvcached.memory.progress import ProgressPage
from kvcached.memory.sealed import SharedMemory, sealed_memfd
from kvcached.worker.pool_memory import CpuMemory
from kvcached.worker.probe import DevicePool
from kvcached.worker.shard import WorkerTransfers
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.copy import MemoryCopier
from kvcached_client.blocks.header import BlockName, HeaderKind
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import PageOrder
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.blocks.transfers import BlockTransfers
from tests.worker.groups import SLOTS, tiny_layout
from tests.worker.host_rigs import (
    BLOCK_BYTES,
    FINGERPRINT,
    GENERATION,
    NAMESPACE,
    HostRig,
    key_of,
    load_of,
    made_memory,
    span_of,
    store_of,
)

SHARDS = 3
#: As small as a slab can be that one shard alone would need.
HOST = HostGeometry(slabs=2, slab_bytes=8192, shards=SHARDS, block_bytes=BLOCK_BYTES, replicated=True)
SOURCES, TARGETS, HOST_RANGES = [(0, 2), (5, 3)], [(10, 5)], [(4, 5)]
HOST_SLOTS = range(4, 9)


@contextmanager
def shards_of(order: PageOrder) -> Iterator[list[HostRig]]:
    """Shards with pools of their own, whose blocks 0 to 7 are the same, and one host pool."""
    layout = tiny_layout(order, SHARDS)
    geometry = pool_geometry(layout, SLOTS)
    with ExitStack() as made:
        descriptor = sealed_memfd("test-host", HOST.size_bytes)
        try:
            host = SharedMemory(descriptor, HOST.size_bytes)
        finally:
            os.close(descriptor)
        made.callback(host.close)
        rigs = []
        for shard in range(SHARDS):
            device = made_memory(geometry.size_bytes)
            made.callback(device.close)
            progress = ProgressPage.make("test-progress")
            made.callback(progress.close)
            content = random.Random(shard).randbytes(device.size_bytes)
            ctypes.memmove(device.address, content, device.size_bytes)
            transfers = BlockTransfers(
                geometry.at(device.address), HOST, shard, host.view, namespace=NAMESPACE, fingerprint=FINGERPRINT
            )
            pool, mover = DevicePool(geometry, CpuMemory(device)), MemoryCopier()
            rig = HostRig(layout, device, host, pool, mover, progress, WorkerTransfers(transfers, progress))
            for slot in range(8):
                rig.write_device(slot, bytes([slot + 1]) * BLOCK_BYTES)
            rigs.append(rig)
        yield rigs


@pytest.fixture(params=["block_first", "layer_first"])
def shards(request: pytest.FixtureRequest) -> Iterator[list[HostRig]]:
    with shards_of(request.param) as rigs:
        yield rigs


def stored(rig: HostRig, index: int) -> bool:
    """Whether the host pool has a block of the chain, as its header says."""
    place = HOST.header_offset(HOST_SLOTS[index], 0)
    name = BlockName(key_of(index + 1), key_of(index) if index else b"", index)
    kind = HeaderKind(NAMESPACE, FINGERPRINT, GENERATION)
    return host_header.stored_checksum(rig.host.view[place : place + 128], kind, name) is not None


def test_a_block_is_stored_once_and_loaded_by_every_shard(shards: list[HostRig]) -> None:
    """Each shard writes some of a store's blocks, together all of them, and afterwards each loads all of them."""
    span = span_of(SOURCES, HOST_RANGES)
    wanted = [shards[0].device_blocks()[slot] for slot in (0, 1, 5, 6, 7)]
    written = []
    for rig in shards:
        before = [index for index in range(5) if stored(rig, index)]
        rig.transfers.store(store_of(span))
        written += [index for index in range(5) if stored(rig, index) and index not in before]

    assert sorted(written) == list(range(5))
    for rig in shards:
        assert rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES))) == ()
        assert rig.device_blocks()[10:15] == wanted


def test_a_shard_writes_its_share_alone(shards: list[HostRig]) -> None:
    """While one shard has yet to write its share, its blocks are not there, and the others' are."""
    span = span_of(SOURCES, HOST_RANGES)
    for rig in (shards[0], shards[2]):
        rig.transfers.store(store_of(span))
    missing = range(5)[HOST.share(5, 1)]

    assert [index for index in range(5) if not stored(shards[0], index)] == list(missing)
    assert shards[0].transfers.load(load_of(span_of(TARGETS, HOST_RANGES))) == tuple(missing)


def test_a_store_of_fewer_blocks_than_shards_has_shards_without_a_share(shards: list[HostRig]) -> None:
    """A shard that has nothing to write of a store changes nothing, and says that it is through."""
    span = span_of([(0, 1)], [(4, 1)])
    idle = [shard for shard in range(SHARDS) if not range(1)[HOST.share(1, shard)]]
    before = bytes(shards[0].host.view)
    for shard in idle:
        shards[shard].transfers.store(store_of(span))

    assert len(idle) == SHARDS - 1
    assert bytes(shards[0].host.view) == before


def test_a_changed_byte_is_found_by_every_shard(shards: list[HostRig]) -> None:
    """The one copy of a block is proven by each shard that loads it."""
    span = span_of(SOURCES, HOST_RANGES)
    for rig in shards:
        rig.transfers.store(store_of(span))
    shards[0].host.view[HOST.block_offset(HOST_SLOTS[3], 0)] ^= 1

    for rig in shards:
        assert rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES))) == (3,)


def test_a_shard_that_is_none_of_the_layout_is_refused() -> None:
    """That there is one part does not make room for more shards than the layout has."""
    with shards_of("block_first") as rigs, pytest.raises(ValueError, match="has parts for 3"):
        BlockTransfers(
            pool_geometry(rigs[0].layout, SLOTS).at(rigs[0].device.address),
            msgspec.structs.replace(HOST, shards=SHARDS),
            SHARDS,
            rigs[0].host.view,
            namespace=NAMESPACE,
            fingerprint=FINGERPRINT,
        )
