"""What a request must satisfy before it changes anything. Each check raises a RequestError that says what to do."""

from __future__ import annotations

from kvcached.core.lease import Lease
from kvcached.core.ranges import Ranges, slot_count, subtract
from kvcached.core.run import KEY_SIZE
from kvcached.core.session import Session
from kvcached.core.states import SessionState
from kvcached_client.errors import ErrorCode, RequestError, request_error
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

    def __init__(self, sessions: dict[SessionId, Session], block_sizes: dict[str, int], session_ttl_ms: int) -> None:
        self._sessions = sessions
        self.block_sizes = block_sizes
        self._session_ttl_ms = session_ttl_ms

    def session(self, session_id: SessionId) -> Session:
        """An active session."""
        session = self._sessions.get(session_id)
        if session is not None and session.state is SessionState.ACTIVE:
            return session
        raise not_alive(session_id, None if session is None else session.state, self._session_ttl_ms)

    def session_at(self, session_id: SessionId, epoch: int) -> Session:
        """An active session whose peer speaks of the pool's memory as it is now."""
        session = self.session(session_id)
        if epoch != session.pool.epoch:
            raise request_error(
                ErrorCode.STALE_EPOCH,
                f"epoch {epoch} of pool {session.pool.name!r} is over, it is {session.pool.epoch} now",
                "attach and say hello again",
            )
        return session

    def lease(self, session: Session, lease_id: LeaseId, granted: int) -> Lease:
        """A session's lease; ids up to `granted` have been given out."""
        lease = session.leases.get(lease_id)
        if lease is not None:
            return lease
        if any(lease_id in other.leases for other in self._sessions.values()):
            raise request_error(
                ErrorCode.FOREIGN_LEASE, f"lease {lease_id} belongs to another session", "use your own lease ids"
            )
        if 0 < lease_id <= granted:
            raise request_error(
                ErrorCode.ALREADY_RELEASED, f"lease {lease_id} has been released", "release a lease once"
            )
        raise request_error(ErrorCode.UNKNOWN_LEASE, f"there has been no lease {lease_id}", "use the id from acquire")

    def hit_limit(self, session: Session, keys: bytes, tokens: int, *, full: bool) -> int:
        """How many blocks of a prompt may be a hit: one token is left to compute, unless `full`."""
        return hit_limit(len(keys) // KEY_SIZE, self.block_sizes[session.pool.name], tokens, full=full)

    def commit(
        self, session: Session, lease: Lease, start: int, keys: bytes, slots: Ranges[int], fence: FenceSequence
    ) -> Ranges[int]:
        """Refuse what does not fit; return the lease's exclusive slots without the committed ones."""
        self.fence(session, fence)
        if lease.loads:
            raise request_error(
                ErrorCode.STILL_LOADING,
                f"part of the hit of lease {lease.id} is still loading, and what was computed on it may be wrong",
                "wait for the loads first: send load",
            )
        if start != lease.depth:
            raise request_error(
                ErrorCode.OUT_OF_ORDER,
                f"commit starts at block {start}, lease {lease.id} is at {lease.depth}",
                "commit blocks in the order of the chain, each once",
            )
        if slot_count(slots) != len(keys) // KEY_SIZE:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"{len(keys) // KEY_SIZE} keys and {slot_count(slots)} slots",
                "name one slot per key",
            )
        left = subtract(lease.open, slots)
        if left is None:
            raise request_error(
                ErrorCode.UNKNOWN_SLOT,
                f"the commit names slots that lease {lease.id} does not hold for writing",
                "name slots from acquire or allocate, each once, that no commit has named",
            )
        return left

    def fence(self, session: Session, fence: FenceSequence, holds: int = 1) -> None:
        """Whether a session may have that many fences more."""
        if fence > session.fence and len(session.holds) + holds > FENCE_HOLDS_PER_SESSION_MAX:
            raise request_error(
                ErrorCode.LIMIT, f"{len(session.holds)} fences are pending", "signal them in the heartbeat"
            )


def check_alive(session_id: SessionId, state: SessionState | None, ttl_ms: int) -> None:
    """Refuse a session that is not there, which has no state, or that has expired."""
    if state is not SessionState.ACTIVE:
        raise not_alive(session_id, state, ttl_ms)


def not_alive(session_id: SessionId, state: SessionState | None, ttl_ms: int) -> RequestError:
    """What somebody is told who speaks of a session that is not active."""
    if state is None:
        return request_error(ErrorCode.NO_SESSION, f"session {session_id} is not open", "attach and say hello again")
    return request_error(
        ErrorCode.SESSION_EXPIRED,
        f"session {session_id} sent no heartbeat for {ttl_ms} ms, or lost one of its processes",
        "stop using its slots, end its processes, then attach and say hello again",
    )


def hit_limit(blocks: int, block_size: int, tokens: int, *, full: bool) -> int:
    """How many blocks of a prompt with so many keys may be a hit: one token is left to compute, unless `full`."""
    if blocks * block_size > tokens:
        raise request_error(
            ErrorCode.BAD_VALUE,
            f"{blocks} keys of {block_size} tokens for a prompt of {tokens} tokens",
            "send the keys of the prompt's full blocks only",
        )
    return blocks if full else min(blocks, max(tokens - 1, 0) // block_size)
