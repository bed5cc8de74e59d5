"""Layers of a block, or blocks of a layer, that a device copies as the rows of one copy.

The pages of a block lie at a stride on the device, and back to back in the host pool. Where the distances are even on
both sides, one copy of rows is faster than a batch of pieces, the more so the smaller they are, and takes none of the
engine's multiprocessors, which a batch of small pieces does: see decision 0065. Rows do not leave their allocation:
where each layer has one of its own, small pages of neighbouring blocks are rows instead (decision 0069).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached_client.cuda import driver
from kvcached_client.cuda.driver import Addresses

#: Fewer rows are no faster than a batch. Small pieces are not copied in batches.
ROWS_MIN: Final = 8
SMALL_ROWS_MIN: Final = 2
#: Pages of K and of V may alternate: every second page is at an even distance then.
_PERIODS: Final = (1, 2)
#: Distances beyond the greatest pitch are those of layers, which are whole pages of memory.
_PARTS_TRIED: Final = 8

Pieces = tuple[Addresses, Addresses, Addresses]  #: destinations, sources, sizes
#: Pieces of blocks: [blocks, pieces of a block, 3], as the numbers of a `Batch`.
Numbers = npt.NDArray[np.int64]
_NO_PIECES: Final[Pieces] = (np.zeros(0, np.uint64),) * 3


class Rows(NamedTuple):
    """Copies of rows, in columns; all are uint64.

    Attributes:
        destinations: addresses of the first rows.
        sources: likewise.
        widths: bytes in a row.
        heights: numbers of rows.
        destination_pitches: bytes from one row to the next, divided by the parts.
        source_pitches: likewise.
        destination_parts: for the driver, rows are planes of so many lines, of which the first one is copied. So they
            can be further apart than a pitch may be, as the layers of a large pool are.
        source_parts: likewise.
    """

    destinations: Addresses
    sources: Addresses
    widths: Addresses
    heights: Addresses
    destination_pitches: Addresses
    source_pitches: Addresses
    destination_parts: Addresses
    source_parts: Addresses


class _Run(NamedTuple):
    """Pieces of every block that are rows of one copy: every `period`-th from the first one on."""

    first: int
    height: int
    period: int
    destination_pitch: int
    source_pitch: int
    destination_parts: int
    source_parts: int


class _Shape(NamedTuple):
    """What becomes of the pieces of a block, wherever the block is.

    Attributes:
        rows: [runs], the first piece of each run of rows.
        columns: [6, runs], uint64: widths, and all that is behind them in `Rows`.
        left: the first of the pieces that are one piece each, and no rows.
        left_sizes: what these have together.
        left_allocations: that these are in.
    """

    rows: Numbers
    columns: Addresses
    left: Numbers
    left_sizes: Numbers
    left_allocations: Numbers


class Neighbours(NamedTuple):
    """Where blocks are neighbours in the host pool.

    Attributes:
        column: of the host, in the numbers of pieces: 0 if it is the destination, 1 if it is the source.
        block_bytes: from a block to the next one in its slab. No other distance is one within registered memory.
    """

    column: int
    block_bytes: int


def split(
    numbers: Numbers,
    destination: int,
    source: int,
    pitch_max: int,
    allocations: Numbers,
    neighbours: Neighbours | None = None,
) -> tuple[Rows | None, Pieces]:
    """What can be copied as rows, and the pieces that are left; every byte is in one of them.

    Args:
        numbers: of whole blocks.
        destination: what the offsets of destinations are from.
        source: likewise.
        pitch_max: bytes between two rows, at most.
        allocations: [pieces of a block], names the allocation of the device that each is in. Rows do not leave it.
        neighbours: small pieces of blocks that are neighbours on both sides are rows, too; None = they are not.
    """
    if not len(numbers):
        return None, addressed(numbers.reshape(-1, 3), destination, source)
    places = numbers.copy()
    places[:, :, :2] -= numbers[:, :1, :2]
    if len(numbers) > 1 and (places[1:] != places[0]).any():  # layers with strides of their own
        return None, addressed(_merged_apart(numbers, allocations), destination, source)
    shape = _shape(places[0].tobytes(), (allocations - allocations[0]).tobytes(), pitch_max)
    rows = [_rows(numbers, shape, destination, source)] if len(shape.rows) else []
    pieces = _NO_PIECES
    if len(shape.left):
        left = numbers[:, shape.left]
        left[:, :, 2] = shape.left_sizes
        if neighbours is not None and shape.left_sizes.max() < min(neighbours.block_bytes, driver.SMALL_PIECE_BYTES):
            along, left = _along_blocks(left, neighbours, destination, source)
            rows += along
        pieces = addressed(_merged_apart(left, shape.left_allocations), destination, source)
    return (Rows(*map(np.concatenate, zip(*rows, strict=True))) if rows else None), pieces


def _along_blocks(blocks: Numbers, neighbours: Neighbours, destination: int, source: int) -> tuple[list[Rows], Numbers]:
    """Rows of blocks that are neighbours on both sides, one copy for each piece of theirs; and the other blocks.

    Layers that are in allocations of their own are no rows of one copy, but the blocks of each layer are.
    """
    host, device = neighbours.column, 1 - neighbours.column
    steps = np.diff(blocks[:, 0, :2], axis=0)  # the same for all pieces of a block
    widest = int(blocks[0, :, 2].max())
    is_next = ((steps[:, host] == neighbours.block_bytes) & (steps[:, device] >= widest)).tolist()
    distances = steps[:, device].tolist()
    runs: list[tuple[int, int, int]] = []
    first = 0
    while first < len(is_next):
        height = 1
        while first + height <= len(is_next) and is_next[first + height - 1]:
            if distances[first + height - 1] != distances[first]:
                break
            height += 1
        if height > 1:
            runs.append((first, height, distances[first]))
        first += height
    if not runs:
        return [], blocks
    taken = {block for first, height, _ in runs for block in range(first, first + height)}
    firsts, heights, pitches = np.array(runs, np.int64).T
    starts = blocks[firsts].reshape(-1, 3).astype(np.uint64)
    columns = np.repeat(np.array((heights, pitches), np.uint64), blocks.shape[1], axis=1)
    ones = np.ones(len(starts), np.uint64)
    to, of = starts[:, 0] + np.uint64(destination), starts[:, 1] + np.uint64(source)
    apart = ones * np.uint64(neighbours.block_bytes), columns[1]  # on the host, on the device
    rows = Rows(to, of, starts[:, 2], columns[0], apart[host], apart[device], ones, ones)
    return [rows], blocks[[block for block in range(len(blocks)) if block not in taken]]


@lru_cache(maxsize=64)
def _shape(block: bytes, allocations: bytes, pitch_max: int) -> _Shape:
    """The shape of a block, of its pieces relative to the first one: the same for all blocks of an engine."""
    numbers, parts = np.frombuffer(block, np.int64).reshape(-1, 3), np.frombuffer(allocations, np.int64)
    ends = numbers[:-1, :2] + numbers[:-1, 2:]
    follows = (ends == numbers[1:, :2]).all(1) & (parts[:-1] == parts[1:])  # back to back on both sides: one piece
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    sizes = np.add.reduceat(numbers[:, 2], firsts)
    runs = _runs(np.column_stack((numbers[firsts, :2], sizes, parts[firsts])).tolist(), pitch_max)
    taken = {run.first + run.period * row for run in runs for row in range(run.height)}
    left = np.array([index for index in range(len(firsts)) if index not in taken], np.int64)
    rows = np.array([run.first for run in runs], np.int64)
    columns = np.array([(sizes[run.first], run.height, *run[3:]) for run in runs], np.uint64).reshape(-1, 6)
    return _Shape(firsts[rows], columns.T.copy(), firsts[left], sizes[left], parts[firsts][left])


def _merged_apart(blocks: Numbers, allocations: Numbers) -> Numbers:
    """As `merged`, of pieces of blocks; none leaves its allocation."""
    where = np.tile(allocations, len(blocks))
    return merged(blocks.reshape(-1, 3), where[:-1] != where[1:])


def merged(numbers: Numbers, apart: npt.NDArray[np.bool] | None = None) -> Numbers:
    """As few copies as possible. None leaves its slab, for each begins with headers, which are not copied.

    Args:
        numbers: of pieces.
        apart: whether each piece and the next one are two copies in any case; None = no two are.
    """
    begins = (numbers[:-1, :2] + numbers[:-1, 2:] != numbers[1:, :2]).any(1)
    if apart is not None:
        begins |= apart
    first = np.flatnonzero(np.concatenate((np.ones(min(len(numbers), 1), np.bool), begins)))
    fewer = numbers[first]
    if len(first) < len(numbers):
        fewer[:, 2] = np.add.reduceat(numbers[:, 2], first)
    return fewer


def addressed(numbers: Numbers, destination: int, source: int) -> Pieces:
    """Pieces by their addresses."""
    unsigned = numbers.astype(np.uint64)
    return (
        unsigned[:, 0] + np.uint64(destination),
        unsigned[:, 1] + np.uint64(source),
        np.ascontiguousarray(unsigned[:, 2]),
    )


def is_small(size_bytes: int) -> bool:
    """Whether pieces of a size are copied as rows or one by one, and never in a batch."""
    return size_bytes < driver.SMALL_PIECE_BYTES


def by_size(pieces: Pieces) -> tuple[Pieces, Pieces]:
    """Small pieces, and all others."""
    which = pieces[2] < driver.SMALL_PIECE_BYTES
    return _some(pieces, which), _some(pieces, ~which) if which.any() else pieces


def _some(pieces: Pieces, which: npt.NDArray[np.bool]) -> Pieces:
    destinations, sources, sizes = (column[which] for column in pieces)
    return destinations, sources, sizes


def _runs(pieces: list[list[int]], pitch_max: int) -> list[_Run]:
    """The runs among a block's pieces."""
    tried = [
        [
            _Run(start + period * first, height, period, *pitches)
            for start in range(period)
            for first, height, pitches in _even(pieces[start::period], pitch_max)
        ]
        for period in _PERIODS
    ]
    return min(tried, key=lambda runs: len(runs) - sum(run.height for run in runs))  # the fewest copies


