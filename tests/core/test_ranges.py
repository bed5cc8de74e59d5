"""Slot ranges behave as the lists of slots that they stand for."""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvcached.core.slots.ranges import (
    append,
    cut,
    hole,
    join,
    overlaid,
    places_of,
    pop_tail,
    section,
    slot_count,
    slots_at,
    subtract,
)

Pairs = list[tuple[int, int]]
PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=6)


def packed(pairs: Pairs) -> array[int]:
    return array("i", [number for pair in pairs for number in pair])


def slots(ranges: array[int]) -> list[int]:
    pairs = zip(ranges[::2], ranges[1::2], strict=True)
    return [slot for first, count in pairs for slot in range(first, first + count)]


@given(PAIRS, st.integers(0, 40))
def test_cut_splits_after_a_number_of_slots(pairs: Pairs, count: int) -> None:
    """The two halves are the first slots and the others, and the original is untouched."""
    ranges = packed(pairs)
    whole = slots(ranges)

    head, tail = cut(ranges, count)

    assert (slots(head), slots(tail), slots(ranges)) == (whole[:count], whole[count:], whole)


@given(PAIRS, st.integers(-3, 40), st.integers(-3, 40))
def test_section_is_a_slice(pairs: Pairs, start: int, end: int) -> None:
    """The slots between two places are those of the list, with nothing before its beginning or behind its end."""
    ranges = packed(pairs)
    whole = slots(ranges)

    assert slots(section(ranges, start, end)) == whole[max(start, 0) : max(end, 0)]
    assert slots(ranges) == whole


@given(PAIRS, PAIRS)
def test_append_concatenates(first: Pairs, second: Pairs) -> None:
    """Appending keeps the order of slots, whether or not the ranges meet."""
    ranges = packed(first)

    append(ranges, packed(second))

    assert slots(ranges) == slots(packed(first)) + slots(packed(second))


def test_append_merges_neighbours() -> None:
    """A range that goes on where the last one ends makes it longer."""
    ranges = packed([(3, 2)])

    append(ranges, packed([(5, 4), (0, 1)]))

    assert ranges == packed([(3, 6), (0, 1)])


def test_append_makes_one_hole_of_two() -> None:
    """Holes side by side are one, also where one is the rest of another; a hole and a slot are not."""
    rest = cut(hole(3), 1)[1]
    ranges = hole(2)
    for more in (rest, hole(1), packed([(0, 1)]), hole(4)):
        append(ranges, more)

    assert ranges[1::2] == array("i", [5, 1, 4])
    assert ranges[2] == 0


@given(PAIRS, st.sets(st.integers(0, 40)))
def test_slots_are_found_by_place_and_places_by_slot(pairs: Pairs, wanted: set[int]) -> None:
    """As one by one in the list of slots; what is behind the end, or not there, is left out."""
    whole, numbers = slots(packed(pairs)), sorted(wanted)

    assert slots_at(packed(pairs), numbers) == [whole[place] for place in numbers if place < len(whole)]
    expected = [(place, slot) for place, slot in enumerate(whole) if slot in wanted]
    assert sorted(places_of(packed(pairs), numbers)) == expected


@given(PAIRS, st.sets(st.integers(0, 40), min_size=1), st.integers(0, 9))
def test_overlaid_slots_take_their_places(pairs: Pairs, places: set[int], offset: int) -> None:
    """What is laid over stands in its places, what was there between them; holes where that does not reach."""
    order = sorted(place - min(places) for place in places)
    starts = [place for place in order if place - 1 not in order]
    ends = [place + 1 for place in order if place + 1 not in order]
    spans = [(start + offset, end + offset) for start, end in zip(starts, ends, strict=True)]
    expected = [*slots(packed(pairs)), *[-1] * 50][: ends[-1]]
    for number, place in enumerate(order):
        expected[place] = 100 + 2 * number

    laid = overlaid(packed(pairs), spans, packed([(100 + 2 * number, 1) for number in range(len(order))]))

    assert [max(slot, -1) for slot in slots(laid)] == expected


@given(st.sets(st.integers(0, 40)), st.randoms(use_true_random=False))
def test_join_keeps_every_slot_in_the_fewest_ranges(owned: set[int], rng: random.Random) -> None:
    """Single slots in any order come back as sorted ranges that do not touch."""
    order = list(owned)
    rng.shuffle(order)

    joined = join([packed([(slot, 1)]) for slot in order])

    assert slots(joined) == sorted(owned)
    assert len(joined) == 2 * sum(slot - 1 not in owned for slot in owned)


@given(PAIRS, st.integers(0, 30))
def test_pop_tail_takes_the_last_slots(pairs: Pairs, wanted: int) -> None:
    """What is popped and what is left are the slots that were there."""
    ranges = packed(pairs)
    whole = slots(ranges)
    count = min(wanted, slot_count(ranges))

    tail = pop_tail(ranges, count)

    assert slots(ranges) + slots(tail) == whole
    assert slot_count(tail) == count


@given(st.sets(st.integers(0, 40)), st.lists(st.tuples(st.integers(-2, 42), st.integers(-1, 4)), max_size=4))
def test_subtract_removes_owned_slots_or_refuses(owned: set[int], taken: Pairs) -> None:
    """Slots are removed where each is owned and named once; anything else is refused."""
    wanted = [slot for first, count in taken for slot in range(first, first + count)]
    fits = set(wanted) <= owned and len(set(wanted)) == len(wanted) and all(count > 0 for _, count in taken)
    ranges = array("i")
    for slot in sorted(owned):
        append(ranges, packed([(slot, 1)]))

    left = subtract(ranges, packed(taken))

    assert (None if left is None else sorted(slots(left))) == (sorted(owned - set(wanted)) if fits else None)
