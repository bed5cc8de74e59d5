from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import pytest
import xxhash

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import one_range
from kvcached.worker.messages import CORRUPT_BLOCKS_MAX, Load
from kvcached.worker.shard import WorkerTransfers
from kvcached_client.blocks import copy as block_copy
from kvcached_client.blocks.copy import Batch, MemoryCopier
from kvcached_client.blocks.header import BlockName, HeaderKind, stored_checksum
from kvcached_client.blocks.layout import PageOrder
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.blocks.progress import STATE_DONE, STATE_FAILED, STATE_RUNNING
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.errors import BadRequest
from tests.worker.groups import SLOTS
from tests.worker.host_rigs import (
    BLOCK_BYTES,
    FINGERPRINT,
    GENERATION,
    HOST,
    NAMESPACE,
    SHARDS,
    HostRig,
    block_place,
    header_place,
    host_rig,
    key_of,
    load_of,
    span_of,
    store_of,
)

KIND = HeaderKind(NAMESPACE, FINGERPRINT, GENERATION)
STRIPS = {"layer_first": 5, "block_first": 1}


@pytest.fixture(params=["layer_first", "block_first"])
def order(request: pytest.FixtureRequest) -> PageOrder:
    chosen: PageOrder = request.param
    return chosen


@pytest.fixture
def rig(order: PageOrder) -> Iterator[HostRig]:
    with host_rig(order) as made:
        yield made


#: Six blocks in scattered device slots; the host slots cross a slab (7 to a slab) and jump.
DEVICE, HOST_RANGES = [(2, 3), (9, 1), (6, 2)], [(5, 4), (18, 2)]
DEVICE_SLOTS, HOST_SLOTS = [2, 3, 4, 9, 6, 7], [5, 6, 7, 8, 18, 19]
#: Where a test loads them to.
TARGETS, TARGET_SLOTS = [(10, 5), (0, 1)], [10, 11, 12, 13, 14, 0]


def store_six(rig: HostRig) -> None:
    rig.transfers.store(store_of(span_of(DEVICE, HOST_RANGES)))


def flip(rig: HostRig, place: int) -> None:
    rig.host.view[place] ^= 0x10


def test_stored_blocks_come_back(rig: HostRig, order: PageOrder) -> None:
    """What was stored is what is loaded into other slots, nothing else changes, and the page tells every layer."""
    stored = rig.device_blocks()
    store_six(rig)
    for slot in DEVICE_SLOTS:
        rig.write_device(slot, bytes(BLOCK_BYTES))
    expected = rig.device_blocks()
    for source, target in zip(DEVICE_SLOTS, TARGET_SLOTS, strict=True):
        expected[target] = stored[source]

    corrupt = rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES)))

    assert corrupt == ()
    assert rig.device_blocks() == expected
    assert rig.entry() == (2, STRIPS[order], STATE_DONE)


def test_headers_say_what_the_blocks_are(rig: HostRig) -> None:
    """After a store each slot's header names its block, and has the checksum of the bytes that are there."""
    store_six(rig)

    for depth, slot in enumerate(HOST_SLOTS):
        name = BlockName(key_of(depth + 1), key_of(depth) if depth else b"", depth)
        header = rig.header(slot)
        assert stored_checksum(memoryview(header), KIND, name) == xxhash.xxh3_128_digest(rig.host_block(slot))
        assert (header[96:104], header[104:112]) == ((3).to_bytes(8, "little"), (1).to_bytes(8, "little"))


def test_spans_are_parts_of_different_chains(rig: HostRig) -> None:
    """Blocks of several spans are stored and loaded in one go, each span with a depth and a parent of its own."""
    here, there = span_of([(2, 2)], [(0, 2)], depth=40), span_of([(8, 1)], [(14, 1)])
    rig.transfers.store(store_of(here, there))

    assert rig.transfers.load(load_of(here, there)) == ()
    assert rig.transfers.load(load_of(there)) == ()
    assert rig.transfers.load(load_of(span_of([(3, 1)], [(1, 1)], depth=41))) == ()
    assert rig.transfers.load(load_of(span_of([(2, 2)], [(0, 2)], depth=39))) == (0, 1)


