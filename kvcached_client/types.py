"""Ids and small values that both sides share. Standard library only."""

from __future__ import annotations

from array import array
from typing import NewType

#: One block key: the first 16 bytes of a block's chained hash.
BlockKey = NewType("BlockKey", bytes)
#: Keys of consecutive blocks, 16 bytes each, back to back.
PackedKeys = NewType("PackedKeys", bytes)
#: Slot ranges as little-endian int32 pairs (first slot, count), back to back, in block order.
PackedRanges = NewType("PackedRanges", bytes)

SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)
RequestId = NewType("RequestId", int)
ShardIndex = NewType("ShardIndex", int)
SlotId = NewType("SlotId", int)
#: A copy between tiers, joined over all shards; never used twice by a daemon.
TransferId = NewType("TransferId", int)
BlockCount = NewType("BlockCount", int)
#: A point in an engine's queued work; grows by one or more per fence. 0 = the work is already over.
FenceSequence = NewType("FenceSequence", int)
NO_FENCE = FenceSequence(0)

KEY_SIZE_BYTES = 16
RANGE_SIZE_BYTES = 8


def unpack_ranges(ranges: PackedRanges | bytes | memoryview) -> list[tuple[int, int]]:
    """Packed ranges as (first slot, count) pairs.

    Raises:
        ValueError: the length is no multiple of 8 bytes.
    """
    if len(ranges) % RANGE_SIZE_BYTES:
        raise ValueError(f"slot ranges of {len(ranges)} bytes are no multiple of {RANGE_SIZE_BYTES}")
    numbers = array("i", bytes(ranges))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def pack_ranges(ranges: list[tuple[int, int]]) -> PackedRanges:
    """The inverse of `unpack_ranges`."""
    return PackedRanges(array("i", [number for pair in ranges for number in pair]).tobytes())
