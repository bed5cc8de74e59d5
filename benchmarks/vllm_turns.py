"""The same requests to a vLLM server with kvcached and to one without, one after the other, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.outputs import TIE, Differences, first_difference
from benchmarks.replay_http import complete
from benchmarks.vllm_load import Counters, complete_all, read_counters
from benchmarks.vllm_server import ServerPair, VllmServer

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


class TurnPair(NamedTuple):
    """The same requests to both servers.

    Attributes:
        prompts: tokens of each request's prompt.
        cached: what came of them with kvcached.
        plain: without it.
    """

    prompts: list[list[int]]
    cached: Turn
    plain: Turn


def take_turns(
    servers: ServerPair, prompts: list[list[int]], *, output_tokens: int, at_once: int, is_cached_first: bool
) -> TurnPair:
    """Have both servers answer prompts, so many at a time, each after a pause in which the other one comes to rest."""

    def turn(server: VllmServer) -> Turn:
        time.sleep(_QUIET_S)
        return asyncio.run(_turn(server, prompts, output_tokens, at_once))

    if is_cached_first:
        cached = turn(servers.cached)
        return TurnPair(prompts, cached, turn(servers.plain))
    plain = turn(servers.plain)
    return TurnPair(prompts, turn(servers.cached), plain)


def count_differences(plain: VllmServer, turns: Iterable[TurnPair]) -> Differences:
    """How many outputs differ, and why: the server without kvcached says how far ahead the first such token was."""
    is_tie = [asyncio.run(_is_tie(plain.socket, *each)) for each in _differing(turns)]
    return Differences(ties=sum(is_tie), others=len(is_tie) - sum(is_tie))


def _differing(turns: Iterable[TurnPair]) -> Iterator[tuple[list[int], list[int], int]]:
    """Prompts whose outputs differ, the output without kvcached, and the place of the first token that differs."""
    for pair in turns:
        for prompt, cached, plain in zip(pair.prompts, pair.cached.outputs, pair.plain.outputs, strict=True):
            if (place := first_difference(plain, cached)) is not None:
                yield prompt, plain, place


async def _is_tie(socket: Path, prompt: list[int], output: list[int], place: int) -> bool:
    """Whether rounding as good as decides the token at a place behind the tokens before it."""
    answer = await complete(socket, (*prompt, *output[:place]), 1)
    return answer.leads[0] < TIE


async def _turn(server: VllmServer, prompts: list[list[int]], output_tokens: int, at_once: int) -> Turn:
    before, cpu_before_s, start = await read_counters(server.socket), server.cpu_s(), time.perf_counter()
    outputs = await complete_all(server.socket, prompts, output_tokens=output_tokens, at_once=at_once)
    seconds = time.perf_counter() - start
    counted = (await read_counters(server.socket)).since(before)
    return Turn(seconds, counted, server.cpu_s() - cpu_before_s, outputs)
