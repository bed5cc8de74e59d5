"""What eviction has to know of each segment, recomputed from the index."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from kvcached.core.index.part_uses import PART_USES_MAX, PartUse
from kvcached.core.index.run import Run, Segment
from kvcached.core.slots.slots import SlotPool


def misjudged(runs: list[Run], pool: SlotPool, index: int) -> Iterator[str]:
    """Every evictable tail is known to the policy, else its slots would never come back; uses of parts are in order."""
    for run in runs:
        segment = run.segments[index]
        if segment is None:
            continue
        name = f"run [{run.start}, {run.end}) in pool {pool.name}"
        if segment.evictable_tail and not segment.queued:
            yield f"{name}: an evictable tail that no policy knows"
        if segment.part_uses and not _is_in_order(segment):
            yield f"{name}: uses of parts are {segment.part_uses}, of all {segment.length} blocks {segment.last_used}"
        if segment.latest_use > pool.clock:
            yield f"{name}: last used at {segment.latest_use}, now is {pool.clock}"


def _is_in_order(segment: Segment) -> bool:
    """Whether uses of parts end inside the segment, and no block matters less or is older than one behind it."""
    uses, start = segment.part_uses, segment.run.start
    everything = PartUse(start + segment.length, segment.last_used, segment.priority)
    steps = [
        longer.end > shorter.end
        and longer.last_used <= shorter.last_used
        and (longer.priority is None or (shorter.priority is not None and longer.priority <= shorter.priority))
        for longer, shorter in pairwise((everything, *uses))
    ]
    return start < uses[-1].end and all(steps) and len(uses) <= PART_USES_MAX
