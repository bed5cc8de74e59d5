"""What the core asks the world to do. The service carries effects out after each call, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvcached.core.ranges import Ranges
from kvcached_client.types import LeaseId, SessionId, TransferId


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


class BlockSpan(NamedTuple):
    """Consecutive blocks of one chain, and their two places."""

    depth: int  #: of the first
    parent: bytes  #: key of the block before it; empty for the first of a chain
    keys: bytes
    device: Ranges[int]
    host: Ranges[int]


class StartTransfer(NamedTuple):
    """Order the copy on every shard of a pool, and tell of each shard by a `ShardSettled`.

    Attributes:
        spans: what to copy; blocks are counted through all of them, from 0.
        urgent: somebody waits for it.
        progress: entry of the progress pages that a load reports to.
    """

    transfer: TransferId
    pool: str
    kind: TransferKind
    spans: tuple[BlockSpan, ...]
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
class SlabLent:
    """A slab of the host pool goes to a namespace: what headers of others lie in it are to be wiped out first."""

    namespace: bytes
    slab: int


@dataclass(frozen=True, slots=True)
class SlotsHandedOut:
    """Processes of an attached engine are about to write host slots: that is to be noted beside the slots."""

    session: SessionId
    namespace: bytes
    slots: Ranges[int]


class StorageSpan(NamedTuple):
    """Consecutive blocks of one chain, and their host slots."""

    depth: int  #: of the first
    parent: bytes  #: key of the block before it; empty for the first of a chain
    keys: bytes
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
    span: StorageSpan


@dataclass(frozen=True, slots=True)
class StartBackup:
    """Copy blocks from host slots to storage, as far as it lacks them, and tell by a `BackupSettled`."""

    transfer: TransferId
    namespace: bytes
    generation: int
    spans: tuple[StorageSpan, ...]


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
class NamespaceCleared:
    """Pools and their host copies are empty, and their keys have another root: whoever waits for that may go on."""

    pools: tuple[str, ...]
    namespace: bytes
    blocks: int


Effect = (
    SessionExpired
    | SessionEnded
    | StartTransfer
    | HurryTransfer
    | AbandonLoad
    | LoadsEnded
    | SlabLent
    | SlotsHandedOut
    | QueryStorage
    | StartFetch
    | StartBackup
    | PrefetchOver
    | ForgetStored
    | NamespaceCleared
)
