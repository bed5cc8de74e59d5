"""Free slots as ranges: grants come out contiguous where they can, neighbours grow together again."""

from __future__ import annotations

from bisect import bisect_left, insort

from kvcached.core.slots.ranges import Ranges, no_ranges


class FreeRanges:
    """The free slots of one pool, O(log n) a range.

    Ranges are filed by size, and found by their first and by their past-the-end slot when a neighbour comes back. A
    grant takes the smallest range that it fits into. One that needs several takes the largest and ends with one that
    fits exactly if there is one, for each range that is cut in two stays so until both parts are free together.
    """

    __slots__ = ("_count_at", "_first_before", "_firsts", "_sizes")

    def __init__(self, slots: int, *, empty: bool = False) -> None:
        """All `slots` are free, or none of them."""
        self._count_at: dict[int, int] = {}  #: first slot -> count
        self._first_before: dict[int, int] = {}  #: past-the-end slot -> first slot
        self._firsts: dict[int, dict[int, None]] = {}  #: count -> first slots of ranges of this size
        self._sizes: list[int] = []  #: counts that there are, in order
        if slots and not empty:
            self._file(0, slots)

    def give(self, first: int, count: int) -> None:
        """Add a range that is not free yet; the pool's state table has made sure of that."""
        before = self._first_before.get(first)
        if before is not None:
            size = self._count_at[before]
            self._unfile(before, size)
            first, count = before, count + size
        after = self._count_at.get(first + count)
        if after is not None:
            self._unfile(first + count, after)
            count += after
        self._file(first, count)

    def take(self, count: int) -> Ranges[int]:
        """Remove `count` slots, in one range if there is one, else in few.

        The caller has checked that as many are free.
        """
        taken = no_ranges()
        firsts, sizes = self._firsts, self._sizes
        while count:
            place = bisect_left(sizes, count)
            size = sizes[place] if place < len(sizes) else sizes[-1]
            first = next(iter(firsts[size]))
            self._unfile(first, size)
            taken.append(first)
            if size >= count:
                taken.append(count)
                if size > count:
                    self._file(first + count, size - count)
                break
            taken.append(size)
            count -= size
        return taken

    def remove(self, first: int, count: int) -> None:
        """Take out slots that are all free. Looks through all ranges: for what happens seldom."""
        around, size = next((start, size) for start, size in self._count_at.items() if start <= first < start + size)
        self._unfile(around, size)
        if around < first:
            self._file(around, first - around)
        if around + size > first + count:
            self._file(first + count, around + size - first - count)

    def ranges(self) -> list[tuple[int, int]]:
        """All free ranges as (first, count), by first slot."""
        return sorted(self._count_at.items())

    def _file(self, first: int, count: int) -> None:
        self._count_at[first] = count
        self._first_before[first + count] = first
        firsts = self._firsts.get(count)
        if firsts is None:
            self._firsts[count] = {first: None}
            insort(self._sizes, count)
        else:
            firsts[first] = None

    def _unfile(self, first: int, count: int) -> None:
        del self._count_at[first]
        del self._first_before[first + count]
        firsts = self._firsts[count]
        del firsts[first]
        if not firsts:
            del self._firsts[count]
            del self._sizes[bisect_left(self._sizes, count)]
