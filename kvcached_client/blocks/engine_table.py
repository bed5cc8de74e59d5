"""The table of an engine pool: which block of the engine's own cache each block of its device memory holds.

An engine pool is device memory of an engine in offload mode that belongs to the daemon: one piece for each rank, and
this table, in sealed memory. The engine writes a row when all ranks have computed a block, and clears it before anybody
may write the block. So an engine that starts on the same memory finds what its blocks hold.

The head holds an epoch, and what the engine computes with (its identity). Rows count only if they have the table's
epoch; a new epoch drops all of them at once. Numbers are little-endian. The first word of a row comes last when the row
is written, and is zeroed first: it is 0 in rows that name no block. Whose pool it is, the daemon writes elsewhere.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: Epoch and identity; rows follow.
HEAD_BYTES: Final = 4096
ROW_BYTES: Final = 80
HASH_BYTES_MAX: Final = 40
RANKS_MAX: Final = 64
IDENTITY_BYTES: Final = 32

_EPOCH_AT: Final = 2048
_KNOWN_AT: Final = 2056  #: whether the identity is written
_IDENTITY_AT: Final = 2064
_NAMESPACE_AT: Final = _IDENTITY_AT + IDENTITY_BYTES
_NAMESPACE_END: Final = _NAMESPACE_AT + IDENTITY_BYTES
_WORD: Final = struct.Struct("<Q")
#: Epoch, parent's block, depth, length of the hash, checksum; the hash follows.
_ROW: Final = struct.Struct("<QIIII")
_ROW_WORDS: Final = ROW_BYTES // 8
NO_PARENT: Final = 0xFFFFFFFF


class Row(NamedTuple):
    """What a block holds.

    Attributes:
        block: its number.
        stamp: when it was used last, as a count; at least 1.
        epoch: of the table when the request began that computed it.
        parent: number of the block before it in its chain; `NO_PARENT` for the first.
        depth: number of blocks before it.
        name: the engine's own hash of it.
    """

    block: int
    stamp: int
    epoch: int
    parent: int
    depth: int
    name: bytes


def table_bytes(blocks: int) -> int:
    """The memory of a table, in whole pages."""
    return -(-(HEAD_BYTES + blocks * ROW_BYTES) // 4096) * 4096


class EngineTable:
    """A mapped table. The daemon and the ranks use its epoch; the engine's scheduler alone its rows."""

    def __init__(self, memory: memoryview, blocks: int) -> None:
        self._memory = memory.cast("B")
        rows = np.frombuffer(self._memory, np.dtype("<u8"), blocks * _ROW_WORDS, HEAD_BYTES)
        self._words: npt.NDArray[np.uint64] = rows.reshape(blocks, _ROW_WORDS)
        self._head_words = self._memory[:HEAD_BYTES].cast("Q")
        self.blocks = blocks

    # --- head -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Rows of other epochs count for nothing."""
        return self._head_words[_EPOCH_AT // 8]

    def new_epoch(self) -> None:
        """Drop all rows, at once. Epochs are random, so that nobody needs to agree with others on the next one."""
        self._head_words[_EPOCH_AT // 8] = secrets.randbits(63) + 1

    @property
    def identity(self) -> bytes:
        """What the engine of the rows computes with; empty if it is not known."""
        known = self._head_words[_KNOWN_AT // 8]
        return bytes(self._memory[_IDENTITY_AT:_NAMESPACE_AT]) if known == 1 else b""

    @property
    def namespace(self) -> bytes:
        """Root of the namespace of these blocks in the daemon; empty if it is not known."""
        known = self._head_words[_KNOWN_AT // 8]
        return bytes(self._memory[_NAMESPACE_AT:_NAMESPACE_END]) if known == 1 else b""

    def identify(self, identity: bytes, namespace: bytes) -> None:
        """Say what the engine computes with. Rows count for nobody before."""
        self._head_words[_KNOWN_AT // 8] = 0
        self._memory[_IDENTITY_AT:_NAMESPACE_AT] = identity
        self._memory[_NAMESPACE_AT:_NAMESPACE_END] = namespace
        self._head_words[_KNOWN_AT // 8] = 1

    def forget(self) -> None:
        """Drop all rows, and the identity."""
        self.new_epoch()
        self._head_words[_KNOWN_AT // 8] = 0
        self._words[:, 0] = 0

    # --- rows -------------------------------------------------------------------------------------------------------

    def write(self, row: Row) -> None:
        """Say what a block holds.

        Raises:
            ValueError: the name is too long.
        """
        if len(row.name) > HASH_BYTES_MAX:
            raise ValueError(f"a hash of {len(row.name)} bytes, {HASH_BYTES_MAX} are possible")
        at = HEAD_BYTES + row.block * ROW_BYTES
        self._words[row.block, 0] = 0
        self._memory[at + 8 : at + ROW_BYTES] = _pack(row)
        self._words[row.block, 0] = row.stamp

    def clear(self, block: int) -> None:
        """Say that a block holds nothing, before anybody may write it."""
        self._words[block, 0] = 0

    def all_of(self, epoch: int, blocks: Sequence[int]) -> bool:
        """Whether all of these blocks have rows, of this epoch."""
        words = self._words[np.asarray(blocks, np.int64)]
        return bool(np.all((words[:, 0] != 0) & (words[:, 1] == np.uint64(epoch))))

    def stamp(self, blocks: Sequence[int], stamp: int) -> None:
        """Note that blocks are used; those without a row are left out."""
        numbers = np.asarray(blocks, np.int64)
        named = numbers[self._words[numbers, 0] != 0]
        self._words[named, 0] = stamp

    def rows(self) -> list[Row]:
        """The rows of the present epoch that are not damaged."""
        named = np.flatnonzero((self._words[:, 0] != 0) & (self._words[:, 1] == np.uint64(self.epoch)))
        found = (self._row(block) for block in named.tolist())
        return [row for row in found if row is not None]

    @property
    def named(self) -> int:
        """How many blocks have a row of the present epoch."""
        return int(np.count_nonzero((self._words[:, 0] != 0) & (self._words[:, 1] == np.uint64(self.epoch))))

    def _row(self, block: int) -> Row | None:
        at = HEAD_BYTES + block * ROW_BYTES
        (stamp,) = _WORD.unpack_from(self._memory, at)
        epoch, parent, depth, length, _ = _ROW.unpack_from(self._memory, at + 8)
        name = bytes(self._memory[at + 8 + _ROW.size : at + 8 + _ROW.size + min(length, HASH_BYTES_MAX)])
        row = Row(block, stamp, epoch, parent, depth, name)
        return row if _pack(row) == bytes(self._memory[at + 8 : at + ROW_BYTES]) else None


def _pack(row: Row) -> bytes:
    """A row without its stamp, which changes. The checksum includes the block's number."""
    name = row.name.ljust(HASH_BYTES_MAX, b"\0")
    fields = (row.epoch, row.parent, row.depth, len(row.name))
    checksum = zlib.crc32(_ROW.pack(*fields, row.block) + name)
    return (_ROW.pack(*fields, checksum) + name).ljust(ROW_BYTES - 8, b"\0")
