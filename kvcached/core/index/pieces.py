"""Pieces of paths: consecutive blocks by their depths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcached.core.index.run import Run


class Piece(NamedTuple):
    """Blocks ``[start, end)`` of a path."""

    start: int
    end: int


def first_blocks(pieces: list[Piece], count: int) -> list[Piece]:
    """The first `count` blocks of the pieces."""
    first: list[Piece] = []
    for start, end in pieces:
        size = min(end - start, count)
        if not size:
            break
        first.append(Piece(start, start + size))
        count -= size
    return first


def pieces_of(depths: Iterable[int]) -> list[Piece]:
    """Blocks that are named one by one, in order."""
    pieces: list[Piece] = []
    for depth in depths:
        if pieces and pieces[-1].end == depth:
            pieces[-1] = Piece(pieces[-1].start, depth + 1)
        else:
            pieces.append(Piece(depth, depth + 1))
    return pieces


def by_run(run: Run, pieces: list[Piece]) -> list[tuple[Run, list[Piece]]]:
    """Blocks of the path to a run by the runs that they lie in, shallow ones first; counted from each run's first."""
    parts: list[tuple[Run, list[Piece]]] = []
    rest = pieces[:]
    while run.parent is not None and rest:
        own = [Piece(start - run.start, end - run.start) for start, end in _pop_deeper(rest, run.start)]
        if own:
            parts.append((run, own))
        run = run.parent
    parts.reverse()
    return parts


def _pop_deeper(pieces: list[Piece], depth: int) -> list[Piece]:
    """Remove the blocks from `depth` on in place and return them; a piece that reaches across is cut in two."""
    deeper: list[Piece] = []
    while pieces and pieces[-1].end > depth:
        start, end = pieces.pop()
        deeper.append(Piece(max(start, depth), end))
        if start < depth:
            pieces.append(Piece(start, depth))
    deeper.reverse()
    return deeper
