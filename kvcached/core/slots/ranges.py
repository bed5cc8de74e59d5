"""Slot ranges: flat int32 arrays ``[first, count, first, count, …]`` in block order; and the free ones of a pool.

In the index of the host pool a range with a negative first stands for blocks that have no slot there: a *hole*.

A prompt of thousands of blocks is a handful of ranges, they are the wire format as they stand, and they cost 8 bytes
each instead of the 32 of one Python integer per block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

Ranges = array  # of typecode "i", with an even number of items

#: First of a hole. Cut in two, its rest begins higher, but never reaches 0.
HOLE = -(1 << 31)

#: Items of a list of one range, which most are.
_ONE_RANGE = 2


def no_ranges() -> Ranges[int]:
    """An empty list of ranges."""
    return array("i")


def one_range(first: int, count: int) -> Ranges[int]:
    """A list of one range."""
    return array("i", (first, count))


def pairs(ranges: Ranges[int]) -> Iterator[tuple[int, int]]:
    """The ranges as (first, count)."""
    numbers = iter(ranges)
    return zip(numbers, numbers, strict=True)


def every_slot(ranges: Ranges[int]) -> Iterator[int]:
    """The slots one by one."""
    return (slot for first, count in pairs(ranges) for slot in range(first, first + count))


def from_slots(slots: Iterable[int]) -> Ranges[int]:
    """Slots that are named one by one, as ranges in the same order."""
    ranges = no_ranges()
    for slot in slots:
        append(ranges, one_range(slot, 1))
    return ranges


def slot_count(ranges: Ranges[int]) -> int:
    """How many slots the ranges hold."""
    return ranges[1] if len(ranges) == _ONE_RANGE else sum(ranges[1::2])


def places_of(ranges: Ranges[int], slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Those of `slots`, which are sorted, that the ranges hold: each behind its place, counted from 0."""
    place = 0
    for first, count in pairs(ranges):
        for slot in slots[bisect_left(slots, first) : bisect_left(slots, first + count)]:
            yield place + slot - first, slot
        place += count


def slots_at(ranges: Ranges[int], places: Sequence[int]) -> list[int]:
    """The slots at these places, which are sorted; below 0 in a hole, and none for a place behind the end."""
    slots: list[int] = []
    reached = 0
    for first, count in pairs(ranges):
        wanted = places[bisect_left(places, reached) : bisect_left(places, reached + count)]
        slots.extend(first + place - reached for place in wanted)
        reached += count
    return slots


def hole(count: int) -> Ranges[int]:
    """A list of one hole."""
    return array("i", (HOLE, count))


def without_holes(ranges: Ranges[int]) -> Ranges[int]:
    """The ranges that have slots."""
    if not has_holes(ranges):
        return ranges
    return array("i", [number for pair in pairs(ranges) if pair[0] >= 0 for number in pair])


def has_holes(ranges: Ranges[int]) -> bool:
    """Whether some blocks have no slot."""
    return bool(ranges) and min(ranges[::2]) < 0


def solid_length(ranges: Ranges[int], offset: int) -> int:
    """How many blocks from `offset` on have slots, up to the first hole."""
    if not has_holes(ranges):
        return max(slot_count(ranges) - offset, 0)
    position = 0
    for first, count in pairs(ranges):
        position += count
        if first < 0 and position > offset:
            return max(position - count - offset, 0)
    return max(position - offset, 0)


def solid_tail(ranges: Ranges[int]) -> int:
    """How many blocks at the end have slots, back to the last hole."""
    count = 0
    for index in range(len(ranges) - 2, -1, -2):
        if ranges[index] < 0:
            return count
        count += ranges[index + 1]
    return count


def hole_tail(ranges: Ranges[int]) -> int:
    """How many blocks at the end have no slot."""
    count = 0
    for index in range(len(ranges) - 2, -1, -2):
        if ranges[index] >= 0:
            return count
        count += ranges[index + 1]
    return count


