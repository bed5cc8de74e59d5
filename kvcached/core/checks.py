"""What a request must satisfy before it changes anything. Each check raises a Refusal that says what to do."""

from __future__ import annotations

from kvcached.core.index.run import KEY_SIZE
from kvcached.core.lease import ManagedLease
from kvcached.core.refusals import Refusal, Why
from kvcached.core.session import ManagedSession
from kvcached.core.slots.ranges import Ranges, slot_count, subtract
from kvcached.core.slots.states import SessionState
from kvcached_client.types import FenceSequence, LeaseId, SessionId

#: A fence is one engine step; a session this far behind is not signalling at all.
FENCE_HOLDS_PER_SESSION_MAX = 65_536


class Checks:
    """Reads sessions and leases; changes nothing.

    Args:
        sessions: the cache's own.
        block_sizes: tokens per block, by pool.
        session_ttl_ms: for what an expired session is told.
    """

    def __init__(
        self, sessions: dict[SessionId, ManagedSession], block_sizes: dict[str, int], session_ttl_ms: int
    ) -> None:
        self._sessions = sessions
        self.block_sizes = block_sizes
        self._session_ttl_ms = session_ttl_ms

    def session(self, session_id: SessionId) -> ManagedSession:
        """An active session."""
        session = self._sessions.get(session_id)
        if session is not None and session.state is SessionState.ACTIVE:
            return session
        raise not_alive(session_id, None if session is None else session.state, self._session_ttl_ms)

    def session_at(self, session_id: SessionId, epoch: int) -> ManagedSession:
        """An active session whose peer speaks of the pool's memory as it is now."""
        session = self.session(session_id)
        if epoch != session.pool.epoch:
            raise Refusal(Why.STALE_EPOCH, epoch=epoch, pool=session.pool.name, present=session.pool.epoch)
        return session

    def lease(self, session: ManagedSession, lease_id: LeaseId, granted: int) -> ManagedLease:
        """A session's lease; ids up to `granted` have been given out."""
        lease = session.leases.get(lease_id)
        if lease is not None:
            return lease
        if any(lease_id in other.leases for other in self._sessions.values()):
            raise Refusal(Why.FOREIGN_LEASE, lease=lease_id)
        if 0 < lease_id <= granted:
            raise Refusal(Why.LEASE_RELEASED, lease=lease_id)
        raise Refusal(Why.NO_SUCH_LEASE, lease=lease_id)

    def hit_limit(self, session: ManagedSession, keys: bytes, tokens: int, *, full: bool) -> int:
        """How many blocks of a prompt may be a hit: one token is left to compute, unless `full`."""
        return hit_limit(len(keys) // KEY_SIZE, self.block_sizes[session.pool.name], tokens, full=full)

    def commit(
        self,
        session: ManagedSession,
        lease: ManagedLease,
        start: int,
        keys: bytes,
        slots: Ranges[int],
        fence: FenceSequence,
    ) -> Ranges[int]:
        """Refuse what does not fit; return the lease's exclusive slots without the committed ones."""
        self.fence(session, fence)
        if lease.loads:
            raise Refusal(Why.STILL_LOADING, lease=lease.id)
        if start != lease.depth:
            raise Refusal(Why.COMMIT_OUT_OF_ORDER, start=start, lease=lease.id, depth=lease.depth)
        if slot_count(slots) != len(keys) // KEY_SIZE:
            raise Refusal(Why.COMMIT_OF_OTHER_LENGTH, keys=len(keys) // KEY_SIZE, slots=slot_count(slots))
        left = subtract(lease.open, slots)
        if left is None:
            raise Refusal(Why.COMMIT_OF_FOREIGN_SLOTS, lease=lease.id)
        return left

    def fence(self, session: ManagedSession, fence: FenceSequence, holds: int = 1) -> None:
        """Whether a session may have that many fences more."""
        if fence > session.fence and len(session.holds) + holds > FENCE_HOLDS_PER_SESSION_MAX:
            raise Refusal(Why.FENCES_FULL, fences=len(session.holds))


def check_alive(session_id: SessionId, state: SessionState | None, ttl_ms: int) -> None:
    """Refuse a session that is not there, which has no state, or that has expired."""
    if state is not SessionState.ACTIVE:
        raise not_alive(session_id, state, ttl_ms)


def not_alive(session_id: SessionId, state: SessionState | None, ttl_ms: int) -> Refusal:
    """What somebody is told who speaks of a session that is not active."""
    if state is None:
        return Refusal(Why.NO_SUCH_SESSION, session=session_id)
    return Refusal(Why.SESSION_EXPIRED, session=session_id, ttl_ms=ttl_ms)


def hit_limit(blocks: int, block_size: int, tokens: int, *, full: bool) -> int:
    """How many blocks of a prompt with so many keys may be a hit: one token is left to compute, unless `full`."""
    if blocks * block_size > tokens:
        raise Refusal(Why.TOO_MANY_KEYS, blocks=blocks, block_size=block_size, tokens=tokens)
    return blocks if full else min(blocks, max(tokens - 1, 0) // block_size)
