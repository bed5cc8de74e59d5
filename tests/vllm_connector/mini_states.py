"""What the model of `mini_hybrid` computes: states of tokens in two groups of layers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tests.vllm_connector.mini_daemon import BLOCK

#: Tokens in a block of each group: full attention, window.
SIZES = (BLOCK, 2 * BLOCK)
FULL, WINDOWED = range(2)
#: A token sees itself and so many less one before it. Not a multiple of a block.
WINDOW = 11
NULL = 0
STATE_LENGTH = 8


class States:
    """What the model computes for tokens; in blocks, or, as the reference, in two lists."""

    def __init__(self, shard: int) -> None:
        self._shard = shard

    def read(self, group: int, position: int) -> str:
        raise NotImplementedError

    def write(self, group: int, position: int, state: str) -> None:
        raise NotImplementedError

    def compute(self, token: int, at: int) -> None:
        """The states of a token."""
        seen = [self.read(FULL, position) for position in {at - 1, at // 2} if at and position >= 0]
        self.write(FULL, at, self._made(token, sorted(seen)))
        first = max(at - WINDOW + 1, 0)
        seen = [self.read(WINDOWED, position) for position in (first, at - 1) if at]
        self.write(WINDOWED, at, self._made(token, [self.read(FULL, at), *seen]))

    def _made(self, token: int, seen: list[str]) -> str:
        data = f"{token} {self._shard} {seen}".encode()
        return hashlib.md5(data, usedforsecurity=False).hexdigest()[:STATE_LENGTH]

    def sample(self, at: int) -> int:
        """The token after the one at a position."""
        return int(self.read(WINDOWED, at), 16) % 11


class BlockStates(States):
    """States in the blocks of a request."""

    def __init__(self, shard: int, memory: dict[int, list[str]], tables: list[list[int]]) -> None:
        super().__init__(shard)
        self._memory, self._tables = memory, tables

    def read(self, group: int, position: int) -> str:
        block = self._tables[group][position // SIZES[group]]
        assert block != NULL, f"position {position} of group {group} has left the window"
        return self._memory[block][position % SIZES[group]]

    def write(self, group: int, position: int, state: str) -> None:
        self._memory[self._tables[group][position // SIZES[group]]][position % SIZES[group]] = state


class ListedStates(States):
    """States of a model that computes everything."""

    def __init__(self) -> None:
        super().__init__(0)
        self._lists: list[list[str]] = [[], []]

    def read(self, group: int, position: int) -> str:
        return self._lists[group][position]

    def write(self, group: int, position: int, state: str) -> None:
        assert position == len(self._lists[group])
        self._lists[group].append(state)


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """Output of a model that computes everything."""
    states, tokens = ListedStates(), list(prompt)
    for at in range(len(prompt) + count - 1):
        states.compute(tokens[at], at)
        if at + 1 == len(tokens):
            tokens.append(states.sample(at))
    return tokens[len(prompt) :]


def skipped_blocks(computed: int) -> int:
    """How many blocks have left the window of the token behind so many."""
    return max(computed - WINDOW + 1, 0) // SIZES[WINDOWED]
