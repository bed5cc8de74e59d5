"""The bytes of blocks between an engine's tensors and the host pool, with checksums taken on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client.batch_copy import copy_all, copy_summed
from kvcached_client.engine_pages import EnginePages
from kvcached_client.failpoints import failpoint
from kvcached_client.mapping import Buffer

#: Planned at once, so that the plan of a large job stays small.
_PIECES_MAX: Final = 8192

Indices = npt.NDArray[np.int64]


class PageCopier:
    """Copies whole blocks. Used by one thread; what it is given must exist, and nothing may be named twice.

    Blocks are indices in the engine's tensors, places are in bytes from the start of the host pool, one for each block.

    Args:
        pages: of the engine.
        memory: the host pool, writable.
    """

    def __init__(self, pages: EnginePages, memory: Buffer) -> None:
        self._owners = (pages, memory)
        self._host = ctypes.addressof(memory)
        self._addresses = np.array([layer.address for layer in pages.layers], np.int64)
        self._strides = np.array([layer.stride_bytes for layer in pages.layers], np.int64)
        self._sizes = np.array([layer.page_bytes for layer in pages.layers], np.int64)
        self._insides = np.cumsum(self._sizes) - self._sizes  #: where each layer is in a block of the host pool

    def to_host(self, blocks: Indices, places: Indices) -> bytes:
        """Copy blocks into the host pool.

        Returns:
            xxh3_128 of each block, back to back.
        """
        plan = self._plan(blocks, places, to_host=True)
        return b"".join(copy_summed(pieces, len(self._sizes), 0, 0) for pieces in plan)

    def to_engine(self, blocks: Indices, places: Indices) -> None:
        """Copy blocks out of the host pool."""
        for pieces in self._plan(blocks, places, to_host=False):
            copy_all(pieces, 0, 0)

    def to_engine_summed(self, blocks: Indices, places: Indices) -> bytes:
        """Copy blocks out of the host pool.

        Returns:
            xxh3_128 of each block, back to back.
        """
        plan = self._plan(blocks, places, to_host=False)
        return b"".join(copy_summed(pieces, len(self._sizes), 0, 0) for pieces in plan)

    def _plan(self, blocks: Indices, places: Indices, *, to_host: bool) -> Iterator[memoryview]:
        """A piece for each block and layer, block after block, in handy numbers. Offsets are addresses."""
        layers = len(self._sizes)
        planned = max(1, _PIECES_MAX // layers)
        host, engine = (0, 1) if to_host else (1, 0)
        for first in range(0, len(blocks), planned):
            some = slice(first, first + planned)
            pieces = np.empty((len(blocks[some]), layers, 3), np.int64)
            pieces[:, :, host] = self._host + places[some, None] + self._insides
            pieces[:, :, engine] = self._addresses + blocks[some, None] * self._strides
            pieces[:, :, 2] = self._sizes
            failpoint("attached.copy")
            yield pieces.reshape(-1).data
