"""Layers of a block that a device copies as the rows of one copy.

The pages of a block lie at a stride on the device, and back to back in the host pool. Where the distances are even on
both sides, one copy of rows is faster than a batch of pieces, the more so the smaller they are, and takes none of the
engine's multiprocessors, which a batch of small pieces does: see decision 0065.
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


def split(numbers: Numbers, destination: int, source: int, pitch_max: int) -> tuple[Rows | None, Pieces]:
    """What can be copied as rows, and the pieces that are left; every byte is in one of them.

    Args:
        numbers: of whole blocks.
        destination: what the offsets of destinations are from.
        source: likewise.
        pitch_max: bytes between two rows, at most.
    """
    steps = np.diff(numbers, axis=1)
    if not len(numbers) or (steps != steps[0]).any():  # layers with strides of their own
        return None, addressed(merged(numbers.reshape(-1, 3)), destination, source)
    numbers = _merged_in_blocks(numbers)
    runs = _runs(np.ascontiguousarray(numbers[0]).tobytes(), pitch_max)
    if not runs:
        return None, addressed(merged(numbers.reshape(-1, 3)), destination, source)
    taken = {run.first + run.period * row for run in runs for row in range(run.height)}
    left = numbers[:, [index for index in range(numbers.shape[1]) if index not in taken]]
    return _rows(numbers, runs, destination, source), addressed(merged(left.reshape(-1, 3)), destination, source)


def _merged_in_blocks(numbers: Numbers) -> Numbers:
    """The same bytes, with pages of a block that are back to back on both sides as one piece."""
    sizes = numbers[0, :, 2:]
    follows = (numbers[0, :-1, :2] + sizes[:-1] == numbers[0, 1:, :2]).all(1)
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    fewer = numbers[:, firsts]
    fewer[:, :, 2] = np.add.reduceat(numbers[:, :, 2], firsts, axis=1)
    return fewer


def merged(numbers: Numbers) -> Numbers:
    """As few copies as possible. None leaves its slab, for each begins with headers, which are not copied."""
    ends = numbers[:-1, :2] + numbers[:-1, 2:]
    first = np.flatnonzero(np.concatenate((np.ones(min(len(numbers), 1), np.bool), (ends != numbers[1:, :2]).any(1))))
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


@lru_cache(maxsize=64)
def _runs(block: bytes, pitch_max: int) -> tuple[_Run, ...]:
    """The runs of a block's pieces, which are the same in all blocks of an engine."""
    pieces: list[list[int]] = np.frombuffer(block, np.int64).reshape(-1, 3).tolist()
    tried = [
        tuple(
            _Run(start + period * first, height, period, *pitches)
            for start in range(period)
            for first, height, pitches in _even(pieces[start::period], pitch_max)
        )
        for period in _PERIODS
    ]
    return min(tried, key=lambda runs: len(runs) - sum(run.height for run in runs))  # the fewest copies


def _even(pieces: list[list[int]], pitch_max: int) -> list[tuple[int, int, tuple[int, int, int, int]]]:
    """What is long enough, and at even distances on both sides: first piece, number of pieces, pitches and parts."""
    found: list[tuple[int, int, tuple[int, int, int, int]]] = []
    first = 0
    while first + 1 < len(pieces):
        size, step = pieces[first][2], _step(pieces, first)
        height = 1
        while first + height < len(pieces) and pieces[first + height][2] == size:
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
    (to, of, _), (next_to, next_of, _) = pieces[index : index + 2]
    return next_to - to, next_of - of


def _rows(numbers: Numbers, runs: tuple[_Run, ...], destination: int, source: int) -> Rows:
    firsts, heights, _, *others = zip(*runs, strict=True)
    return Rows(
        *addressed(numbers[:, firsts].reshape(-1, 3), destination, source),
        *(np.tile(np.array(column, np.uint64), len(numbers)) for column in (heights, *others)),
    )
