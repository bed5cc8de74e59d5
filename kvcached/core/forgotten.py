"""Which blocks left the index lately, and why: for people who ask why a prompt missed.

A run that leaves hands its keys over as they are, so the index pays for one entry a run. They are looked through only
when somebody asks.
"""

from __future__ import annotations

from collections import deque

from kvcached.core.run import KEY_SIZE
from kvcached_client.types import MissReason

#: What is remembered of all namespaces together: at most 256 Ki blocks, fewer where runs are short.
FORGOTTEN_BYTES_MAX = 4 << 20
#: Of one entry besides its keys: a tuple of three, an empty bytearray, their places in memory.
ENTRY_BYTES = 144


class ForgottenKeys:
    """The blocks that left the index last, the oldest forgotten first.

    Args:
        bytes_max: of all entries, about.
    """

    __slots__ = ("_bytes", "_bytes_max", "_entries")

    def __init__(self, bytes_max: int = FORGOTTEN_BYTES_MAX) -> None:
        self._entries: deque[tuple[bytes, MissReason, bytearray]] = deque()
        self._bytes = 0
        self._bytes_max = bytes_max

    def add(self, namespace: bytes, reason: MissReason, keys: bytearray) -> None:
        """Consecutive blocks left the index; `keys` is not changed any more by anybody."""
        self._entries.append((namespace, reason, keys))
        self._bytes += len(keys) + ENTRY_BYTES
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._entries.popleft()[2]) + ENTRY_BYTES

    def find(self, namespace: bytes, key: bytes) -> MissReason | None:
        """Why a block left the index the last time; None where that is not known (any more)."""
        for entry_namespace, reason, keys in reversed(self._entries):
            if entry_namespace == namespace and _holds(keys, key):
                return reason
        return None


def _holds(keys: bytearray, key: bytes) -> bool:
    position = keys.find(key)
    while position % KEY_SIZE and position >= 0:  # across two keys
        position = keys.find(key, position + 1)
    return position >= 0
