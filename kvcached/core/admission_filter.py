"""Which blocks engines in offload mode have offered lately, so that a second offer of one can be told from a first.

Keys are chained: whoever offers a block has all before it. So what is asked is how deep a chain is known, and a block
that was forgotten meanwhile changes nothing as long as one behind it is remembered.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached.core.index.run import KEY_SIZE

_Words: TypeAlias = npt.NDArray[np.uint64]

#: Blocks that are remembered at most, of all namespaces together: 8 MiB. A power of two.
FILTER_BLOCKS_MAX = 1 << 20
_WORD_BYTES = KEY_SIZE // 2


class AdmissionFilter:
    """A table with one place for each first half of a key, where the second half of the last such key stands.

    A newer block may so take the place of an older one. Memory is taken with the first block that is noted.
    """

    def __init__(self, places: int = FILTER_BLOCKS_MAX) -> None:
        self._places = places
        self._marks: _Words | None = None

    def depth(self, namespace: bytes, generation: int, keys: bytes) -> int:
        """How many leading blocks have been noted, as the deepest one that is known says."""
        if self._marks is None:
            return 0
        places, marks = self._split(namespace, generation, keys)
        known = np.flatnonzero(self._marks[places] == marks)
        return int(known[-1]) + 1 if len(known) else 0

    def note(self, namespace: bytes, generation: int, keys: bytes) -> None:
        """Blocks of a namespace have been offered."""
        if self._marks is None:
            self._marks = np.zeros(self._places, np.uint64)
        places, marks = self._split(namespace, generation, keys)
        self._marks[places] = marks

    def _split(self, namespace: bytes, generation: int, keys: bytes) -> tuple[_Words, _Words]:
        """Where each block stands, and what stands there; 0 is nothing."""
        words = np.frombuffer(keys, np.uint64).reshape(-1, KEY_SIZE // _WORD_BYTES)
        first = int.from_bytes(namespace[:_WORD_BYTES], "little") ^ generation
        second = int.from_bytes(namespace[_WORD_BYTES:KEY_SIZE], "little")
        places = (words[:, 0] ^ np.uint64(first)) & np.uint64(self._places - 1)
        return places, (words[:, 1] ^ np.uint64(second)) | np.uint64(1)
