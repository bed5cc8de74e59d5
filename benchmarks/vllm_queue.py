"""What kvcached costs requests that hit nothing: two vLLM servers do the same work in turns, with and without it.

Sixteen clients send short prompts that nobody has seen. The hooks of the connector take microseconds (suite `vllm`);
what requests feel beside that is the wait for the daemon's "no", in vLLM's own queue, and steps that compute nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.local_model import BLOCK_SIZE, MODELS, TOKEN_IDS
from benchmarks.outputs import Differences
from benchmarks.pairs import mean_difference, paired_ratio
from benchmarks.result import Result, Target, judge
from benchmarks.vllm_environment import CONTEXT_TOKENS
from benchmarks.vllm_server import ServerPair, server_pair
from benchmarks.vllm_turns import TurnPair, count_differences, take_turns

_SUITE: Final = "vllm-queue"
_TIME: Final = Target("value", "<=", 1.05)
_QUEUE: Final = Target("value", "<=", 5)
_NONE: Final = Target("value", "<=", 0)
_MODEL: Final = MODELS["tiny"]
_PROMPTS: Final = 200
_PROMPT_TOKENS: Final = 100
_OUTPUT_TOKENS: Final = 16
_AT_ONCE: Final = 16
#: Of vLLM's own cache: more than what runs at once. vLLM wants room for the longest prompt.
_DEVICE_BLOCKS: Final = 2 * CONTEXT_TOKENS // BLOCK_SIZE
_HOST_BYTES: Final = 256 << 20
_WARM_UP_ROUNDS: Final = 2


def queueing(directory: Path, rounds: int) -> Iterator[Result]:
    """The figures of so many rounds."""
    with server_pair(directory, _MODEL, device_blocks=_DEVICE_BLOCKS, host_bytes=_HOST_BYTES) as servers:
        turns = [_turns(servers, number) for number in range(-_WARM_UP_ROUNDS, rounds)]
        differ = count_differences(servers.plain, turns[_WARM_UP_ROUNDS:])
    yield from _figures(turns[_WARM_UP_ROUNDS:], differ)


def _turns(servers: ServerPair, number: int) -> TurnPair:
    source = random.Random(f"{_SUITE} {number}")
    prompts = [[source.randrange(*TOKEN_IDS) for _ in range(_PROMPT_TOKENS)] for _ in range(_PROMPTS)]
    return take_turns(servers, prompts, output_tokens=_OUTPUT_TOKENS, at_once=_AT_ONCE, is_cached_first=number % 2 == 1)


def _figures(turns: list[TurnPair], differ: Differences) -> Iterator[Result]:
    cached, plain = [pair.cached for pair in turns], [pair.plain for pair in turns]
    seconds = [turn.seconds for turn in cached], [turn.seconds for turn in plain]
    queue_ms = [turn.queue_ms for turn in cached], [turn.queue_ms for turn in plain]
    time_, added = paired_ratio(*seconds), mean_difference(*queue_ms)
    yield judge(_SUITE, "time_over_plain_ratio", time_.ratio, "ratio", target=_TIME)
    yield judge(_SUITE, "time_over_plain_low_ratio", time_.low, "ratio")
    yield judge(_SUITE, "time_over_plain_high_ratio", time_.high, "ratio")
    yield judge(_SUITE, "time_best_s", min(seconds[0]), "s", floor=min(seconds[1]))
    yield judge(_SUITE, "time_median_s", median(seconds[0]), "s", floor=median(seconds[1]))
    yield judge(_SUITE, "queue_over_plain_ms", added.mean, "ms", target=_QUEUE)
    yield judge(_SUITE, "queue_over_plain_low_ms", added.low, "ms")
    yield judge(_SUITE, "queue_over_plain_high_ms", added.high, "ms")
    yield judge(_SUITE, "queue_median_ms", median(queue_ms[0]), "ms", floor=median(queue_ms[1]))
    for name, values, floors in (
        ("first_token", [turn.first_token_ms for turn in cached], [turn.first_token_ms for turn in plain]),
        ("steps", [turn.counted.steps for turn in cached], [turn.counted.steps for turn in plain]),
        ("cpu", [turn.cpu_s for turn in cached], [turn.cpu_s for turn in plain]),
    ):
        yield judge(_SUITE, f"{name}_over_plain_ratio", paired_ratio(values, floors).ratio, "ratio")
    yield judge(_SUITE, "late_requests", sum(turn.counted.late for turn in cached), "requests")
    yield judge(_SUITE, "hit_tokens", sum(turn.counted.hit_tokens for turn in cached), "tokens")
    yield judge(_SUITE, "outputs_that_differ_by_ties", differ.ties, "requests")
    yield judge(_SUITE, "outputs_that_differ", differ.others, "requests", target=_NONE)
