"""SGLang with no storage, with kvcached and with files: three engines that do the same work in turns.

All have SGLang's hierarchical cache. Where nothing hits, the difference is what storing and asking costs; after a
restart of all of them, what the storage brings back.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final, TypeAlias

from benchmarks.engine_child import Engine
from benchmarks.local_model import BLOCK_SIZE, TOKEN_IDS, LocalModel, daemon_config, make_model
from benchmarks.outputs import first_difference
from benchmarks.pairs import paired_ratio
from benchmarks.programs import daemon_process, touch_host_pool
from benchmarks.result import Result, Target, judge
from benchmarks.sglang_environment import STORAGES, Storage, interpreter, running_engine

SUITE: Final = "sglang"
#: Of a prompt's pages, in percent, those that were stored before the restart. Of a prompt that was stored whole, SGLang
#: takes all pages but that of its last token.
SHARES_PERCENT: Final = (30, 60, 90, 100)
#: What a storage may cost where it never hits.
_MISSES: Final = Target("value", "<=", 1.02)
_NONE: Final = Target("value", "<=", 0)

#: Prompts of a turn, all at once.
_PROMPTS: Final = 4
_MISS_PAGES: Final = 16
_HIT_PAGES: Final = 24
_OUTPUT_TOKENS: Final = 16
#: Of SGLang's device pool: what a turn needs twice over, so that each turn evicts the last but one.
_CACHE_TOKENS: Final = 2 * _PROMPTS * (_HIT_PAGES + 1) * BLOCK_SIZE
_WARM_UP_ROUNDS: Final = 2
#: In which one engine stores its last pages before the next has its turn.
_QUIET_S: Final = 0.5

Prompts: TypeAlias = list[list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's part of a round.

    Attributes:
        seconds: until the last token.
        first_token_s: mean over the prompts.
        cpu_s: of all its processes, with what they stored behind the last token.
        storage_tokens: of prompts that came from the storage.
        outputs: tokens of each request.
    """

    seconds: float
    first_token_s: float
    cpu_s: float
    storage_tokens: int
    outputs: list[list[int]]


Round: TypeAlias = dict[Storage, Turn]


def misses_and_hits(model: LocalModel, directory: Path, rounds: int) -> Iterator[Result]:
    """The figures of so many rounds of each kind."""
    folder, source = make_model(model, directory, interpreter()), random.Random(SUITE)
    stored = {share: [_prompts(source, _HIT_PAGES) for _ in range(rounds)] for share in SHARES_PERCENT}
    # Of each share's prompts those stored at first, and the new part of those that come again: less than two for all.
    per_round = _MISS_PAGES + 1 + (_HIT_PAGES + 1) * (len(SHARES_PERCENT) + 2)
    pages = (rounds + _WARM_UP_ROUNDS) * _PROMPTS * per_round
    with daemon_process(daemon_config(pages * model.block_bytes), directory) as process:
        touch_host_pool(process)
        run_dir = directory / "run"
        with _engines("before", directory, folder, run_dir) as engines:
            played = _misses(engines, source, rounds)
            for storage in STORAGES[1:]:
                for prompts in (each for sets in stored.values() for each in sets):
                    engines[storage].generate(prompts, 1)
        yield from _figures(0, played, _MISS_PAGES)
        with _engines("after", directory, folder, run_dir) as engines:
            hits = _hits(engines, source, stored)
    for share, turns in hits.items():
        yield from _figures(share, turns, _HIT_PAGES)


@contextlib.contextmanager
def _engines(name: str, directory: Path, folder: Path, run_dir: Path) -> Iterator[dict[Storage, Engine]]:
    """An engine for each storage, ready; those with one have stored all pages when the block is over."""
    with contextlib.ExitStack() as stack:
        engines = {
            storage: stack.enter_context(
                running_engine(
                    f"{name}-{storage}",
                    directory,
                    folder,
                    cache_tokens=_CACHE_TOKENS,
                    storage=storage,
                    run_dir=run_dir,
                )
            )
            for storage in STORAGES
        }
        for engine in engines.values():
            engine.wait_until_ready()
        yield engines


