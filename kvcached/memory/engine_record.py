"""What the daemon has recorded of an engine pool, for the next daemon: a page of memory that no engine gets.

The head says what the pool is and whose. Behind it stand when it was asked for last, for which start of its engine, and
who was given each piece of memory last, and who copies there for that process. The table of the pool, which its engines
write, tells none of this: an engine could make the pool another user's, and have its memory handed to that user's
engine.

Pieces on CUDA devices are made one by one, when their ranks ask for them. The head names the device of each.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from kvcached_client.blocks.engine_table import RANKS_MAX

RECORD_BYTES: Final = 4096
POOL_ID_BYTES: Final = 16
NAME_BYTES_MAX: Final = 256

_MAGIC: Final = b"kvcengr1"
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
_USED_AT: Final = 2048  #: seconds since the machine's start
_USED: Final = struct.Struct("<Q")
#: Of the start that has asked last: `used_s` as it noted it, a digest of its claim, their checksum.
_CLAIM_AT: Final = _USED_AT + _USED.size
_CLAIM: Final = struct.Struct("<Q32s")
_WRITERS_AT: Final = 2560  #: pid, start time and pid namespace of each writer
_WRITER: Final = struct.Struct("<QQQ")


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
    def unpack(cls, record: memoryview | bytes) -> Self | None:
        """The head of a record; None if it is damaged, or none."""
        head = bytes(record[:_CHECKSUM_AT])
        if len(head) < _CHECKSUM_AT or bytes(record[_CHECKSUM_AT : _CHECKSUM_AT + 4]) != _CHECKSUM.pack(
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


class EngineRecord:
    """A mapped record."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory.cast("B")

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
    def used_s(self) -> int:
        """When an engine asked for the pool last, in seconds since the machine's start."""
        (used_s,) = _USED.unpack_from(self._memory, _USED_AT)
        return int(used_s)

    @property
    def claim(self) -> bytes:
        """Digest of the claim of the start that has asked last; empty if that asked a daemon that notes none."""
        packed = bytes(self._memory[_CLAIM_AT : _CLAIM_AT + _CLAIM.size])
        used_s, digest = _CLAIM.unpack(packed)
        is_whole = _CHECKSUM.unpack_from(self._memory, _CLAIM_AT + _CLAIM.size) == (zlib.crc32(packed),)
        return bytes(digest) if is_whole and used_s == self.used_s else b""

    def note_use(self, now_s: int, claim: bytes) -> None:
        """Note that a start of an engine, with this digest of its claim, asks for the pool."""
        packed = _CLAIM.pack(now_s, claim)
        self._memory[_CLAIM_AT : _CLAIM_AT + _CLAIM.size] = packed
        _CHECKSUM.pack_into(self._memory, _CLAIM_AT + _CLAIM.size, zlib.crc32(packed))
        _USED.pack_into(self._memory, _USED_AT, now_s)


def claim_digest(claim: str) -> bytes:
    """What is written down of a claim, which may be too long for its place."""
    return hashlib.sha256(claim.encode()).digest()
