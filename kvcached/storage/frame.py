"""The 4096 bytes before a stored block that say what it is, and prove it.

Little-endian::

      0   4s  magic        b"KVCS"
      4  u16  format       1
      6  u16  shards       of the layout, or parts in a canonical one; the value has the bytes of each, in order
      8  u64  generation   of the namespace
     16  16s  namespace    its first 16 bytes
     32  16s  fingerprint  of the layout
     48  16s  key          of the block
     64  16s  parent       key of the block before it; zeros for the first of a chain
     80  u64  part bytes   of the block on one shard
     88  u32  depth        blocks before it in its chain
     92  u32  zero
     96  16s  checksum     xxh3_128 of the block's bytes on shard 0 (of part 0), and so on for every one
    ...       zeros
   2032  16s  seal         xxh3_128 of the 2032 bytes before
   2048       free for stages between the frame and the backend, such as encryption; zeros without one

A page, so that frame and parts can go to a device without the page cache in between.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

FRAME_BYTES: Final = 4096
#: Where the part of a frame ends that a stage may not touch.
SEALED_BYTES: Final = 2048
SHARDS_MAX: Final = 64

_MAGIC: Final = b"KVCS"
_FORMAT: Final = 1
_HEAD: Final = struct.Struct("<4sHHQ16s16s16s16sQII")
_CHECKSUM_BYTES: Final = 16
_SEAL_AT: Final = SEALED_BYTES - 16
_NO_PARENT: Final = bytes(16)


class StoredKind(NamedTuple):
    """What the values of one namespace have in common.

    Attributes:
        namespace, fingerprint: whose blocks these are, and of which layout; 16 bytes each.
        generation: of the namespace.
        shards: how many parts a block has: one for each shard, or those of its canonical layout.
        part_bytes: size of each.
    """

    namespace: bytes
    fingerprint: bytes
    generation: int
    shards: int
    part_bytes: int

    def prefix(self) -> bytes:
        """How the keys of these values begin: 16 bytes. Another sharding of the same layout has another one."""
        text = struct.pack(
            "<16s16sQIQ", self.namespace, self.fingerprint, self.generation, self.shards, self.part_bytes
        )
        return hashlib.blake2b(text, digest_size=16, person=b"kvcached storage").digest()


class StoredBlock(NamedTuple):
    """What a frame tells of its block: its name, and the checksum of each part."""

    key: bytes
    parent: bytes  #: empty for the first of a chain
    depth: int
    checksums: tuple[bytes, ...]


def pack(kind: StoredKind, block: StoredBlock) -> bytes:
    """A valid frame.

    Raises:
        ValueError: there is not one checksum of 16 bytes for each shard.
    """
    if len(block.checksums) != kind.shards or any(len(each) != _CHECKSUM_BYTES for each in block.checksums):
        raise ValueError(f"{len(block.checksums)} checksums for {kind.shards} shards")
    head = _HEAD.pack(
        _MAGIC,
        _FORMAT,
        kind.shards,
        kind.generation,
        kind.namespace,
        kind.fingerprint,
        block.key,
        block.parent or _NO_PARENT,
        kind.part_bytes,
        block.depth,
        0,
    )
    body = (head + b"".join(block.checksums)).ljust(_SEAL_AT, b"\0")
    return (body + xxhash.xxh3_128_digest(body)).ljust(FRAME_BYTES, b"\0")


def unpack(frame: bytes, kind: StoredKind, key: bytes) -> StoredBlock | None:
    """What a frame tells, or None where it is no whole frame of that very block."""
    body = frame[:_SEAL_AT]
    if len(frame) != FRAME_BYTES or xxhash.xxh3_128_digest(body) != frame[_SEAL_AT:SEALED_BYTES]:
        return None
    magic, form, shards, generation, namespace, fingerprint, found, parent, part_bytes, depth, _ = _HEAD.unpack_from(
        body
    )
    told = StoredKind(namespace, fingerprint, generation, shards, part_bytes)
    if (magic, form, told, found) != (_MAGIC, _FORMAT, kind, key) or shards > SHARDS_MAX:
        return None
    sums = tuple(
        body[at : at + _CHECKSUM_BYTES]
        for at in range(_HEAD.size, _HEAD.size + shards * _CHECKSUM_BYTES, _CHECKSUM_BYTES)
    )
    return StoredBlock(found, b"" if depth == 0 else parent, depth, sums)


def is_sound(block: StoredBlock, parts: Sequence[memoryview]) -> bool:
    """Whether the parts are what was stored."""
    return all(xxhash.xxh3_128_digest(part) == each for part, each in zip(parts, block.checksums, strict=True))