def cut_at(rig: HostRig, bad: int, work: Load) -> None:
    """A load reports the block, and copies the ones before it and no other."""
    expected = rig.device_blocks()
    for source, target in list(zip(HOST_SLOTS, TARGET_SLOTS, strict=True))[:bad]:
        expected[target] = rig.host_block(source)

    assert rig.transfers.load(work) == (bad,)
    assert rig.device_blocks() == expected
    assert rig.entry() == (work.transfer, 0, STATE_FAILED)


@pytest.mark.parametrize("bad", range(6))
@pytest.mark.parametrize("byte", [0, 300, BLOCK_BYTES - 1])
def test_flipped_bit_of_a_block_is_found(rig: HostRig, bad: int, byte: int) -> None:
    """A bit that flipped in a block is reported as that block; the blocks before it are copied, none from it on."""
    store_six(rig)
    flip(rig, block_place(HOST_SLOTS[bad]) + byte)

    cut_at(rig, bad, load_of(span_of(TARGETS, HOST_RANGES)))


def test_block_of_the_trusted_epoch_is_not_compared(rig: HostRig) -> None:
    """A block that was stored in the trusted epoch is copied as it is; one of another epoch is compared."""
    store_six(rig)
    flip(rig, block_place(HOST_SLOTS[2]))
    load = load_of(span_of(TARGETS, HOST_RANGES))

    cut_at(rig, 2, msgspec.structs.replace(load, trusted_epoch=store_of().epoch + 1))
    assert rig.transfers.load(msgspec.structs.replace(load, trusted_epoch=store_of().epoch)) == ()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("byte", [0, 6, 10, 20, 40, 50, 70, 90, 100, 113, 121])
def test_flipped_bit_of_a_header_is_found(rig: HostRig, byte: int, verify: bool) -> None:
    """A bit that flipped anywhere in a header is reported as its block, whether or not checksums are compared."""
    store_six(rig)
    flip(rig, header_place(HOST_SLOTS[3]) + byte)

    cut_at(rig, 3, load_of(span_of(TARGETS, HOST_RANGES), verify=verify))


def test_without_verification_only_bytes_go_unnoticed(rig: HostRig) -> None:
    """Without verification a flipped bit of a block is copied as it is, but another key, parent or depth never is."""
    store_six(rig)
    flip(rig, block_place(HOST_SLOTS[2]) + 7)

    assert rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES), verify=False)) == ()
    assert rig.device_blocks()[TARGET_SLOTS[2]] == rig.host_block(HOST_SLOTS[2])

    span = span_of([(0, 1)], [(HOST_SLOTS[1], 1)], depth=1)
    before = rig.device_blocks()
    for wrong in (
        span._replace(keys=key_of(9)),
        span._replace(parent=key_of(9)),
        span._replace(depth=2),
        span._replace(host=one_range(HOST_SLOTS[2], 1)),
    ):
        assert rig.transfers.load(load_of(wrong, verify=False)) == (0,)
    assert rig.device_blocks() == before
    assert rig.transfers.load(load_of(span, verify=False)) == ()


def test_blocks_of_others_are_never_loaded(rig: HostRig) -> None:
    """Another generation, namespace or layout, and a slot that was never written, hold none of the wanted blocks."""
    store_six(rig)
    span = span_of(TARGETS, HOST_RANGES)
    before = rig.device_blocks()

    later = msgspec.structs.replace(load_of(span, verify=False), generation=GENERATION + 1)
    assert rig.transfers.load(later) == tuple(range(6))
    assert rig.transfers.load(load_of(span_of([(0, 1)], [(20, 1)]))) == (0,)
    for names in ((b"n" * 16, FINGERPRINT), (NAMESPACE, b"f" * 16)):
        other = BlockTransfers(
            pool_geometry(rig.layout, SLOTS).at(rig.device.address),
            HOST,
            1,
            rig.host.view,
            namespace=names[0],
            fingerprint=names[1],
        )
        assert WorkerTransfers(other, rig.progress).load(load_of(span)) == tuple(range(6))
    assert rig.device_blocks() == before


