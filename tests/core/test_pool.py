"""Slots of a pool: every state, every edge, and grants that are contiguous."""

from __future__ import annotations

import random
from array import array
from itertools import product

import pytest

from kvcached.core.slots.ranges import FreeRanges, one_range, pairs, slot_count
from kvcached.core.slots.slots import DevicePool, IllegalTransition
from kvcached.core.slots.states import SLOT_TRANSITIONS, SlotState

#: One way from FREE to each state.
WAYS = {
    SlotState.FREE: [],
    SlotState.LEASED: [SlotState.LEASED],
    SlotState.CACHED: [SlotState.LEASED, SlotState.CACHED],
    SlotState.FENCED: [SlotState.LEASED, SlotState.FENCED],
    SlotState.QUARANTINED: [SlotState.LEASED, SlotState.QUARANTINED],
    SlotState.FILLING: [SlotState.LEASED, SlotState.FILLING],
    SlotState.ABSENT: [SlotState.ABSENT],
}


def pool_with_slot_in(state: SlotState) -> DevicePool:
    pool = DevicePool("a", 0, 8, 1)
    before = SlotState.FREE
    for step in WAYS[state]:
        if before is SlotState.FREE:
            pool.take(1, step, "take")
        else:
            pool.move(one_range(0, 1), before, step, f"to {step.name}")
        before = step
    return pool


@pytest.mark.parametrize(("actual", "source", "target"), list(product(SlotState, SlotState, SlotState)))
def test_slot_moves_only_along_the_table(actual: SlotState, source: SlotState, target: SlotState) -> None:
    """Every state times every edge: legal ones happen, others raise and change nothing."""
    pool = pool_with_slot_in(actual)
    before = (bytes(pool._states), list(pool.counts), pool.free_ranges())
    legal = actual is source and (source, target) in SLOT_TRANSITIONS and source is not SlotState.FREE

    if legal:
        pool.move(one_range(0, 1), source, target, "edge")

        assert pool.state_of(0) is target
        assert pool.counts == pool.count_states()
    elif actual is not source or (source, target) not in SLOT_TRANSITIONS:  # what leaves FREE is taken, below
        with pytest.raises(IllegalTransition):
            pool.move(one_range(0, 1), source, target, "edge")

        assert (bytes(pool._states), list(pool.counts), pool.free_ranges()) == before


@pytest.mark.parametrize("ranges", [(6, 4), (-1, 2), (8, 1), (0, 0), (3, -1)])
def test_slots_that_do_not_exist_are_refused(ranges: tuple[int, int]) -> None:
    """A range outside the pool, or an empty one, is refused whatever the edge."""
    pool = DevicePool("a", 0, 8, 1)
    pool.take(8, SlotState.LEASED, "take")

    with pytest.raises(IllegalTransition):
        pool.move(one_range(*ranges), SlotState.LEASED, SlotState.FREE, "release")


def test_double_free_tells_the_story_of_the_slot() -> None:
    """The second free of a slot raises, names every step of the slot's life, and frees nothing else."""
    pool = DevicePool("a", 0, 8, 1)
    pool.take(4, SlotState.LEASED, "acquire 'one'")
    pool.move(one_range(1, 2), SlotState.LEASED, SlotState.FREE, "release of lease 1")

    with pytest.raises(IllegalTransition) as caught:
        pool.move(one_range(0, 4), SlotState.LEASED, SlotState.FREE, "release of lease 2")

    assert caught.value.slot == 1
    assert [entry.cause for entry in caught.value.story] == ["acquire 'one'", "release of lease 1"]
    assert "acquire 'one': FREE -> LEASED" in str(caught.value)
    assert pool.counts == pool.count_states() == [6, 2, 0, 0, 0, 0, 0]


def test_slot_named_twice_in_one_move_is_refused() -> None:
    """A move that names a slot twice is refused whole."""
    pool = DevicePool("a", 0, 8, 1)
    pool.take(4, SlotState.LEASED, "take")

    with pytest.raises(IllegalTransition):
        pool.move(one_range(0, 2) + one_range(1, 1), SlotState.LEASED, SlotState.FREE, "release")

    assert pool.counts == pool.count_states() == [4, 4, 0, 0, 0, 0, 0]


def test_story_is_bounded() -> None:
    """The journal keeps the last moves only."""
    pool = DevicePool("a", 0, 1, 1)
    for number in range(10_000):
        pool.take(1, SlotState.LEASED, f"take {number}")
        pool.move(one_range(0, 1), SlotState.LEASED, SlotState.FREE, f"free {number}")

    story = pool.journal.story(0)

    assert len(story) == 8192
    assert story[-1].cause == "free 9999"


def test_grants_are_contiguous_where_they_can() -> None:
    """A fresh pool grants one range, and neighbours that come back are one range again."""
    free = FreeRanges(64)
    first, second, third = free.take(10), free.take(20), free.take(34)

    for ranges in (second, first, third):
        for start, count in pairs(ranges):
            free.give(start, count)

    assert [len(ranges) for ranges in (first, second, third)] == [2, 2, 2]
    assert free.ranges() == [(0, 64)]


@pytest.mark.parametrize("seed", range(5))
def test_free_ranges_neither_lose_nor_invent_slots(seed: int) -> None:
    """Over random takes and gives, what is free and what is taken are always the whole, and never overlap."""
    rng, free = random.Random(seed), FreeRanges(100)
    taken: list[array[int]] = []
    for _ in range(400):
        left = 100 - sum(slot_count(ranges) for ranges in taken)
        if taken and (not left or rng.random() < 0.5):
            for first, count in pairs(taken.pop(rng.randrange(len(taken)))):
                free.give(first, count)
        else:
            taken.append(free.take(rng.randint(1, left)))
        slots = [slot for ranges in taken for first, count in pairs(ranges) for slot in range(first, first + count)]
        slots += [slot for first, count in free.ranges() for slot in range(first, first + count)]
        assert sorted(slots) == list(range(100))
