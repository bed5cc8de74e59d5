"""What the model computes: a state for each token in each group of layers, made of states that it reads from blocks.

A block that was overwritten, named too early, stored too early or loaded wrongly changes every token behind it. A state
says in which epoch it was computed, too: the earliest of all that went into it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

#: Tokens that there are.
VOCABULARY = 11
#: Of a request.
MAX_TOKENS = 256
DIGEST_LENGTH = 8
#: Digest and epoch.
STATE_LENGTH = DIGEST_LENGTH + 4
#: In vLLM's tables, a block that a group does not need.
NULL_BLOCK = 0
OUTDATED = "outdated" + "0000"

Memory: TypeAlias = dict[int, list[str]]


class Layers(NamedTuple):
    """A group of layers.

    Attributes:
        kind: which states of earlier tokens they see.
        block: tokens of a block.
        reach: tokens of a window, or of a chunk.
        keeps_middle: whether the state inside a step is kept where a later request may continue, as Mamba 2 does.
    """

    kind: Literal["full", "window", "chunk", "state"]
    block: int
    reach: int = 0
    keeps_middle: bool = False

    def seen_at(self, position: int) -> list[int]:
        """The positions whose states the one at a position is made of."""
        first = {
            "full": position // 2,
            "window": max(position - self.reach + 1, 0),
            "chunk": position // (self.reach or 1) * (self.reach or 1),
            "state": position - 1,
        }[self.kind]
        return sorted({place for place in (first, position - 1) if max(first, 0) <= place < position})


class Model:
    """The groups of its layers, and what it computes without a cache.

    Args:
        groups: as said.
        match_unit: of how many tokens vLLM's hashes are; None = as vLLM decides.
        drafts: how many tokens are guessed ahead, and computed before it is known whether they are right.
    """

    def __init__(self, groups: Sequence[Layers], match_unit: int | None = None, drafts: int = 0) -> None:
        self.groups = tuple(groups)
        self.match_unit = match_unit
        self.drafts = drafts
        self._digests = cache(self._compute)

    @property
    def is_grouped(self) -> bool:
        """Whether vLLM has more for it than one group that keeps all blocks."""
        return [layers.kind for layers in self.groups] != ["full"]

    @property
    def has_states(self) -> bool:
        """Whether there are layers that keep states."""
        return any(layers.kind == "state" for layers in self.groups)

    def digests(self, tokens: Sequence[int], shard: int) -> tuple[str, ...]:
        """The digests of the last token in each group."""
        return self._digests(tuple(tokens), shard)

    def block(self, tokens: Sequence[int], group: int, shard: int) -> list[str]:
        """The digests in a group's block that ends with these tokens."""
        layers = self.groups[group]
        count = 1 if layers.kind == "state" else layers.block
        return [self.digests(tokens[: len(tokens) - rest], shard)[group] for rest in reversed(range(count))]

    def output(self, prompt: Sequence[int], count: int) -> list[int]:
        """What it answers."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(self.digests(tokens, 0)))
        return tokens[len(prompt) :]

    def _compute(self, tokens: tuple[int, ...], shard: int) -> tuple[str, ...]:
        made: list[str] = []
        for group, layers in enumerate(self.groups):
            seen = [self.digests(tokens[: place + 1], shard)[group] for place in layers.seen_at(len(tokens) - 1)]
            made.append(digest(tokens[-1], shard, [*made[-1:], *seen]))
        return tuple(made)


class Blocks:
    """A request's blocks, in which the model computes on one shard."""

    def __init__(self, model: Model, memory: Memory, tables: Sequence[Sequence[int]], shard: int) -> None:
        self._model, self._memory, self._tables, self._shard = model, memory, tables, shard

    def move_state(self, group: int, source: int, target: int) -> None:
        """Go on in another block of the request with a state."""
        table = self._tables[group]
        self._memory[table[target]] = list(self._memory.get(table[source], [OUTDATED]))

    def keep_state(self, group: int, column: int, stop: int) -> None:
        """Copy the state of the pass into another block of the request."""
        block = self._tables[group][column]
        if block != NULL_BLOCK:
            self._memory[block] = list(self._cells(group, 0, stop)[0])

    def compute(self, token: int, position: int, stop: int, epoch: int) -> None:
        """The states of a token, in a pass that ends at `stop`."""
        made: list[str] = []
        for group, layers in enumerate(self._model.groups):
            seen = made[-1:] + [self._read(group, place, stop) for place in layers.seen_at(position)]
            born = min([epoch, *(int(state[DIGEST_LENGTH:]) for state in seen)])
            made.append(digest(token, self._shard, [state[:DIGEST_LENGTH] for state in seen]) + f"{born:04}")
            cells, place = self._cells(group, position, stop)
            cells[place] = made[-1]

    def sample(self, position: int, stop: int) -> int:
        """The token behind the one at a position."""
        groups = range(len(self._model.groups))
        return next_token([self._read(group, position, stop)[:DIGEST_LENGTH] for group in groups])

    def _read(self, group: int, position: int, stop: int) -> str:
        cells, place = self._cells(group, position, stop)
        return cells[place]

    def _cells(self, group: int, position: int, stop: int) -> tuple[list[str], int]:
        """The states in the block of a position, and which of them is its own."""
        layers = self._model.groups[group]
        is_state = layers.kind == "state"
        block = self._tables[group][((stop if is_state else position + 1) - 1) // layers.block]
        assert block != NULL_BLOCK, f"group {group} has no block for position {position}"
        count = 1 if is_state else layers.block
        if len(self._memory.get(block, ())) != count:
            self._memory[block] = [OUTDATED] * count
        return self._memory[block], 0 if is_state else position % layers.block


def digest(token: int, shard: int, seen: Sequence[str]) -> str:
    """The state of a token, of what it sees."""
    data = f"{token} {shard} {' '.join(seen)}".encode()
    return hashlib.md5(data, usedforsecurity=False).hexdigest()[:DIGEST_LENGTH]


def next_token(digests: Sequence[str]) -> int:
    """What the model samples."""
    return int(digest(0, 0, digests), 16) % VOCABULARY


def write_config(folder: Path) -> Path:
    """Write what vLLM asks of a model into a folder, which is returned."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
