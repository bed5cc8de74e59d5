"""Stores and loads of one shard in offload mode: bytes, headers, order, and what is refused."""

from __future__ import annotations

import gc
import random
import struct
import weakref
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_client.blocks import copy as batch_copy
from kvcached_client.blocks.header import BlockName, HeaderKind, stored_checksum
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.errors import BadRequest
from kvcached_client.offload_shard import BlockJob, JobSpan
from tests.client.offload_rig import (
    EPOCH,
    FINGERPRINT,
    GENERATION,
    NAMESPACE,
    SHARD,
    EngineRig,
    HostTensor,
    engine_rig,
    job,
    key_of,
    layer,
    span,
)

KIND = HeaderKind(NAMESPACE, FINGERPRINT, GENERATION)
BLOCKS = 8


@pytest.fixture(params=["native", "python"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineRig]:
    """Three layers of different pages; copies by the native helper, and without it."""
    if request.param == "python":
        monkeypatch.setattr(batch_copy, "native_copy_all", None)
        monkeypatch.setattr(batch_copy, "native_copy_summed", None)
    with engine_rig([layer(BLOCKS, 256), layer(BLOCKS, 320, gap_bytes=64), layer(BLOCKS, 128, seed=2)]) as made:
        yield made


@pytest.fixture
def stored(rig: EngineRig) -> BlockJob:
    """Blocks 1, 4, 0, 6 stored in slots 2, 3, 0, 7."""
    work = job(span([1, 4, 0, 6], [2, 3, 0, 7]))
    rig.transfers.store(work, epoch=EPOCH)
    return work


def elsewhere(work: BlockJob, blocks: list[int] | None = None) -> BlockJob:
    """The same blocks, to be loaded into others of the engine."""
    (only,) = work.spans
    target = np.array(blocks or [7, 5, 3, 2])
    return BlockJob(work.transfer, work.generation, (JobSpan(only.depth, only.parent, only.keys, target, only.slots),))


def test_blocks_come_back_through_host_memory(rig: EngineRig, stored: BlockJob) -> None:
    """What was stored from some blocks is loaded into others, and no further byte of the engine changes."""
    expected = rig.blocks()
    for target, source in zip((7, 5, 3, 2), (1, 4, 0, 6), strict=True):
        expected[target] = expected[source]

    assert rig.transfers.load(elsewhere(stored), verify=True) == []

    assert rig.blocks() == expected


def test_block_in_a_slot_is_its_pages_back_to_back(rig: EngineRig, stored: BlockJob) -> None:
    """A slot holds the layers' pages in order, and its header names the block and proves the bytes."""
    for index, (block, slot) in enumerate(zip((1, 4, 0, 6), (2, 3, 0, 7), strict=True)):
        assert bytes(rig.slot(slot)) == rig.block(block)
        name = BlockName(key_of(index + 1), key_of(index) if index else b"", index)
        assert stored_checksum(rig.header(slot), KIND, name) == xxhash.xxh3_128_digest(rig.block(block))
        assert struct.unpack("<QQ", rig.header(slot)[96:112]) == (EPOCH, stored.transfer)


def test_store_touches_only_its_slots(rig: EngineRig) -> None:
    """Other slots, the other shard's part and the padding stay as they were, byte for byte."""
    expected = bytearray(rig.view)
    rig.transfers.store(job(span([3, 2], [8, 1])), epoch=EPOCH)

    for slot in (8, 1):
        for place, size in (
            (rig.host.block_offset(slot, SHARD), rig.host.block_bytes),
            (rig.host.header_offset(slot, SHARD), 128),
        ):
            expected[place : place + size] = rig.view[place : place + size]
    assert bytes(rig.view) == expected


def test_spans_of_one_job_have_their_own_depths(rig: EngineRig) -> None:
    """Pieces of a chain with holes between them are stored in one job and loaded as others."""
    rig.transfers.store(job(span([0, 1], [0, 1]), span([5], [4], depth=7)), epoch=EPOCH)
    rig.fill(5, 0)

    assert rig.transfers.load(job(span([5], [4], depth=7)), verify=True) == []
    assert rig.block(5) == bytes(rig.slot(4))
    assert rig.transfers.load(job(span([6], [4], depth=8)), verify=True) == [0]


@pytest.mark.parametrize("verify", [True, False])
def test_flipped_bit_of_a_header_is_reported(rig: EngineRig, stored: BlockJob, verify: bool) -> None:
    """A block whose header is broken is named and not copied; the others are copied."""
    rig.header(3)[50] ^= 4
    before = rig.blocks()

    assert rig.transfers.load(elsewhere(stored), verify=verify) == [1]

    assert [rig.block(index) for index in (7, 5, 3, 2)] == [before[1], before[5], before[0], before[6]]


@pytest.mark.parametrize("place", [0, 300, 703])
def test_flipped_bit_of_a_block_is_reported(rig: EngineRig, stored: BlockJob, place: int) -> None:
    """A block with a changed byte, in whatever layer, is named; the others are copied and right."""
    rig.slot(0)[place] ^= 1
    before = rig.blocks()

    assert rig.transfers.load(elsewhere(stored), verify=True) == [2]

    assert [rig.block(index) for index in (7, 5, 2)] == [before[1], before[4], before[6]]


def test_unverified_load_reads_headers_only(rig: EngineRig, stored: BlockJob) -> None:
    """Without verification a changed byte of a block goes unnoticed, and is what the engine gets."""
    rig.slot(0)[9] ^= 1

    assert rig.transfers.load(elsewhere(stored), verify=False) == []

    assert rig.block(3) == bytes(rig.slot(0))


def test_blocks_of_the_trusted_epoch_are_not_compared(rig: EngineRig, stored: BlockJob) -> None:
    """Of blocks that were stored in the trusted epoch headers are read only; all others are compared as ever."""
    rig.transfers.store(job(span([2], [5], depth=9)), epoch=EPOCH + 1)
    work = BlockJob(stored.transfer, stored.generation, (*elsewhere(stored).spans, span([1], [5], depth=9)))
    for slot in (3, 5):
        rig.slot(slot)[9] ^= 1

    assert rig.transfers.load(work, verify=True, trusted_epoch=EPOCH) == [4]
    assert rig.transfers.load(work, verify=True, trusted_epoch=EPOCH + 1) == [1]
    assert rig.transfers.load(work, verify=True) == [1, 4]
    assert rig.transfers.load(work, verify=False, trusted_epoch=EPOCH) == []

    assert [rig.block(index) for index in (7, 5, 3, 2, 1)] == [bytes(rig.slot(slot)) for slot in (2, 3, 0, 7, 5)]


def test_bad_blocks_of_every_kind_are_reported_in_order(rig: EngineRig, stored: BlockJob) -> None:
    """Broken headers and broken bytes come back in the order of the job."""
    rig.slot(2)[0] ^= 1
    rig.header(3)[0] ^= 1
    rig.slot(7)[0] ^= 1

    assert rig.transfers.load(elsewhere(stored), verify=True) == [0, 1, 3]


def test_load_where_no_block_is_good_changes_nothing(rig: EngineRig, stored: BlockJob) -> None:
    """If no header fits, no byte of the engine is touched."""
    before = rig.blocks()
    work = elsewhere(stored)

    assert rig.transfers.load(BlockJob(work.transfer, 6, work.spans), verify=True) == [0, 1, 2, 3]
    assert rig.blocks() == before


@pytest.mark.parametrize("names", [(b"n" * 16, FINGERPRINT), (NAMESPACE, b"f" * 16)], ids=["namespace", "fingerprint"])
def test_blocks_of_others_are_not_loaded(rig: EngineRig, stored: BlockJob, names: tuple[bytes, bytes]) -> None:
    """Blocks that another namespace or layout stored are bad, all of them."""
    pages = EnginePages.of_tensors({str(index): each for index, each in enumerate(rig.tensors)})
    foreign = BlockTransfers(pages, rig.host, SHARD, rig.memory, namespace=names[0], fingerprint=names[1])

    assert foreign.load(elsewhere(stored), verify=False) == [0, 1, 2, 3]


def test_other_keys_are_not_loaded(rig: EngineRig, stored: BlockJob) -> None:
    """A slot that holds another block than asked for is bad: another key, another parent, another depth."""
    (only,) = stored.spans
    keys = only.keys[:16] + b"k" * 16 + only.keys[32:]
    asked = JobSpan(0, b"", keys, only.blocks, only.slots)
    assert rig.transfers.load(job(asked), verify=False) == [1, 2]

    deeper = JobSpan(1, key_of(0), only.keys, only.blocks, only.slots)
    assert rig.transfers.load(job(deeper), verify=False) == [0, 1, 2, 3]


def test_headers_are_gone_while_blocks_are_overwritten(
    rig: EngineRig, stored: BlockJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before the first byte is copied until the last one is there, no slot of a store has a header."""
    seen: list[list[bytes]] = []
    copy = batch_copy.copy_summed

    def look(pieces: memoryview, *arguments: int) -> bytes:
        seen.append([bytes(rig.header(slot)) for slot in (2, 3, 0, 7)])
        sums = copy(pieces, *arguments)
        seen.append([bytes(rig.header(slot)) for slot in (2, 3, 0, 7)])
        return sums

    monkeypatch.setattr(batch_copy, "copy_summed", look)
    monkeypatch.setattr(batch_copy, "PIECES_MAX", 3)

    rig.transfers.store(stored, epoch=EPOCH)

    assert len(seen) == 8
    assert all(header == bytes(128) for headers in seen for header in headers)
    assert rig.transfers.load(elsewhere(stored), verify=True) == []


@pytest.mark.parametrize("verify", [True, False])
def test_block_that_is_overwritten_while_it_is_read_is_reported(
    rig: EngineRig, stored: BlockJob, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    """Whoever writes into a slot takes its header away before: a reader that was stopped in between notices."""
    name = "copy_summed" if verify else "copy_all"
    copy = getattr(batch_copy, name)

    def overtaken(pieces: memoryview, *arguments: int) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(batch_copy, name, copy)
            rig.transfers.store(job(JobSpan(1, key_of(0), key_of(77), np.array([2]), np.array([3]))), epoch=EPOCH)
        return copy(pieces, *arguments)

    monkeypatch.setattr(batch_copy, name, overtaken)

    assert rig.transfers.load(elsewhere(stored), verify=verify) == [1]


def test_store_whose_bytes_may_be_wrong_writes_no_header(rig: EngineRig, stored: BlockJob) -> None:
    """What is asked when all bytes are copied, and no header is written, may still fail the store."""
    asked: list[bytes] = []

    def confirm() -> None:
        asked.append(bytes(rig.slot(2)))
        raise RuntimeError

    transfers = BlockTransfers(
        EnginePages.of_tensors({f"layer{index}": tensor for index, tensor in enumerate(rig.tensors)}),
        *(rig.host, SHARD, rig.memory), namespace=NAMESPACE, fingerprint=FINGERPRINT, confirm=confirm,
    )  # fmt: skip
    rig.fill(1, 7)
    with pytest.raises(RuntimeError):
        transfers.store(stored, epoch=EPOCH)

    assert asked == [rig.block(1)]
    assert rig.transfers.load(elsewhere(stored), verify=False) == [0, 1, 2, 3]


def test_store_that_fails_leaves_no_header(rig: EngineRig, stored: BlockJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that ends in the middle leaves slots without headers, so that nobody finds half a block."""

    def fail(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(batch_copy, "copy_summed", fail)
        with pytest.raises(MemoryError):
            rig.transfers.store(stored, epoch=EPOCH)

    assert rig.transfers.load(elsewhere(stored), verify=False) == [0, 1, 2, 3]


BROKEN = {
    "engine block": job(span([1, BLOCKS], [0, 1])),
    "engine block below": job(span([1, -1], [0, 1])),
    "host slot": job(span([0, 1], [0, 999])),
    "host slot below": job(span([0, 1], [0, -1])),
    "block twice": job(span([1, 1], [0, 1])),
    "slot twice": job(span([0], [4]), span([1], [4], depth=1)),
    "blocks": job(JobSpan(0, b"", bytes(32), np.array([0]), np.array([0, 1]))),
    "slots": job(JobSpan(0, b"", bytes(32), np.array([0, 1]), np.array([0]))),
    "keys": job(JobSpan(0, b"", bytes(31), np.array([0, 1]), np.array([0, 1]))),
    "nothing": job(JobSpan(0, b"", b"", np.array([], np.int64), np.array([], np.int32))),
    "no span": job(),
    "parent": job(JobSpan(1, bytes(15), bytes(16), np.array([0]), np.array([0]))),
    "no parent": job(JobSpan(1, b"", bytes(16), np.array([0]), np.array([0]))),
    "parent of the first": job(JobSpan(0, bytes(16), bytes(16), np.array([0]), np.array([0]))),
    "depth": job(JobSpan(-1, bytes(16), bytes(16), np.array([0]), np.array([0]))),
    "deep": job(JobSpan((1 << 32) - 1, bytes(16), bytes(32), np.array([0, 1]), np.array([0, 1]))),
}


@pytest.mark.parametrize("work", BROKEN.values(), ids=BROKEN.keys())
def test_broken_jobs_are_refused_untouched(rig: EngineRig, stored: BlockJob, work: BlockJob) -> None:
    """A job that contradicts itself, or names what is not there, is refused before a byte or a header changes."""
    host, engine = bytes(rig.view), rig.blocks()

    with pytest.raises(BadRequest):
        rig.transfers.store(work, epoch=EPOCH)
    with pytest.raises(BadRequest):
        rig.transfers.load(work, verify=True)

    assert (bytes(rig.view), rig.blocks()) == (host, engine)


@st.composite
def rigs(draw: st.DrawFn) -> tuple[list[HostTensor], int]:
    """Layers with random pages, gaps between them and alignments, and how many slots a slab has."""
    unit = draw(st.sampled_from([1, 64]))
    count = draw(st.integers(1, 4))
    return [
        layer(
            BLOCKS,
            unit * draw(st.integers(1, 90)),
            gap_bytes=draw(st.integers(0, 200)),
            alignment=draw(st.integers(0, 130)),
            seed=index,
        )
        for index in range(count)
    ], draw(st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(made=rigs(), data=st.data())
def test_any_blocks_go_through_any_slots(made: tuple[list[HostTensor], int], data: st.DataObject) -> None:
    """Whatever strides, page sizes and slabs there are, blocks land where a loop would put them, and come back."""
    tensors, slots_per_slab = made
    with engine_rig(tensors, slots_per_slab=slots_per_slab, slabs=4) as rig, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_copy, "PIECES_MAX", data.draw(st.sampled_from([1, 5, 8192])))
        count = data.draw(st.integers(1, min(BLOCKS, rig.host.slots)))
        source, target = (data.draw(st.permutations(range(BLOCKS)))[:count] for _ in range(2))
        slots = data.draw(st.permutations(range(rig.host.slots)))[:count]
        engine, other = rig.blocks(), bytes(rig.view)

        rig.transfers.store(job(span(source, slots)), epoch=EPOCH)

        assert rig.blocks() == engine
        assert [bytes(rig.slot(slot)) for slot in slots] == [engine[block] for block in source]
        touched = array("b", bytes(len(other)))
        for slot in slots:
            for place, size in (
                (rig.host.block_offset(slot, SHARD), rig.host.block_bytes),
                (rig.host.header_offset(slot, SHARD), 128),
            ):
                touched[place : place + size] = array("b", b"\1" * size)
        same = np.frombuffer(rig.view, np.uint8) == np.frombuffer(other, np.uint8)
        assert same[np.frombuffer(touched, np.uint8) == 0].all()

        assert rig.transfers.load(job(span(target, slots)), verify=data.draw(st.booleans())) == []
        for block, origin in zip(target, source, strict=True):
            assert rig.block(block) == engine[origin]
        for block in set(range(BLOCKS)) - set(target):
            assert rig.block(block) == engine[block]


def test_plan_of_many_blocks_is_cut(rig: EngineRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of more pieces than are planned at once is carried out in parts, whole blocks each."""
    planned: list[int] = []
    copy = batch_copy.copy_summed

    def count(pieces: memoryview, *arguments: int) -> bytes:
        planned.append(len(pieces) // 3)
        return copy(pieces, *arguments)

    monkeypatch.setattr(batch_copy, "copy_summed", count)
    monkeypatch.setattr(batch_copy, "PIECES_MAX", 7)
    order = random.Random(1).sample(range(BLOCKS), 5)

    rig.transfers.store(job(span(order, [8, 0, 3, 5, 1])), epoch=EPOCH)

    assert planned == [6, 6, 3]
    assert [bytes(rig.slot(slot)) for slot in (8, 0, 3, 5, 1)] == [rig.block(block) for block in order]


def test_tensors_live_as_long_as_copies_are_made() -> None:
    """The engine's memory cannot go while somebody may copy to it."""
    tensor = layer(BLOCKS, 256)
    alive = weakref.ref(tensor)
    with engine_rig([tensor]) as rig:
        pages = EnginePages.of_tensors({"only": tensor})
        transfers = BlockTransfers(pages, rig.host, SHARD, rig.memory, namespace=NAMESPACE, fingerprint=FINGERPRINT)

    del tensor, rig, pages
    gc.collect()
    assert alive() is not None
    del transfers
    gc.collect()
    assert alive() is None
