"""Many copies between two memories in one call. The interpreter lock is given up: copies hold up nobody."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable

try:
    from kvcached.worker import _native_copy
except ImportError:  # built where a C compiler was at hand
    native_copy_all: Callable[[array[int], int, int], None] | None = None
else:
    native_copy_all = _native_copy.copy_all


def copy_all(pieces: array[int], destination: int, source: int) -> None:
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
