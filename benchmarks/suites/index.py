"""Suite ``index``: the core's index with 1 M blocks, in three shapes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain, count
from statistics import fmean
from time import perf_counter
from typing import Final

from benchmarks.bare_tree import BareTree, walk
from benchmarks.one_engine import OneEngine
from benchmarks.result import Result, Target, judge
from benchmarks.shapes import ADVERSARIAL, CHAT, LONG_PROMPT_BLOCKS, TRACE, PiecePath, Shape
from benchmarks.timing import ROUNDS_MIN, interleave
from kvcached.core.run import KEY_SIZE

_SLOTS: Final = 1_000_000
#: Holds the long prompt of a shape and branches of one block, and little else.
_SMALL_SLOTS: Final = 10_000
_REQUEST_BLOCKS: Final = 512
_EVICTED_BLOCKS: Final = 8192
_EVICTIONS_PER_PASS: Final = 4
#: Passes with lower numbers are for building.
_REPLAY_FIRST_PASS: Final = 1_000
_MATCH_SECONDS: Final = 3.0
#: Passes take seconds where other suites' rounds take milliseconds.
_ROUNDS_PER_PASS: Final = 6

_BYTES_PER_BLOCK_MAX: Final = {"trace": 64, "chat": 128}
_MATCH_US_MAX: Final = {"trace": 10}
_MATCH_US_PER_RUN_MAX: Final = 2
_REQUEST_RATIO_MAX: Final = 3
_REQUEST_US_MAX: Final = {"trace": 50}
_EVICT_US_MAX: Final = {"trace": 150}
_EVICT_US_PER_RUN_MAX: Final = 6


def run(rounds: int) -> Iterator[Result]:
    """Measure shape by shape; each has a cache of its own, built by requests through the core's front door."""
    for shape in (TRACE, CHAT, ADVERSARIAL):
        yield from _measure(shape, rounds)
        gc.collect()


