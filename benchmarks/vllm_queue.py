"""What kvcached costs requests that hit nothing: two vLLM servers do the same work in turns, with and without it.

Sixteen clients send short prompts that nobody has seen. The hooks of the connector take microseconds (suite `vllm`);
what requests feel beside that is the wait for the daemon's "no", in vLLM's own queue, and steps that compute nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.pairs import mean_difference, paired_ratio
from benchmarks.programs import daemon
from benchmarks.result import Result, Target, judge
from benchmarks.vllm_environment import BLOCK_SIZE, CONTEXT_TOKENS, MODELS, TOKEN_IDS, daemon_config, make_model
from benchmarks.vllm_load import Counters, complete_all, read_counters
from benchmarks.vllm_server import VllmServer

_SUITE: Final = "vllm-queue"
_TIME: Final = Target("value", "<=", 1.05)
_QUEUE: Final = Target("value", "<=", 5)
_MODEL: Final = MODELS["tiny"]
_PROMPTS: Final = 200
_PROMPT_TOKENS: Final = 100
_OUTPUT_TOKENS: Final = 16
_AT_ONCE: Final = 16
#: Of vLLM's own cache: more than what runs at once. vLLM wants room for the longest prompt.
_DEVICE_BLOCKS: Final = 2 * CONTEXT_TOKENS // BLOCK_SIZE
_HOST_BYTES: Final = 256 << 20
_WARM_UP_ROUNDS: Final = 2
#: vLLM's processes spin for a second after their last step, which would be the other server's time.
_QUIET_S: Final = 1.2


@dataclass(frozen=True, slots=True)
class Turn:
    """One server's part of a round.

    Attributes:
        seconds: from the first request sent to the last answer.
        counted: by the server meanwhile.
        cpu_s: of its processes.
        outputs: tokens of each request.
    """

    seconds: float
    counted: Counters
    cpu_s: float
    outputs: list[list[int]]

    @property
    def queue_ms(self) -> float:
        """Mean time of a request in vLLM's queue."""
        return self.counted.queued_s / self.counted.requests * 1e3

    @property
    def first_token_ms(self) -> float:
        """Mean time from a request's arrival to its first token."""
        return self.counted.first_tokens_s / self.counted.requests * 1e3


def queueing(directory: Path, rounds: int) -> Iterator[Result]:
    """The figures of so many rounds."""
    folder = make_model(_MODEL, directory)
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(daemon(daemon_config(_HOST_BYTES), directory))
        servers = {
            name: stack.enter_context(
                VllmServer(name, directory, _MODEL, folder, device_blocks=_DEVICE_BLOCKS, run_dir=place)
            )
            for name, place in (("cached", run_dir), ("plain", None))
        }
        for server in servers.values():
            server.wait_until_ready()
        turns = list(_played(servers, rounds))
    yield from _figures([each["cached"] for each in turns], [each["plain"] for each in turns])


def _played(servers: dict[str, VllmServer], rounds: int) -> Iterator[dict[str, Turn]]:
    """The turns of every round but the first ones. Each server is first in every other round."""
    source = random.Random(_SUITE)
    for number in range(_WARM_UP_ROUNDS + rounds):
        prompts = [[source.randrange(*TOKEN_IDS) for _ in range(_PROMPT_TOKENS)] for _ in range(_PROMPTS)]
        turns = {}
        for name in ("cached", "plain") if number % 2 else ("plain", "cached"):
            turns[name] = take_turn(servers[name], prompts, output_tokens=_OUTPUT_TOKENS, at_once=_AT_ONCE)
        if number >= _WARM_UP_ROUNDS:
            yield turns


def take_turn(server: VllmServer, prompts: list[list[int]], *, output_tokens: int, at_once: int) -> Turn:
    """Have a server answer prompts, so many at a time, after a pause in which the other one comes to rest."""
    time.sleep(_QUIET_S)
    return asyncio.run(_turn(server, prompts, output_tokens, at_once))


async def _turn(server: VllmServer, prompts: list[list[int]], output_tokens: int, at_once: int) -> Turn:
    before, cpu_before_s, start = await read_counters(server.socket), server.cpu_s(), time.perf_counter()
    outputs = await complete_all(server.socket, prompts, output_tokens=output_tokens, at_once=at_once)
    seconds = time.perf_counter() - start
    counted = (await read_counters(server.socket)).since(before)
    return Turn(seconds, counted, server.cpu_s() - cpu_before_s, outputs)


def _figures(cached: list[Turn], plain: list[Turn]) -> Iterator[Result]:
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
    one, other = ([output for turn in turns for output in turn.outputs] for turns in (cached, plain))
    different = sum(mine != theirs for mine, theirs in zip(one, other, strict=True))
    yield judge(_SUITE, "outputs_that_differ", different, "requests")
