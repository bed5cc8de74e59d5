"""Ids and small values that both sides share. Standard library only."""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import Literal, NamedTuple, NewType, TypeAlias

#: Key of a block: the first 16 bytes of its chained hash.
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
#: A copy between tiers, on all shards together. A daemon never uses an id twice.
TransferId = NewType("TransferId", int)
BlockCount = NewType("BlockCount", int)
#: A point in an engine's queued work; later fences have higher numbers. 0 = the work is already done.
FenceSequence = NewType("FenceSequence", int)
NO_FENCE = FenceSequence(0)


class ChainKind(NamedTuple):
    """What every chain of a session's keys has in common with the session."""

    namespace: bytes
    block_size: int
    algorithm: str


class AcquiredPrefix(NamedTuple):
    """Leading blocks of a chain whose keys a session's daemon has, because they were acquired there."""

    session: object
    blocks: int


class MissReason(StrEnum):
    """Why a prompt's hit is not longer: what happened to the block after it. Values never change."""

    HIT = "hit"  #: every full block is a hit
    LAST_TOKEN = "last_token"  # noqa: S105 - of a prompt. Its block is cached, but the last token must be computed
    NEVER_STORED = "never_stored"  #: the block is unknown
    EVICTED = "evicted"  #: its slot was needed
    CORRUPT_OR_FAILED = "corrupt_or_failed"  #: its copy failed, or was damaged
    NO_ROOM = "no_room"  #: every slot was in use when it was to be stored
    WORKER_LOST = "worker_lost"  #: it is in host memory, but the worker that would load it has died
    CLEARED = "cleared"  #: it was stored before the namespace was cleared
    FORGOTTEN = "forgotten"  #: it was removed on request
    FILLING = "filling"  #: it is being stored right now
    BELOW_THRESHOLD = "below_threshold"  #: it is in host memory, but there are too few blocks for a load
    OVER_QUOTA = "over_quota"  #: it is in host memory, but the quota of loading blocks is used up
    PAUSED = "paused"  #: it is in host memory, but copies are paused
    OTHER_REPLICA = "other_replica"  #: it is only in the device pool of another replica
    UNKNOWN_NAMESPACE = "unknown_namespace"  #: no engine has declared the namespace


#: What a daemon logs: messages of this level and above.
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class WritePolicy(StrEnum):
    """When blocks of a namespace are copied to the host pool. Values never change."""

    WRITE_THROUGH = "write_through"  #: when they are committed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  #: when a second request has them
    WRITE_BACK = "write_back"  #: when their device slots are needed
    NEVER = "never"


class Verify(StrEnum):
    """Which loaded blocks are compared with their stored checksums. Values never change."""

    INHERITED = "inherited"  #: those that were stored before the present daemon began
    ALWAYS = "always"  #: all
    NEVER = "never"

    def trusted_epoch(self, epoch: int) -> int | None:
        """The epoch whose blocks are trusted, where `epoch` is the present daemon's; None: no epoch's."""
        return epoch if self is Verify.INHERITED else None


KEY_SIZE_BYTES = 16
#: Loads in flight in one pool: the entries of a shard's progress page.
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
