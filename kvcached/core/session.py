"""One engine group in a namespace: the owner of leases, and what it may still write when it is silent.

A managed session has a device pool, and the daemon's workers copy for it. An offload session has none: its engine keeps
its own device memory, and copies between that and host slots by itself, so that a host slot that it was given is its
own until it says that it is through, or is dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import Asked, Lease, OffloadLease
from kvcached.core.namespaces import Namespace
from kvcached.core.refusals import Refusal, Why
from kvcached.core.slots.ranges import (
    Ranges,
)
from kvcached.core.slots.slots import SlotPool
from kvcached.core.slots.states import SESSION_TRANSITIONS, SessionState, follow
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached_client.types import LeaseId, SessionId, ShardIndex, TransferId

#: A scheduler runs hundreds of requests at once and queues thousands; beyond that something does not release.
LEASES_PER_SESSION_MAX = 16_384
LeaseT = TypeVar("LeaseT", bound=Lease)
SessionT = TypeVar("SessionT", bound="Session")


class Leases(dict[LeaseId, LeaseT], Generic[LeaseT]):
    """The leases of one session by id, at most `LEASES_PER_SESSION_MAX`.

    Attributes:
        by_request: the same leases by the engine's request id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_request: dict[str, LeaseT] = {}

    def granted(self, request: str, asked: Asked) -> LeaseT | None:
        """The lease that a request has, where this is a retry of its acquire; None where it has none yet.

        Raises:
            Refusal: another request has this name, or there is no room for one lease more.
        """
        lease = self.by_request.get(request)
        if lease is None:
            self.check_room()
        elif lease.asked != asked or lease.has_grown:
            raise Refusal(Why.REQUEST_IN_USE, request=request, lease=lease.id)
        return lease

    def check_room(self) -> None:
        """Refuse one lease more than there may be."""
        if len(self) >= LEASES_PER_SESSION_MAX:
            raise Refusal(Why.LEASES_FULL, leases=len(self))

    def add(self, lease: LeaseT) -> None:
        """Put a lease on the books."""
        self[lease.id] = self.by_request[lease.request] = lease

    def remove(self, lease: LeaseT) -> None:
        """Take a lease off the books; what it holds is the caller's to give back."""
        del self[lease.id], self.by_request[lease.request]


@dataclass(slots=True, eq=False)
class Session:
    """What an engine group holds, whatever its kind.

    Attributes:
        id: never used twice, not by sessions of the other kind either.
        block_size: tokens per block.
        last_heard_ms: time of the last heartbeat, or of its start.
        state: see `SessionState`.
        over: why an expired session is over: what whoever still asks for it is told.
        leases: what its requests hold.
    """

    id: SessionId
    last_heard_ms: int
    block_size: int = field(kw_only=True)
    state: SessionState = field(default=SessionState.ACTIVE, kw_only=True)
    over: Why = field(default=Why.SESSION_SILENT, kw_only=True)
    leases: Leases[Any] = field(default_factory=Leases, kw_only=True)

    def enter(self, state: SessionState) -> None:
        """Go along an edge of `SESSION_TRANSITIONS`."""
        self.state = follow(SESSION_TRANSITIONS, self.state, state, f"session {self.id}")

    def enter_expired(self, over: Why) -> None:
        """Expire for a reason."""
        self.over = over
        self.enter(SessionState.EXPIRED)

    def hit_limit(self, keys: bytes, tokens: int, *, full: bool) -> int:
        """How many blocks of a prompt may be a hit: one token is left to compute, unless `full`.

        Raises:
            Refusal: the keys are of more blocks than the tokens fill.
        """
        blocks, block_size = len(keys) // KEY_SIZE, self.block_size
        if blocks * block_size > tokens:
            raise Refusal(Why.TOO_MANY_KEYS, blocks=blocks, block_size=block_size, tokens=tokens)
        return blocks if full else min(blocks, max(tokens - 1, 0) // block_size)

    def heard(self, now_ms: int) -> None:
        """It lives."""
        self.last_heard_ms = now_ms


@dataclass(slots=True, eq=False)
class OffloadSession(Session):
    """An engine group that keeps its own device memory.

    Attributes:
        namespace: where it works.
        read_only: it stores nothing: what it offers is passed over.
        transfers: copies that its processes are not through with.
        quarantined: host slots that they could write when it expired, with the pool that they are of.
        left: shards whose processes have left it: no copy is ordered that would wait for them.
    """

    leases: Leases[OffloadLease] = field(default_factory=Leases, kw_only=True)
    namespace: Namespace
    read_only: bool = field(default=False, kw_only=True)
    transfers: dict[TransferId, EngineTransfer] = field(default_factory=dict)
    quarantined: list[tuple[SlotPool, Ranges[int]]] = field(default_factory=list)
    left: set[ShardIndex] = field(default_factory=set)

    @property
    def tree(self) -> PrefixTree:
        """Of the present generation of its namespace."""
        return self.namespace.tree


class Sessions(dict[SessionId, SessionT], Generic[SessionT, LeaseT]):
    """Active and expired sessions of one kind by id, and the ids of their leases.

    Args:
        ttl_ms: how long a session may be silent.
    """

    def __init__(self, ttl_ms: int) -> None:
        super().__init__()
        self._ttl_ms = ttl_ms
        self._last_lease = 0

    def next_lease(self) -> LeaseId:
        """An id that no lease of this kind has had."""
        self._last_lease += 1
        return LeaseId(self._last_lease)

    def active(self, session_id: SessionId) -> SessionT:
        """An active session.

        Raises:
            Refusal: there is none of this id, or it has expired.
        """
        session = self.get(session_id)
        if session is None:
            raise Refusal(Why.NO_SUCH_SESSION, session=session_id)
        if session.state is SessionState.ACTIVE:
            return session
        if session.over is Why.SESSION_CLEARED:
            raise Refusal(Why.SESSION_CLEARED, session=session_id)
        if session.over is Why.SESSION_LOST_MEMBER:
            raise Refusal(Why.SESSION_LOST_MEMBER, session=session_id)
        raise Refusal(Why.SESSION_SILENT, session=session_id, ttl_ms=self._ttl_ms)

    def lease(self, leases: Leases[LeaseT], lease_id: LeaseId) -> LeaseT:
        """One of a session's leases.

        Raises:
            Refusal: it is another session's, or released, or has never been.
        """
        lease = leases.get(lease_id)
        if lease is not None:
            return lease
        if any(lease_id in other.leases for other in self.values()):
            raise Refusal(Why.FOREIGN_LEASE, lease=lease_id)
        if 0 < lease_id <= self._last_lease:
            raise Refusal(Why.LEASE_RELEASED, lease=lease_id)
        raise Refusal(Why.NO_SUCH_LEASE, lease=lease_id)

    def silent(self, now_ms: int, *, late: bool) -> list[SessionT]:
        """Active sessions that went silent; none where the tick itself was late: then all count as heard."""
        if late:
            for session in self.values():
                session.heard(now_ms)
            return []
        active = (session for session in self.values() if session.state is SessionState.ACTIVE)
        return [session for session in active if now_ms - session.last_heard_ms > self._ttl_ms]