def test_every_bad_block_is_named(rig: HostRig) -> None:
    """All bad blocks of a load are named, not only the one that cut it."""
    store_six(rig)
    for bad in (1, 3, 4):
        flip(rig, block_place(HOST_SLOTS[bad]))

    assert rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES))) == (1, 3, 4)


def test_named_bad_blocks_are_bounded(rig: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more bad blocks are named than an ack has room for."""
    assert CORRUPT_BLOCKS_MAX == 1024
    monkeypatch.setattr("kvcached.worker.shard.CORRUPT_BLOCKS_MAX", 4)

    assert rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES))) == (0, 1, 2, 3)


class WatchingCopier(MemoryCopier):
    """Calls `watch` before each batch."""

    watch: Callable[[], None] = staticmethod(lambda: None)

    def copy(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return super().copy(self._watched(batches))

    def copy_summed(self, batches: Iterable[Batch], per_sum: int) -> Iterator[bytes]:
        return super().copy_summed(self._watched(batches), per_sum)

    def _watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.watch()
            yield batch


@pytest.fixture
def watched(order: PageOrder, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HostRig, WatchingCopier]]:
    """Stores copy block by block, so that they have a middle."""
    monkeypatch.setattr(block_copy, "PIECES_MAX", 1)
    with host_rig(order, WatchingCopier) as made:
        assert isinstance(made.copier, WatchingCopier)
        yield made, made.copier


def test_headers_are_gone_while_blocks_are_overwritten(
    watched: tuple[HostRig, WatchingCopier], order: PageOrder
) -> None:
    """From the first copied byte on, no slot of a store says that it holds a block; when it is over, all do."""
    rig, copier = watched
    store_six(rig)
    seen = []
    copier.watch = lambda: seen.append([rig.header(slot) for slot in HOST_SLOTS])

    rig.transfers.store(store_of(span_of(DEVICE, HOST_RANGES), transfer=9))

    assert seen == [[bytes(128)] * 6] * 6
    assert all(rig.header(slot)[:4] == b"KVCH" for slot in HOST_SLOTS)


def test_torn_store_leaves_no_block(watched: tuple[HostRig, WatchingCopier], order: PageOrder) -> None:
    """A store that ends half-way leaves slots that hold nothing, neither the old blocks nor the new ones."""
    rig, copier = watched
    store_six(rig)
    remaining = iter(range(5))

    def tear() -> None:
        if next(remaining, None) is None:
            raise OSError("torn")

    copier.watch = tear
    with pytest.raises(OSError, match="torn"):
        rig.transfers.store(store_of(span_of(DEVICE, HOST_RANGES)))
    copier.watch = lambda: None

    assert rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES), verify=False)) == tuple(range(6))


def test_layers_are_told_after_their_bytes(
    watched: tuple[HostRig, WatchingCopier], order: PageOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the page tells a layer its bytes are there; before the next one is copied the load is still running."""
    rig, copier = watched
    store_six(rig)
    seen: list[tuple[int, int, int]] = []
    arrived: list[bool] = []
    copier.watch = lambda: seen.append(rig.entry())
    ends = list(accumulate(strip.page_bytes for strip in pool_geometry(rig.layout, SLOTS).strips))
    advance = rig.progress.advance

    def look(entry: int) -> None:
        end = ends[len(arrived)]
        blocks = zip(TARGET_SLOTS, HOST_SLOTS, strict=True)
        arrived.append(all(rig.device_blocks()[target][:end] == rig.host_block(slot)[:end] for target, slot in blocks))
        advance(entry)

    monkeypatch.setattr(rig.progress, "advance", look)

    rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES), transfer=77))

    assert arrived == [True] * STRIPS[order]
    assert seen == [(77, layers, STATE_RUNNING) for layers in range(STRIPS[order])]
    assert rig.entry() == (77, STRIPS[order], STATE_DONE)


