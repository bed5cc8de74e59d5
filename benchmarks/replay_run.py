"""Plays calls against a server at their times, and pairs what came back with and without the cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.replay_http import Answer, ask, complete
from benchmarks.replay_trace import Call

#: Calls of the warm-up, from which the pace comes.
WARM_UP_CALLS: Final = 12
_WARM_UP_AT_ONCE: Final = 4
#: Two log-probabilities that are closer may change places with the order in which a sum is added up.
TIE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Play:
    """The same calls against two fresh servers, one after the other.

    Attributes:
        calls: what was asked.
        without: what came back without kvcached.
        cached: what came back with it.
    """

    calls: tuple[Call, ...]
    without: tuple[Answer, ...]
    cached: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Differences:
    """Requests whose two outputs differ.

    Attributes:
        ties: the first token that differs was as good as decided by rounding.
        others: all others.
    """

    ties: int
    others: int


async def play(socket: Path, calls: Sequence[Call]) -> tuple[Answer, ...]:
    """Send every call at its time, whether earlier ones are answered or not; what came back, in order."""
    clock = asyncio.get_running_loop().time
    start = clock()

    async def one(call: Call) -> Answer:
        await asyncio.sleep(start + call.at_s - clock())
        return await complete(socket, call.prompt, call.output_tokens)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(call)) for call in calls]
    return tuple(task.result() for task in tasks)


async def warm_up(socket: Path, calls: Sequence[Call], token_ids: tuple[int, int]) -> float:
    """Play some calls' lengths on other tokens, a few at once, then drop what is cached of them.

    Returns:
        Seconds per call: the inverse is about what the server can take without any hit.
    """
    clock = asyncio.get_running_loop().time
    source = random.Random("warm-up")
    some = [calls[place * len(calls) // WARM_UP_CALLS] for place in range(WARM_UP_CALLS)]
    gate = asyncio.Semaphore(_WARM_UP_AT_ONCE)

    async def one(call: Call) -> None:
        prompt = tuple(source.randrange(*token_ids) for _ in call.prompt)
        async with gate:
            await complete(socket, prompt, call.output_tokens)

    await one(some[0])  # the first request of a server is slow
    start = clock()
    async with asyncio.TaskGroup() as group:
        for call in some:
            group.create_task(one(call))
    seconds = clock() - start
    await ask(socket, "POST", "/reset_prefix_cache")
    return seconds / len(some)


def differences(play: Play) -> Differences:
    """How many outputs differ, and why."""
    ties = others = 0
    for without, cached in zip(play.without, play.cached, strict=True):
        if without.tokens != cached.tokens:
            pairs = zip(without.tokens, cached.tokens, strict=True)
            place = next(index for index, (one, other) in enumerate(pairs) if one != other)
            if min(without.leads[place], cached.leads[place]) < TIE:
                ties += 1
            else:
                others += 1
    return Differences(ties, others)
