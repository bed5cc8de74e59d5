"""The header of a host slot: 128 bytes that identify the slot's block and prove its bytes. One per slot and shard.

Little-endian::

      0   4s  magic        b"KVCH"
      4  u16  format       1
      6  u16  valid        1: the slot holds a block; 2: a claim, see below; anything else: the slot is empty
      8  u64  generation   of the namespace
     16  16s  namespace    its first 16 bytes
     32  16s  fingerprint  fingerprint of the layout
     48  16s  key          of the block
     64  16s  parent       key of the block before it; zeros for the first of a chain
     80  16s  checksum     xxh3_128 of the block's bytes on this shard
     96  u64  epoch        of the daemon that ordered the store
    104  u64  transfer     which store of that epoch it was
    112  u32  depth        blocks before it in its chain
    116  u32  zero
    120  u64  seal         xxh3_64 of the 120 bytes before

While a slot is written, its header names no block; it is written when the block is complete. Its first eight bytes are
written last, in one write, so a writer that dies at any moment leaves either no header or a complete one.

A *claim* names the session that may be writing the slot. The daemon writes the claim before it tells an engine in
offload mode to write. A daemon that finds a claim after a restart does not use the slot until that engine has reported
or is dead. In a claim all fields are zero except magic, format, valid, seal, and::

     96  u64  epoch        of the daemon that granted the slot
    104  u64  session      session that got the slot

A slot with a claim holds no block. A writer zeroes the header of an earlier block, but leaves a claim in place until
the header of the new block replaces it.
"""

from __future__ import annotations

import struct
from array import array
from operator import itemgetter
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvcached_client.blocks.host_layout import HEADER_BYTES
from kvcached_client.types import KEY_SIZE_BYTES

CHECKSUM_BYTES: Final = 16
SEAL_BYTES: Final = 8
#: Length of the prefix of a namespace's root that a header holds.
NAMESPACE_BYTES: Final = 16

_MAGIC: Final = b"KVCH"
_FORMAT: Final = 1
_VALID: Final = 1
_CLAIMED: Final = 2
#: Magic, format and valid; generation, namespace, fingerprint: the start of every header of a transfer.
_KIND: Final = struct.Struct("<8sQ16s16s")
#: A packed `_KIND`; key, parent, checksum; epoch, transfer; depth, zero.
_BODY: Final = struct.Struct(f"<{_KIND.size}s16s16s16sQQII")
_DEPTH: Final = struct.Struct("<II")
_SEAL: Final = struct.Struct("<Q")
_FIRST_WRITE_END: Final = 8
_NAME_END: Final = _KIND.size + 2 * KEY_SIZE_BYTES
_CHECKSUM_END: Final = _NAME_END + CHECKSUM_BYTES
_DEPTH_START: Final = _BODY.size - _DEPTH.size
_NO_PARENT: Final = bytes(KEY_SIZE_BYTES)
_EMPTY: Final = bytes(HEADER_BYTES)

# Columns of many headers, each a row of 16 words of 8 bytes.
_ROW: Final = HEADER_BYTES // 8
_KEY_COLUMN: Final = _KIND.size // 8
_PARENT_COLUMN: Final = _KEY_COLUMN + 2
_CHECKSUM_COLUMN: Final = _PARENT_COLUMN + 2
_WRITER_COLUMN: Final = _CHECKSUM_COLUMN + 2  #: epoch and transfer of the store; readers do not check them
_DEPTH_COLUMN: Final = _WRITER_COLUMN + 2
_SEAL_COLUMN: Final = _DEPTH_COLUMN + 1
#: All of a header before its seal.
_SEALED: Final = struct.Struct(f"{_BODY.size}s{SEAL_BYTES}x")

#: First eight bytes of a block's header, and of a claim.
BLOCK_START: Final = struct.pack("<4sHH", _MAGIC, _FORMAT, _VALID)
CLAIM_START: Final = struct.pack("<4sHH", _MAGIC, _FORMAT, _CLAIMED)


class BlockName(NamedTuple):
    """Identity of a block in its namespace: its key, its parent's key, and its depth in the chain."""

    key: bytes
    parent: bytes  #: empty for the first of a chain
    depth: int


_NOBODY: Final = BlockName(b"", b"", 0)


class BlockNames(NamedTuple):
    """The `BlockName` of several blocks, in order, as columns."""

    keys: bytes  #: 16 bytes each, back to back
    parents: bytes  #: keys of their parents, likewise; zeros for the first of a chain
    depths: array[int]  #: an array of type "Q"


class HeaderKind(NamedTuple):
    """What the headers of one transfer have in common."""

    namespace: bytes
    fingerprint: bytes
    generation: int


