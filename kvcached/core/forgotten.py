"""Which blocks left the index lately, and why: for people who ask why a prompt missed.

What an operation takes out of the index comes here in one piece, so that a run that leaves costs little more than the
copy of its keys. They are looked through only when somebody asks.
"""

from __future__ import annotations

from collections import deque

from kvcached.core.run import KEY_SIZE
from kvcached_client.types import MissReason

#: What is remembered of all namespaces together: about 256 Ki blocks.
FORGOTTEN_BYTES_MAX = 4 << 20
#: Smaller pieces are joined up to so many bytes.
BATCH_BYTES = 32 << 10
#: Of a batch besides its keys: a tuple of three, an empty bytearray, their places in memory.
BATCH_OVERHEAD_BYTES = 144


class ForgottenKeys:
    """The blocks that left the index last, the oldest forgotten first.

    Args:
        bytes_max: what all of it takes.
    """

    def __init__(self, bytes_max: int = FORGOTTEN_BYTES_MAX) -> None:
        self._batches: deque[tuple[bytes, MissReason, bytearray]] = deque()  #: namespace, why, keys
        self._bytes = 0
        self._bytes_max = bytes_max

    def add(self, namespace: bytes, reason: MissReason, keys: bytearray) -> None:
        """Blocks left the index, those before others last. `keys` belongs to this object from now on.

        Of more than there is room for the last ones are remembered: a prompt misses the first block that it lacks.
        """
        room = (self._bytes_max - BATCH_OVERHEAD_BYTES) // KEY_SIZE * KEY_SIZE
        if len(keys) > room:
            del keys[:-room]
        last = self._batches[-1] if self._batches else None
        if last is not None and last[:2] == (namespace, reason) and len(last[2]) < BATCH_BYTES:
            last[2].extend(keys)
        else:
            self._batches.append((namespace, reason, keys))
            self._bytes += BATCH_OVERHEAD_BYTES
        self._bytes += len(keys)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._batches.popleft()[2]) + BATCH_OVERHEAD_BYTES

    def find(self, namespace: bytes, key: bytes) -> MissReason | None:
        """Why a block left the index the last time; None where that is not known (any more)."""
        for batch_namespace, reason, keys in reversed(self._batches):
            if batch_namespace == namespace and _holds(keys, key):
                return reason
        return None


def _holds(keys: bytearray, key: bytes) -> bool:
    position = keys.find(key)
    while position % KEY_SIZE and position >= 0:  # across two keys
        position = keys.find(key, position + 1)
    return position >= 0
