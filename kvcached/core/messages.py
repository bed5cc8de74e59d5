"""What goes in and out of the core: effects that it asks the world for, events that it is told, answers to requests.

The service carries effects out after each call, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kvcached.core.slots.ranges import Ranges
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, SessionId, TransferId

if TYPE_CHECKING:
    SlotRanges = Ranges[int]
else:  # in Python 3.11 an array has no parameters, and decoders of messages look at annotations
    SlotRanges = Ranges


@dataclass(frozen=True, slots=True)
class SessionExpired:
    """It went silent or lost a member: tell the log, keep watching its processes for their death."""

    session: SessionId
    quarantined_slots: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Nothing of the session is left: forget its connection and its processes."""

    session: SessionId
    freed_slots: int


class TransferKind(StrEnum):
    """Direction of a copy."""

    STORE = "store"  #: device pool to host pool
    LOAD = "load"  #: host pool to device pool


class Span(NamedTuple):
    """Consecutive blocks of one chain, and where they are. There are as many slots of each pool as keys.

    Attributes:
        depth: of the first block.
        parent: key of the block before it; empty for the first of a chain.
        keys: of the blocks, 16 bytes each.
        host: their slots in the host pool.
        device: their slots in a device pool; empty where none has a part in the copy.
    """

    depth: int
    parent: bytes
    keys: bytes
    host: SlotRanges
    device: SlotRanges


def span_of(depth: int, keys: bytes, host: Ranges[int], device: Ranges[int]) -> Span:
    """The span of blocks from `depth` on. `keys` begins with the key of the block before them, if there is one."""
    parent = keys[:KEY_SIZE_BYTES] if depth else b""
    return Span(depth, parent, keys[len(parent) :], host, device)


class StartTransfer(NamedTuple):
    """Order the copy on every shard of a pool, and tell `WorkerCopies.shard_done` of each shard.

    Attributes:
        spans: what to copy; blocks are counted through all of them, from 0.
        urgent: somebody waits for it.
        progress: entry of the progress pages that a load reports to.
    """

    transfer: TransferId
    pool: str
    kind: TransferKind
    spans: tuple[Span, ...]
    urgent: bool
    progress: int


@dataclass(frozen=True, slots=True)
class HurryTransfer:
    """Somebody waits now for a transfer that was started without urgency."""

    transfer: TransferId
    pool: str


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """A load failed before it was started: write that into its entry of the progress pages."""

    transfer: TransferId
    pool: str
    progress: int


@dataclass(frozen=True, slots=True)
class LoadsEnded:
    """Every load that a lease depended on has ended: answer who waits for it."""

    session: SessionId
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class SlabAllocated:
    """A slab of the host pool goes to a namespace: what headers of others lie in it are to be wiped out first."""

    namespace: bytes
    slab: int


@dataclass(frozen=True, slots=True)
class SlotsHandedOut:
    """Processes of an offload engine are about to write host slots: that is to be noted beside the slots."""

    session: SessionId
    namespace: bytes
    slots: Ranges[int]


@dataclass(frozen=True, slots=True)
class SlotsReclaimed:
    """Dead processes had these host slots, and had not said that they were through: no block is to be found there."""

    namespace: bytes
    slots: Ranges[int]


