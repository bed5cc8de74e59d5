"""Two engines up at the same time, with and without kvcached, that do the same work in turns."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.engine_child import Engine
from benchmarks.local_model import BLOCK_SIZE, TOKEN_IDS, LocalModel, daemon_config, make_model
from benchmarks.pairs import Interval, paired_ratio
from benchmarks.programs import daemon
from benchmarks.result import Result, Target, judge
from benchmarks.vllm_child import running_engine
from benchmarks.vllm_environment import interpreter

#: What a cache may cost where it never hits.
_MISSES: Final = Target("value", ">=", 0.98)
_SEQUENCES: Final = 16
_HOST_BYTES: Final = 1 << 30
_WARM_UP_ROUNDS: Final = 2
#: vLLM's processes spin for a second after their last step, which would be the other engine's time.
_QUIET_S: Final = 1.2

#: Prompts of a round in which nothing hits, and what is generated for each.
_MISS_PROMPTS: Final = 4
_MISS_TOKENS: Final = 256
_MISS_OUTPUT: Final = 16
#: Prompts of a round, each with another beginning that it shares with one before.
_HIT_PROMPTS: Final = 3
_HIT_SHARED_TOKENS: Final = 768
_HIT_OWN_TOKENS: Final = BLOCK_SIZE
_HIT_OUTPUT: Final = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """Both engines, ready."""

    cached: Engine
    plain: Engine

    def turns(self, number: int) -> Iterator[Engine]:
        """The engine whose turn it is, once the other one is quiet. Each is first in every other round."""
        for engine in (self.cached, self.plain) if number % 2 else (self.plain, self.cached):
            time.sleep(_QUIET_S)
            yield engine


@contextlib.contextmanager
def engine_pair(model: LocalModel, directory: Path) -> Iterator[Pair]:
    """A daemon and two engines; vLLM's own cache takes what one round needs twice over."""
    folder = make_model(model, directory, interpreter())
    tokens = max(_MISS_PROMPTS * (_MISS_TOKENS + _MISS_OUTPUT), _HIT_PROMPTS * (_HIT_SHARED_TOKENS + 2 * BLOCK_SIZE))
    cache_bytes = 2 * tokens // BLOCK_SIZE * model.block_bytes
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(daemon(daemon_config(_HOST_BYTES), directory))
        cached, plain = (
            stack.enter_context(
                running_engine(
                    f"{model.name}-{name}",
                    directory,
                    folder,
                    cache_bytes=cache_bytes,
                    sequences=_SEQUENCES,
                    run_dir=place,
                )
            )
            for name, place in (("with", run_dir), ("without", None))
        )
        for engine in (cached, plain):
            engine.wait_until_ready()
        yield Pair(cached, plain)


def misses(pair: Pair, model: LocalModel, rounds: int) -> Iterator[Result]:
    """Throughput where no prompt was ever seen: what storing costs.

    A round is over once nothing is left to store, in both engines.
    """
    source = random.Random("misses")

    def round_(number: int) -> dict[Engine, dict[str, Any]]:
        prompts = [_tokens(source, _MISS_TOKENS) for _ in range(_MISS_PROMPTS)]
        return {engine: engine.generate(prompts, _MISS_OUTPUT) for engine in pair.turns(number)}

    answers = _rounds(round_, rounds)
    assert not any(answer["cached_tokens"] for each in answers for answer in each.values())
    settled, generated = (_speed(pair, answers, key) for key in ("settled_seconds", "seconds"))
    yield from _interval(f"{model.name}_throughput_at_no_hits", settled, _MISSES)
    yield from _interval(f"{model.name}_throughput_at_no_hits_last_stores_apart", generated)
    yield _differences(f"{model.name}_outputs_that_differ_at_no_hits", pair, answers)


def hits(pair: Pair, model: LocalModel, rounds: int) -> Iterator[Result]:
    """Time to first token, and throughput, of prompts whose beginning is in the host pool, not in vLLM's own cache.

    The engine without kvcached computes them anew. What is in vLLM's own cache is dropped after each call.
    """
    source = random.Random("hits")

    def round_(number: int) -> dict[Engine, dict[str, Any]]:
        beginnings = [_tokens(source, _HIT_SHARED_TOKENS) for _ in range(_HIT_PROMPTS)]
        fill, again = ([[*shared, *_tokens(source, _HIT_OWN_TOKENS)] for shared in beginnings] for _ in range(2))
        one = [*beginnings[0], *_tokens(source, _HIT_OWN_TOKENS)]
        answers = {}
        for engine in pair.turns(number):
            engine.generate(fill, 1)
            first = engine.generate([one], 1)
            answers[engine] = engine.generate(again, _HIT_OUTPUT) | {
                "first_token_seconds": first["seconds"],
                "cached_tokens_of_first": first["cached_tokens"],
            }
        return answers

    answers = _rounds(round_, rounds)
    for each in answers:
        assert each[pair.plain]["cached_tokens"] == each[pair.plain]["cached_tokens_of_first"] == 0
        assert each[pair.cached]["cached_tokens_of_first"] == _HIT_SHARED_TOKENS
        assert each[pair.cached]["cached_tokens"] == _HIT_PROMPTS * _HIT_SHARED_TOKENS
    for name, key in (("first_token", "first_token_seconds"), ("throughput", "settled_seconds")):
        yield from _interval(f"{model.name}_{name}_speed_at_hits", _speed(pair, answers, key))
    seconds = [min(each[engine]["first_token_seconds"] for each in answers) for engine in (pair.cached, pair.plain)]
    yield judge("vllm", f"{model.name}_first_token_at_hits_ms", seconds[0] * 1e3, "ms", floor=seconds[1] * 1e3)
    yield _differences(f"{model.name}_outputs_that_differ_at_hits", pair, answers)


_Answers = list[dict[Engine, dict[str, Any]]]


def _rounds(round_: Callable[[int], dict[Engine, dict[str, Any]]], rounds: int) -> _Answers:
    """The answers of every round but the first ones."""
    answers = []
    for number in range(_WARM_UP_ROUNDS + rounds):
        gc.collect()
        answers.append(round_(number))
    return answers[_WARM_UP_ROUNDS:]


def _differences(metric: str, pair: Pair, answers: _Answers) -> Result:
    """How many outputs of the two engines differ: sums that are added up in another order may decide a tie."""
    cached, plain = (
        [tokens for each in answers for tokens in each[engine]["tokens"]] for engine in (pair.cached, pair.plain)
    )
    different = sum(one != other for one, other in zip(cached, plain, strict=True))
    return judge("vllm", metric, different, "requests")


def _speed(pair: Pair, answers: _Answers, key: str) -> Interval:
    """How many times as fast as without kvcached."""
    plain, cached = ([each[engine][key] for each in answers] for engine in (pair.plain, pair.cached))
    return paired_ratio(plain, cached)


def _interval(metric: str, interval: Interval, target: Target | tuple[()] = ()) -> Iterator[Result]:
    yield judge("vllm", f"{metric}_ratio", interval.ratio, "ratio", target=target)
    yield judge("vllm", f"{metric}_low_ratio", interval.low, "ratio")
    yield judge("vllm", f"{metric}_high_ratio", interval.high, "ratio")


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(*TOKEN_IDS) for _ in range(count)]