def pack(kind: HeaderKind, name: BlockName, checksum: bytes, epoch: int, transfer: int) -> bytes:
    """A valid header."""
    parent = name.parent or _NO_PARENT
    body = _BODY.pack(_start(kind), name.key, parent, checksum, epoch, transfer, name.depth, 0)
    return body + _SEAL.pack(xxh3_64_intdigest(body))


def pack_claim(epoch: int, session: int) -> bytes:
    """A claim: the daemon of `epoch` granted the slot to `session`."""
    body = _BODY.pack(CLAIM_START, b"", b"", b"", epoch, session, 0, 0)
    return body + _SEAL.pack(xxh3_64_intdigest(body))


def invalidate(place: memoryview) -> None:
    """Mark a slot as empty; `place` is the 128 bytes of its header in the host pool. A claim stays."""
    if place[:_FIRST_WRITE_END] != CLAIM_START:
        place[:] = _EMPTY


def write(place: memoryview, header: bytes) -> None:
    """Mark a slot as holding a block, after the bytes of the block were written."""
    place[_FIRST_WRITE_END:] = header[_FIRST_WRITE_END:]
    place[:_FIRST_WRITE_END] = header[:_FIRST_WRITE_END]


def stored_checksum(place: memoryview | bytes, kind: HeaderKind, name: BlockName) -> bytes | None:
    """The checksum that the header stores for a block; None if the slot does not hold that block."""
    header = bytes(place)
    body = header[: _BODY.size]
    is_that_block = (
        body[:_NAME_END] == _start(kind) + name.key + (name.parent or _NO_PARENT)
        and body[_DEPTH_START:] == _DEPTH.pack(name.depth, 0)
        and header[_BODY.size :] == _SEAL.pack(xxh3_64_intdigest(body))
    )
    return body[_NAME_END:_CHECKSUM_END] if is_that_block else None


# --- many blocks at once, faster than one by one ----------------------------------------------------------------------


def pack_all(kind: HeaderKind, names: BlockNames, checksums: bytes, epoch: int, transfer: int) -> bytes:
    """Valid headers, back to back, as `pack` returns them. `checksums` has 16 bytes for each block."""
    words = _named(kind, names, epoch, transfer)
    _fill(words, _CHECKSUM_COLUMN, checksums)
    words[_SEAL_COLUMN::_ROW] = seals(words.tobytes())
    return words.tobytes()


def stored_checksums(headers: bytes, kind: HeaderKind, names: BlockNames) -> list[bytes | None]:
    """`stored_checksum` of each of several headers, which are back to back."""
    found, wanted = array("Q", headers), _named(kind, names, 0, 0)
    for column in range(_CHECKSUM_COLUMN, _DEPTH_COLUMN):
        wanted[column::_ROW] = found[column::_ROW]
    wanted[_SEAL_COLUMN::_ROW] = seals(headers)
    sums = [headers[at + _NAME_END : at + _CHECKSUM_END] for at in range(0, len(headers), HEADER_BYTES)]
    good = wanted.tobytes()
    if good == headers:
        return [*sums]
    rows = range(0, len(headers), HEADER_BYTES)
    return [
        checksum if headers[at : at + HEADER_BYTES] == good[at : at + HEADER_BYTES] else None
        for at, checksum in zip(rows, sums, strict=True)
    ]


def epochs(headers: bytes) -> array[int]:
    """For each of several headers, which are back to back, the epoch of the daemon that ordered the store."""
    return array("Q", headers)[_WRITER_COLUMN::_ROW]


def seals(headers: bytes) -> array[int]:
    """The correct seals of these headers, whatever seals they have."""
    return array("Q", map(xxh3_64_intdigest, map(itemgetter(0), _SEALED.iter_unpack(headers))))


def _named(kind: HeaderKind, names: BlockNames, epoch: int, transfer: int) -> array[int]:
    """Headers without checksums and seals, as words."""
    words = array("Q", pack(kind, _NOBODY, b"", epoch, transfer) * len(names.depths))
    _fill(words, _KEY_COLUMN, names.keys)
    _fill(words, _PARENT_COLUMN, names.parents)
    words[_DEPTH_COLUMN::_ROW] = names.depths  # and the zeros after it
    return words


def _fill(words: array[int], column: int, values: bytes) -> None:
    """Put 16 bytes into each row."""
    halves = array("Q", values)
    words[column::_ROW], words[column + 1 :: _ROW] = halves[0::2], halves[1::2]


def _start(kind: HeaderKind) -> bytes:
    return _KIND.pack(BLOCK_START, kind.generation, kind.namespace, kind.fingerprint)
