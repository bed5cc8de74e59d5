"""The keys of prompts that a session has acquired, so that a continuation of one sends only the keys behind it.

Keys are all that is remembered here: whether their blocks are still cached is looked up with each acquire. So a prompt
that is forgotten costs a round trip, and one that is remembered can be evicted or cleared as any other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.fields import KEYS, KNOWN_BLOCKS_MIN
from kvcached_client.types import KEY_SIZE_BYTES

#: Keys of one session: 128 conversations of 128 Ki tokens, in blocks of 16.
KNOWN_BYTES_MAX: Final = 16 << 20
#: Keys of all sessions together; each has an equal part. Sessions cost their user nothing else.
_ALL_KNOWN_BYTES_MAX: Final = 128 << 20


class KnownPrompts:
    """The prompts that one session acquired last.

    Args:
        blocks_min: shorter prompts are not remembered.
        sessions: how many sessions there are.

    Attributes:
        size_bytes: of all keys that are remembered.
    """

    def __init__(self, blocks_min: int = KNOWN_BLOCKS_MIN, sessions: Callable[[], int] = lambda: 1) -> None:
        self._sessions = sessions
        self._bytes_min = blocks_min * KEY_SIZE_BYTES
        #: Keys by the last of them, which stands for all; what was used last comes last.
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def whole(self, known: int, frame: bytes) -> bytes:
        """All keys of a prompt, of which `frame` holds those from the last of `known` blocks on.

        Raises:
            RequestError: there is no prompt of `known` blocks with that last key, or the keys are too many.
        """
        if not known:
            return frame
        keys = self._keys.get(frame[:KEY_SIZE_BYTES])
        if keys is None or len(keys) != known * KEY_SIZE_BYTES:
            raise request_error(
                ErrorCode.UNKNOWN_PREFIX,
                f"no prompt of {known} blocks with this last key is remembered",
                "send the keys of all blocks",
            )
        size_bytes = len(keys) + len(frame) - KEY_SIZE_BYTES
        if size_bytes > KEYS.size_bytes_max:
            raise request_error(
                ErrorCode.OVERSIZE, f"keys of {size_bytes} bytes in all", f"at most {KEYS.size_bytes_max}"
            )
        return keys + frame[KEY_SIZE_BYTES:]

    def keep(self, keys: bytes, known: int = 0) -> None:
        """Remember a prompt that was acquired, whose first `known` blocks are one that was continued.

        Beyond the limit, those are forgotten that were neither acquired nor continued for longest.
        """
        if len(keys) < self._bytes_min or not keys:
            return
        if known:
            self._keys.move_to_end(keys[(known - 1) * KEY_SIZE_BYTES : known * KEY_SIZE_BYTES])
        last = keys[-KEY_SIZE_BYTES:]
        if last in self._keys:
            self.size_bytes -= len(self._keys.pop(last))
        self._keys[last] = keys
        self.size_bytes += len(keys)
        self.trim()

    def trim(self) -> None:
        """Forget what is beyond the limit, which is lower the more sessions there are."""
        most = min(KNOWN_BYTES_MAX, _ALL_KNOWN_BYTES_MAX // max(self._sessions(), 1))
        while self.size_bytes > most:
            self.size_bytes -= len(self._keys.popitem(last=False)[1])
