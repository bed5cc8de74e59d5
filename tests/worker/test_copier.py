from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.worker.copier import SlotRun, check_runs, cut_runs, merge_runs, plan_copies
from kvcached.worker.copier_host import HostCopier
from kvcached.worker.geometry import pool_geometry
from kvcached_client import batch_copy
from kvcached_client.layout import PageOrder
from tests.worker.groups import SLOTS, tiny_layout
from tests.worker.host_rigs import BLOCK_BYTES, HOST, SHARD, SHARDS, HostRig, host_rig

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


@st.composite
def scattered_runs(draw: st.DrawFn) -> list[SlotRun]:
    """Runs between the rig's pools, anywhere and in any order, no slot twice; runs may cross slabs."""
    blocks = draw(st.integers(1, SLOTS))
    device = draw(st.permutations(range(SLOTS)))[:blocks]
    first = draw(st.integers(0, HOST.slots - blocks))
    host = draw(st.one_of(st.just(list(range(first, first + blocks))), st.permutations(range(HOST.slots))))[:blocks]
    if draw(st.booleans()):
        device = sorted(device)
    return merge_runs([(slot, 1) for slot in device], [(slot, 1) for slot in host])


def expanded(ranges: Ranges) -> list[int]:
    return [slot for first, count in ranges for slot in range(first, first + count)]


def pairs_of(runs: list[SlotRun]) -> list[tuple[int, int]]:
    """(device slot, host slot) of every block."""
    return [(run.device + index, run.host + index) for run in runs for index in range(run.slots)]


@given(paired_ranges())
def test_merge_runs_pairs_slots_in_order(ranges: tuple[Ranges, Ranges]) -> None:
    """Merged runs pair the n-th device slot with the n-th host slot, and no two neighbours could be one."""
    device, host = ranges

    runs = merge_runs(device, host)

    assert pairs_of(runs) == list(zip(expanded(device), expanded(host), strict=True))
    for one, two in itertools.pairwise(runs):
        assert (one.device + one.slots, one.host + one.slots) != (two.device, two.host)


def test_merge_runs_joins_ranges_that_go_on() -> None:
    """Adjacent ranges on both sides become one copy; a gap on either side starts another."""
    assert merge_runs([(0, 2), (2, 3)], [(10, 5)]) == [SlotRun(0, 10, 5)]
    assert merge_runs([(0, 5)], [(10, 2), (20, 3)]) == [SlotRun(0, 10, 2), SlotRun(2, 20, 3)]


@pytest.mark.parametrize(("device", "host"), [([(0, 2)], [(5, 3)]), ([(0, 3)], [(5, 2)]), ([(0, 0)], [(5, 0)])])
def test_merge_runs_refuses_ranges_that_do_not_pair(device: Ranges, host: Ranges) -> None:
    """Ranges with unequal totals or without slots are refused."""
    with pytest.raises(ValueError, match=r"slot"):
        merge_runs(device, host)


@given(paired_ranges(), st.none() | st.integers(0, 31), st.none() | st.integers(0, 31))
def test_cut_runs_have_the_blocks_of_the_slice(
    ranges: tuple[Ranges, Ranges], start: int | None, stop: int | None
) -> None:
    """Some blocks of runs are the same slice of their pairs of slots, without empty runs."""
    runs = merge_runs(*ranges)

    kept = cut_runs(runs, slice(start, stop))

    assert pairs_of(kept) == pairs_of(runs)[start:stop]
    assert all(run.slots > 0 for run in kept)


@given(st.lists(st.builds(SlotRun, st.integers(-2, 20), st.integers(-2, 30), st.integers(1, 5)), max_size=5))
def test_check_runs_refuses_what_depends_on_order(runs: list[SlotRun]) -> None:
    """Runs pass exactly when every slot is in its pool and none is named twice."""
    device = [slot for slot, _ in pairs_of(runs)]
    host = [slot for _, slot in pairs_of(runs)]
    fine = (
        all(0 <= slot < SLOTS for slot in device)
        and all(0 <= slot < HOST.slots for slot in host)
        and len(set(device)) == len(device)
        and len(set(host)) == len(host)
    )

    if fine:
        check_runs(runs, SLOTS, HOST.slots)
    else:
        with pytest.raises(ValueError, match=r"slot"):
            check_runs(runs, SLOTS, HOST.slots)