def _measure(shape: Shape, rounds: int) -> Iterator[Result]:
    collecting = gc.isenabled()
    gc.disable()  # a collection walks a million objects that are all alive
    try:
        limit = _BYTES_PER_BLOCK_MAX.get(shape.name)
        target = Target("value", "<=", limit) if limit else ()
        yield judge("index", f"bytes_per_block_{shape.name}", _bytes_per_block(shape), "bytes", target=target)
        gc.collect()
        engine, keys = _build(shape, _SLOTS)
        gc.freeze()
        yield judge("index", f"blocks_per_run_{shape.name}", engine.cached_blocks / engine.tree.run_count, "blocks")
        yield from _match(shape, engine, keys, rounds)
        if shape.name != ADVERSARIAL.name:
            passes = max(ROUNDS_MIN, rounds // _ROUNDS_PER_PASS)
            yield from _Replay(shape, engine).run(passes)
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()


def _bytes_per_block(shape: Shape) -> float:
    """Everything that is allocated between an empty process and a full cache, for each block in it."""
    shape.paths()
    gc.collect()
    tracemalloc.start()
    try:
        engine, _ = _build(shape, _SLOTS)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / engine.cached_blocks
    finally:
        tracemalloc.stop()


def _build(shape: Shape, slots: int) -> tuple[OneEngine, bytes]:
    """A cache in this shape, full for a while: a quarter of it has been evicted again. And its long prompt's keys."""
    engine = OneEngine(slots)
    for keys in chain.from_iterable(map(shape.prompts, count())):
        engine.request(keys)
        if engine.cache.counters["evicted_blocks"] > slots // 4:
            break
    return engine, _add_long_prompt(engine, shape)


def _add_long_prompt(engine: OneEngine, shape: Shape, *, branch_blocks: int | None = None) -> bytes:
    prompts = shape.long_prompt(branch_blocks=branch_blocks)
    keys = next(prompts)
    engine.request(keys)
    for branch in prompts:
        engine.request(branch)
    return keys


def _match(shape: Shape, engine: OneEngine, keys: bytes, rounds: int) -> Iterator[Result]:
    runs = _runs_on_path(engine, keys)
    cases: dict[str, Callable[[], int]] = {
        "match": lambda: engine.match(keys),
        "walk": lambda: walk(engine.tree.root, keys),
    }
    if shape.name == CHAT.name:
        small = OneEngine(_SMALL_SLOTS)
        assert _add_long_prompt(small, shape, branch_blocks=1) == keys
        assert _runs_on_path(small, keys) == runs
        cases["small"] = lambda: small.match(keys)
    assert {case() for case in cases.values()} == {LONG_PROMPT_BLOCKS}
    best_us = _best_us(cases, rounds)
    limit = _MATCH_US_MAX.get(shape.name, _MATCH_US_PER_RUN_MAX * runs)
    yield judge("index", f"runs_on_path_{shape.name}", runs, "runs")
    yield judge(
        "index",
        f"match_128k_{shape.name}_us",
        best_us["match"],
        "us",
        floor=best_us["walk"],
        target=Target("value", "<=", limit),
    )
    if shape.name == CHAT.name:
        yield judge("index", "match_128k_1m_over_10k", best_us["match"] / best_us["small"], "ratio")


def _best_us(cases: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """The best of so many rounds, and of more until they have seen some seconds of the machine: a case takes µs."""
    best = dict.fromkeys(cases, float("inf"))
    end = perf_counter() + _MATCH_SECONDS
    while perf_counter() < end:
        for name, measured in interleave(cases, rounds).items():
            best[name] = min(best[name], *measured)
    return {name: seconds * 1e6 for name, seconds in best.items()}


def _runs_on_path(engine: OneEngine, keys: bytes) -> int:
    run, _ = engine.tree.match(keys, LONG_PROMPT_BLOCKS, engine.pool.index)
    runs = 0
    while run.parent is not None:
        runs, run = runs + 1, run.parent
    return runs


class _Times:
    """Nanoseconds of the same work in every pass, in the core and in the bare tree."""

    def __init__(self) -> None:
        self._core: list[list[int]] = []
        self._bare: list[list[int]] = []

    def next_pass(self) -> None:
        """What is added from now on belongs to another pass."""
        self._core.append([])
        self._bare.append([])

    def add(self, core: int, bare: int) -> None:
        """One operation of the current pass."""
        self._core[-1].append(core)
        self._bare[-1].append(bare)

    def best_us(self) -> tuple[float, float]:
        """An operation in its best pass, all operations of a pass alike: core and bare.

        Means within a pass, not medians, so that what only some of its operations pay (an eviction) is in the figure.
        """
        core, bare = (min(map(fmean, passes)) / 1e3 for passes in (self._core, self._bare))
        return core, bare


class _Replay:
    """Passes of a shape over a full cache, on new keys each, with some of the work timed.

    What a pass does is the same every time, evictions included, for least recently used is what an older pass left.
    Only free slots may grow more scattered; ``ranges_per_grant`` of the last pass tells.
    """

    def __init__(self, shape: Shape, engine: OneEngine) -> None:
        self._shape = shape
        self._engine = engine
        self._bare = BareTree(_SLOTS)
        self._cuts = {place for place, path in enumerate(shape.paths()) if _crosses(path)}
        self._marks = {index * len(shape.paths()) // _EVICTIONS_PER_PASS for index in range(_EVICTIONS_PER_PASS)}
        self._next_pass = _REPLAY_FIRST_PASS
        self._evicted_before = 0
        self._runs_evicted: list[int] = []
        self._grant_ranges: list[int] = []

    def run(self, passes: int) -> Iterator[Result]:
        """Time requests and evictions in so many passes."""
        self._fill_bare()
        self._play(_Times(), _Times())
        requests, evictions = _Times(), _Times()
        for _ in range(passes):
            self._play(requests, evictions)
        name = self._shape.name
        yield judge("index", f"ranges_per_grant_{name}", fmean(self._grant_ranges), "ranges")
        value, floor = requests.best_us()
        targets = [Target("ratio", "<=", _REQUEST_RATIO_MAX)]
        if name in _REQUEST_US_MAX:
            targets.append(Target("value", "<=", _REQUEST_US_MAX[name]))
        yield judge("index", f"request_8k_{name}_us", value, "us", floor=floor, target=tuple(targets))
        value, floor = evictions.best_us()
        runs = fmean(self._runs_evicted)
        target = Target("value", "<=", _EVICT_US_MAX.get(name, _EVICT_US_PER_RUN_MAX * runs))
        yield judge("index", f"runs_evicted_{name}", runs, "runs")
        yield judge("index", f"evict_8192_{name}_us", value, "us", floor=floor, target=target)

    def _fill_bare(self) -> None:
        for keys in chain.from_iterable(map(self._shape.prompts, count())):
            self._bare.request(keys)
            if not self._bare.free:
                break

    def _play(self, requests: _Times, evictions: _Times) -> None:
        self._runs_evicted.clear()
        self._grant_ranges.clear()
        requests.next_pass()
        evictions.next_pass()
        for place, keys in enumerate(self._shape.prompts(self._next_pass)):
            if place in self._marks:
                self._evict(evictions)
            if place in self._cuts:
                self._request(keys[: _REQUEST_BLOCKS * KEY_SIZE], requests)
            self._engine.request(keys)
            self._bare.request(keys)
        self._next_pass += 1
        gc.collect()

    def _request(self, keys: bytes, times: _Times) -> None:
        core, bare = sum(self._engine.request(keys)), self._bare.request(keys)
        if self._evicted() > self._evicted_before:
            times.add(core, bare)
            self._grant_ranges.append(self._engine.granted_ranges)

    def _evict(self, times: _Times) -> None:
        """Time an eviction. Until what it freed is used again, requests are not in steady eviction."""
        before = self._engine.tree.run_count
        times.add(self._engine.evict(_EVICTED_BLOCKS), self._bare.evict(_EVICTED_BLOCKS))
        self._runs_evicted.append(before - self._engine.tree.run_count + 1)  # the last one is trimmed
        self._evicted_before = self._evicted()

    def _evicted(self) -> int:
        """Blocks that requests have evicted."""
        return self._engine.cache.counters["evicted_blocks"]


def _crosses(path: PiecePath) -> bool:
    """Whether a prompt is the first of its conversation to reach 8k tokens."""
    blocks = sum(piece.blocks for piece in path)
    return blocks - path[-1].blocks < _REQUEST_BLOCKS <= blocks
