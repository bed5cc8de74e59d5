"""Free slots as ranges: grants come out contiguous where they can, neighbours grow together again."""

from __future__ import annotations

from kvcached.core.ranges import Ranges, no_ranges


class FreeRanges:
    """The free slots of one pool, O(1) a range.

    Ranges are filed by exact size within classes of powers of two, and found by their first and by their past-the-end
    slot when a neighbour comes back. A grant that needs several ranges takes whole ones and ends with one that fits
    exactly if there is one, for each range that is cut in two stays so until both parts are free together.
    """

    __slots__ = ("_classes", "_count_at", "_first_before", "_mask")

    def __init__(self, slots: int, *, empty: bool = False) -> None:
        """All `slots` are free, or none of them."""
        self._count_at: dict[int, int] = {}  #: first slot -> count
        self._first_before: dict[int, int] = {}  #: past-the-end slot -> first slot
        #: class c: the firsts of ranges with 2^c <= count < 2^(c+1), by count
        self._classes: list[dict[int, dict[int, None]]] = [{} for _ in range(slots.bit_length())]
        self._mask = 0  #: bit c is set while class c holds something
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
        while count:
            size = self._best_size(count)
            first = next(iter(self._classes[size.bit_length() - 1][size]))
            self._unfile(first, size)
            used = min(count, size)
            taken.append(first)
            taken.append(used)
            if size > used:
                self._file(first + used, size - used)
            count -= used
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

    def _best_size(self, count: int) -> int:
        """A size that is there: `count` itself, else one above it that is near, else the largest class has one."""
        own = count.bit_length() - 1
        if count in self._classes[own]:
            return count
        larger = self._mask >> (own + 1)
        chosen = own + (larger & -larger).bit_length() if larger else self._mask.bit_length() - 1
        return next(iter(self._classes[chosen]))

    def _file(self, first: int, count: int) -> None:
        self._count_at[first] = count
        self._first_before[first + count] = first
        size_class = count.bit_length() - 1
        sizes = self._classes[size_class]
        members = sizes.get(count)
        if members is None:
            sizes[count] = {first: None}
            self._mask |= 1 << size_class
        else:
            members[first] = None

    def _unfile(self, first: int, count: int) -> None:
        del self._count_at[first]
        del self._first_before[first + count]
        size_class = count.bit_length() - 1
        sizes = self._classes[size_class]
        members = sizes[count]
        del members[first]
        if not members:
            del sizes[count]
            if not sizes:
                self._mask ^= 1 << size_class
