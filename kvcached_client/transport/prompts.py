"""Which prompts the daemon knows: those that a session has acquired, so that it sends only the keys behind them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvcached_client.protocol.fields import KNOWN_BLOCKS_MIN
from kvcached_client.types import KEY_SIZE_BYTES

#: Prompts that a session looks for. A daemon remembers more than these, unless they are very long.
_PROMPTS_MAX: Final = 64


class AcquiredPrompts:
    """The prompts that a session acquired last, each by the last of its keys, which stands for all."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, int] = OrderedDict()

    def known_blocks(self, keys: bytes) -> int:
        """The length of the longest prompt that `keys` begin with, in blocks; 0 if there is none.

        The daemon may have forgotten it.
        """
        count, known = len(keys) // KEY_SIZE_BYTES, 0
        if count >= KNOWN_BLOCKS_MIN:
            for last, blocks in self._blocks.items():
                if known < blocks <= count and last == _last_key(keys, blocks):
                    known = blocks
        return known

    def note(self, last: bytes, blocks: int) -> None:
        """A prompt of `blocks` blocks was acquired, whose last key is `last`."""
        if blocks < KNOWN_BLOCKS_MIN:
            return
        self._blocks[last] = blocks
        self._blocks.move_to_end(last)
        if len(self._blocks) > _PROMPTS_MAX:
            self._blocks.popitem(last=False)

    def note_all(self, keys: bytes) -> None:
        """As `note`, of a prompt with these keys."""
        self.note(keys[-KEY_SIZE_BYTES:], len(keys) // KEY_SIZE_BYTES)

    def forget(self, last: bytes) -> None:
        """The daemon does not know this prompt."""
        self._blocks.pop(last, None)


def keys_behind(keys: bytes, known: int) -> bytes:
    """The frame of an acquire whose first `known` blocks the daemon knows."""
    return keys[(known - 1) * KEY_SIZE_BYTES :] if known else keys


def _last_key(keys: bytes, blocks: int) -> bytes:
    return keys[(blocks - 1) * KEY_SIZE_BYTES : blocks * KEY_SIZE_BYTES]
