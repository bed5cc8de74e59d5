"""Three shapes of prefix trees, as streams of prompts: what a cache sees, not what it should look like inside.

A prompt is a path of *pieces*. A piece has an id and a number of blocks, and stands for these blocks *and everything
before them*, so two prompts share exactly their leading equal pieces. Its keys are seeded pseudo-random bytes that the
id and the pass name: they have a chain's structure without the cost of hashing tokens. Another pass over a shape has
other keys throughout.

Shapes are endless by repetition: a pass is the same work each time, on new keys.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import shake_128
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from kvcached.core.index.run import KEY_SIZE

BLOCK_SIZE: Final = 16
#: 128k tokens.
LONG_PROMPT_BLOCKS: Final = 8192

_TRACE: Final = Path(__file__).parent / "traces" / "mooncake-conversation.jsonl.gz"
_TRACE_BLOCK_TOKENS: Final = 512
_CHATS_PER_PASS: Final = 100
_CHATS_AT_ONCE: Final = 64
_SYSTEM_PROMPTS: Final = 64
_TURNS_MAX: Final = 63
_ADVERSARIAL_TRUNKS: Final = 16_000
_ADVERSARIAL_TRUNK_PIECES: Final = 13
#: Ids of the long prompt's pieces begin here, out of every shape's way.
_LONG_ID: Final = 1 << 40
#: And those of prompts that share nothing.
_LONE_ID: Final = 1 << 41


class Piece(NamedTuple):
    """Consecutive blocks of prompts that no prompt leaves half-way."""

    id: int
    blocks: int


PiecePath = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A stream of prompts, and a prompt of 128k tokens that lies in the tree as others of this shape do.

    Attributes:
        name: as metrics spell it.
        run_blocks: blocks per run of the tree that the shape is known for.
        paths: one pass of prompts.
        step: blocks of the next piece of the long prompt.
    """

    name: str
    run_blocks: float
    paths: Callable[[], tuple[PiecePath, ...]]
    step: Callable[[random.Random], int]

    def prompts(self, number: int) -> Iterator[bytes]:
        """Keys of the prompts of one pass, in order; another `number` has other keys."""
        known: dict[int, bytes] = {}
        for path in self.paths():
            yield _keys(path, number, known)

    def lone_prompt(self, number: int, place: int, blocks: int) -> bytes:
        """Keys of a prompt that shares no block with any other, for a place in a pass."""
        return _keys((Piece(_LONE_ID + place, blocks),), number, {})

    def long_prompt(self, *, branch_blocks: int | None = None) -> Iterator[bytes]:
        """A prompt of 8,192 blocks, then the prompts that leave it, one at the end of every piece but its last.

        Those go from the deepest to the shallowest, as that is the cheaper way to the same tree. Each goes on for as
        many blocks as a piece has, or for `branch_blocks`.
        """
        generator = random.Random(self.name)
        trunk: list[Piece] = []
        left = LONG_PROMPT_BLOCKS
        while left:
            blocks = min(self.step(generator), left)
            trunk.append(Piece(_LONG_ID + 2 * len(trunk), blocks))
            left -= blocks
        known: dict[int, bytes] = {}
        keys = _keys(tuple(trunk), 0, known)
        yield keys
        ends = list(accumulate(piece.blocks for piece in trunk))
        for index in range(len(trunk) - 2, -1, -1):
            branch = Piece(_LONG_ID + 2 * index + 1, branch_blocks or self.step(generator))
            yield keys[: ends[index] * KEY_SIZE] + _keys((branch,), 0, known)


def _keys(path: PiecePath, number: int, known: dict[int, bytes]) -> bytes:
    parts = []
    for piece in path:
        keys = known.get(piece.id)
        if keys is None:
            name = f"{number}/{piece.id}".encode()
            keys = known[piece.id] = shake_128(name).digest(piece.blocks * KEY_SIZE)
        parts.append(keys)
    return b"".join(parts)


@cache
def _trace_paths() -> tuple[PiecePath, ...]:
    """The recorded requests; a recorded block of 512 tokens is 32 blocks. Partial last ones are left out."""
    blocks = _TRACE_BLOCK_TOKENS // BLOCK_SIZE
    paths: list[PiecePath] = []
    with gzip.open(_TRACE, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            ids = request["hash_ids"][: request["input_length"] // _TRACE_BLOCK_TOKENS]
            if ids:
                paths.append(tuple(Piece(recorded, blocks) for recorded in ids))
    return tuple(paths)


@cache
def _chat_paths() -> tuple[PiecePath, ...]:
    """Conversations of 1 to 63 turns under one of 64 system prompts, 64 of them at once in random order.

    A turn is asked twice, as with a rejected answer or a second sample: the first version is left, the second goes on.
    """
    generator = random.Random("chat")
    systems = [Piece(index, _about_16(generator)) for index in range(_SYSTEM_PROMPTS)]
    ids = iter(range(_SYSTEM_PROMPTS, _LONG_ID))
    waiting = [generator.randint(1, _TURNS_MAX) for _ in range(_CHATS_PER_PASS)]
    active: list[tuple[PiecePath, int]] = []
    paths: list[PiecePath] = []
    while waiting or active:
        if waiting and len(active) < _CHATS_AT_ONCE:
            active.append(((generator.choice(systems),), waiting.pop()))
            continue
        index = generator.randrange(len(active))
        history, turns = active[index]
        paths.append((*history, Piece(next(ids), _about_16(generator))))
        history = (*history, Piece(next(ids), _about_16(generator)))
        paths.append(history)
        if turns > 1:
            active[index] = history, turns - 1
        else:
            del active[index]
    return tuple(paths)


@cache
def _adversarial_paths() -> tuple[PiecePath, ...]:
    """Trunks of 13 pieces of 1 to 4 blocks, and a branch of 1 to 4 blocks at the end of each piece but the last."""
    generator = random.Random("adversarial")
    ids = iter(range(_LONG_ID))
    paths: list[PiecePath] = []
    for _ in range(_ADVERSARIAL_TRUNKS):
        trunk = tuple(Piece(next(ids), generator.randint(1, 4)) for _ in range(_ADVERSARIAL_TRUNK_PIECES))
        paths.append(trunk)
        paths += [
            (*trunk[:length], Piece(next(ids), generator.randint(1, 4))) for length in range(len(trunk) - 1, 0, -1)
        ]
    return tuple(paths)


def _about_16(generator: random.Random) -> int:
    return generator.randint(1, 31)


TRACE: Final = Shape("trace", 740, _trace_paths, lambda generator: 32 * generator.randint(12, 34))
CHAT: Final = Shape("chat", 16, _chat_paths, _about_16)
ADVERSARIAL: Final = Shape("adversarial", 2.5, _adversarial_paths, lambda generator: generator.randint(1, 4))
#: Its long prompt is the worst that a tree can hold: a branch behind each block, so as many runs as blocks.
BRANCHED: Final = replace(ADVERSARIAL, name="branched", run_blocks=1, step=lambda _: 1)
