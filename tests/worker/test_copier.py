from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.worker.copier import SlotRun, byte_runs, check_runs, merge_runs
from kvcached.worker.copier_host import HostCopier
from kvcached.worker.geometry import pool_geometry
from kvcached.worker.memory import PoolMemory
from kvcached_client.layout import Layout, PageOrder
from tests.worker.groups import SLOTS, read_block, tiny_layout

LAYER_FIRST = tiny_layout("layer_first")
BLOCK_FIRST = tiny_layout("block_first")
Ranges = list[tuple[int, int]]


@st.composite
def paired_ranges(draw: st.DrawFn) -> tuple[Ranges, Ranges]:
    """Two lists of ranges with equal totals, cut at places of their own."""
    total = draw(st.integers(1, 30))
    return draw(_cuts(total)), draw(_cuts(total))


@st.composite
def _cuts(draw: st.DrawFn, total: int) -> Ranges:
    ends = [*sorted(draw(st.sets(st.integers(1, total), max_size=8)) - {total}), total]
    starts = [0, *ends[:-1]]
    return [(draw(st.integers(0, 50)), end - start) for start, end in zip(starts, ends, strict=True)]


def expanded(ranges: Ranges) -> list[int]:
    return [slot for first, count in ranges for slot in range(first, first + count)]


@given(paired_ranges())
def test_merge_runs_pairs_slots_in_order(ranges: tuple[Ranges, Ranges]) -> None:
    """Merged runs pair the n-th source slot with the n-th target slot, and no two neighbours could be one."""
    sources, targets = ranges

    runs = merge_runs(sources, targets)

    assert [run.source + i for run in runs for i in range(run.slots)] == expanded(sources)
    assert [run.target + i for run in runs for i in range(run.slots)] == expanded(targets)
    for one, two in itertools.pairwise(runs):
        assert (one.source + one.slots, one.target + one.slots) != (two.source, two.target)


def test_merge_runs_joins_ranges_that_go_on() -> None:
    """Adjacent ranges on both sides become one copy; a gap on either side starts another."""
    assert merge_runs([(0, 2), (2, 3)], [(10, 5)]) == [SlotRun(0, 10, 5)]
    assert merge_runs([(0, 5)], [(10, 2), (20, 3)]) == [SlotRun(0, 10, 2), SlotRun(2, 20, 3)]


@pytest.mark.parametrize(("sources", "targets"), [([(0, 2)], [(5, 3)]), ([(0, 3)], [(5, 2)]), ([(0, 0)], [(5, 0)])])
def test_merge_runs_refuses_ranges_that_do_not_pair(sources: Ranges, targets: Ranges) -> None:
    """Ranges with unequal totals or without slots are refused."""
    with pytest.raises(ValueError, match=r"slot"):
        merge_runs(sources, targets)


@given(st.lists(st.builds(SlotRun, st.integers(-2, 20), st.integers(-2, 20), st.integers(1, 5)), max_size=5))
def test_check_runs_refuses_what_depends_on_order(runs: list[SlotRun]) -> None:
    """Runs pass exactly when every slot is in the pool and no target is named twice or also a source."""
    sources = [run.source + i for run in runs for i in range(run.slots)]
    targets = [run.target + i for run in runs for i in range(run.slots)]
    fine = (
        all(0 <= slot < SLOTS for slot in sources + targets)
        and len(set(targets)) == len(targets)
        and not set(sources) & set(targets)
    )

    if fine:
        check_runs(runs, SLOTS)
    else:
        with pytest.raises(ValueError, match=r"slot"):
            check_runs(runs, SLOTS)


@pytest.mark.parametrize(("layout", "copies"), [(LAYER_FIRST, 5), (BLOCK_FIRST, 1)], ids=["layer_first", "block_first"])
def test_byte_runs_are_few(layout: Layout, copies: int) -> None:
    """A run of slots takes one copy per layer where layers are contiguous, and one in all where blocks are."""
    runs = list(byte_runs(pool_geometry(layout, SLOTS), [SlotRun(0, 8, 4)]))

    assert len(runs) == copies
    assert sum(run.size_bytes for run in runs) == 4 * layout.bytes_per_block()


