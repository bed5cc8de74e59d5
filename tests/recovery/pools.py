"""A host pool with blocks in it, made by the code that engines write headers with."""

from __future__ import annotations

import os
import random

import numpy as np
import numpy.typing as npt

from kvcached.worker.host_memory import HostHeaders, HostMemory
from kvcached_client import header_table
from kvcached_client.header_table import BlockNames
from kvcached_client.host_geometry import HostGeometry
from kvcached_client.host_header import HeaderKind

KIND = HeaderKind(b"namespace-namesp", b"fingerprint-fing", 5)
#: Slabs of 24 slots on two shards.
GEOMETRY = HostGeometry(slabs=6, slab_bytes=1 << 20, shards=2, block_bytes=20_000)


def chain(count: int, seed: int = 0) -> BlockNames:
    """Consecutive blocks from the first of a chain on."""
    keys = np.frombuffer(random.Random(seed).randbytes(16 * count), np.uint8).reshape(-1, 16)
    parents = np.concatenate([np.zeros((1, 16), np.uint8), keys[:-1]])
    return BlockNames(keys, parents, np.arange(count, dtype=np.int64))


def places_of(slots: npt.NDArray[np.int64], shard: int, geometry: HostGeometry = GEOMETRY) -> npt.NDArray[np.int64]:
    """Where their headers are."""
    return np.array([geometry.header_offset(int(slot), shard) for slot in slots], np.int64)


def store(
    headers: HostHeaders,
    slots: npt.NDArray[np.int64],
    names: BlockNames,
    *,
    shards: tuple[int, ...] = (0, 1),
    kind: HeaderKind = KIND,
    epoch: int = 1,
    transfer: int = 1,
    geometry: HostGeometry = GEOMETRY,
) -> None:
    """Write headers as shards do, each with checksums of its own."""
    for shard in shards:
        table = header_table.pack(kind, names, bytes([shard]) * 16 * len(slots), epoch, transfer)
        headers.table.write(places_of(slots, shard, geometry), table)


def first(names: BlockNames, count: int) -> BlockNames:
    return BlockNames(names.keys[:count], names.parents[:count], names.depths[:count])


def header_bytes(memory: HostMemory, geometry: HostGeometry, slot: int, shard: int) -> bytes:
    """A header as it is in the memory, whoever has it mapped."""
    return os.pread(memory.descriptor, 128, geometry.header_offset(slot, shard))
