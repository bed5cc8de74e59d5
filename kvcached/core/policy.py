"""Which cached tail goes first.

A policy orders *evictable tails*: segments without resident children and with unprotected blocks at their end. The tree
tells it when a segment becomes one; `pop` hands out the next victim. A policy may keep stale entries, but then drops
them in `pop`, so that nothing is ever scanned.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

from kvcached.core.run import Segment


class EvictionPolicy(Protocol):
    """Order of eviction among the tails of one pool."""

    def add(self, segment: Segment) -> None:
        """The segment's tail has become evictable, or is so still after a trim. A second call changes nothing."""

    def pop(self) -> Segment | None:
        """The next victim, removed from the order; None when no tail is evictable."""

    def remove(self, segment: Segment) -> None:
        """The segment has left the pool."""

    def clear(self) -> None:
        """Forget everything: the pool was reset."""


#: Entries of segments that are gone are few enough below this not to be looked for.
_GONE_MIN = 64


class LeastRecentlyUsed:
    """The tail that was touched longest ago. O(log tails) a call.

    A segment has at most one entry. A touch does not move it: an entry whose stamp is out of date is filed again when
    it comes to the top.
    """

    __slots__ = ("_gone", "_heap", "_number")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Segment]] = []
        self._gone = 0  #: entries of segments that have left the pool
        self._number = 0  #: breaks ties in the order of arrival, so that segments are never compared

    def add(self, segment: Segment) -> None:
        """File a tail under its last use."""
        if not segment.queued:
            segment.queued = True
            self._number += 1
            heappush(self._heap, (segment.last_used, self._number, segment))

    def pop(self) -> Segment | None:
        """The least recently used evictable tail."""
        heap = self._heap
        while heap:
            stamp, _, segment = heappop(heap)
            if not segment.queued:
                self._gone -= 1
                continue
            segment.queued = False
            if segment.resident_children or segment.length <= segment.protected:
                continue  # no tail any more; the tree adds it again when it becomes one
            if segment.last_used == stamp:
                return segment
            self.add(segment)
        return None

    def remove(self, segment: Segment) -> None:
        """Leave its entry to be dropped in `pop`; when most entries are such, drop them all."""
        if not segment.queued:
            return
        segment.queued = False
        self._gone += 1
        if self._gone > _GONE_MIN and self._gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapify(self._heap)
            self._gone = 0

    def clear(self) -> None:
        """Forget every entry."""
        for _, _, segment in self._heap:
            segment.queued = False
        self._heap.clear()
        self._gone = 0
