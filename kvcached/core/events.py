"""What arrives by itself, without a request."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_client.types import SessionId


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
    """A shard's worker is gone, and with it the memory of the whole pool."""

    pool: str


Event = Ticked | MemberLost | MembersDied | WorkerDied
