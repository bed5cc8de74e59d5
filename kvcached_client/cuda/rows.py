"""Layers of a block that a device copies as the rows of one copy.

The pages of a block lie at a stride on the device, and back to back in the host pool. Where the distances are even on
both sides, one copy of rows takes a fraction of the processor's time that a batch of pieces does, and less of the
engine's: see decision 0065. Rows do not leave their allocation (decision 0069).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached_client.cuda.driver import Addresses

#: Fewer rows are no faster than a batch, whatever they have.
ROWS_MIN: Final = 8
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


def split(
    numbers: Numbers,
    destination: int,
    source: int,
    pitch_max: int,
    allocations: Numbers,
) -> tuple[Rows | None, Pieces]:
    """What can be copied as rows, and the pieces that are left; every byte is in one of them.

    Args:
        numbers: of whole blocks.
        destination: what the offsets of destinations are from.
        source: likewise.
        pitch_max: bytes between two rows, at most.
        allocations: [pieces of a block], names the allocation of the device that each is in. Rows do not leave it.
    """
    if not len(numbers):
        return None, _NO_PIECES
    places = numbers.copy()
    places[:, :, :2] -= numbers[:, :1, :2]
    if len(numbers) > 1 and (places[1:] != places[0]).any():  # layers with strides of their own
        return None, addressed(_merged_apart(numbers, allocations), destination, source)
    shape = _shape(places[0].tobytes(), (allocations - allocations[0]).tobytes(), pitch_max)
    rows = _rows(numbers, shape, destination, source) if len(shape.rows) else None
    if not len(shape.left):
        return rows, _NO_PIECES
    left = numbers[:, shape.left]
    left[:, :, 2] = shape.left_sizes
    return rows, addressed(_merged_apart(left, shape.left_allocations), destination, source)


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


def merged(numbers: Numbers, apart: npt.NDArray[np.bool_] | None = None) -> Numbers:
    """As few copies as possible, [3, copies]. None leaves its slab, for each begins with headers, which are not copied.

    Args:
        numbers: of pieces, [pieces, 3].
        apart: whether each piece and the next one are two copies in any case; None = no two are.
    """
    begins = (numbers[:-1, :2] + numbers[:-1, 2:] != numbers[1:, :2]).any(1)
    if apart is not None:
        begins |= apart
    first = np.flatnonzero(np.concatenate((np.ones(min(len(numbers), 1), np.bool_), begins)))
    fewer = numbers[first]
    if len(first) < len(numbers):
        fewer[:, 2] = np.add.reduceat(numbers[:, 2], first)
    return np.ascontiguousarray(fewer.T)


def addressed(copies: Numbers, destination: int, source: int) -> Pieces:
    """Copies of `merged` by their addresses."""
    destinations, sources, sizes = (copies + np.array(((destination,), (source,), (0,)))).view(np.uint64)
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
        if height >= ROWS_MIN and to and of:
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
