"""What arrives by itself, without a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcached_client.types import SessionId, ShardIndex, TransferId


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


class ShardSettled(NamedTuple):
    """One shard is through with a transfer: nothing of it reads or writes any more.

    Attributes:
        error: why it failed; empty where it was carried out.
        corrupt: blocks of a load, counted through its spans, whose stored bytes are not those that were stored. Only
            the blocks before the first of them were copied.
    """

    transfer: TransferId
    shard: ShardIndex
    error: str = ""
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A shard's worker is gone, and with it the memory of the whole pool."""

    pool: str


@dataclass(frozen=True, slots=True)
class PoolRestored:
    """Every shard of a pool has a worker and memory again. No transfer of the old ones is under way."""

    pool: str


@dataclass(frozen=True, slots=True)
class StorageReady:
    """There is storage, and it works."""


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


StorageEvent = StorageReady | StorageSuspended | StorageLost | StorageAnswered | FetchSettled | BackupSettled
Event = Ticked | MemberLost | MembersDied | ShardSettled | WorkerDied | PoolRestored | StorageEvent
