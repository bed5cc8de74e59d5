"""Slots for a lease: free ones, and where they do not suffice those of the least valuable blocks."""

from __future__ import annotations

from kvcached.core.ranges import Ranges, no_ranges
from kvcached.core.session import Session
from kvcached.core.states import SlotState
from kvcached.core.tiers import Tiers
from kvcached.core.tree import BATCH_DIVISOR, SLACK_DIVISOR
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.types import WritePolicy

#: Under these policies demotion keeps slots free, and what it drops has a copy: nothing is evicted ahead of need.
_DEMOTED = frozenset({WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK})


def take_slots(session: Session, tiers: Tiers, count: int, cause: str) -> Ranges[int]:
    """Grant slots of a session's pool, evicting what is missing, or refuse without any loss.

    Raises:
        NoCapacity: nothing free and nothing evictable; `CAPACITY_PENDING` where transfers under way may change that,
            and under write-back where they are about to make room without loss.
    """
    if not count:
        return no_ranges()
    tree, pool = session.tree, session.pool
    if count > pool.free:
        if count - pool.free > pool.evictable or tiers.stores.write_back(tree, pool, count):
            raise _no_capacity(session, tiers, count)
        _evict(session, count - pool.free, f"eviction for {cause}")
    pool.demand = 0
    return pool.take(count, SlotState.LEASED, cause)


def _evict(session: Session, shortage: int, cause: str) -> None:
    """Free what is short, unless demotion has done so already; a batch where nothing is demoted."""
    tree, pool = session.tree, session.pool
    if shortage <= 0:
        return
    if tree.host is None or tree.write_policy not in _DEMOTED:
        shortage = max(shortage, min(pool.slots // BATCH_DIVISOR, pool.evictable))
    tree.evict(shortage, pool.index, cause, slack=pool.slots // SLACK_DIVISOR)


def _no_capacity(session: Session, tiers: Tiers, count: int) -> RequestError:
    pool = session.pool
    session.counters["no_capacity"] += 1
    reachable = pool.free + pool.counts[SlotState.CACHED] + pool.counts[SlotState.FILLING]
    message = f"{count} slots wanted; of {pool.slots} are {pool.free} free and {pool.evictable} evictable"
    copying = len(tiers.book.of_pool(pool))
    if copying and count <= reachable:
        return request_error(
            ErrorCode.CAPACITY_PENDING,
            f"{message}; {copying} copies under way hold others",
            "send vacancy and try again when it is answered",
        )
    fix = "release leases and try again, or configure more slots"
    return request_error(ErrorCode.NO_CAPACITY, message, fix)
