"""Values for tests of storage: real frames before random bytes, in memory that begins on a page."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

import xxhash

from kvcached.storage.backend import Block
from kvcached.storage.frame import FRAME_BYTES, StoredBlock, StoredKind, is_sound, pack, unpack

PART_BYTES = 8192
KIND = StoredKind(bytes(range(16)), bytes(range(16, 32)), 7, shards=2, part_bytes=PART_BYTES)
#: For tests in which nothing depends on it; no backend here waits for it.
TIMEOUT_S = 5.0


def kind(part_bytes: int = PART_BYTES, shards: int = 2, generation: int = 7) -> StoredKind:
    """What values of a namespace have in common."""
    return KIND._replace(part_bytes=part_bytes, shards=shards, generation=generation)


def name(number: int) -> bytes:
    """A block's own key: 16 bytes."""
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little"))


def key(number: int, of: StoredKind = KIND) -> bytes:
    """Its key in storage: 32 bytes."""
    return of.prefix() + name(number)


def memory(sizes: Sequence[int]) -> list[memoryview]:
    """Zeros, as parts of these sizes."""
    return [memoryview(mmap.mmap(-1, size)) for size in sizes]


def stored(number: int, of: StoredKind = KIND) -> Block:
    """A block to be put: the same bytes each time."""
    draw = random.Random(number)
    parts = memory([FRAME_BYTES] + [of.part_bytes] * of.shards)
    for part in parts[1:]:
        part[:] = draw.randbytes(of.part_bytes)
    sums = tuple(xxhash.xxh3_128_digest(part) for part in parts[1:])
    parts[0][:] = pack(of, StoredBlock(name(number), b"", 0, sums))
    return Block(key(number, of), parts)


def asked(number: int, of: StoredKind = KIND) -> Block:
    """A block to be got: the same key, other memory."""
    return Block(key(number, of), memory([FRAME_BYTES] + [of.part_bytes] * of.shards))


def is_right(block: Block, number: int, of: StoredKind = KIND) -> bool:
    """Whether all bytes are those that were put."""
    return [bytes(part) for part in block.parts] == [bytes(part) for part in stored(number, of).parts]


def proves_itself(block: Block, number: int, of: StoredKind = KIND) -> bool:
    """What the storage process asks of a value before anybody sees it."""
    told = unpack(bytes(block.parts[0]), of, name(number))
    return told is not None and is_sound(told, block.parts[1:])
