"""A host pool with blocks in it, made by the code that engines write headers with."""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached.memory.host_pool import HostHeaders, HostMemory
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, HeaderKind
from kvcached_client.blocks.host_layout import HostGeometry


class BlockNames(NamedTuple):
    """What blocks are called, one row for each: keys and parents of 16 bytes, and depths."""

    keys: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    depths: npt.NDArray[np.int64]


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
    memory = headers._mapped.cast("B")
    for shard in shards:
        rows = zip(names.keys, names.parents, names.depths.tolist(), strict=True)
        for place, (key, parent, depth) in zip(places_of(slots, shard, geometry).tolist(), rows, strict=True):
            name = BlockName(key.tobytes(), parent.tobytes(), depth)
            header = host_header.pack(kind, name, bytes([shard]) * 16, epoch, transfer)
            host_header.write(memory[place : place + 128], header)


def invalidate(headers: HostHeaders, slots: npt.NDArray[np.int64], shard: int) -> None:
    """Say that slots hold no blocks."""
    memory = headers._mapped.cast("B")
    for place in places_of(slots, shard).tolist():
        host_header.invalidate(memory[place : place + 128])


def first(names: BlockNames, count: int) -> BlockNames:
    return BlockNames(names.keys[:count], names.parents[:count], names.depths[:count])


def header_bytes(memory: HostMemory, geometry: HostGeometry, slot: int, shard: int) -> bytes:
    """A header as it is in the memory, whoever has it mapped."""
    return os.pread(memory.descriptor, 128, geometry.header_offset(slot, shard))
