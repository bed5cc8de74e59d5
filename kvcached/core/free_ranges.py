"""Free slots as ranges: grants come out contiguous where they can, neighbours grow together again."""

from __future__ import annotations

from kvcached.core.ranges import Ranges, no_ranges


class FreeRanges:
    """The free slots of one pool, O(1) a range.

    Ranges are filed by size in bins of powers of two, and found by their first and by their past-the-end slot when a
    neighbour comes back.
    """

    __slots__ = ("_bins", "_count_at", "_first_before", "_mask")

    def __init__(self, slots: int) -> None:
        self._count_at: dict[int, int] = {}  #: first slot -> count
        self._first_before: dict[int, int] = {}  #: past-the-end slot -> first slot
        self._bins: list[dict[int, None]] = [{} for _ in range(slots.bit_length())]  #: bin b: 2^b <= count < 2^(b+1)
        self._mask = 0  #: bit b is set while bin b holds something
        if slots:
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
        """Remove `count` slots in as few ranges as a first look finds.

        The caller has checked that as many are free.
        """
        taken = no_ranges()
        while count:
            fits = (count - 1).bit_length()
            larger = self._mask >> fits
            size_class = fits + (larger & -larger).bit_length() - 1 if larger else self._mask.bit_length() - 1
            first = next(iter(self._bins[size_class]))
            size = self._count_at[first]
            self._unfile(first, size)
            used = min(count, size)
            taken.append(first)
            taken.append(used)
            if size > used:
                self._file(first + used, size - used)
            count -= used
        return taken

    def ranges(self) -> list[tuple[int, int]]:
        """All free ranges as (first, count), by first slot."""
        return sorted(self._count_at.items())

    def _file(self, first: int, count: int) -> None:
        self._count_at[first] = count
        self._first_before[first + count] = first
        size_class = count.bit_length() - 1
        self._bins[size_class][first] = None
        self._mask |= 1 << size_class

    def _unfile(self, first: int, count: int) -> None:
        del self._count_at[first]
        del self._first_before[first + count]
        size_class = count.bit_length() - 1
        members = self._bins[size_class]
        del members[first]
        if not members:
            self._mask ^= 1 << size_class
