"""The 128 bytes beside each host slot that say what its block is, and prove it. One per slot and shard.

Little-endian::

      0   4s  magic        b"KVCH"
      4  u16  format       1
      6  u16  valid        1: the slot holds a block; 2: a claim, see below; anything else: nothing
      8  u64  generation   of the namespace
     16  16s  namespace    its first 16 bytes
     32  16s  fingerprint  of the layout
     48  16s  key          of the block
     64  16s  parent       key of the block before it; zeros for the first of a chain
     80  16s  checksum     xxh3_128 of the block's bytes on this shard
     96  u64  epoch        of the daemon that ordered the store
    104  u64  transfer     which store of that epoch it was
    112  u32  depth        blocks before it in its chain
    116  u32  zero
    120  u64  seal         xxh3_64 of the 120 bytes before

A header is no block's while its slot is written, and appears when the block is complete. Its first eight bytes come
last, in one write: a writer that dies at any moment leaves either no header or a whole one.

A *claim* says who may be writing the slot. The daemon writes it before it tells an engine in attached mode to write, so
that a daemon that finds it after a restart leaves the slot alone until that engine has spoken or is dead. In a claim
all fields are zero but magic, format, valid, seal, and::

     96  u64  epoch        of the daemon that gave the slot away
    104  u64  session      to whom

A claim is no block. Writers leave it in place while they write, where they would zero the header of an earlier block;
the header of the new block replaces it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from kvcached_client.slabs import HEADER_BYTES

KEY_BYTES: Final = 16
#: Of a namespace, its first ones.
NAMESPACE_BYTES: Final = 16

_MAGIC: Final = b"KVCH"
_FORMAT: Final = 1
_VALID: Final = 1
_CLAIMED: Final = 2
_BODY: Final = struct.Struct("<4sHHQ16s16s16s16s16sQQII")
_SEAL: Final = struct.Struct("<Q")
_FIRST_WRITE_END: Final = 8
_NO_PARENT: Final = bytes(KEY_BYTES)

#: How the header of a block begins, and how a claim does.
BLOCK_START: Final = struct.pack("<4sHH", _MAGIC, _FORMAT, _VALID)
CLAIM_START: Final = struct.pack("<4sHH", _MAGIC, _FORMAT, _CLAIMED)


class BlockName(NamedTuple):
    """What a block is called in its namespace, and where in a chain it stands."""

    key: bytes
    parent: bytes  #: empty for the first of a chain
    depth: int


class HeaderKind(NamedTuple):
    """What the headers of one transfer have in common."""

    namespace: bytes
    fingerprint: bytes
    generation: int


def pack(kind: HeaderKind, name: BlockName, checksum: bytes, epoch: int, transfer: int) -> bytes:
    """A valid header."""
    body = _BODY.pack(
        _MAGIC,
        _FORMAT,
        _VALID,
        kind.generation,
        kind.namespace,
        kind.fingerprint,
        name.key,
        name.parent or _NO_PARENT,
        checksum,
        epoch,
        transfer,
        name.depth,
        0,
    )
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def pack_claim(epoch: int, session: int) -> bytes:
    """A claim, in place of a header: the slot was given to `session` by the daemon of `epoch`."""
    zeros = bytes(KEY_BYTES)
    body = _BODY.pack(_MAGIC, _FORMAT, _CLAIMED, 0, zeros, zeros, zeros, zeros, zeros, epoch, session, 0, 0)
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def invalidate(place: memoryview) -> None:
    """Say that the slot holds no block. `place` is the header's 128 bytes in the host pool. A claim stays."""
    if place[:_FIRST_WRITE_END] != CLAIM_START:
        place[:] = bytes(HEADER_BYTES)


def write(place: memoryview, header: bytes) -> None:
    """Say that the slot holds the block. The bytes of the block must be there already."""
    place[_FIRST_WRITE_END:] = header[_FIRST_WRITE_END:]
    place[:_FIRST_WRITE_END] = header[:_FIRST_WRITE_END]


def stored_checksum(place: memoryview, kind: HeaderKind, name: BlockName) -> bytes | None:
    """The checksum of a block as it was stored, or None where the slot does not hold that very block."""
    header = bytes(place)
    body = header[: _BODY.size]
    if _SEAL.pack(xxhash.xxh3_64_intdigest(body)) != header[_BODY.size :]:
        return None
    magic, form, valid, generation, namespace, fingerprint, key, parent, checksum, _, _, depth, _ = _BODY.unpack(body)
    found = (magic, form, valid, namespace, fingerprint, generation, key, parent, depth)
    expected = (_MAGIC, _FORMAT, _VALID, *kind, name.key, name.parent or _NO_PARENT, name.depth)
    return bytes(checksum) if found == expected else None