@dataclass(frozen=True, slots=True)
class QueryStorage:
    """Ask storage how many of the first of these blocks it has, and tell by a `StorageAnswered`."""

    query: int
    namespace: bytes
    generation: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Copy blocks from storage into host slots, and tell by a `FetchSettled`."""

    transfer: TransferId
    namespace: bytes
    generation: int
    span: Span


@dataclass(frozen=True, slots=True)
class StartBackup:
    """Copy blocks from host slots to storage, as far as it lacks them, and tell by a `BackupSettled`."""

    transfer: TransferId
    namespace: bytes
    generation: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ForgetStored:
    """A generation of a namespace is over: storage need not keep its blocks, and must not give them back ever."""

    namespace: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class PrefetchOver:
    """Nothing more will come of a prefetch: answer who waits for it."""

    prefetch: int


@dataclass(frozen=True, slots=True)
class ClearingEnded:
    """Pools and their host copies are empty, and their keys have another root: whoever waits for that may go on."""

    pools: tuple[str, ...]
    namespace: bytes
    blocks: int


@dataclass(frozen=True, slots=True)
class PoolEmptied:
    """Nothing of a device pool is in the index, and nobody may touch a slot of it: end its workers, give it back."""

    pool: str
    blocks: int  #: that it held
    dropped: int  #: of them, how many have no copy left


class BlocksCached(NamedTuple):
    """Consecutive blocks of one chain lie in these slots of a device pool, all their bytes: write that beside them."""

    pool: str
    depth: int  #: of the first
    parent: bytes  #: key of the block before it; empty for the first of a chain
    keys: bytes
    slots: Ranges[int]


class BlocksUncached(NamedTuple):
    """These slots of a device pool hold no cached block any more: nothing beside them may say so."""

    pool: str
    slots: Ranges[int]


#: What the headers beside the slots of device pools are to say. It comes before every effect, order and reply that the
#: core has decided on since: a header that still names a block when somebody writes its slot would name wrong bytes.
HeaderChange = BlocksCached | BlocksUncached


class Tier(NamedTuple):
    """What of a namespace lies in one pool, as routers hear of it.

    Attributes:
        namespace: root of the keys.
        generation: of the namespace.
        label: what people call the namespace: as an engine has declared it, or the name of its first replica.
        replica: of a device pool; "" for the host pool.
        rank: place of the device pool among those of its namespace; None for the host pool.
        block_size: tokens per block.
    """

    namespace: bytes
    generation: int
    label: str
    replica: str
    rank: int | None
    block_size: int


class BlocksStored(NamedTuple):
    """Consecutive blocks of one chain are complete in a tier, where anybody can find them."""

    tier: Tier
    parent: bytes  #: key of the block before them; empty for the first of a chain
    keys: bytes


class BlocksRemoved(NamedTuple):
    """These blocks have left a tier."""

    tier: Tier
    keys: bytes


class AllRemoved(NamedTuple):
    """Every block has left a tier: its namespace was cleared, or is forgotten."""

    tier: Tier


class TierEnded(NamedTuple):
    """Nothing of a tier is to be found any more, on request or because its namespace is forgotten.

    Routers hear of its blocks by the changes before this one.
    """

    tier: Tier


#: What routers are told, in order.
IndexChange = BlocksStored | BlocksRemoved | AllRemoved | TierEnded

#: What the core may ask for.
Effect = (
    SessionExpired
    | SessionEnded
    | StartTransfer
    | HurryTransfer
    | AbandonLoad
    | LoadsEnded
    | SlabAllocated
    | SlotsHandedOut
    | SlotsReclaimed
    | QueryStorage
    | StartFetch
    | StartBackup
    | PrefetchOver
    | ForgetStored
    | ClearingEnded
    | PoolEmptied
)


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed. Monotonic milliseconds."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class MemberLost:
    """One process of a session is dead, others may still write: the group is over, its slots are not free yet."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class MembersDied:
    """Every process of a session is confirmed dead: nothing of it can write any more."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A shard's worker is gone: nothing is copied until there is another. Its copies end as its death is confirmed."""

    pool: str


@dataclass(frozen=True, slots=True)
class PoolRestored:
    """Every shard of a pool has a worker again. No transfer of the old ones is under way."""

    pool: str


@dataclass(frozen=True, slots=True)
class StorageReady:
    """There is storage, and it works."""


@dataclass(frozen=True, slots=True)
class StorageEmptied:
    """Storage has no block any more, or another device is where it was: what was written is written again."""


@dataclass(frozen=True, slots=True)
class StorageSuspended:
    """Storage fails too often to be asked. What is under way ends by itself."""


@dataclass(frozen=True, slots=True)
class StorageLost:
    """The storage process is confirmed dead: nothing of it reads or writes host slots any more."""


@dataclass(frozen=True, slots=True)
class StorageAnswered:
    """Storage has the first `found` of the blocks of a query; below 0: it cannot say. Monotonic microseconds."""

    query: int
    found: int
    now_us: int


@dataclass(frozen=True, slots=True)
class FetchSettled:
    """Nothing writes the slots of a fetch any more; its first `good` blocks are what had been stored."""

    transfer: TransferId
    good: int
    now_us: int


@dataclass(frozen=True, slots=True)
class BackupSettled:
    """Nothing reads the slots of a backup any more; storage has its first `written` blocks."""

    transfer: TransferId
    written: int


StorageEvent = (
    StorageReady | StorageEmptied | StorageSuspended | StorageLost | StorageAnswered | FetchSettled | BackupSettled
)
Event = Ticked | MemberLost | MembersDied | WorkerDied | PoolRestored | StorageEvent


class Grant(NamedTuple):
    """Answer to acquire: `hit` blocks to read at `hit_ranges`, the rest to compute into `ranges` (both packed).

    Of the hit, `ready` blocks can be read now, the others when `loads` have ended: transfers, each with its entry in
    the progress pages.
    """

    lease: LeaseId
    hit: int
    ready: int
    loads: tuple[tuple[TransferId, int], ...]
    hit_ranges: bytes
    ranges: bytes


class Loaded(NamedTuple):
    """A lease's loads have ended: the hit as it is now, and slots for the blocks that are missing from it (packed)."""

    hit: int
    ranges: bytes


class Commitment(NamedTuple):
    """Answer to commit: the lease's new depth, and how many of the first blocks were there already."""

    depth: int
    adopted: int
    duplicates: int