def append(ranges: Ranges[int], more: Ranges[int]) -> None:
    """Append `more` in place, merging where it goes on from the last range, and two holes into one."""
    if ranges and more:
        last, first = ranges[-2], more[0]
        if last + ranges[-1] == first or (last < 0 and first < 0):
            ranges[-1] += more[1]
            ranges.extend(more[2:])
            return
    ranges.extend(more)


def chained(first: Ranges[int], then: Ranges[int]) -> Ranges[int]:
    """A new list: the one, and the other behind it."""
    both = first[:]
    append(both, then)
    return both


def join(parts: list[Ranges[int]]) -> Ranges[int]:
    """The slots of many ranges in as few as hold them, by first slot; their order does not matter to the caller."""
    joined = no_ranges()
    end = -1
    for first, count in sorted(chain.from_iterable(map(pairs, parts))):
        if first == end:
            joined[-1] += count
        else:
            joined.extend((first, count))
        end = first + count
    return joined


def cut(ranges: Ranges[int], count: int) -> tuple[Ranges[int], Ranges[int]]:
    """Split into the first `count` slots and the rest."""
    if count <= 0:
        return array("i"), ranges[:]
    if len(ranges) == _ONE_RANGE:
        first, size = ranges
        if count >= size:
            return ranges[:], array("i")
        return array("i", (first, count)), array("i", (first + count, size - count))
    for index in range(1, len(ranges), 2):
        size = ranges[index]
        if count < size:
            head = ranges[: index + 1]
            head[index] = count
            rest = ranges[index - 1 :]
            rest[0] += count
            rest[1] -= count
            return head, rest
        count -= size
        if not count:
            return ranges[: index + 1], ranges[index + 1 :]
    return ranges[:], no_ranges()


def parted(ranges: Ranges[int], sizes: Iterable[int]) -> Iterator[Ranges[int]]:
    """The ranges in parts of so many slots each, in one pass over them; the last parts are short where they end."""
    rest = pairs(ranges)
    first = left = 0
    for size in sizes:
        part, missing = no_ranges(), size
        while missing:
            if not left:
                first, left = next(rest, (0, 0))
                if not left:
                    break
            taken = min(left, missing)
            part.extend((first, taken))
            first, left, missing = first + taken, left - taken, missing - taken
        yield part


def overlaid(ranges: Ranges[int], spans: Sequence[tuple[int, int]], over: Ranges[int]) -> Ranges[int]:
    """A new list of `over` in the places ``[start, end)``, and of `ranges` between them; holes where those end before.

    The places are in order, and the first of them is that of the ranges' first slot.
    """
    sizes = [end - start for start, end in spans]
    gaps = [start - end for (_, end), (start, _) in pairwise(spans)]
    kept = parted(ranges, chain.from_iterable(zip(sizes, gaps, strict=False)))
    laid = no_ranges()
    for part, gap in zip(parted(over, sizes), [*gaps, 0], strict=True):
        append(laid, part)
        if gap:
            next(kept)  # what `part` is laid over
            between = next(kept)
            append(laid, between)
            missing = gap - slot_count(between)
            append(laid, hole(missing) if missing else no_ranges())
    return laid


def section(ranges: Ranges[int], start: int, end: int) -> Ranges[int]:
    """The slots of blocks ``[start, end)``, as far as there are any: a new list."""
    if len(ranges) > _ONE_RANGE:
        return cut(cut(ranges, end)[0], start)[1]
    if not ranges:
        return array("i")
    first, size = ranges
    start, end = max(start, 0), min(end, size)
    return array("i", (first + start, end - start)) if start < end else array("i")


def pop_tail(ranges: Ranges[int], count: int) -> Ranges[int]:
    """Remove the last `count` slots in place and return them, in block order. Reads no range before them."""
    place = len(ranges)
    while count > 0 and place:
        place -= 2
        size = ranges[place + 1]
        if size > count:
            tail = ranges[place:]
            tail[0], tail[1] = tail[0] + size - count, count
            del ranges[place + 2 :]
            ranges[place + 1] = size - count
            return tail
        count -= size
    tail = ranges[place:]
    del ranges[place:]
    return tail


