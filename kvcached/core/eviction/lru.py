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
    stand in a queue, O(1). One that belongs somewhere between waits in a heap beside it, O(log n). An entry has the
    stamp that it was filed under; one whose stamp or segment is outdated is dropped or filed again when its turn comes.
    """

    __slots__ = ("_between", "_newest", "_number", "_outdated", "_queue")

    def __init__(self) -> None:
        self._queue: OrderedDict[Segment, int] = OrderedDict()  #: stamps, oldest first
        self._between: list[tuple[int, int, Segment]] = []  #: heap of (stamp, number, segment)
        self._newest = 0  #: stamp of the last in the queue, or of one that was
        self._number = 0  #: breaks ties in the heap, so that segments are never compared
        self._outdated = 0  #: entries of the heap whose segment has left it

    def add(self, segment: Segment) -> None:
        """File a tail under its last use."""
        if segment.queued:
            return
        segment.queued = True
        stamp, queue = segment.last_used, self._queue
        if stamp >= self._newest:
            self._newest = stamp
            queue[segment] = stamp
        elif not queue or stamp <= next(iter(queue.values())):
            queue[segment] = stamp
            queue.move_to_end(segment, last=False)
        else:
            self._number += 1
            heappush(self._between, (stamp, self._number, segment))

    def pop(self) -> Segment | None:
        """The least recently used evictable tail."""
        queue, between = self._queue, self._between
        while queue or between:
            if between and (not queue or between[0][0] < next(iter(queue.values()))):
                stamp, _, segment = heappop(between)
                if not segment.queued or segment in queue:
                    self._outdated = max(self._outdated - 1, 0)
                    continue
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
            self._outdated += segment not in self._queue
            self._newest = self._queue[segment] = segment.last_used
            self._queue.move_to_end(segment)

    def remove(self, segment: Segment) -> None:
        """Forget its entry, if it has one."""
        if not segment.queued:
            return
        segment.queued = False
        if self._queue.pop(segment, None) is None:
            self._outdated += 1
            if self._outdated > max(_OUTDATED_MIN, len(self._between) // 2):
                self._sweep()

    def clear(self) -> None:
        """Forget every entry."""
        for segment in (*self._queue, *(entry[2] for entry in self._between)):
            segment.queued = False
        self._queue.clear()
        self._between.clear()
        self._outdated = 0

    def _sweep(self) -> None:
        self._between = [entry for entry in self._between if entry[2].queued and entry[2] not in self._queue]
        heapify(self._between)
        self._outdated = 0
