"""Which cached tail goes first.

A policy orders *evictable tails*: segments without resident children and with unprotected blocks at their end. The tree
tells it when a segment becomes one; `pop` hands out the next victim. A policy may keep stale entries, but then drops
them in `pop`, so that nothing is ever scanned.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Protocol

from kvcached.core.index.run import Segment


class EvictionPolicy(Protocol):
    """Order of eviction among the tails of one pool."""

    def add(self, segment: Segment) -> None:
        """The segment's tail is evictable, or more or less of it is than before. A second call changes nothing."""

    def pop(self) -> Segment | None:
        """The next victim, removed from the order; None when no tail is evictable."""

    def most(self, segment: Segment) -> int:
        """How many of a victim's evictable blocks may go before another victim is asked for; one or more."""

    def touch(self, segment: Segment) -> None:
        """The segment was used now: `last_used` is the newest of the pool. It may not be a tail."""

    def remove(self, segment: Segment) -> None:
        """The segment has left the pool."""

    def clear(self) -> None:
        """Forget everything: the pool was reset."""


#: Outdated entries are few enough below this not to be looked for.
_OUTDATED_MIN = 64


class LeastRecentlyUsed:
    """The tail that was touched longest ago.

    Tails become evictable mostly as the newest (a request ends) or as the oldest (an eviction lays a parent bare): they
    stand in a queue, O(1). One that belongs somewhere between waits in a heap beside it, O(log n). Each has the stamp
    that it was filed under, and is filed again when its turn comes and it was used since. Entries of the heap whose
    segment has left it are dropped then; the segment may stand in another policy, and does not hear of it.
    """

    __slots__ = ("_between", "_newest", "_number", "_queue", "_waiting")

    def __init__(self) -> None:
        self._queue: OrderedDict[Segment, int] = OrderedDict()  #: stamps, oldest first
        self._between: list[tuple[int, int, Segment]] = []  #: heap of (stamp, number, segment)
        self._waiting: dict[Segment, int] = {}  #: numbers of the heap's entries that are not outdated
        self._newest = 0  #: stamp of the last in the queue, or of one that was
        self._number = 0  #: of the last entry in the heap; breaks ties there, so that segments are never compared

    def add(self, segment: Segment) -> None:
        """File a tail under its last use."""
        if segment.queued:
            return
        segment.queued = True
        stamp, queue = segment.last_used, self._queue
        if stamp >= self._newest:
            self._newest = queue[segment] = stamp
            queue.move_to_end(segment)
        elif not queue or stamp <= next(iter(queue.values())):
            queue[segment] = stamp
            queue.move_to_end(segment, last=False)
        else:
            self._number += 1
            self._waiting[segment] = self._number
            heappush(self._between, (stamp, self._number, segment))

    def pop(self) -> Segment | None:
        """The least recently used evictable tail."""
        queue, between = self._queue, self._between
        while queue or between:
            if between and (not queue or between[0][0] < next(iter(queue.values()))):
                stamp, number, segment = heappop(between)
                if self._waiting.get(segment) != number:
                    continue  # outdated
                del self._waiting[segment]
            else:
                segment, stamp = queue.popitem(last=False)
            segment.queued = False
            if segment.resident_children or segment.length <= segment.protected:
                continue  # no tail any more; the tree adds it again when it becomes one
            if segment.last_used == stamp:
                return segment
            self.add(segment)
        return None

    def most(self, segment: Segment) -> int:
        """Those that were used at one time, as far as is known."""
        return segment.last_part

    def touch(self, segment: Segment) -> None:
        """Move its entry to the end, if it has one."""
        if segment.queued:
            self._waiting.pop(segment, None)
            self._newest = self._queue[segment] = segment.last_used
            self._queue.move_to_end(segment)

    def remove(self, segment: Segment) -> None:
        """Forget its entry, if it has one."""
        if self._queue.pop(segment, None) is None:
            if self._waiting.pop(segment, None) is None:
                return
            self._sweep()
        segment.queued = False

    def clear(self) -> None:
        """Forget every entry."""
        for segment in (*self._queue, *self._waiting):
            segment.queued = False
        self._queue.clear()
        self._waiting.clear()
        self._between.clear()

    def _sweep(self) -> None:
        if len(self._between) <= max(_OUTDATED_MIN, 2 * len(self._waiting)):
            return
        self._between = [entry for entry in self._between if self._waiting.get(entry[2]) == entry[1]]
        heapify(self._between)
