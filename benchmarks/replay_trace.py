"""Recorded requests, thinned to whole conversations and scaled down to what a small machine can take.

The trace names one id per 512 tokens of a prompt; equal leading ids are equal beginnings. It has no session ids: here a
*conversation* is all requests that share their first two full blocks, as the first one is the same in every request.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

#: Carried with its licence and checksum, see traces/README.md.
TRACE: Final = Path(__file__).parent / "traces" / "mooncake-conversation.jsonl.gz"
RECORDED_BLOCK_TOKENS: Final = 512
_SHARED_BLOCKS: Final = 2
#: A conversation of fewer requests has no second turn that could hit.
TURNS_MIN: Final = 2


class Recorded(NamedTuple):
    """One line of the trace.

    Attributes:
        at_ms: arrival, from the start of the trace.
        prompt_tokens, output_tokens: how long it was.
        ids: one for each block of the prompt, the last one possibly partial.
    """

    at_ms: int
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]

    @property
    def full_ids(self) -> tuple[int, ...]:
        """Of full blocks only."""
        return self.ids[: self.prompt_tokens // RECORDED_BLOCK_TOKENS]


@dataclass(frozen=True, slots=True)
class Scale:
    """How a recorded request becomes one that is played.

    Attributes:
        block_tokens: that a recorded block of 512 becomes.
        token_ids: the first id that may be used, and the first that may not.
        tokens_max: longest prompt with its output; conversations with a longer one are left out.
    """

    block_tokens: int
    token_ids: tuple[int, int]
    tokens_max: int

    def tokens(self, recorded: int) -> int:
        """Of so many recorded tokens; at least one."""
        return max(1, recorded * self.block_tokens // RECORDED_BLOCK_TOKENS)

    def fits(self, request: Recorded) -> bool:
        """Whether a request is short enough."""
        return self.tokens(request.prompt_tokens) + self.tokens(request.output_tokens) <= self.tokens_max


@dataclass(frozen=True, slots=True)
class Call:
    """A request to play.

    Attributes:
        at_s: when, from the start.
        prompt: token ids.
        output_tokens: to generate.
    """

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


class Reuse(NamedTuple):
    """Blocks of prompts, and how many of them an endless cache would have had, from the same requests before."""

    blocks: int
    repeated: int

    @property
    def ratio(self) -> float:
        """The hit ratio of an endless cache."""
        return self.repeated / self.blocks


def read_trace(path: Path = TRACE) -> list[Recorded]:
    """All recorded requests, by arrival."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [
            Recorded(line["timestamp"], line["input_length"], line["output_length"], tuple(line["hash_ids"]))
            for line in map(json.loads, lines)
        ]


def thin(recorded: Iterable[Recorded], scale: Scale, requests: int, seed: int) -> list[Recorded]:
    """Whole conversations of two turns or more, drawn at random until there are so many requests; by arrival."""
    conversations: dict[tuple[int, ...], list[Recorded]] = defaultdict(list)
    for request in recorded:
        if len(request.full_ids) >= _SHARED_BLOCKS:
            conversations[request.full_ids[:_SHARED_BLOCKS]].append(request)
    chosen = [turns for turns in conversations.values() if len(turns) >= TURNS_MIN and all(map(scale.fits, turns))]
    random.Random(seed).shuffle(chosen)
    drawn: list[Recorded] = []
    for turns in chosen:
        if len(drawn) >= requests:
            break
        drawn += turns
    return sorted(drawn, key=lambda request: request.at_ms)


def reuse(recorded: Sequence[Recorded]) -> Reuse:
    """What the full blocks of these requests have in common."""
    seen: set[int] = set()
    blocks = repeated = 0
    for request in recorded:
        ids = request.full_ids
        blocks += len(ids)
        repeated += next((place for place, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
    return Reuse(blocks, repeated)


def calls(recorded: Sequence[Recorded], scale: Scale, requests_per_s: float) -> list[Call]:
    """The requests to play, at so many a second in the mean. Equal ids give equal tokens."""
    start, end = recorded[0].at_ms, recorded[-1].at_ms
    stretch = len(recorded) / requests_per_s / max(end - start, 1)
    known: dict[int, tuple[int, ...]] = {}
    return [
        Call((each.at_ms - start) * stretch, _prompt(each, scale, known), scale.tokens(each.output_tokens))
        for each in recorded
    ]


def _prompt(request: Recorded, scale: Scale, known: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    tokens: list[int] = []
    for block in request.ids:
        if block not in known:
            source = random.Random(block)
            known[block] = tuple(source.randrange(*scale.token_ids) for _ in range(scale.block_tokens))
        tokens += known[block]
    return tuple(tokens[: scale.tokens(request.prompt_tokens)])
