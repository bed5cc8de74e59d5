"""Slots for a lease: free ones, and where they do not suffice those of the least valuable blocks."""

from __future__ import annotations

from kvcached.core.ranges import Ranges, no_ranges
from kvcached.core.session import Session
from kvcached.core.states import SlotState
from kvcached.core.transfer_book import TransferBook
from kvcached.core.tree import SLACK_DIVISOR
from kvcached_client.errors import ErrorCode, RequestError, request_error

#: An eviction frees at least this share of a pool: what goes together leaves ranges that stay together (decision 0008).
BATCH_DIVISOR = 64


def take_slots(session: Session, book: TransferBook, count: int, cause: str) -> Ranges[int]:
    """Grant slots of a session's pool, evicting what is missing, or change nothing.

    Raises:
        NoCapacity: nothing free and nothing evictable; `CAPACITY_PENDING` where transfers under way may change that.
    """
    if not count:
        return no_ranges()
    pool = session.pool
    shortage = count - pool.free
    if shortage > 0:
        if shortage > pool.evictable:
            raise _no_capacity(session, book, count)
        if session.tree.host is None:  # with a host pool the watermark does the same, and loses nothing
            shortage = max(shortage, min(pool.slots // BATCH_DIVISOR, pool.evictable))
        slack = pool.slots // SLACK_DIVISOR
        session.tree.evict(shortage, pool.index, f"eviction for {cause}", slack=slack)
    return pool.take(count, SlotState.LEASED, cause)


def _no_capacity(session: Session, book: TransferBook, count: int) -> RequestError:
    pool = session.pool
    session.counters["no_capacity"] += 1
    reachable = pool.free + pool.counts[SlotState.CACHED] + pool.counts[SlotState.FILLING]
    message = f"{count} slots wanted; of {pool.slots} are {pool.free} free and {pool.evictable} evictable"
    copying = len(book.of_pool(pool))
    if copying and count <= reachable:
        return request_error(
            ErrorCode.CAPACITY_PENDING,
            f"{message}; {copying} copies under way hold others",
            "send vacancy and try again when it is answered",
        )
    fix = "release leases and try again, or configure more slots"
    return request_error(ErrorCode.NO_CAPACITY, message, fix)