@pytest.mark.parametrize(("order", "pieces"), [("layer_first", 5 * 9), ("block_first", 2)])
def test_copies_are_few(order: PageOrder, pieces: int) -> None:
    """Nine blocks across two slabs are two pieces where blocks are contiguous, and one per block and layer else."""
    geometry = pool_geometry(tiny_layout(order, SHARDS), SLOTS)

    strips = list(plan_copies(geometry, HOST, SHARD, [SlotRun(0, 5, 9)], to_host=True))

    assert sum(len(strip.pieces) // 3 for strip in strips) == pieces
    assert sum(sum(strip.pieces[2::3]) for strip in strips) == 9 * BLOCK_BYTES


@pytest.fixture(params=["layer_first", "block_first"])
def rig(request: pytest.FixtureRequest) -> Iterator[HostRig]:
    with host_rig(request.param) as made:
        yield made


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=40, deadline=None)
@given(runs=scattered_runs())
def test_copies_are_those_of_a_loop_over_blocks(order: PageOrder, native: bool, runs: list[SlotRun]) -> None:
    """In both layouts, however slots are scattered and whatever slabs they cross, blocks go where a loop puts them."""
    if native and batch_copy.native_copy_all is None:
        pytest.skip("the native helper was not built: pip install -e ., with a C compiler")
    with host_rig(order) as rig, pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(batch_copy, "native_copy_all", None)
        geometry = pool_geometry(rig.layout, SLOTS)
        everything = bytes(rig.host.view)

        device, host = rig.device_blocks(), [rig.host_block(slot) for slot in range(HOST.slots)]
        for device_slot, host_slot in pairs_of(runs):
            host[host_slot] = device[device_slot]
        for strip in plan_copies(geometry, HOST, SHARD, runs, to_host=True):
            rig.copier.to_host(strip)
        assert [rig.host_block(slot) for slot in range(HOST.slots)] == host
        assert rig.device_blocks() == device

        rig.host.view[:] = everything
        for device_slot, host_slot in pairs_of(runs):
            device[device_slot] = rig.host_block(host_slot)
        for strip in plan_copies(geometry, HOST, SHARD, runs, to_host=False):
            rig.copier.to_device(strip)
        assert rig.device_blocks() == device
        assert bytes(rig.host.view) == everything


def test_duplicate_moves_one_block_and_nothing_else(rig: HostRig) -> None:
    """After a duplication the target equals the source, page for page as the layout places them; no other changed."""
    expected = rig.device_blocks()
    expected[9] = expected[3]

    rig.copier.duplicate(3, 9)

    assert rig.device_blocks() == expected


def test_fill_and_zero_change_one_block(rig: HostRig) -> None:
    """`fill` writes a block's bytes in the layout's page order, `zero` clears them, and both leave the others alone."""
    expected = rig.device_blocks()
    expected[7] = random.Random(2).randbytes(BLOCK_BYTES)
    expected[2] = bytes(BLOCK_BYTES)

    rig.copier.fill(7, expected[7])
    rig.copier.zero(2)

    assert rig.device_blocks() == expected


def test_checksum_is_that_of_the_bytes(rig: HostRig) -> None:
    """The checksum of a slot is xxh3_128 of its pages in the layout's order, wherever they lie."""
    sums = [rig.copier.checksum(slot) for slot in range(SLOTS)]

    assert sums == [xxhash.xxh3_128_digest(block) for block in rig.device_blocks()]


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_copier_refuses_slots_outside_the_pool(rig: HostRig, slot: int) -> None:
    """A slot that the pool does not have is refused by every operation, and no byte changes."""
    copier, before = rig.copier, rig.device_blocks()

    for operation in (
        lambda: copier.duplicate(0, slot),
        lambda: copier.duplicate(slot, 0),
        lambda: copier.fill(slot, bytes(BLOCK_BYTES)),
        lambda: copier.zero(slot),
        lambda: copier.checksum(slot),
    ):
        with pytest.raises(ValueError, match="not in a pool"):
            operation()

    assert rig.device_blocks() == before


def test_copier_refuses_what_is_no_block(rig: HostRig) -> None:
    """A block is filled whole or not at all, and is never its own duplicate."""
    with pytest.raises(ValueError, match="543 bytes for a block of 544"):
        rig.copier.fill(0, bytes(543))
    with pytest.raises(ValueError, match="slot 4 is source and target"):
        rig.copier.duplicate(4, 4)


def test_copier_needs_no_host_pool(rig: HostRig) -> None:
    """A copier without a host pool serves its own pool."""
    copier = HostCopier(pool_geometry(rig.layout, SLOTS), rig.device.address)

    assert copier.checksum(5) == rig.copier.checksum(5)
