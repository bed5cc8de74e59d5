"""Suite ``index``: the core's index with 1 M blocks, in three shapes."""

from __future__ import annotations

import gc
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
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
#: Passes take seconds where other suites' rounds take milliseconds.
_ROUNDS_PER_PASS: Final = 5
#: With fewer free slots than this, requests evict for what they add.
_FEW_SLOTS: Final = 16

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
        engine, keys, size = _build(shape)
        gc.freeze()
        cached = engine.cached_blocks
        yield judge("index", f"blocks_per_run_{shape.name}", cached / engine.tree.run_count, "blocks")
        limit = _BYTES_PER_BLOCK_MAX.get(shape.name)
        target = Target("value", "<=", limit) if limit else ()
        yield judge("index", f"bytes_per_block_{shape.name}", size / cached, "bytes", target=target)
        yield from _match(shape, engine, keys, rounds)
        if shape is not ADVERSARIAL:
            passes = max(ROUNDS_MIN, rounds // _ROUNDS_PER_PASS)
            yield from _Replay(shape, engine).run(passes)
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()


def _build(shape: Shape) -> tuple[OneEngine, bytes, int]:
    """A full cache in this shape, the keys of its long prompt, and the bytes of all that was allocated for it."""
    shape.paths()
    tracemalloc.start()
    try:
        engine = OneEngine(_SLOTS)
        number = 0
        while not engine.cache.counters["evicted_blocks"]:
            for keys in shape.prompts(number):
                engine.request(keys)
            number += 1
        keys = _add_long_prompt(engine, shape)
        gc.collect()
        return engine, keys, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


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
    if shape is CHAT:
        small = OneEngine(_SMALL_SLOTS)
        assert _add_long_prompt(small, shape, branch_blocks=1) == keys
        assert _runs_on_path(small, keys) == runs
        cases["small"] = lambda: small.match(keys)
    assert {case() for case in cases.values()} == {LONG_PROMPT_BLOCKS}
    best_us = {name: min(measured) * 1e6 for name, measured in interleave(cases, rounds).items()}
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
    if shape is CHAT:
        yield judge("index", "match_128k_1m_over_10k", best_us["match"] / best_us["small"], "ratio")


def _runs_on_path(engine: OneEngine, keys: bytes) -> int:
    run, _ = engine.tree.match(keys, LONG_PROMPT_BLOCKS, engine.pool.index)
    runs = 0
    while run.parent is not None:
        runs, run = runs + 1, run.parent
    return runs


@dataclass(slots=True)
class _Times:
    """Nanoseconds of the same work in every pass, by its place in the pass."""

    core: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    bare: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: int, core: int, bare: int) -> None:
        self.core[place].append(core)
        self.bare[place].append(bare)

    def best_us(self) -> tuple[float, float]:
        """Mean over the places of each place's best pass: core and bare."""
        core, bare = (fmean(map(min, times.values())) / 1e3 for times in (self.core, self.bare))
        return core, bare


class _Replay:
    """Passes of a shape over a full cache, on new keys each, with some of the work timed.

    What a pass does is the same every time, evictions included, for least recently used is what an older pass left.
    """

    def __init__(self, shape: Shape, engine: OneEngine) -> None:
        self._shape = shape
        self._engine = engine
        self._bare = BareTree(_SLOTS)
        self._cuts = {place for place, path in enumerate(shape.paths()) if _crosses(path)}
        self._marks = {index * len(shape.paths()) // _EVICTIONS_PER_PASS for index in range(_EVICTIONS_PER_PASS)}
        self._next_pass = 1_000  # the build has used those before
        self._runs_evicted: list[int] = []

    def run(self, passes: int) -> Iterator[Result]:
        """Time requests and evictions in so many passes."""
        while self._bare.free > _FEW_SLOTS:
            self._play(_Times(), _Times())
        self._play(_Times(), _Times())
        self._runs_evicted.clear()
        requests, evictions = _Times(), _Times()
        for _ in range(passes):
            self._play(requests, evictions)
        name = self._shape.name
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

    def _play(self, requests: _Times, evictions: _Times) -> None:
        for place, keys in enumerate(self._shape.prompts(self._next_pass)):
            if place in self._marks:
                self._evict(place, evictions)
            if place in self._cuts:
                self._request(place, keys[: _REQUEST_BLOCKS * KEY_SIZE], requests)
            self._engine.request(keys)
            self._bare.request(keys)
        self._next_pass += 1
        gc.collect()

    def _request(self, place: int, keys: bytes, times: _Times) -> None:
        steady = self._engine.pool.free <= _FEW_SLOTS
        core, bare = sum(self._engine.request(keys)), self._bare.request(keys)
        if steady:
            times.add(place, core, bare)

    def _evict(self, place: int, times: _Times) -> None:
        if self._bare.free > _FEW_SLOTS:
            return  # still filling
        before = self._engine.tree.run_count
        times.add(place, self._engine.evict(_EVICTED_BLOCKS), self._bare.evict(_EVICTED_BLOCKS))
        self._runs_evicted.append(before - self._engine.tree.run_count + 1)  # the last one is trimmed


def _crosses(path: PiecePath) -> bool:
    """Whether a prompt is the first of its conversation to reach 8k tokens."""
    blocks = sum(piece.blocks for piece in path)
    return blocks - path[-1].blocks < _REQUEST_BLOCKS <= blocks
