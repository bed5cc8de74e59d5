"""What kvcached gains by the share of a prompt that it has: two vLLM servers do the same work in turns, one with it.

Every prompt begins with blocks that the daemon has and vLLM's own cache, which is small, has not; the rest is new.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.local_model import BLOCK_SIZE, TOKEN_IDS, LocalModel
from benchmarks.outputs import Differences
from benchmarks.pairs import paired_ratio
from benchmarks.result import Result, Target, judge
from benchmarks.vllm_environment import CONTEXT_TOKENS
from benchmarks.vllm_server import ServerPair, server_pair
from benchmarks.vllm_turns import TurnPair, count_differences, take_turns

SUITE: Final = "vllm-hits"
#: Of a prompt's blocks, in percent, those that the daemon has.
SHARES_PERCENT: Final = (0, 30, 60, 90)
_PROMPT_BLOCKS: Final = 40
_PROMPTS: Final = 8
_OUTPUT_TOKENS: Final = 16
_AT_ONCE: Final = 4
#: Of vLLM's own cache: fewer than the prompts of one turn have. vLLM wants room for the longest prompt.
_DEVICE_BLOCKS: Final = 2 * CONTEXT_TOKENS // BLOCK_SIZE
#: Sets of beginnings that turns use one after the other: more than the turns of a round, so that none comes back soon.
_SETS: Final = len(SHARES_PERCENT) + 1
#: For all that is stored until a beginning comes back whole, five rounds later.
_HOST_BYTES: Final = 4 << 30
_NONE: Final = Target("value", "<=", 0)


class _Work(NamedTuple):
    """The prompts' beginnings, and the source of all else."""

    sets: list[list[list[int]]]
    source: random.Random

    def prompts(self, turn: int, share_percent: int) -> list[list[int]]:
        """The prompts of a turn: this share of each is the beginning of one that the daemon has."""
        known = _PROMPT_BLOCKS * share_percent // 100 * BLOCK_SIZE
        rest = _PROMPT_BLOCKS * BLOCK_SIZE - known
        return [beginning[:known] + _tokens(self.source, rest) for beginning in self.sets[turn % _SETS]]


def gains(model: LocalModel, directory: Path, rounds: int) -> Iterator[Result]:
    """The figures of so many rounds, with each share in each of them."""
    with server_pair(directory, model, device_blocks=_DEVICE_BLOCKS, host_bytes=_HOST_BYTES) as servers:
        played = _played(servers, rounds)
        differ = {share: count_differences(servers.plain, turns) for share, turns in played.items()}
    for share_percent, turns in played.items():
        yield from _figures(share_percent, turns, differ[share_percent])


def _played(servers: ServerPair, rounds: int) -> dict[int, list[TurnPair]]:
    """The turns by share. Each server is first in every other round; the first turns store all beginnings."""
    source = random.Random(SUITE)
    sets = [[_tokens(source, _PROMPT_BLOCKS * BLOCK_SIZE) for _ in range(_PROMPTS)] for _ in range(_SETS)]
    work = _Work(sets, source)
    for prompts in sets:
        _turns(servers, prompts, is_cached_first=True)
    played: dict[int, list[TurnPair]] = {share_percent: [] for share_percent in SHARES_PERCENT}
    for number in range(rounds):
        for place, share_percent in enumerate(SHARES_PERCENT):
            prompts = work.prompts(number * len(SHARES_PERCENT) + place, share_percent)
            played[share_percent].append(_turns(servers, prompts, is_cached_first=number % 2 == 0))
        print(f"suite {SUITE}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return played


def _turns(servers: ServerPair, prompts: list[list[int]], *, is_cached_first: bool) -> TurnPair:
    return take_turns(servers, prompts, output_tokens=_OUTPUT_TOKENS, at_once=_AT_ONCE, is_cached_first=is_cached_first)


def _figures(share_percent: int, turns: Sequence[TurnPair], differ: Differences) -> Iterator[Result]:
    cached, plain = [pair.cached for pair in turns], [pair.plain for pair in turns]
    for name, values, floors in (
        ("time", [turn.seconds for turn in cached], [turn.seconds for turn in plain]),
        ("first_token", [turn.first_token_ms for turn in cached], [turn.first_token_ms for turn in plain]),
    ):
        ratio = paired_ratio(values, floors)
        yield judge(SUITE, f"{name}_{share_percent}_over_plain_ratio", ratio.ratio, "ratio")
        yield judge(SUITE, f"{name}_{share_percent}_over_plain_low_ratio", ratio.low, "ratio")
        yield judge(SUITE, f"{name}_{share_percent}_over_plain_high_ratio", ratio.high, "ratio")
    tokens = len(turns) * _PROMPTS * _PROMPT_BLOCKS * BLOCK_SIZE
    hits = sum(turn.counted.hit_tokens for turn in cached)
    yield judge(SUITE, f"hit_{share_percent}_percent", 100 * hits / tokens, "percent")
    yield judge(SUITE, f"outputs_that_differ_by_ties_{share_percent}", differ.ties, "requests")
    yield judge(SUITE, f"outputs_that_differ_{share_percent}", differ.others, "requests", target=_NONE)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(*TOKEN_IDS) for _ in range(count)]