def whole_tail(ranges: Ranges[int], least: int, *, most: int) -> int:
    """How many slots to take off the end so that no range is cut: at least `least`; `least` if that is over `most`."""
    whole = 0
    for size in reversed(ranges[1::2]):
        whole += size
        if whole >= least:
            return whole if whole <= most else least
    return whole


def subtract(owned: Ranges[int], taken: Ranges[int]) -> Ranges[int] | None:
    """`owned` without `taken`, or None where `taken` names a slot that is not owned or names one twice."""
    first, rest = cut(owned, slot_count(taken))
    if first == taken:  # in their order, which is the rule
        return rest
    return _subtract_sorted(sorted(pairs(owned)), sorted(pairs(taken)))


def _subtract_sorted(owned: list[tuple[int, int]], taken: list[tuple[int, int]]) -> Ranges[int] | None:
    """As `subtract`, in one pass over both."""
    left = no_ranges()
    position = 0
    for own_first, own_count in owned:
        reached, end = own_first, own_first + own_count
        while position < len(taken) and reached <= taken[position][0] < end:
            first, count = taken[position]
            if count <= 0 or first + count > end:
                return None
            if first > reached:
                left.extend((reached, first - reached))
            reached = first + count
            position += 1
        if reached < end:
            left.extend((reached, end - reached))
    return left if position == len(taken) else None


def encode_ranges(ranges: object) -> bytes:
    """Ranges as they are sent to another process.

    Raises:
        TypeError: these are no ranges.
    """
    if not isinstance(ranges, array):
        raise TypeError(f"{type(ranges).__name__} cannot be sent")
    return ranges.tobytes()


def decode_ranges(_: object, packed: object) -> Ranges[int]:
    """Ranges as another process has sent them.

    Raises:
        ValueError: the bytes are no pairs.
    """
    ranges = no_ranges()
    if not isinstance(packed, bytes) or len(packed) % (_ONE_RANGE * ranges.itemsize):
        raise ValueError("slot ranges are no pairs of int32")
    ranges.frombytes(packed)
    return ranges


class FreeRanges:
    """The free slots of one pool, O(log n) a range: grants are contiguous where they can be, neighbours grow together.

    Ranges are filed by size, and found by their first and by their past-the-end slot when a neighbour comes back. A
    grant takes the smallest range that it fits into. One that needs several takes the largest and ends with one that
    fits exactly if there is one, for each range that is cut in two stays so until both parts are free together.
    """

    __slots__ = ("_count_at", "_first_before", "_firsts", "_sizes")

    def __init__(self, slots: int, *, empty: bool = False) -> None:
        """All `slots` are free, or none of them."""
        self._count_at: dict[int, int] = {}  #: first slot -> count
        self._first_before: dict[int, int] = {}  #: past-the-end slot -> first slot
        #: count -> first slots of ranges of this size, first filed first: a dict walks over what has left its front
        self._firsts: dict[int, OrderedDict[int, None]] = {}
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
        sizes = self._sizes
        while count:
            place = bisect_left(sizes, count)
            if place == len(sizes):
                place -= 1
            size = sizes[place]
            firsts = self._firsts[size]
            first = next(iter(firsts))
            del self._count_at[first], self._first_before[first + size], firsts[first]
            if not firsts:
                del self._firsts[size], sizes[place]
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
            firsts = self._firsts[count] = OrderedDict()
            insort(self._sizes, count)
        firsts[first] = None

    def _unfile(self, first: int, count: int) -> None:
        del self._count_at[first]
        del self._first_before[first + count]
        firsts = self._firsts[count]
        del firsts[first]
        if not firsts:
            del self._firsts[count]
            del self._sizes[bisect_left(self._sizes, count)]
