"""The table of an engine pool: which block of the engine's own cache each block of its device memory holds.

An engine pool is device memory of an engine in offload mode that belongs to the daemon: one piece for each rank, and
this table, in sealed memory. The daemon writes the head when it makes the pool. The engine writes a row when all ranks
have computed a block, and clears it before anybody may write the block. So an engine that starts on the same memory
finds what its blocks hold.

Pieces on CUDA devices are made one by one, when their ranks ask for them. The head then names the device of each, and
behind it stands who was given it last, and who copies there for that process.

The head names the pool's ranks and sizes. Behind it stand an epoch, and what the engine computes with (its identity).
Rows count only if they have the table's epoch; a new epoch drops all of them at once. Numbers are little-endian. The
first word of a row comes last when the row is written, and is zeroed first: it is 0 in rows that name no block.
"""

from __future__ import annotations

import secrets
import struct
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

#: Head and identity; rows follow.
HEAD_BYTES: Final = 4096
ROW_BYTES: Final = 80
HASH_BYTES_MAX: Final = 40
RANKS_MAX: Final = 64
NAME_BYTES_MAX: Final = 256
POOL_ID_BYTES: Final = 16
IDENTITY_BYTES: Final = 32

_MAGIC: Final = b"kvcengp1"
#: Magic, id, ranks, blocks, bytes of a rank, length of the name.
_HEAD: Final = struct.Struct("<8s16sIIQI")
_NAME_AT: Final = _HEAD.size
_MEMORY_AT: Final = 512  #: device and inode of each rank's memory
_MEMORY: Final = struct.Struct("<QQ")
_CHECKSUM_AT: Final = _MEMORY_AT + RANKS_MAX * _MEMORY.size
_CHECKSUM: Final = struct.Struct("<I")
_KIND_AT: Final = _MEMORY_AT - _CHECKSUM.size  #: 1 if the pieces are on CUDA devices
_ON_CUDA: Final = 1
_NO_DEVICE: Final = bytes(_MEMORY.size)
_DEVICE_PREFIX: Final = "GPU-"
_EPOCH_AT: Final = 2048
_KNOWN_AT: Final = 2056  #: whether the identity is written
_IDENTITY_AT: Final = 2064
_NAMESPACE_AT: Final = _IDENTITY_AT + IDENTITY_BYTES
_USED_AT: Final = _NAMESPACE_AT + IDENTITY_BYTES  #: seconds since the machine's start
_WRITERS_AT: Final = 2560  #: pid, start time and pid namespace of each writer
_WRITER: Final = struct.Struct("<QQQ")
_WORD: Final = struct.Struct("<Q")
#: Epoch, parent's block, depth, length of the hash, checksum; the hash follows.
_ROW: Final = struct.Struct("<QIIII")
_ROW_WORDS: Final = ROW_BYTES // 8
NO_PARENT: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class PoolHead:
    """What the daemon has made.

    Attributes:
        pool_id: random, of this pool alone.
        name: of the engines that use it, one after the other.
        blocks: of the engine; block 0 included.
        rank_bytes: of each rank's memory.
        memories: device and inode of each rank's memory; none on CUDA devices.
        devices: UUID of the CUDA device that has each rank's memory, empty for memory that is not made; none on a CPU.
    """

    pool_id: bytes
    name: str
    blocks: int
    rank_bytes: int
    memories: tuple[tuple[int, int], ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many pieces of memory there are, or will be."""
        return len(self.memories) + len(self.devices)

    def pack(self) -> bytes:
        """The head's bytes, up to and including their checksum."""
        name = self.name.encode()
        head = bytearray(_CHECKSUM_AT)
        _HEAD.pack_into(head, 0, _MAGIC, self.pool_id, self.ranks, self.blocks, self.rank_bytes, len(name))
        head[_NAME_AT : _NAME_AT + len(name)] = name
        _CHECKSUM.pack_into(head, _KIND_AT, _ON_CUDA if self.devices else 0)
        pieces = [_MEMORY.pack(*memory) for memory in self.memories] + list(map(_device_bytes, self.devices))
        for rank, piece in enumerate(pieces):
            at = _MEMORY_AT + rank * _MEMORY.size
            head[at : at + _MEMORY.size] = piece
        return bytes(head) + _CHECKSUM.pack(zlib.crc32(head))

    @classmethod
    def unpack(cls, table: memoryview | bytes) -> Self | None:
        """The head of a table; None if it is damaged, or none."""
        head = bytes(table[:_CHECKSUM_AT])
        if len(head) < _CHECKSUM_AT or bytes(table[_CHECKSUM_AT : _CHECKSUM_AT + 4]) != _CHECKSUM.pack(
            zlib.crc32(head)
        ):
            return None
        magic, pool_id, ranks, blocks, rank_bytes, length = _HEAD.unpack_from(head)
        if magic != _MAGIC or ranks > RANKS_MAX or length > NAME_BYTES_MAX:
            return None
        pieces = [head[at : at + _MEMORY.size] for at in range(_MEMORY_AT, _CHECKSUM_AT, _MEMORY.size)][:ranks]
        name = head[_NAME_AT : _NAME_AT + length].decode(errors="replace")
        if _CHECKSUM.unpack_from(head, _KIND_AT) == (_ON_CUDA,):
            return cls(pool_id, name, blocks, rank_bytes, devices=tuple(map(_device_text, pieces)))
        return cls(pool_id, name, blocks, rank_bytes, tuple(_MEMORY.unpack(piece) for piece in pieces))


def _device_bytes(device: str) -> bytes:
    return uuid.UUID(device.removeprefix(_DEVICE_PREFIX)).bytes if device else _NO_DEVICE


def _device_text(piece: bytes) -> str:
    return "" if piece == _NO_DEVICE else f"{_DEVICE_PREFIX}{uuid.UUID(bytes=piece)}"


class Writer(NamedTuple):
    """A process that was given a rank's memory.

    Attributes:
        pid: its id, as the daemon sees it; 0 = there was none.
        started: when it started, in clock ticks after the boot.
        namespace: inode of the pid namespace of the id; 0 = the daemon saw no id.
    """

    pid: int
    started: int
    namespace: int


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
    def head(self) -> PoolHead | None:
        """The head; None if it is damaged."""
        return PoolHead.unpack(self._memory)

    def begin(self, head: PoolHead) -> None:
        """Write the head of a new table, whose memory is all zero."""
        self.new_epoch()
        self.write_head(head)

    def write_head(self, head: PoolHead) -> None:
        """Write the head. A daemon that is killed meanwhile leaves a damaged one."""
        packed = head.pack()
        self._memory[: len(packed)] = packed

    def writer(self, place: int) -> Writer:
        """Who was given memory on a CUDA device last, in one of `RANKS_MAX` places.

        Rank r of n has place r. The process that copies for it has place n + r, if there is such a place.
        """
        return Writer(*_WRITER.unpack_from(self._memory, _WRITERS_AT + place * _WRITER.size))

    def note_writer(self, place: int, writer: Writer) -> None:
        """Note who is given memory, before it is. Whoever was noted in this place before is dead."""
        at = _WRITERS_AT + place * _WRITER.size
        _WRITER.pack_into(self._memory, at, 0, writer.started, writer.namespace)
        _WRITER.pack_into(self._memory, at, *writer)

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
        return bytes(self._memory[_NAMESPACE_AT:_USED_AT]) if known == 1 else b""

    def identify(self, identity: bytes, namespace: bytes) -> None:
        """Say what the engine computes with. Rows count for nobody before."""
        self._head_words[_KNOWN_AT // 8] = 0
        self._memory[_IDENTITY_AT:_NAMESPACE_AT] = identity
        self._memory[_NAMESPACE_AT:_USED_AT] = namespace
        self._head_words[_KNOWN_AT // 8] = 1

    def forget(self) -> None:
        """Drop all rows, and the identity."""
        self.new_epoch()
        self._head_words[_KNOWN_AT // 8] = 0
        self._words[:, 0] = 0

    @property
    def used_s(self) -> int:
        """When an engine asked for the pool last, in seconds since the machine's start."""
        return self._head_words[_USED_AT // 8]

    def note_use(self, now_s: int) -> None:
        """Note that an engine asks for the pool."""
        self._head_words[_USED_AT // 8] = now_s

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
