"""Eviction in two segments: tails that a later request has hit outlive those that none has (SLRU)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvcached.core.index.run import Segment

#: Share of the pool that tails in the upper segment may have. Blocks that others continue cannot be evicted anyway and
#: are not counted, and most of what is hit is such: more than this costs hits (docs/policies.md).
UPPER_PERCENT = 20
#: Outdated entries are few enough below this not to be looked for.
_OUTDATED_MIN = 64
_LOWER, _UPPER = 0, 1

#: Order, rank among those of one order, number, tail.
_Entry = tuple[int, int, int, Segment]


class _Place(NamedTuple):
    """Where a tail stands.

    Attributes:
        half: lower or upper.
        number: of its entry in that heap; others of the same tail are outdated.
        stamp: its last use when it was filed.
        blocks: its evictable ones.
    """

    half: int
    number: int
    stamp: int
    blocks: int


class SegmentedLeastRecentlyUsed:
    """The tail that was used longest ago in the lower segment, else in the upper one.

    A tail stands in the upper segment when its last block was found by a request after the one that committed it. When
    more than `UPPER_PERCENT` of the pool stands there, the tail that was used longest ago moves to the lower segment,
    as the newest. It keeps that place until its next use, also when it is handed out and filed again. Each operation is
    O(log n) in the number of tails, spread over those that filed what moves down.
    """

    __slots__ = ("_blocks", "_heaps", "_newest", "_number", "_places", "_upper_max")

    def __init__(self, slots: int) -> None:
        """For a pool of so many slots."""
        self._upper_max = slots * UPPER_PERCENT // 100
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])
        self._places: dict[Segment, _Place] = {}
        self._blocks = [0, 0]  #: that can be evicted from each half
        self._newest = 0  #: highest order that was ever filed in the lower half
        self._number = 0

    def add(self, segment: Segment) -> None:
        """File a tail under its last use, in the half where it belongs; count one that is filed again."""
        place, blocks = self._places.get(segment), segment.evictable_tail
        half = _UPPER if is_hit(segment) and not _is_moved_down(segment) else _LOWER
        if place is not None and (place.half, place.stamp) == (half, segment.last_used):
            self._blocks[half] += blocks - place.blocks
            self._places[segment] = _Place(half, place.number, place.stamp, blocks)
        else:
            if place is not None:
                self._unfile(segment, place)
                self._sweep()
            self._file(segment, half)
        self._move_down()

    def pop(self) -> Segment | None:
        """The next victim."""
        lower, upper = self._heaps
        while lower or upper:
            _, _, number, segment = heappop(lower or upper)
            place = self._places.get(segment)
            if place is None or place.number != number:
                continue  # outdated
            self._unfile(segment, place)
            if segment.resident_children or segment.length <= segment.protected:
                continue  # no tail any more; the tree adds it again when it becomes one
            if segment.last_used == place.stamp:
                return segment
            self.add(segment)
        return None

    def most(self, segment: Segment) -> int:
        """Of a tail whose last blocks nobody has hit, those only: what lies before them is worth more."""
        first = max(segment.protected, segment.hit_end - segment.run.start)
        return min(segment.length - first, segment.last_part) if first < segment.length else segment.last_part

    def touch(self, segment: Segment) -> None:
        """File it anew, if it is filed: it is the newest, and may have been hit."""
        place = self._places.get(segment)
        if place is not None:
            self._unfile(segment, place)
            self.add(segment)
            self._sweep()

    def remove(self, segment: Segment) -> None:
        """Forget its place, if it has one."""
        place = self._places.get(segment)
        if place is not None:
            self._unfile(segment, place)
            self._sweep()

    def clear(self) -> None:
        """Forget every place."""
        for segment in self._places:
            segment.queued = False
        self._places.clear()
        for heap in self._heaps:
            heap.clear()
        self._blocks = [0, 0]

    def _file(self, segment: Segment, half: int) -> None:
        self._number += 1
        blocks, moved_down = segment.evictable_tail, segment.moved_down
        if moved_down is not None and half == _LOWER and _is_moved_down(segment):
            order, rank = moved_down
        else:
            order, rank, segment.moved_down = segment.last_used, 0, None
        self._places[segment] = _Place(half, self._number, segment.last_used, blocks)
        self._blocks[half] += blocks
        if half == _LOWER:
            self._newest = max(self._newest, order)
        segment.queued = True
        heappush(self._heaps[half], (order, rank, self._number, segment))

    def _unfile(self, segment: Segment, place: _Place) -> None:
        del self._places[segment]
        self._blocks[place.half] -= place.blocks
        segment.queued = False

    def _move_down(self) -> None:
        upper = self._heaps[_UPPER]
        while self._blocks[_UPPER] > self._upper_max:
            _, _, number, segment = heappop(upper)
            place = self._places.get(segment)
            if place is not None and place.number == number:
                self._unfile(segment, place)
                segment.moved_down = max(self._newest, segment.last_used), self._number + 1
                self._file(segment, _LOWER)

    def _sweep(self) -> None:
        if sum(map(len, self._heaps)) <= max(_OUTDATED_MIN, 2 * len(self._places)):
            return
        for heap in self._heaps:
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapify(heap)

    def _is_current(self, entry: _Entry) -> bool:
        place = self._places.get(entry[3])
        return place is not None and place.number == entry[2]


def is_hit(segment: Segment) -> bool:
    """Whether a later request has found a segment's last block."""
    return segment.hit_end >= segment.run.start + segment.length


def _is_moved_down(segment: Segment) -> bool:
    """Whether it has not been used since it moved to the lower segment, behind all that had been used until then."""
    return segment.moved_down is not None and segment.last_used <= segment.moved_down[0]