def _misses(engines: dict[Storage, Engine], source: random.Random, rounds: int) -> list[Round]:
    """Rounds in which no prompt was ever seen."""
    played = []
    for number in range(-_WARM_UP_ROUNDS, rounds):
        played.append(_round(engines, _prompts(source, _MISS_PAGES), number))
        _say(f"misses, round {number + 1} of {rounds}")
    return played[_WARM_UP_ROUNDS:]


def _hits(
    engines: dict[Storage, Engine], source: random.Random, stored: dict[int, list[Prompts]]
) -> dict[int, list[Round]]:
    """Rounds in which a share of each prompt comes again for the first time."""
    for number in range(_WARM_UP_ROUNDS):
        _round(engines, _prompts(source, _HIT_PAGES), number)
    played: dict[int, list[Round]] = {share: [] for share in stored}
    for number in range(len(stored[SHARES_PERCENT[0]])):
        for share, sets in stored.items():
            known = _HIT_PAGES * share // 100 * BLOCK_SIZE
            prompts = [each[:known] + _tokens(source, len(each) - known) for each in sets[number]]
            played[share].append(_round(engines, prompts, number))
        _say(f"hits, round {number + 1}")
    return played


def _round(engines: dict[Storage, Engine], prompts: Prompts, number: int) -> Round:
    """Each engine's turn; every one of them is first, second and last in turn."""
    first = number % len(STORAGES)
    return {storage: _turn(engines[storage], prompts) for storage in (*STORAGES[first:], *STORAGES[:first])}


def _turn(engine: Engine, prompts: Prompts) -> Turn:
    before_s = engine.cpu_s()
    answer = engine.generate(prompts, _OUTPUT_TOKENS)
    time.sleep(_QUIET_S)
    return Turn(
        answer["seconds"],
        fmean(answer["first_token_seconds"]),
        engine.cpu_s() - before_s,
        answer["storage_tokens"],
        answer["tokens"],
    )


def _figures(share: int, played: Sequence[Round], pages: int) -> Iterator[Result]:
    """What each storage costs or gains over none."""
    for storage in STORAGES[1:]:
        turns, plain = [each[storage] for each in played], [each["plain"] for each in played]
        for name, values, floors in (
            ("time", [turn.seconds for turn in turns], [turn.seconds for turn in plain]),
            ("first_token", [turn.first_token_s for turn in turns], [turn.first_token_s for turn in plain]),
            ("cpu", [turn.cpu_s for turn in turns], [turn.cpu_s for turn in plain]),
        ):
            metric, ratio = f"{storage}_{name}_{share}", paired_ratio(values, floors)
            is_promised = storage == "kvcached" and not share and name != "cpu"
            yield judge(
                SUITE, f"{metric}_over_plain_ratio", ratio.ratio, "ratio", target=_MISSES if is_promised else ()
            )
            yield judge(SUITE, f"{metric}_over_plain_low_ratio", ratio.low, "ratio")
            yield judge(SUITE, f"{metric}_over_plain_high_ratio", ratio.high, "ratio")
            yield judge(SUITE, f"{metric}_median_s", median(values), "s", floor=median(floors))
        tokens = len(played) * _PROMPTS * pages * BLOCK_SIZE
        hits = sum(turn.storage_tokens for turn in turns)
        yield judge(SUITE, f"{storage}_hit_{share}_percent", 100 * hits / tokens, "percent")
        yield judge(SUITE, f"{storage}_outputs_that_differ_{share}", _differ(turns, plain), "requests", target=_NONE)


def _differ(turns: Sequence[Turn], plain: Sequence[Turn]) -> int:
    """How many requests have another output than without storage."""
    return sum(
        first_difference(one, other) is not None
        for turn, same in zip(turns, plain, strict=True)
        for one, other in zip(turn.outputs, same.outputs, strict=True)
    )


def _prompts(source: random.Random, pages: int) -> Prompts:
    return [_tokens(source, pages * BLOCK_SIZE) for _ in range(_PROMPTS)]


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(*TOKEN_IDS) for _ in range(count)]


def _say(text: str) -> None:
    print(f"suite {SUITE}: {text}", file=sys.stderr, flush=True)
