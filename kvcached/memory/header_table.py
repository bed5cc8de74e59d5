"""The daemon's view of the headers of a pool: many at once, where `blocks.header` has one.

A header is a row of 16 words of 8 bytes here.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.host_layout import HEADER_BYTES

#: Headers, one row of 16 words each.
Words = npt.NDArray[np.uint64]

_WORD: Final = np.dtype("<u8")
#: The word of a header with the first half of its block's key.
_KEY_WORD: Final = 6


class HeaderTable:
    """The headers of one pool, in memory whose size is a multiple of 128 bytes.

    Places are those of headers, in bytes from the start of the memory; rows are counted from there, too.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory.cast("B")
        self._words: Words = np.frombuffer(memory, _WORD).reshape(-1, HEADER_BYTES // _WORD.itemsize)

    def claim(self, places: npt.NDArray[np.int64], epoch: int, session: int) -> None:
        """Say who may be writing the slots, as `blocks.header.write` says it of one: the first word comes last."""
        rows = places // HEADER_BYTES
        words = np.frombuffer(host_header.pack_claim(epoch, session), _WORD)
        self._words[rows, 1:] = words[1:]
        self._words[rows, 0] = words[0]

    @property
    def rows(self) -> int:
        """How many headers the memory has room for."""
        return len(self._words)

    def write(self, rows: array[int], headers: bytes) -> None:
        """Put headers, back to back, into rows, named as ranges: first and count by turns. First words come last."""
        if len(headers) == HEADER_BYTES:  # as most are while an engine decodes
            place = rows[0] * HEADER_BYTES
            host_header.write(self._memory[place : place + HEADER_BYTES], headers)
            return
        words = np.frombuffer(headers, _WORD).reshape(-1, HEADER_BYTES // _WORD.itemsize)
        done = 0
        for first, count in zip(rows[::2], rows[1::2], strict=True):
            target, source = self._words[first : first + count], words[done : done + count]
            target[:, 1:] = source[:, 1:]
            target[:, 0] = source[:, 0]
            done += count

    def clear_rows(self, rows: array[int]) -> None:
        """Zero the first words of rows, named as ranges: they are no headers any more."""
        for first, count in zip(rows[::2], rows[1::2], strict=True):
            self._words[first : first + count, 0] = 0

    def clear_chosen(self, chosen: npt.NDArray[np.bool_]) -> None:
        """As `clear_rows`, of those rows for which `chosen` is true."""
        self._words[chosen, 0] = 0

    def find(self, place: int, count: int, halves: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Which of `count` headers from `place` on have keys that begin with one of these halves, which are sorted."""
        first = place // HEADER_BYTES
        words = self._words[first : first + count, _KEY_WORD]
        places = np.minimum(np.searchsorted(halves, words), len(halves) - 1)
        return np.flatnonzero(halves[places] == words)

    def clear_places(self, places: npt.NDArray[np.int64]) -> None:
        """Zero the first words of some headers: they are no headers any more."""
        self._words[places // HEADER_BYTES, 0] = 0

    def clear(self, place: int, size_bytes: int) -> None:
        """Zero what lies from `place` on, whatever it is; both are multiples of 128."""
        self._words[place // HEADER_BYTES : (place + size_bytes) // HEADER_BYTES] = 0

    def named_rows(self) -> npt.NDArray[np.int64]:
        """Which rows begin as a header does."""
        return np.flatnonzero(self._words[:, 0])

    def copy(self, place: int, count: int) -> Words:
        """So many headers from `place` on. Writers do not change what was copied."""
        first = place // HEADER_BYTES
        return self._words[first : first + count].copy()
