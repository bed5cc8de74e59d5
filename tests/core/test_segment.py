"""A segment finds blocks, holes and its deepest lock as a list of its slots and a count of its locks would."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvcached.core.index.run import Run, Segment
from kvcached.core.lease import FenceHold, FenceHolds
from kvcached.core.slots.ranges import append, every_slot, hole, no_ranges, one_range, solid_length
from kvcached_client.types import FenceSequence

#: Slots and, where the first is None, holes.
PARTS = st.lists(st.tuples(st.none() | st.integers(0, 30), st.integers(1, 4)), max_size=6)
PLACES = st.integers(0, 26)


def segment_of(parts: list[tuple[int | None, int]]) -> Segment:
    """A segment that grows part by part."""
    segment = Segment(Run(b"", 0, None, 1), None, no_ranges(), 0, 0)
    for first, count in parts:
        append(segment.ranges, hole(count) if first is None else one_range(first, count))
        segment.grow(count, is_solid=first is not None)
    return segment


@given(PARTS, PLACES, PLACES)
def test_slots_are_a_slice(parts: list[tuple[int | None, int]], start: int, end: int) -> None:
    """Whichever end they are found from, slots are those of the blocks, and nothing changes."""
    segment = segment_of(parts)
    before, slots = segment.ranges[:], list(every_slot(segment.ranges))

    found = list(every_slot(segment.slots(start, end)))
    assert [slot >= 0 for slot in found] == [slot >= 0 for slot in slots[start : max(start, end)]]
    assert [slot for slot in found if slot >= 0] == [slot for slot in slots[start : max(start, end)] if slot >= 0]
    assert segment.ranges == before


@given(PARTS, PLACES)
def test_solid_blocks_come_before_the_first_hole(parts: list[tuple[int | None, int]], offset: int) -> None:
    """A segment knows where its first hole is, also when it has grown or was cut in two."""
    segment = segment_of(parts)
    assert segment.solid == solid_length(segment.ranges, 0)
    assert segment.solid_from(offset) == solid_length(segment.ranges, offset) or offset > segment.length
    if not 0 < offset < segment.length:
        return
    front = segment.split(Run(bytes(16 * offset), 0, None, 1), offset)
    assert (front.length, front.solid) == (offset, solid_length(front.ranges, 0))
    assert segment.solid == solid_length(segment.ranges, 0)


@given(PARTS, PLACES)
def test_gaps_are_what_has_no_slot(parts: list[tuple[int | None, int]], wanted: int) -> None:
    """Gaps are the holes among so many blocks and what the segment does not reach, the last first."""
    segment = segment_of(parts)
    slots = list(every_slot(segment.ranges))
    missing = [place for place in range(wanted) if place >= len(slots) or slots[place] < 0]

    gaps = segment.gaps(wanted)
    assert [place for first, end in reversed(gaps) for place in range(first, end)] == missing


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=200))
def test_deepest_lock_is_known(steps: list[tuple[bool, int]]) -> None:
    """After any locks and unlocks, the deepest lock is the deepest that there is; its change is told."""
    segment = Segment(Run(b"", 0, None, 1), None, array("i", (0, 40)), 40, 0)
    held = Counter(range(1, 30))
    for depth in range(1, 30):
        segment.lock(depth)
    for is_lock, depth in steps:
        before = max(held, default=0)
        if is_lock:
            held[depth] += 1
        elif held[depth]:
            held[depth] -= 1
        else:
            continue
        held = +held
        changed = segment.lock(depth) if is_lock else segment.unlock(depth)
        assert (segment.locked, changed) == (max(held, default=0), max(held, default=0) != before)
        assert (segment.locks or {}) == dict(held)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(0, 10))
def test_fences_give_back_in_the_order_of_their_holds(fences: list[int], signalled: int) -> None:
    """What a fence and earlier ones hold comes in the order in which it was noted; the rest stays, in its order."""
    holds = FenceHolds()
    noted = [FenceHold(FenceSequence(fence), Run(b"", 0, None, 1), 0, 0, no_ranges()) for fence in fences]
    for hold in noted:
        holds.append(hold)

    assert holds.take(FenceSequence(signalled)) == [hold for hold in noted if hold.fence <= signalled]
    assert list(holds) == [hold for hold in noted if hold.fence > signalled]
    assert len(holds) == len(list(holds))
    holds.clear()
    assert (len(holds), holds.take(FenceSequence(10))) == (0, [])
