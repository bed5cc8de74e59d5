"""What every block must hold: bytes that follow from its key, the layer, K or V, and the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: What a slot holds from its grant until its block is written.
POISON = 0xEE
#: What is written to slots whose blocks are given back uncommitted.
JUNK = 0xDD

Pages = npt.NDArray[np.uint8]


class Item(NamedTuple):
    """A block of a chain: how many blocks come before it, the slot where it lies, and its key."""

    depth: int
    slot: int
    key: bytes


class Wrong(NamedTuple):
    """A page that holds other bytes than its block's."""

    depth: int
    slot: int
    key: str
    layer: int
    part: str
    found: str
    expected: str


@lru_cache(maxsize=32_768)
def page(key: bytes, layer: int, shard: int, size_bytes: int) -> Pages:
    """One layer of a block on a shard: K, then V of the same size."""
    halves = [
        np.resize(np.frombuffer(blake2b(key, person=bytes([layer, shard, part])).digest(), np.uint8), size_bytes // 2)
        for part in range(2)
    ]
    return np.concatenate(halves)


def pages(items: Sequence[Item], layer: int, shard: int, size_bytes: int) -> Pages:
    """One layer of several blocks: uint8 ``[items, size_bytes]``."""
    return np.stack([page(item.key, layer, shard, size_bytes) for item in items])


def compare(found: Pages, items: Sequence[Item], layer: int, shard: int) -> Iterator[Wrong]:
    """The pages, uint8 ``[items, page bytes]``, that are not what they must be."""
    size_bytes = found.shape[1]
    expected = pages(items, layer, shard, size_bytes)
    if np.array_equal(found, expected):
        return
    for index in np.flatnonzero((found != expected).any(axis=1)).tolist():
        item, at = items[index], int(np.flatnonzero(found[index] != expected[index])[0])
        yield Wrong(
            item.depth,
            item.slot,
            item.key.hex(),
            layer,
            "K" if at < size_bytes // 2 else "V",
            found[index, at : at + 8].tobytes().hex(),
            expected[index, at : at + 8].tobytes().hex(),
        )