class DeferredCopier(MemoryCopier):
    """Takes every batch before it begins to copy, as a copier does whose copies go on by themselves."""

    def copy(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return super().copy(list(batches))

    def copy_summed(self, batches: Iterable[Batch], per_sum: int) -> Iterator[bytes]:
        return super().copy_summed(list(batches), per_sum)


def test_copier_may_take_batches_ahead(order: PageOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copier that gives batches back later than it takes them stores and loads the same bytes, layer by layer."""
    monkeypatch.setattr(block_copy, "PIECES_MAX", 1)
    with host_rig(order, DeferredCopier) as rig:
        test_stored_blocks_come_back(rig, order)


def test_failed_load_is_told(watched: tuple[HostRig, WatchingCopier], order: PageOrder) -> None:
    """A load that an error ends in the middle is failed in the page."""
    rig, copier = watched
    store_six(rig)

    def fail() -> None:
        raise OSError("broken")

    copier.watch = fail
    with pytest.raises(OSError, match="broken"):
        rig.transfers.load(load_of(span_of(TARGETS, HOST_RANGES)))

    assert rig.entry() == (2, 0, STATE_FAILED)


def broken(**changes: Any) -> tuple[Span, ...]:
    return (span_of([(1, 2)], [(0, 2)])._replace(**changes),)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        (broken(keys=b"k" * 31), "2 slots for 1 keys"),
        (broken(keys=b"k" * 16), "2 slots for 1 keys"),
        (broken(parent=b"p" * 15), "a parent of 15 bytes at depth 0"),
        (broken(device=array("i", [1])), "shorter"),
        (broken(device=one_range(1, 3)), "3 slots for 2 keys"),
        (broken(host=one_range(20, 2)), "host slots from 20 to 21 of 21"),
        (broken(device=one_range(15, 2)), "blocks of the shard from 15 to 16 of 16"),
        (broken(host=array("i", [1, 1, 1, 1])), "host slots: one is named twice"),
        ((*broken(), *broken()), "blocks of the shard: one is named twice"),
    ],
)
def test_orders_that_make_no_sense_touch_nothing(rig: HostRig, spans: Sequence[Span], reason: str) -> None:
    """Keys and slots that do not pair, do not exist or come twice are refused before any byte or header changes."""
    store_six(rig)
    device, host = rig.device_blocks(), bytes(rig.host.view)

    with pytest.raises((ValueError, BadRequest), match=reason):
        rig.transfers.store(store_of(*spans))
    with pytest.raises((ValueError, BadRequest), match=reason):
        rig.transfers.load(load_of(*spans))

    assert (rig.device_blocks(), bytes(rig.host.view)) == (device, host)
    assert rig.entry() == (2, 0, STATE_FAILED)


def test_pools_that_do_not_fit_are_refused(rig: HostRig) -> None:
    """A host pool for blocks of another size, or without a part for the shard, is refused at the start."""
    pages = pool_geometry(rig.layout, SLOTS).at(rig.device.address)
    other = msgspec.structs.replace(HOST, block_bytes=BLOCK_BYTES + 1)

    for host, shard, reason in [(other, 0, "the shard's blocks have 544 bytes"), (HOST, SHARDS, "has parts for 2")]:
        with pytest.raises(ValueError, match=reason):
            BlockTransfers(pages, host, shard, rig.host.view, namespace=NAMESPACE, fingerprint=FINGERPRINT)
