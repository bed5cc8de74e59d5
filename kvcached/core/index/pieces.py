"""Pieces of paths: consecutive blocks by their depths."""

from __future__ import annotations

from typing import NamedTuple

from kvcached.core.slots.ranges import Ranges, pairs


class Piece(NamedTuple):
    """Blocks ``[start, end)`` of a path."""

    start: int
    end: int


def gaps_of(ranges: Ranges[int], wanted: int) -> list[tuple[int, int]]:
    """Blocks [first, end) among the first `wanted` that are holes, or that the ranges do not reach."""
    gaps: list[tuple[int, int]] = []
    position = 0
    for first, count in pairs(ranges):
        end = min(position + count, wanted)
        if first < 0 and position < wanted:
            gaps.append((position, end))
        position += count
    if position < wanted:
        gaps.append((position, wanted))
    return gaps


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
