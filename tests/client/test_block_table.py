"""Slot ranges and the arrays made of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.blocks.block_table import SlotRanges, compress_slots, expand_ranges, slot_mapping
from kvcached_client.types import PackedRanges, pack_ranges, unpack_ranges


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 50)), max_size=20))
def test_expand_ranges_lists_every_slot_in_order(ranges: list[tuple[int, int]]) -> None:
    """Ranges become the slots that they name, in their order."""
    slots = expand_ranges(pack_ranges(ranges))
    assert slots.dtype == np.int32
    assert slots.tolist() == [first + index for first, count in ranges for index in range(count)]


@given(st.lists(st.integers(0, 30), max_size=40))
def test_compress_slots_is_undone_by_expand_ranges(slots: list[int]) -> None:
    """Compressing loses nothing, and no two neighbouring ranges could be one."""
    packed = compress_slots(np.array(slots, np.int32))
    assert expand_ranges(packed).tolist() == slots
    pairs = unpack_ranges(packed)
    assert all(first + count != after for (first, count), (after, _) in itertools.pairwise(pairs))


@pytest.mark.parametrize(
    "packed",
    [
        b"\0" * 7,
        pack_ranges([(0, 0)]),
        pack_ranges([(-1, 2)]),
        pack_ranges([(5, -1)]),
        pack_ranges([(0, 2), (9, -1)]),
        pack_ranges([(0, 1 << 30), (0, 1 << 30)]),
        pack_ranges([(0, (1 << 31) - 1)]),
        pack_ranges([(0, 1), ((1 << 31) - 1, 2)]),
    ],
)
def test_expand_ranges_refuses_nonsense(packed: PackedRanges) -> None:
    """Ragged, empty, negative, or huge ranges raise instead of naming slots that are not there."""
    with pytest.raises(ValueError, match="slot ranges"):
        expand_ranges(packed)


def test_slot_mapping_places_each_token_in_its_block() -> None:
    """A token's place is its block's slot and its offset inside the block."""
    table = np.array([7, 2, 5], np.int32)
    mapping = slot_mapping(table, np.array([0, 3, 4, 11]), block_size=4)
    assert mapping.dtype == np.int64
    assert mapping.tolist() == [28, 31, 8, 23]


@pytest.mark.parametrize("position", [-1, 12])
def test_slot_mapping_refuses_positions_without_a_slot(position: int) -> None:
    """A position outside the block table raises, rather than wrapping around to another block."""
    with pytest.raises(IndexError):
        slot_mapping(np.array([7, 2, 5], np.int32), np.array([position]), block_size=4)


@given(
    ranges=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 9)), max_size=20),
    more=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 9)), max_size=3),
    cuts=st.tuples(st.integers(0, 200), st.integers(0, 200)),
)
def test_ranges_stay_ranges_and_mean_the_same_slots(
    ranges: list[tuple[int, int]], more: list[tuple[int, int]], cuts: tuple[int, int]
) -> None:
    """Sections and sums of ranges have the slots of the table that they stand for, few ranges or many."""
    slots = SlotRanges.checked(pack_ranges(ranges)) + SlotRanges.checked(pack_ranges(more))
    table = [slot for first, count in (*ranges, *more) for slot in range(first, first + count)]
    start, stop = sorted(min(cut, len(table)) for cut in cuts)

    assert expand_ranges(slots.section(start, stop)).tolist() == table[start:stop]
    assert (slots.count, slots.table.tolist()) == (len(table), table)
    assert expand_ranges(SlotRanges.of(slots.table).packed).tolist() == table


@pytest.mark.parametrize("packed", [b"1234567", pack_ranges([(0, 0)]), pack_ranges([(-1, 2)]), pack_ranges([(5, -1)])])
def test_bad_ranges_are_refused_before_they_are_kept(packed: bytes) -> None:
    """Few ranges are checked as many are."""
    with pytest.raises(ValueError, match="slot ranges of"):
        SlotRanges.checked(packed)
