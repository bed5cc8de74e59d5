"""Prompts that share their beginnings, so that engines hit each other's blocks and evict them."""

from __future__ import annotations

from hashlib import blake2b
from random import Random
from typing import NamedTuple

BLOCK_SIZE = 4
DOCUMENTS = 7
BLOCKS_MAX = 9
#: One block in so many is another one than most prompts of its document have there.
_BRANCH = 0.12
_RECENT_SHARE = 0.4


class Prompt(NamedTuple):
    """Tokens, and what roots their keys beside the namespace."""

    tokens: list[int]
    salt: str
    lora: str

    @property
    def keys(self) -> bytes:
        """Keys of an engine that names its blocks itself: 16 bytes for each full block."""
        key, keys = f"{self.salt}/{self.lora}".encode(), b""
        for start in range(0, len(self.tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            key = blake2b(key + bytes(self.tokens[start : start + BLOCK_SIZE]), digest_size=16).digest()
            keys += key
        return keys


def some_prompt(random: Random) -> Prompt:
    """A prompt of a few blocks; most have the last one in part."""
    document = random.randrange(DOCUMENTS)
    symbols = [document, *(10 + (random.random() < _BRANCH) for _ in range(random.randint(0, BLOCKS_MAX - 1)))]
    tokens = [symbol for symbol in symbols for _ in range(BLOCK_SIZE)] + [9] * random.randrange(BLOCK_SIZE)
    is_plain = random.random() < 0.8
    return Prompt(tokens, "" if is_plain else random.choice(["", "tenant"]), "" if is_plain else "adapter")


class Prompts:
    """Prompts of one engine. Many are those of other requests just now, which find blocks that are hardly committed."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._recent: list[Prompt] = []

    def next(self) -> Prompt:
        """A prompt that is new, or recent, or goes on after a recent one."""
        random = self._random
        if self._recent and random.random() < _RECENT_SHARE:
            recent = random.choice(self._recent)
            room = BLOCKS_MAX * BLOCK_SIZE - len(recent.tokens)
            return recent._replace(tokens=recent.tokens + [30] * random.randrange(max(room, 1)))
        prompt = some_prompt(random)
        self._recent = [*self._recent[-3:], prompt]
        return prompt