@pytest.fixture(params=["layer_first", "block_first"])
def order(request: pytest.FixtureRequest) -> PageOrder:
    chosen: PageOrder = request.param
    return chosen


@pytest.fixture
def memory(order: PageOrder) -> Iterator[PoolMemory]:
    """A pool of random bytes."""
    pool = PoolMemory("test", tiny_layout(order).pool_bytes(SLOTS))
    ctypes.memmove(pool.address, random.Random(1).randbytes(pool.size_bytes), pool.size_bytes)
    yield pool
    pool.close()


def blocks_of(memory: PoolMemory, order: PageOrder) -> list[bytes]:
    content = ctypes.string_at(memory.address, memory.size_bytes)
    return [read_block(content, tiny_layout(order), SLOTS, slot) for slot in range(SLOTS)]


def test_copy_moves_blocks_and_nothing_else(memory: PoolMemory, order: PageOrder) -> None:
    """After a copy the targets equal their sources, page for page as the layout places them; no other slot changed."""
    expected = blocks_of(memory, order)
    for source, target in zip([3, 4, 5, 0], [9, 10, 12, 15], strict=True):
        expected[target] = expected[source]

    HostCopier(pool_geometry(tiny_layout(order), SLOTS), memory.address).copy(
        merge_runs([(3, 3), (0, 1)], [(9, 2), (12, 1), (15, 1)])
    )

    assert blocks_of(memory, order) == expected


def test_fill_and_zero_change_one_block(memory: PoolMemory, order: PageOrder) -> None:
    """`fill` writes a block's bytes in the layout's page order, `zero` clears them, and both leave the others alone."""
    layout = tiny_layout(order)
    copier = HostCopier(pool_geometry(layout, SLOTS), memory.address)
    expected = blocks_of(memory, order)
    expected[7] = random.Random(2).randbytes(layout.bytes_per_block())
    expected[2] = bytes(layout.bytes_per_block())

    copier.fill(7, expected[7])
    copier.zero(2)

    assert blocks_of(memory, order) == expected


def test_checksum_is_that_of_the_bytes(memory: PoolMemory, order: PageOrder) -> None:
    """The checksum of a slot is BLAKE2b-128 of its pages in the layout's order, wherever they lie."""
    copier = HostCopier(pool_geometry(tiny_layout(order), SLOTS), memory.address)

    sums = [copier.checksum(slot) for slot in range(SLOTS)]

    assert sums == [hashlib.blake2b(block, digest_size=16).digest() for block in blocks_of(memory, order)]


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_copier_refuses_slots_outside_the_pool(memory: PoolMemory, order: PageOrder, slot: int) -> None:
    """A slot that the pool does not have is refused by every operation, and no byte changes."""
    copier = HostCopier(pool_geometry(tiny_layout(order), SLOTS), memory.address)
    before = blocks_of(memory, order)

    for operation in (
        lambda: copier.copy([SlotRun(0, 1, 1), SlotRun(slot, 3, 1)]),
        lambda: copier.fill(slot, bytes(tiny_layout().bytes_per_block())),
        lambda: copier.zero(slot),
        lambda: copier.checksum(slot),
    ):
        with pytest.raises(ValueError, match="not in a pool"):
            operation()

    assert blocks_of(memory, order) == before


def test_fill_refuses_another_size(memory: PoolMemory, order: PageOrder) -> None:
    """A block is filled whole or not at all."""
    copier = HostCopier(pool_geometry(tiny_layout(order), SLOTS), memory.address)

    with pytest.raises(ValueError, match="543 bytes for a block of 544"):
        copier.fill(0, bytes(543))
