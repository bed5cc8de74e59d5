from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_client.blocks import copy as block_copy
from kvcached_client.blocks.copy import Batch, MemoryCopier
from kvcached_client.blocks.layout import PageOrder
from tests.worker.groups import SLOTS
from tests.worker.host_rigs import BLOCK_BYTES, HOST, HostRig, block_place, host_rig

Pairs = list[tuple[int, int]]


@st.composite
def scattered_pairs(draw: st.DrawFn) -> Pairs:
    """(device slot, host slot) of some blocks, anywhere and in any order, no slot twice; neighbours may cross slabs."""
    blocks = draw(st.integers(1, SLOTS))
    device = draw(st.permutations(range(SLOTS)))[:blocks]
    first = draw(st.integers(0, HOST.slots - blocks))
    host = draw(st.one_of(st.just(list(range(first, first + blocks))), st.permutations(range(HOST.slots))))[:blocks]
    if draw(st.booleans()):
        device = sorted(device)
    return list(zip(device, host, strict=True))


def places_of(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Device slots, and where the host slots' blocks are."""
    return [slot for slot, _ in pairs], [block_place(slot) for _, slot in pairs]


@pytest.mark.parametrize(("order", "pieces"), [("layer_first", 5 * 9), ("block_first", 2)])
def test_copies_are_few(order: PageOrder, pieces: int) -> None:
    """Nine blocks across two slabs are two pieces where blocks are contiguous, and one per block and layer else."""
    with host_rig(order) as rig:
        batches = list(rig.plan.by_layer(*places_of([(slot, 5 + slot) for slot in range(9)])))

    assert sum(len(batch.pieces) // 3 for batch in batches) == pieces
    assert sum(sum(batch.pieces[2::3]) for batch in batches) == 9 * BLOCK_BYTES


def test_blocks_that_are_neighbours_on_one_side_only_are_copied_apart() -> None:
    """Blocks are one piece where they follow each other in both pools; a gap on either side starts another."""
    with host_rig("block_first") as rig:
        for pairs, wanted in [
            ([(0, 0), (1, 1), (2, 2)], [3]),
            ([(0, 0), (1, 2), (2, 3)], [1, 2]),
            ([(0, 0), (2, 1), (3, 2)], [1, 2]),
            ([(1, 1), (0, 0)], [1, 1]),
        ]:
            (batch,) = rig.plan.by_layer(*places_of(pairs))
            assert [size // BLOCK_BYTES for size in batch.pieces[2::3]] == wanted


def test_first_batch_is_small_and_no_batch_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device begins early, and later batches are as large as may be; every block is in one of them, in its order."""
    monkeypatch.setattr(block_copy, "FIRST_BATCH_BYTES_MAX", BLOCK_BYTES)
    monkeypatch.setattr(block_copy, "BATCH_BYTES_MAX", 5 * BLOCK_BYTES)
    with host_rig("layer_first") as rig:
        slots, places = places_of([(slot, slot) for slot in range(SLOTS)])
        batches = list(rig.plan.by_block(slots, places, to_host=True))
        monkeypatch.setattr(block_copy, "FIRST_BATCH_BYTES_MAX", 1 << 40)
        (whole,) = rig.plan.by_block(slots, places, to_host=True)

    assert [sum(batch.pieces[2::3]) // BLOCK_BYTES for batch in batches] == [1, 4, 5, 5, 1]
    assert sum((batch.pieces for batch in batches), array("q")) == whole.pieces


class Grouping(MemoryCopier):
    """It takes some layers at once."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once

    def layers_at_once(self, page_bytes: int, blocks: int) -> int:
        return self._at_once


@pytest.mark.parametrize(("blocks", "batches"), [(1, [1]), (2, [1, 1]), (3, [1, 2]), (12, [1, 4, 5, 2])])
def test_last_batch_of_a_transfer_is_small(blocks: int, batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied while who waits for the batch before it wakes up. A large block is no such end."""
    monkeypatch.setattr(block_copy, "FIRST_BATCH_BYTES_MAX", BLOCK_BYTES)
    monkeypatch.setattr(block_copy, "BATCH_BYTES_MAX", 5 * BLOCK_BYTES)
    monkeypatch.setattr(block_copy, "END_BYTES_MAX", 2 * BLOCK_BYTES + 1)
    with host_rig("layer_first") as rig:
        slots, places = places_of([(slot, slot) for slot in range(blocks)])
        planned = list(rig.plan.by_block(slots, places, to_host=True))
        monkeypatch.setattr(block_copy, "END_BYTES_MAX", BLOCK_BYTES - 1)
        large = list(rig.plan.by_block(slots, places, to_host=True))

    assert [sum(batch.pieces[2::3]) // BLOCK_BYTES for batch in planned] == batches
    assert [batch.is_end for batch in planned] == [False] * (len(batches) - 1) + [True]
    assert not any(batch.is_end for batch in large)


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
def test_last_layer_of_a_load_ends_with_a_small_batch(order: PageOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers before it are one batch each, and the last layer is there when its last batch is."""
    with host_rig(order) as rig:
        slots, places = places_of([(slot, SLOTS - 1 - slot) for slot in range(SLOTS)])
        *layers, last = rig.plan.by_layer(slots, places)
        page_bytes = sum(last.pieces[2::3]) // SLOTS
        monkeypatch.setattr(block_copy, "END_BYTES_MAX", 3 * page_bytes)
        batches = list(rig.plan.by_layer(slots, places))

    assert [batch.layers for batch in batches] == [1] * len(layers) + [0, 1]
    assert [sum(batch.pieces[2::3]) // page_bytes for batch in batches[-2:]] == [SLOTS - 3, 3]
    assert [batch.is_end for batch in batches] == [False] * (len(layers) + 1) + [True]


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_large_layers_are_several_batches(order: PageOrder, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of a group of layers says that they are there, and no other does."""
    with host_rig(order) as rig:
        slots, places = places_of([(slot, SLOTS - 1 - slot) for slot in range(SLOTS)])
        groups = rig.plan.layer_groups(Grouping(at_once), SLOTS)
        whole = list(rig.plan.by_layer(slots, places, groups))
        group_bytes = len(groups[0]) * BLOCK_BYTES // rig.plan.pieces_per_block
        monkeypatch.setattr(block_copy, "BATCH_BYTES_MAX", 4 * group_bytes)
        batches = list(rig.plan.by_layer(slots, places, groups))

    assert [batch.layers for batch in whole] == [len(group) for group in groups]
    assert sum(batch.layers for batch in batches) == rig.plan.pieces_per_block
    per_group = [0]
    for batch in batches:
        per_group[-1] += 1
        per_group += [0] if batch.layers else []
    assert per_group[-1] == 0
    assert min(per_group[:-1]) > 1
    assert _moves(batches) == _moves(whole)


def _moves(batches: list[Batch]) -> list[tuple[int, int]]:
    """Where each byte goes, and from where."""
    return sorted(
        (batch.destination + to + at, batch.source + of + at)
        for batch in batches
        for to, of, size in zip(*[iter(batch.pieces)] * 3, strict=True)
        for at in range(0, size, 64)
    )


@pytest.fixture(params=["layer_first", "block_first"])
def rig(request: pytest.FixtureRequest) -> Iterator[HostRig]:
    with host_rig(request.param) as made:
        yield made


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=40, deadline=None)
@given(pairs=scattered_pairs())
def test_copies_are_those_of_a_loop_over_blocks(order: PageOrder, native: bool, pairs: Pairs) -> None:
    """In both layouts, however slots are scattered and whatever slabs they cross, blocks go where a loop puts them."""
    if native and block_copy.native_copy_all is None:
        pytest.skip("the native helper was not built: pip install -e ., with a C compiler")
    with host_rig(order) as rig, pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(block_copy, "native_copy_all", None)
        everything = bytes(rig.host.view)

        device, host = rig.device_blocks(), [rig.host_block(slot) for slot in range(HOST.slots)]
        for device_slot, host_slot in pairs:
            host[host_slot] = device[device_slot]
        list(rig.copier.copy(rig.plan.by_block(*places_of(pairs), to_host=True)))
        assert [rig.host_block(slot) for slot in range(HOST.slots)] == host
        assert rig.device_blocks() == device

        for batches in (rig.plan.by_layer(*places_of(pairs)), rig.plan.by_block(*places_of(pairs), to_host=False)):
            rig.host.view[:] = everything
            for device_slot, host_slot in pairs:
                device[device_slot] = rig.host_block(host_slot)
                rig.pool.zero(device_slot)
            list(rig.copier.copy(batches))
            assert rig.device_blocks() == device
            assert bytes(rig.host.view) == everything


def test_duplicate_moves_one_block_and_nothing_else(rig: HostRig) -> None:
    """After a duplication the target equals the source, page for page as the layout places them; no other changed."""
    expected = rig.device_blocks()
    expected[9] = expected[3]

    rig.pool.duplicate(3, 9)

    assert rig.device_blocks() == expected


def test_fill_and_zero_change_one_block(rig: HostRig) -> None:
    """`fill` writes a block's bytes in the layout's page order, `zero` clears them, and both leave the others alone."""
    expected = rig.device_blocks()
    expected[7] = random.Random(2).randbytes(BLOCK_BYTES)
    expected[2] = bytes(BLOCK_BYTES)

    rig.pool.fill(7, expected[7])
    rig.pool.zero(2)

    assert rig.device_blocks() == expected


def test_checksum_is_that_of_the_bytes(rig: HostRig) -> None:
    """The checksum of a slot is xxh3_128 of its pages in the layout's order, wherever they lie."""
    sums = [rig.pool.checksum(slot) for slot in range(SLOTS)]

    assert sums == [xxhash.xxh3_128_digest(block) for block in rig.device_blocks()]


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_device_pool_refuses_slots_outside_the_pool(rig: HostRig, slot: int) -> None:
    """A slot that the pool does not have is refused by every operation, and no byte changes."""
    pool, before = rig.pool, rig.device_blocks()

    for operation in (
        lambda: pool.duplicate(0, slot),
        lambda: pool.duplicate(slot, 0),
        lambda: pool.fill(slot, bytes(BLOCK_BYTES)),
        lambda: pool.zero(slot),
        lambda: pool.checksum(slot),
    ):
        with pytest.raises(ValueError, match="not in a pool"):
            operation()

    assert rig.device_blocks() == before


def test_device_pool_refuses_what_is_no_block(rig: HostRig) -> None:
    """A block is filled whole or not at all, and is never its own duplicate."""
    with pytest.raises(ValueError, match="543 bytes for a block of 544"):
        rig.pool.fill(0, bytes(543))
    with pytest.raises(ValueError, match="slot 4 is source and target"):
        rig.pool.duplicate(4, 4)
