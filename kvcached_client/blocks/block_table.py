"""From slot ranges to the arrays that attention kernels take."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from kvcached_client.protocol.engine import TOKENS_PER_MESSAGE_MAX
from kvcached_client.types import RANGE_SIZE_BYTES, PackedRanges

_RANGE: Final = struct.Struct("<ii")
_FEW_RANGES: Final = 8
_FIRST: Final = np.zeros(1, np.int64)


def expand_ranges(packed: PackedRanges | bytes | memoryview) -> npt.NDArray[np.int32]:
    """Slots of packed ranges in block order: int32 ``[blocks]``.

    Raises:
        ValueError: the bytes are no ranges, a range is empty or negative, or together they are implausibly long.
    """
    if len(packed) % RANGE_SIZE_BYTES:
        raise ValueError(f"slot ranges of {len(packed)} bytes are no multiple of {RANGE_SIZE_BYTES}")
    if len(packed) <= _FEW_RANGES * RANGE_SIZE_BYTES:
        return _expand_few(_RANGE.iter_unpack(packed))
    pairs = np.frombuffer(packed, "<i4").reshape(-1, 2).astype(np.int64)
    firsts, counts = pairs[:, 0], pairs[:, 1]
    total = int(counts.sum())
    _check_ranges(int(firsts.min()), int(counts.min()), total, int((firsts + counts).max()))
    starts_in_table = np.cumsum(counts) - counts
    return (np.repeat(firsts - starts_in_table, counts) + np.arange(total)).astype(np.int32)


def _expand_few(ranges: Iterable[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """What a pool mostly grants: a handful of ranges, which numpy would take longer to look at than to write."""
    pieces = []
    for first, count in ranges:
        _check_ranges(first, count, count, first + count)
        pieces.append(np.arange(first, first + count, dtype=np.int32))
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def _check_ranges(first_min: int, count_min: int, total: int, end_max: int) -> None:
    if first_min < 0 or count_min < 1 or total > TOKENS_PER_MESSAGE_MAX or end_max > 1 << 31:
        raise ValueError(
            f"slot ranges of {total} slots, the shortest of {count_min}, the first slot {first_min}, the end {end_max}"
        )


def compress_slots(slots: npt.NDArray[np.int32]) -> PackedRanges:
    """The inverse of `expand_ranges`: consecutive ascending slots share a range."""
    if not len(slots):
        return PackedRanges(b"")
    ends = np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1
    if not len(ends):
        return PackedRanges(_RANGE.pack(slots[0], len(slots)))
    starts = np.concatenate((_FIRST, ends))
    ranges = np.empty((len(starts), 2), "<i4")
    ranges[:, 0] = slots[starts]
    ranges[:-1, 1] = ends - starts[:-1]
    ranges[-1, 1] = len(slots) - starts[-1]
    return PackedRanges(ranges.tobytes())


class SlotRanges:
    """The slots of consecutive blocks: ranges, as they are on the wire, until somebody asks for the table.

    Attributes:
        packed: the ranges, in block order.
        count: slots in them.
    """

    __slots__ = ("_table", "count", "packed")

    def __init__(self, packed: bytes, count: int, table: npt.NDArray[np.int32] | None = None) -> None:
        """`packed` has `count` slots; `table` holds them one by one."""
        self.packed = packed
        self.count = count
        self._table = table

    @classmethod
    def checked(cls, packed: bytes) -> Self:
        """Ranges of a peer.

        Raises:
            ValueError: see `expand_ranges`.
        """
        if len(packed) > _FEW_RANGES * RANGE_SIZE_BYTES or len(packed) % RANGE_SIZE_BYTES:
            table = expand_ranges(packed)
            return cls(packed, len(table), table)
        count = 0
        for first, size in _RANGE.iter_unpack(packed):
            _check_ranges(first, size, size, first + size)
            count += size
        return cls(packed, count)

    @classmethod
    def of(cls, table: npt.NDArray[np.int32]) -> Self:
        """These slots."""
        return cls(compress_slots(table), len(table), table)

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The slot of each block: int32 ``[blocks]``, made once."""
        if self._table is None:
            self._table = expand_ranges(self.packed)
        return self._table

    def section(self, start: int, stop: int) -> bytes:
        """The ranges of the blocks [start, stop)."""
        if len(self.packed) > _FEW_RANGES * RANGE_SIZE_BYTES:
            return compress_slots(self.table[start:stop])
        pieces = []
        for first, size in _RANGE.iter_unpack(self.packed):
            low, high = max(start, 0), min(stop, size)
            if low < high:
                pieces.append(_RANGE.pack(first + low, high - low))
            start, stop = start - size, stop - size
        return b"".join(pieces)

    def __add__(self, other: SlotRanges) -> SlotRanges:
        """These slots, then those of another."""
        return SlotRanges(self.packed + other.packed, self.count + other.count)


def slot_mapping(
    block_table: npt.NDArray[np.int32], positions: npt.NDArray[np.integer[Any]], block_size: int
) -> npt.NDArray[np.int64]:
    """Where the KV of each token goes: int64 ``[tokens]``, slot * block_size + offset inside the block.

    Args:
        block_table: int32 ``[blocks]``, the slot of each block of one request.
        positions: ``[tokens]``, positions inside that request.
        block_size: tokens per block.

    Raises:
        IndexError: a position is negative or lies beyond the block table.
    """
    positions = np.asarray(positions, np.int64)
    if len(positions) and positions.min() < 0:
        raise IndexError(f"position {positions.min()} is negative")
    slots: npt.NDArray[np.int64] = block_table[positions // block_size].astype(np.int64)
    return slots * block_size + positions % block_size
