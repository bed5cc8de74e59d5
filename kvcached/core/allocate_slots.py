"""Slots for a lease: free ones, and where they do not suffice those of the least valuable blocks."""

from __future__ import annotations

from kvcached.core.index.host_tree import SLACK_DIVISOR
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import BATCH_DIVISOR, PrefixTree
from kvcached.core.lease import ManagedLease
from kvcached.core.refusals import Refusal, Why
from kvcached.core.session import ManagedSession
from kvcached.core.slots.ranges import Ranges, no_ranges
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.worker_copies import WorkerCopies
from kvcached_client.types import WritePolicy

#: Under these policies demotion keeps slots free, and what it drops has a copy: nothing is evicted ahead of need.
_DEMOTED = frozenset({WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK})


def take_slots(session: ManagedSession, worker_copies: WorkerCopies, count: int, cause: str) -> Ranges[int]:
    """Grant slots of a session's pool, evicting what is missing, or refuse without any loss.

    Raises:
        Refusal: nothing free and nothing evictable; `Why.SLOTS_PENDING` where transfers under way may change that,
            and under write-back where they are about to make room without loss.
    """
    if not count:
        return no_ranges()
    tree, pool = session.tree, session.pool
    if count > pool.free:
        if count - pool.free > pool.evictable or worker_copies.stores.write_back(tree, pool, count):
            raise _no_capacity(session, worker_copies, count)
        _evict(session, count - pool.free, f"eviction for {cause}")
    pool.meet_demand()
    return pool.take(count, SlotState.LEASED, cause)


def replace_missing(session: ManagedSession, worker_copies: WorkerCopies, lease: ManagedLease) -> None:
    """Slots for blocks of a lease's hit that could not be loaded.

    Raises:
        Refusal: as `take_slots`.
    """
    missing = lease.hit - lease.depth
    if missing <= 0:
        return
    ranges = take_slots(session, worker_copies, missing, f"replacement for lease {lease.id}")
    lease.replace_missing(ranges)


def discard(tree: PrefixTree, pool: DevicePool, keys: bytes) -> None:
    """Drop the last run of a chain from a replica's pool; a no-op where it is not there or in use."""
    run, _ = tree.match(keys, len(keys) // KEY_SIZE, pool.index)
    segment = run.segments[pool.index]
    if run is not tree.root and segment is not None and not segment.protected:
        dropped = tree.drop(run, run.start, pool.index)
        pool.move(dropped, SlotState.CACHED, SlotState.FREE, "discard")


def _evict(session: ManagedSession, shortage: int, cause: str) -> None:
    """Free what is short, unless demotion has done so already; a batch where nothing is demoted."""
    tree, pool = session.tree, session.pool
    if shortage <= 0:
        return
    if tree.host is None or tree.write_policy not in _DEMOTED:
        shortage = max(shortage, min(pool.slots // BATCH_DIVISOR, pool.evictable))
    tree.evict(shortage, pool.index, cause, slack=pool.slots // SLACK_DIVISOR)


def _no_capacity(session: ManagedSession, worker_copies: WorkerCopies, count: int) -> Refusal:
    pool = session.pool
    session.counters["no_capacity"] += 1
    reachable = pool.free + pool.counts[SlotState.CACHED] + pool.counts[SlotState.FILLING]
    about = {"wanted": count, "slots": pool.slots, "free": pool.free, "evictable": pool.evictable}
    copying = len(worker_copies.table.of_pool(pool))
    if copying and count <= reachable:
        return Refusal(Why.SLOTS_PENDING, **about, copying=copying)
    return Refusal(Why.NO_SLOTS, **about)
