"""Many copies between two memories in one call. The interpreter lock is given up: copies hold up nobody."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Final

from xxhash import xxh3_128

try:
    from kvcached_client import _native_copy
except ImportError:  # built where a C compiler was at hand
    native_copy_all: Callable[[array[int] | memoryview, int, int], None] | None = None
    native_copy_summed: Callable[[array[int] | memoryview, int, int, int], bytes | None] | None = None
else:
    native_copy_all = _native_copy.copy_all
    native_copy_summed = _native_copy.copy_summed

_PIECE_NUMBERS: Final = 3


def copy_all(pieces: array[int] | memoryview, destination: int, source: int) -> None:
    """Copy pieces of memory.

    Args:
        pieces: int64 triples: offset from `destination`, offset from `source`, size, all in bytes. No piece may overlap
            another one's destination.
        destination: address of memory that is mapped as far as the pieces reach.
        source: the same.
    """
    if native_copy_all is not None:
        native_copy_all(pieces, destination, source)
        return
    move = ctypes.memmove
    triples = iter(pieces)
    for target, origin, size in zip(triples, triples, triples, strict=True):
        move(destination + target, source + origin, size)


def copy_summed(pieces: array[int] | memoryview, per_sum: int, destination: int, source: int) -> bytes:
    """Copy pieces of memory, with checksums of what was copied.

    Args:
        pieces: as in `copy_all`.
        per_sum: so many pieces have one checksum.
        destination: as in `copy_all`.
        source: as in `copy_all`.

    Returns:
        xxh3_128 of each group's bytes, in the order of the pieces, 16 bytes for each group.

    Raises:
        ValueError: the pieces are no groups of `per_sum`.
    """
    if native_copy_summed is not None:
        sums = native_copy_summed(pieces, per_sum, destination, source)
        if sums is not None:
            return sums
    numbers = per_sum * _PIECE_NUMBERS
    if per_sum < 1 or len(pieces) % numbers:
        raise ValueError(f"{len(pieces)} numbers are no groups of {per_sum} pieces")
    return b"".join(
        _copy_group(pieces[first : first + numbers], destination, source) for first in range(0, len(pieces), numbers)
    )


def _copy_group(pieces: array[int] | memoryview, destination: int, source: int) -> bytes:
    checksum = xxh3_128()
    for first in range(0, len(pieces), _PIECE_NUMBERS):  # each is summed while a cache has it
        copy_all(pieces[first : first + _PIECE_NUMBERS], destination, source)
        _, origin, size = pieces[first : first + _PIECE_NUMBERS]
        checksum.update((ctypes.c_ubyte * size).from_address(source + origin))
    return checksum.digest()
