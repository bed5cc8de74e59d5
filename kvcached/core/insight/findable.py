"""What routers have to know: the complete blocks of every pool, recomputed from the index."""

from __future__ import annotations

from collections.abc import Iterator

from kvcached.core.cache import Cache
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.ranges import every_slot, pairs
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import SlotState


def findable(cache: Cache, tree: PrefixTree, runs: list[Run], pool: SlotPool) -> dict[int, bytes]:
    """The key of each slot of a pool whose block anybody can find: CACHED, and not behind a fence."""
    suspects = _suspects(cache, tree, pool) if isinstance(pool, DevicePool) else set()
    index = tree.members.index(pool)
    found: dict[int, bytes] = {}
    for run in runs:
        segment, place = run.segments[index], 0
        for first, count in pairs(segment.ranges) if segment is not None else ():
            if first >= 0:
                is_whole = pool.holds(first, count, SlotState.CACHED)
                for slot in range(first, first + count):
                    if slot not in suspects and (is_whole or pool.state_of(slot) is SlotState.CACHED):
                        at = place + (slot - first) * KEY_SIZE
                        found[slot] = bytes(run.keys[at : at + KEY_SIZE])
            place += count * KEY_SIZE
    return found


def misinformed(cache: Cache, tree: PrefixTree, runs: list[Run]) -> Iterator[str]:
    """Routers know of every block that can be found, and of no other."""
    for pool in tree.members:
        announced = pool.announced
        if announced is None:
            continue
        right = findable(cache, tree, runs, pool)
        wrong = [slot for slot, key in right.items() if announced.key(slot) != key]
        if wrong or not announced.count == announced.recount() == len(right):
            yield f"pool {pool.name}: routers know of {announced.recount()} blocks, not {len(right)}; slots {wrong[:4]}"


def _suspects(cache: Cache, tree: PrefixTree, pool: DevicePool) -> set[int]:
    return {
        slot
        for session in cache.managed.sessions.values()
        if session.pool is pool
        for hold in session.holds
        for slot in every_slot(tree.path_slots(hold.run, hold.suspect, hold.depth, pool.index))
    }