def _even(pieces: list[list[int]], pitch_max: int) -> list[tuple[int, int, tuple[int, int, int, int]]]:
    """What is long enough, in one allocation, and at even distances on both sides.

    Returns:
        First piece, number of pieces, pitches and parts, of each.
    """
    found: list[tuple[int, int, tuple[int, int, int, int]]] = []
    first = 0
    while first + 1 < len(pieces):
        size, step = pieces[first][2], _step(pieces, first)
        height = 1
        while first + height < len(pieces) and pieces[first + height][2:] == pieces[first][2:]:
            if _step(pieces, first + height - 1) != step:
                break
            height += 1
        to, of = (_parts(distance, size, pitch_max) for distance in step)
        if height >= (SMALL_ROWS_MIN if is_small(size) else ROWS_MIN) and to and of:
            found.append((first, height, (step[0] // to, step[1] // of, to, of)))
            first += height
        else:
            first += max(1, height - 1)  # the last piece may begin another run
    return found


def _parts(distance: int, width: int, pitch_max: int) -> int:
    """The fewest equal parts of a distance, none of them longer than a pitch may be; 0 if there are none."""
    fewest = max(1, -(-distance // pitch_max))
    for parts in range(fewest, fewest + _PARTS_TRIED):
        if distance % parts == 0 and distance // parts >= width:
            return parts
    return 0


def _step(pieces: list[list[int]], index: int) -> tuple[int, int]:
    """From a piece to the next one, in the destination and in the source."""
    (to, of, *_), (next_to, next_of, *_) = pieces[index : index + 2]
    return next_to - to, next_of - of


def _rows(numbers: Numbers, shape: _Shape, destination: int, source: int) -> Rows:
    firsts = numbers[:, shape.rows].reshape(-1, 3).astype(np.uint64)
    columns = np.tile(shape.columns, (1, len(numbers)))
    return Rows(firsts[:, 0] + np.uint64(destination), firsts[:, 1] + np.uint64(source), *columns)
