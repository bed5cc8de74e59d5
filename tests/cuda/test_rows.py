"""Which pieces are copied as rows: every piece once, with the addresses it had."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.blocks.copy import Batch, CopyPlan, MemoryCopier
from kvcached_client.blocks.pages import LayerPages
from kvcached_client.cuda import driver as cuda_driver
from kvcached_client.cuda.allocations import Allocations
from kvcached_client.cuda.copier import CudaCopier
from kvcached_client.cuda.driver import CudaFailure
from kvcached_client.cuda.rows import ROWS_MIN, Pieces, Rows, split

PITCH_MAX = 1 << 20


def listed(pieces: Pieces) -> list[tuple[int, int, int]]:
    return list(zip(*(column.tolist() for column in pieces), strict=True))


def unrolled(rows: Rows | None) -> list[tuple[int, int, int]]:
    """The pieces that rows stand for."""
    if rows is None:
        return []
    return [
        (to + row * to_pitch * to_parts, of + row * of_pitch * of_parts, width)
        for to, of, width, height, to_pitch, of_pitch, to_parts, of_parts in zip(
            *(column.tolist() for column in rows), strict=True
        )
        for row in range(height)
    ]


def bytes_of(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Where every byte of pieces goes, and from where: pieces back to back may be copied as one."""
    return [(to + at, of + at) for to, of, size in pieces for at in range(size)]


@st.composite
def blocks_of_pieces(draw: st.DrawFn) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    """Pieces of some blocks: runs one after the other, some long, some short, some that meet."""
    pieces: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(1, 6))):
        size, to_step, of_step = draw(st.integers(1, 3)), draw(st.integers(-1, 4)), draw(st.integers(-1, 4))
        to, of = draw(st.integers(100, 130)), draw(st.integers(100, 130))
        if pieces and (to + of) % 2:
            to, of = pieces[-1][0] + to_step, pieces[-1][1] + of_step
        pieces += [(to + each * to_step, of + each * of_step, size) for each in range(draw(st.integers(1, 12)))]
    moves = [(1000 * draw(st.integers(0, 9)), 1000 * draw(st.integers(0, 9)), 0) for _ in range(3)]
    blocks = [np.add(pieces, move) for move in moves]
    if draw(st.booleans()):  # the last layer has another stride
        blocks[-1][-1, 0] += 1
    return np.array(blocks[: draw(st.integers(0, 3))], np.int64).reshape(-1, len(pieces), 3)


@given(numbers=blocks_of_pieces(), data=st.data())
def test_every_piece_is_copied_once(
    numbers: np.ndarray[tuple[int, int, int], np.dtype[np.int64]], data: st.DataObject
) -> None:
    """What is left and what rows stand for are the bytes of the pieces, each as often as it was there.

    And no copy has bytes of two allocations.
    """
    size = numbers.shape[1]
    where = np.array(data.draw(st.lists(st.integers(1, 2), min_size=size, max_size=size)), np.int64)
    rows, left = split(numbers, 5000, 7000, PITCH_MAX, where)

    pieces = [(to + 5000, of + 7000, size) for to, of, size in numbers.reshape(-1, 3).tolist()]
    assert sorted(bytes_of(unrolled(rows) + listed(left))) == sorted(bytes_of(pieces))
    if rows is not None:
        assert rows.heights.min() >= ROWS_MIN
        assert (np.minimum(rows.destination_pitches, rows.source_pitches) >= rows.widths).all()


