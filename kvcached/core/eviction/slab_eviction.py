"""Whole slabs of a namespace are freed for another one: the blocks in them are evicted, and no other memory is touched.

Which slabs: those whose blocks, with all that continues them, are the fewest and were used longest ago. A slab with a
slot that somebody holds, writes or may write is left alone. The index does not know which blocks lie in a slab, so this
walks all runs: callers free some slabs at a time.
"""

from __future__ import annotations

from kvcached.core.index.run import Run
from kvcached.core.index.tree import HOST, PrefixTree
from kvcached.core.slots.host_slots import HostPool
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.core.slots.states import SlotState

#: Slots in these states may be freed. All others belong to copies, or to processes that may write them.
_AT_REST = (SlotState.FREE, SlotState.CACHED)


def evict_slabs(tree: PrefixTree, host: HostPool, count: int, cause: str) -> int:
    """Evict what lies in up to `count` slabs of a tree's host pool, which stand empty then; returns how many."""
    runs = [run for run in tree.runs() if run.segments[HOST] is not None]
    size = host.slots_per_slab
    losses, held = _losses(runs, size)
    movable = (
        slab
        for slab in sorted(host.slabs, key=lambda slab: (losses.get(slab, 0), slab))
        if slab not in held and sum(host.count_in(slab * size, size, state) for state in _AT_REST) == size
    )
    chosen = {slab for slab, _ in zip(movable, range(count), strict=False)}
    for run in runs:  # parents first: what hangs on a block goes with it
        segment = run.segments[HOST]
        if segment is not None:
            places = _first_positions(segment.ranges, size)
            cut = min((place for slab, place in places.items() if slab in chosen), default=None)
            if cut is not None:
                tree.cut_host(run, run.start + cut, cause)
    return len(chosen & host.empty)


def _losses(runs: list[Run], size: int) -> tuple[dict[int, int], set[int]]:
    """What would be lost with each slab, as a sum over blocks of how recently they were used; and which are held.

    With a block goes what continues it, wherever that lies; so it counts, and a block is as recent as the latest of it.
    """
    used: dict[Run, int] = {}
    for run in reversed(runs):
        segment = run.segments[HOST]
        if segment is not None and run.parent is not None:
            used[run] = latest = max(segment.last_used, used.get(run, 0))
            used[run.parent] = max(latest, used.get(run.parent, 0))
    oldest = min((used[run] for run in runs), default=0)
    below: dict[Run, int] = {}
    losses: dict[int, int] = {}
    held: set[int] = set()
    for run in reversed(runs):
        segment = run.segments[HOST]
        if segment is None or run.parent is None:
            continue
        worth, deeper = used[run] - oldest + 1, below.pop(run, 0)
        below[run.parent] = below.get(run.parent, 0) + segment.length * worth + deeper
        for slab, position in _first_positions(segment.ranges, size).items():
            losses[slab] = losses.get(slab, 0) + (segment.length - position) * worth + deeper
            if position < segment.protected:
                held.add(slab)
    return losses, held


def _first_positions(ranges: Ranges[int], size: int) -> dict[int, int]:
    """The slabs that the slots of a segment lie in, each with the first of the segment's blocks in it."""
    positions: dict[int, int] = {}
    position = 0
    for first, length in pairs(ranges):
        if first >= 0:
            for slab in range(first // size, (first + length - 1) // size + 1):
                positions.setdefault(slab, position + max(slab * size - first, 0))
        position += length
    return positions
