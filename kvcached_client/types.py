"""Ids and small values that both sides share. Standard library only."""

from __future__ import annotations

from array import array
from enum import StrEnum
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


class MissReason(StrEnum):
    """Why a prompt's hit ends where it does: what became of the block behind it. Values never change."""

    HIT = "hit"  #: there is none: every full block is a hit
    LAST_TOKEN = "last_token"  # noqa: S105 - of a prompt. It is cached, but that token has to be computed
    NEVER_STORED = "never_stored"  #: nothing is known of it
    EVICTED = "evicted"  #: others needed its slot
    CORRUPT_OR_FAILED = "corrupt_or_failed"  #: its copy failed, or proved to be damaged
    NO_ROOM = "no_room"  #: it was to be stored when every slot was in use
    WORKER_LOST = "worker_lost"  #: host memory has it, but the worker that would load it has died
    CLEARED = "cleared"  #: it was stored before the namespace was cleared
    FILLING = "filling"  #: it is being stored right now
    BELOW_THRESHOLD = "below_threshold"  #: host memory has it, but too few blocks to be worth a load
    OVER_QUOTA = "over_quota"  #: host memory has it, but as many blocks are being loaded as may be
    PAUSED = "paused"  #: host memory has it, but copies are paused
    OTHER_REPLICA = "other_replica"  #: only the device pool of another replica has it
    UNKNOWN_NAMESPACE = "unknown_namespace"  #: nobody has declared the namespace


class WritePolicy(StrEnum):
    """When blocks of a namespace are copied to the host pool. Values never change."""

    WRITE_THROUGH = "write_through"  #: when they are committed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  #: when a second request has them
    WRITE_BACK = "write_back"  #: when their device slots are needed
    NEVER = "never"


KEY_SIZE_BYTES = 16
#: Loads under way in one pool: the entries of a shard's progress page.
PROGRESS_SLOTS = 32
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