def in_one(numbers: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """All pieces of a block are in one allocation."""
    return np.zeros(numbers.shape[1], np.int64)


def split_blocks(
    pages: list[LayerPages], allocations: list[int] | None = None
) -> tuple[Rows | None, Pieces, list[tuple[int, int, int]]]:
    """What becomes of four scattered blocks that go to the host; last, their pieces.

    Args:
        pages: of the layers.
        allocations: that these are in; None = one.
    """
    plan = CopyPlan(pages, host_address=1 << 40)
    block_bytes = sum(page.page_bytes for page in pages)
    (batch,) = plan.by_block([5, 2, 9, 0], [block_bytes * place for place in (7, 1, 3, 0)], to_host=True)
    numbers = np.frombuffer(batch.pieces, np.int64).reshape(-1, batch.per_block, 3)
    where = in_one(numbers) if allocations is None else np.array(allocations, np.int64)
    return *split(numbers, batch.destination, batch.source, PITCH_MAX, where), pieces_of([batch])


@pytest.mark.parametrize(("layers", "gap"), [(8, 4096), (32, 4096), (33, 5000)])
def test_block_is_one_copy(layers: int, gap: int) -> None:
    """The layers of a block are the rows of one copy, whatever lies between the layers."""
    pages = [LayerPages((1 << 30) + gap * layer, 256, 256) for layer in range(layers)]
    rows, left, _ = split_blocks(pages)

    assert rows is not None
    assert rows.heights.tolist() == [layers] * 4
    assert listed(left) == []


def test_rows_end_with_their_allocation() -> None:
    """Layers at even distances in two allocations are rows of two copies, and a single one in a third is a piece."""
    pages = [LayerPages((1 << 30) + 4096 * layer, 256, 256) for layer in range(20)]
    rows, left, pieces = split_blocks(pages, [5] * 8 + [6] * 11 + [7])

    assert rows is not None
    assert rows.heights.tolist() == [8, 11] * 4
    assert sorted(unrolled(rows) + listed(left)) == pieces


def test_pages_back_to_back_in_two_allocations_are_two_pieces() -> None:
    """No copy leaves its allocation, be it one of bytes that follow each other."""
    pages = [LayerPages((1 << 30) + 256 * layer, 256, 32 * 256) for layer in range(32)]
    rows, left, _ = split_blocks(pages, [5] * 16 + [6] * 16)

    assert rows is None
    assert left[2].tolist() == [16 * 256] * 8
    assert sorted(bytes_of(unrolled(rows) + listed(left))) == sorted(bytes_of(split_blocks(pages)[2]))


def test_neighbouring_blocks_in_two_allocations_are_two_pieces() -> None:
    """The last layer of a block and the first one of the next may meet on both sides, and are two copies then."""
    numbers = np.array([[[0, 1000, 50], [50, 2000, 60]], [[110, 2060, 50], [160, 3060, 60]]])
    _, one = split(numbers, 0, 0, PITCH_MAX, np.array([1, 1]))
    _, two = split(numbers, 0, 0, PITCH_MAX, np.array([1, 2]))

    assert one[2].tolist() == [50, 110, 60]
    assert two[2].tolist() == [50, 60, 50, 60]


class Ranges:
    """A driver that knows ranges of addresses."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.ranges, self.asked = list(ranges), list[int]()

    def call(self, name: str, address: int) -> tuple[int, int]:
        assert name == "cuMemGetAddressRange"
        self.asked.append(address)
        return next(each for each in self.ranges if each[0] <= address < sum(each) or each == self.ranges[-1])


def test_driver_is_asked_once_for_each_allocation() -> None:
    """Addresses have the start of theirs, in any order; what was asked for is known from then on."""
    driver: Any = Ranges((500, 100), (600, 50), (100, 200))
    allocations = Allocations(driver)
    for addresses, expected in (
        ([610, 100, 599], [600, 100, 500]),
        ([299, 649, 500, 501], [100, 600, 500, 500]),
    ):
        assert allocations.starts(np.array(addresses)).tolist() == expected
    assert sorted(driver.asked) == [100, 599, 610]


def test_memory_that_was_made_anew_is_asked_for_again() -> None:
    """Where an allocation is larger than the one that was there, the new one counts."""
    driver: Any = Ranges((500, 100))
    allocations = Allocations(driver)
    assert allocations.starts(np.array([510])).tolist() == [500]
    driver.ranges = [(500, 300)]

    assert allocations.starts(np.array([510, 700])).tolist() == [500, 500]
    assert allocations.starts(np.array([799])).tolist() == [500]


def test_answer_about_other_memory_is_a_failure() -> None:
    """A driver that names a range without the address is not asked for ever."""
    driver: Any = Ranges((500, 100))
    with pytest.raises(CudaFailure, match="0x2bc is in 0x1f4 to 0x258, it says"):
        Allocations(driver).starts(np.array([700]))


def test_keys_and_values_apart_are_two_copies() -> None:
    """Where pages of K and of V alternate at uneven distances, a block is a copy of its K and one of its V."""
    starts = ((1 << 30) + 10_000 * layer for layer in range(16))
    pages = [LayerPages(start + part, 256, 256) for start in starts for part in (0, 4096)]
    rows, left, _ = split_blocks(pages)

    assert rows is not None
    assert rows.heights.tolist() == [16] * 8
    assert listed(left) == []


def test_layers_back_to_back_are_one_piece() -> None:
    """Where a block is one run on the device as well, it is one piece, and no rows."""
    pages = [LayerPages((1 << 30) + 256 * layer, 256, 32 * 256) for layer in range(32)]
    rows, left, _ = split_blocks(pages)

    assert rows is None
    assert left[2].tolist() == [32 * 256] * 4


def test_layers_at_two_distances_are_two_copies() -> None:
    """Where the distance changes, the layer between belongs to the first copy alone."""
    starts = [(1 << 30) + 1000 * min(layer, 10) + 3000 * max(0, layer - 10) for layer in range(20)]
    rows, left, pieces = split_blocks([LayerPages(start, 256, 256) for start in starts])

    assert rows is not None
    assert rows.heights.tolist() == [11, 9] * 4
    assert sorted(unrolled(rows)) == pieces
    assert listed(left) == []


def test_layers_far_apart_are_rows_with_a_shorter_pitch() -> None:
    """A device refuses a pitch above its limit: it is told a part of the distance, and how many parts there are."""
    pages = [LayerPages((1 << 30) + 3 * PITCH_MAX * layer, 256, 256) for layer in range(32)]
    rows, left, pieces = split_blocks(pages)

    assert rows is not None
    assert set(rows.source_pitches.tolist()) == {PITCH_MAX}
    assert set(rows.source_parts.tolist()) == {3}
    assert sorted(unrolled(rows)) == pieces
    assert listed(left) == []


def test_layers_at_an_odd_distance_beyond_the_pitch_are_pieces() -> None:
    """A distance that has no equal parts below the limit is none that a device copies."""
    prime = 2_097_169
    pages = [LayerPages((1 << 30) + prime * layer, 256, 256) for layer in range(32)]
    rows, left, pieces = split_blocks(pages)

    assert rows is None
    assert sorted(listed(left)) == pieces


def test_layers_in_reverse_are_pieces() -> None:
    """A pitch is never negative: layers that lie the other way round are copied as pieces."""
    pages = [LayerPages((1 << 30) - 4096 * layer, 256, 256) for layer in range(32)]
    rows, left, pieces = split_blocks(pages)

    assert rows is None
    assert sorted(listed(left)) == pieces


def test_layers_with_strides_of_their_own_are_pieces() -> None:
    """Where a layer's blocks are further apart than another's, distances differ from block to block."""
    pages = [LayerPages((1 << 30) + 40_960 * layer, 256, 256 + 256 * (layer == 5)) for layer in range(16)]
    rows, left, pieces = split_blocks(pages)

    assert rows is None
    assert sorted(listed(left)) == pieces


class Grouping(MemoryCopier):
    """It takes some layers of each size at once, and those of one allocation only."""

    def __init__(self, at_once: dict[int, int], *allocations: int) -> None:
        self._at_once, self._allocations = at_once, allocations

    def layers_at_once(self, page_bytes: int, blocks: int) -> int:
        return self._at_once[page_bytes]

    def allocations(self, addresses: Sequence[int]) -> Sequence[int]:
        return self._allocations


@pytest.mark.parametrize("blocks", [3, 40])
def test_groups_of_layers_hold_every_page_once(blocks: int) -> None:
    """Groups are neighbours of one size at even distances in one allocation; they have every page of a load once."""
    starts = [1 << 30, (1 << 30) + 100_000, (1 << 30) + 200_000, (1 << 30) + 250_000, (1 << 30) + 300_000]
    sizes = [256, 256, 256, 256, 128]
    pages = [LayerPages(start, size, size) for start, size in zip(starts, sizes, strict=True)]
    plan = CopyPlan(pages, host_address=1 << 40)
    groups = plan.layer_groups(Grouping({256: 4, 128: 4}, 0, 0, 0, 0, 0), blocks)
    numbers = list(range(blocks))
    places = [sum(sizes) * number for number in numbers]

    assert groups == [range(3), range(3, 4), range(4, 5)]
    two = plan.layer_groups(Grouping({256: 2, 128: 1}, 0, 0, 0, 0, 0), blocks)
    assert two == [range(2), range(2, 4), range(4, 5)]
    apart = plan.layer_groups(Grouping({256: 4, 128: 4}, 7, 8, 8, 8, 8), blocks)
    assert apart == [range(1), range(1, 3), range(3, 4), range(4, 5)]
    assert pieces_of(plan.by_layer(numbers, places, groups)) == pieces_of(plan.by_layer(numbers, places))


def pieces_of(batches: Iterable[Batch]) -> list[tuple[int, int, int]]:
    """All pieces of batches, by their addresses."""
    found: list[tuple[int, int, int]] = []
    for batch in batches:
        numbers = iter(batch.pieces)
        found += [
            (to + batch.destination, of + batch.source, size)
            for to, of, size in zip(numbers, numbers, numbers, strict=True)
        ]
    return sorted(found)


class RefusingStream:
    """A stream of a driver that takes rows and refuses the pieces after them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def copy_rows(self, rows: Rows, *, to_host: bool) -> None:
        self.done.append("rows")

    def copy(self, *_: object) -> None:
        raise CudaFailure("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")

    def synchronize(self) -> None:
        self.done.append("waited for")


def test_rows_that_are_queued_before_a_refusal_are_waited_for() -> None:
    """A batch of which only some is queued fails when that is over: nobody else would wait for it."""
    stream = RefusingStream()
    driver = SimpleNamespace(call=lambda *_: (0, 1 << 40), devices=lambda: 1)  # all is one allocation
    device: Any = SimpleNamespace(make_stream=lambda: stream, attribute=lambda _: PITCH_MAX, driver=driver)
    copier = CudaCopier(device, range(1 << 20))
    rows = [number for row in range(ROWS_MIN) for number in (64 * row, (1 << 30) + 4096 * row, 64)]
    pieces = array("q", [*rows, 64 * ROWS_MIN, (1 << 30) + 99_999, 32])
    with pytest.raises(CudaFailure, match="INVALID_VALUE"):
        list(copier.copy([Batch(pieces, 0, 0, ROWS_MIN + 1)]))

    assert stream.done == ["rows", "waited for"]


@pytest.mark.parametrize("way", ["native", "ctypes"])
def test_calls_of_the_driver_end_with_the_first_that_fails(way: str) -> None:
    """Both ways to queue copies of rows give the driver each one's parameters and the stream, until it refuses one."""
    queue_each = cuda_driver.native_queue_each if way == "native" else cuda_driver._queue_each
    if queue_each is None:
        pytest.skip("the native helper was not built: pip install -e ., with a C compiler")
    parameters, told = bytearray(range(12)), []

    def call(at: int, stream: int) -> int:
        told.append((ctypes.string_at(at, 3), stream))
        return 719 * (ctypes.string_at(at, 1) == b"\x06")

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(call)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None

    assert queue_each(address, memoryview(parameters), 3, 0xABCD) == 719
    assert told == [(bytes([first, first + 1, first + 2]), 0xABCD) for first in (0, 3, 6)]
    assert queue_each(address, memoryview(parameters)[:6], 3, 0xABCD) == 0
    assert len(told) == 5


def test_native_calls_refuse_half_of_the_parameters() -> None:
    """Parameters that are no whole number of calls are a mistake, and nothing is called."""
    if cuda_driver.native_queue_each is None:
        pytest.skip("the native helper was not built: pip install -e ., with a C compiler")
    for size in (5, 0):
        with pytest.raises(ValueError, match=f"12 bytes are no multiple of {size}"):
            cuda_driver.native_queue_each(0, memoryview(bytearray(12)), size, 0)


@pytest.mark.parametrize("to_host", [True, False])
def test_many_pieces_are_planned_as_few_are(monkeypatch: pytest.MonkeyPatch, to_host: bool) -> None:
    """The plan of many pieces, which numpy makes, is that of Python."""
    pages = [LayerPages((1 << 30) + 5000 * layer, 256 + layer, 512) for layer in range(7)]
    plan = CopyPlan(pages, host_address=1 << 40)
    blocks, places = list(range(60, 0, -1)), [3000 * each for each in range(60)]
    many = list(plan.by_block(blocks, places, to_host=to_host))
    monkeypatch.setattr("kvcached_client.blocks.copy._PIECES_FOR_NUMPY", 1 << 30)

    assert many == list(plan.by_block(blocks, places, to_host=to_host))
