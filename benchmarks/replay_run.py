"""Plays calls against two servers at their times, in turns, and pairs what came back."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.outputs import TIE, Differences, first_difference
from benchmarks.replay_http import Answer, ask, complete
from benchmarks.replay_trace import Call

#: Calls of the warm-up, from which the pace comes.
WARM_UP_CALLS: Final = 12
_WARM_UP_AT_ONCE: Final = 4
#: Of the run, until the other server takes its turn: the machine's moods last longer.
SEGMENT_S: Final = 20.0
#: vLLM's processes spin for a second after their last step.
_QUIET_S: Final = 1.5


@dataclass(frozen=True, slots=True)
class Play:
    """The same calls against two fresh servers.

    Attributes:
        calls: what was asked.
        without: what came back without kvcached, in the order of the calls.
        cached: what came back with it.
    """

    calls: tuple[Call, ...]
    without: tuple[Answer, ...]
    cached: tuple[Answer, ...]


async def play_in_turns(without: Path, cached: Path, calls: Sequence[Call]) -> Play:
    """Play all calls against both servers, a segment of the run against one and then against the other.

    A segment is over when its last call is answered. Each server is first in every other segment.

    Args:
        without: socket of the server without kvcached.
        cached: of the one with it.
        calls: by their times.
    """
    answers: dict[Path, list[Answer]] = {without: [], cached: []}
    for number, segment in enumerate(segments(calls)):
        for socket in (cached, without) if number % 2 else (without, cached):
            answers[socket] += await play(socket, segment)
            await asyncio.sleep(_QUIET_S)
    return Play(tuple(calls), tuple(answers[without]), tuple(answers[cached]))


def segments(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """The calls of each segment, by their times."""
    for _, segment in itertools.groupby(calls, key=lambda call: call.at_s // SEGMENT_S):
        yield list(segment)


async def play(socket: Path, calls: Sequence[Call]) -> list[Answer]:
    """Send calls at their times, the first one at once, whether earlier ones are answered or not; answers in order."""
    clock = asyncio.get_running_loop().time
    start = clock() - calls[0].at_s

    async def one(call: Call) -> Answer:
        await asyncio.sleep(start + call.at_s - clock())
        return await complete(socket, call.prompt, call.output_tokens)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(call)) for call in calls]
    return [task.result() for task in tasks]


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
        if (place := first_difference(without.tokens, cached.tokens)) is not None:
            if min(without.leads[place], cached.leads[place]) < TIE:
                ties += 1
            else:
                others += 1
    return Differences(ties, others)
