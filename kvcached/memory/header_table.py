"""The daemon's view of the headers of a host pool: many at once, where `blocks.header` has one.

A header is a row of 16 words of 8 bytes here.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.slabs import HEADER_BYTES

#: Headers, one row of 16 words each.
Words = npt.NDArray[np.uint64]

_WORD: Final = np.dtype("<u8")


class HeaderTable:
    """The headers of one host pool, whose size is a multiple of 128 bytes.

    Places are those of headers, in bytes from the start of the pool.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words: Words = np.frombuffer(memory, _WORD).reshape(-1, HEADER_BYTES // _WORD.itemsize)

    def claim(self, places: npt.NDArray[np.int64], epoch: int, session: int) -> None:
        """Say who may be writing the slots, as `blocks.header.write` says it of one: the first word comes last."""
        rows = places // HEADER_BYTES
        words = np.frombuffer(host_header.pack_claim(epoch, session), _WORD)
        self._words[rows, 1:] = words[1:]
        self._words[rows, 0] = words[0]

    def clear(self, place: int, size_bytes: int) -> None:
        """Zero what lies from `place` on, whatever it is; both are multiples of 128."""
        self._words[place // HEADER_BYTES : (place + size_bytes) // HEADER_BYTES] = 0

    def copy(self, place: int, count: int) -> Words:
        """So many headers from `place` on. Writers do not change what was copied."""
        first = place // HEADER_BYTES
        return self._words[first : first + count].copy()
