"""Which blocks left the index lately, and why: for people who ask why a prompt missed.

What an operation takes out of the index comes here in one piece, runs as they are, so that eviction pays next to
nothing for it. The pieces are looked through only when somebody asks, and dropped when nobody waits.
"""

from __future__ import annotations

from collections import deque

from kvcached.core.index.run import KEY_SIZE
from kvcached_client.types import MissReason

#: What is remembered of all namespaces together: at most 256 Ki blocks, fewer where runs are short.
EVICTION_LOG_BYTES_MAX = 4 << 20
#: Of one run besides its keys: an empty bytearray, and its places in memory and in a list.
RUN_OVERHEAD_BYTES = 88
#: Of one piece besides its runs: a tuple of four, an empty list, a number.
PIECE_OVERHEAD_BYTES = 192

#: The keys of runs that left one namespace for one reason, and what all of it takes, in bytes.
_Piece = tuple[bytes, MissReason, list[bytearray], int]


class EvictionLog:
    """The blocks that left the index last.

    Args:
        bytes_max: what is kept by `trim`.

    Attributes:
        size_bytes: what is kept now.
    """

    def __init__(self, bytes_max: int = EVICTION_LOG_BYTES_MAX) -> None:
        self._pieces: deque[_Piece] = deque()
        self.size_bytes = 0
        self.bytes_max = bytes_max

    def add(self, namespace: bytes, reason: MissReason, runs: list[bytearray]) -> None:
        """Runs left the index, in this order; their keys, and the list, are not changed any more by anybody."""
        size = sum(map(len, runs)) + len(runs) * RUN_OVERHEAD_BYTES + PIECE_OVERHEAD_BYTES
        self._pieces.append((namespace, reason, runs, size))
        self.size_bytes += size

    def trim(self) -> None:
        """Forget the oldest pieces, and the first runs of one that is too large itself."""
        while self.size_bytes > self.bytes_max:
            namespace, reason, runs, size = self._pieces.popleft()
            self.size_bytes -= size
            if not self._pieces:
                self._add_last(namespace, reason, runs)

    def find(self, namespace: bytes, key: bytes) -> MissReason | None:
        """Why a block left the index the last time; None where that is not known (any more)."""
        for piece_namespace, reason, runs, _ in reversed(self._pieces):
            if piece_namespace == namespace and any(_holds(keys, key) for keys in runs):
                return reason
        return None

    def _add_last(self, namespace: bytes, reason: MissReason, runs: list[bytearray]) -> None:
        """The last of some runs, as many as there is room for: those that lie before others in their chains."""
        room = self.bytes_max - PIECE_OVERHEAD_BYTES
        first = len(runs)
        while first and room >= len(runs[first - 1]) + RUN_OVERHEAD_BYTES:
            first -= 1
            room -= len(runs[first]) + RUN_OVERHEAD_BYTES
        if first < len(runs):
            self.add(namespace, reason, runs[first:])


def _holds(keys: bytearray, key: bytes) -> bool:
    position = keys.find(key)
    while position % KEY_SIZE and position >= 0:  # across two keys
        position = keys.find(key, position + 1)
    return position >= 0
