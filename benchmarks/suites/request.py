"""Suite ``request``: whole requests through the daemon, from tokens to the last answer, against a bare echo."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns, thread_time_ns
from typing import Final

import numpy as np

from benchmarks.configurations import small_replica
from benchmarks.programs import daemon_process, running
from benchmarks.request_rig import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    Echo,
    Engine,
    ManagedEngine,
    OffloadEngine,
    Tokens,
    Traffic,
    traffic_of,
)
from benchmarks.result import Result, Target, judge
from kvcached_client import KeyChain, Lease

_SHORT_TOKENS: Final = 512
_MEDIUM_TOKENS: Final = 8192
_LONG_TOKENS: Final = 131_072
_TURN_TOKENS: Final = 256
_VOCABULARY: Final = 128_256
#: The long prompt, and room for requests until the oldest are evicted: eviction is steady after the warm-up.
_SLOTS: Final = _LONG_TOKENS // BLOCK_SIZE + 4096
#: Of a pool with a hundred times as many blocks, about.
_MANY_SLOTS: Final = 1_000_000
#: Prompts that fill it.
_FILLING_TOKENS: Final = 1024
_SLAB_BYTES: Final = 1 << 20
_OFFLOAD: Final = f"[host]\nsize_bytes = {2 * _SLOTS * BLOCK_BYTES}\nslab_bytes = {_SLAB_BYTES}\n[offload]\n"
_WARM_UP_ROUNDS: Final = 20
_REQUESTS_PER_ROUND: Final = 8
#: Requests that run in a step.
_STEP_REQUESTS: Final = 64
_SIZE_RATIO_MAX: Final = Target("value", "<=", 1.3)


@dataclass(frozen=True, slots=True)
class _Case:
    """A kind of request.

    Attributes:
        name: as metrics spell it.
        engine: that serves it.
        prepare: makes what the next request starts with, untimed, and returns the request.
        limit: for its time over that of the echo; None where nothing was promised.
    """

    name: str
    engine: Engine
    prepare: Callable[[], Callable[[], object]]
    limit: float | None = None


@dataclass(slots=True)
class _Times:
    """Nanoseconds of each request of a case, and of the echo beside it."""

    request: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    daemon: list[int] = field(default_factory=list)
    echo: list[int] = field(default_factory=list)


class _Prompts:
    """Tokens of prompts: a beginning that many share, and an end of their own."""

    def __init__(self, first: int = 0) -> None:
        self._random = np.random.default_rng(first)
        self._count = first

    def tokens(self, count: int) -> Tokens:
        """New tokens."""
        return self._random.integers(0, _VOCABULARY, count, dtype=np.int32)

    def name(self) -> str:
        """A name for the next request."""
        self._count += 1
        return f"request-{self._count}"


def run(rounds: int) -> Iterator[Result]:
    """Measure each kind of request beside an echo of as many bytes, request by request."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name, ExitStack() as stack:
        directory = Path(name)
        endpoint = f"ipc://{directory / 'echo.sock'}"
        stack.enter_context(running("echo", ["benchmarks.echo", endpoint], directory))
        for config, cases in ((_replica(_SLOTS), _managed), (_OFFLOAD, _offload)):
            place = directory / cases.__name__
            with daemon_process(config, place) as daemon:
                for case in cases(place / "run"):
                    yield from _beside_echo(case, endpoint, daemon.pid, rounds)
        yield from _by_size(directory, rounds)


def _replica(slots: int) -> str:
    return small_replica("managed", model="benchmark", block_size=BLOCK_SIZE, slots=slots)


def _managed(run_dir: Path) -> Iterator[_Case]:
    """An engine on a device pool, without a host pool."""
    with ManagedEngine(run_dir, "managed") as engine:
        prompts = _Prompts()
        for kind, tokens, limit in (("short", _SHORT_TOKENS, 1.6), ("8k", _MEDIUM_TOKENS, 2.0)):
            yield _Case(f"{kind}_managed", engine, _half_cached(engine, prompts, tokens), limit)
        engine.turn_over(prompts.name(), engine.root(prompts.tokens(_SHORT_TOKENS)))
        turned_over = _half_cached(engine, prompts, _SHORT_TOKENS, engine.turn_over)
        yield _Case("short_managed_batched", engine, turned_over)
        yield _Case("64_commits", engine, _full_blocks(engine, prompts, engine.commit))
        yield _Case("64_commits_batched", engine, _full_blocks(engine, prompts, engine.commit_batched), 3.0)
        long = prompts.tokens(_LONG_TOKENS)
        engine.serve(prompts.name(), engine.root(long))
        yield _Case("128k_match", engine, lambda: lambda: engine.match(engine.root(long)))
        yield _Case("128k_turn", engine, _next_turn(engine, prompts, long), 1.6)


def _offload(run_dir: Path) -> Iterator[_Case]:
    """An engine with device memory of its own."""
    with OffloadEngine(run_dir) as engine:
        prompts = _Prompts()
        yield _Case("short_offload_miss", engine, _missed(engine, prompts), 1.7)
        for kind, tokens in (("short", _SHORT_TOKENS), ("8k", _MEDIUM_TOKENS)):
            yield _Case(f"{kind}_offload", engine, _half_cached(engine, prompts, tokens))
        pipelined = _half_cached(engine, prompts, _SHORT_TOKENS, engine.serve_pipelined)
        yield _Case("short_offload_pipelined", engine, pipelined)


def _beside_echo(case: _Case, endpoint: str, pid: int, rounds: int) -> Iterator[Result]:
    traffic = traffic_of(case.engine, case.prepare())
    with Echo(endpoint, traffic) as echo:
        _measure(case, echo, pid, _WARM_UP_ROUNDS)
        times = _measure(case, echo, pid, rounds)
    return _results(case, traffic, times)


def _half_cached(
    engine: Engine, prompts: _Prompts, count: int, serve: Callable[[str, KeyChain], object] | None = None
) -> Callable[[], Callable[[], object]]:
    """Prompts whose first half is cached; the blocks of the second half take the place of the oldest.

    `serve` is how the engine serves them: `Engine.serve` by default.
    """
    served = serve or engine.serve
    shared = prompts.tokens(count // 2)
    engine.serve(prompts.name(), engine.root(shared))

    def prepare() -> Callable[[], object]:
        name, tokens = prompts.name(), np.concatenate((shared, prompts.tokens(count - len(shared))))
        return lambda: served(name, engine.root(tokens))

    return prepare


def _full_blocks(
    engine: ManagedEngine, prompts: _Prompts, commit: Callable[[list[Lease], int], None]
) -> Callable[[], Callable[[], object]]:
    """Steps in which each of many requests has filled a block; all these blocks are committed."""

    def prepare() -> Callable[[], object]:
        chains = [(prompts.name(), engine.root(prompts.tokens(BLOCK_SIZE))) for _ in range(_STEP_REQUESTS)]
        return partial(commit, engine.acquire(chains), BLOCK_SIZE)

    return prepare


def _missed(engine: OffloadEngine, prompts: _Prompts) -> Callable[[], Callable[[], object]]:
    """Prompts of which nothing is cached, and nothing is to be stored."""

    def prepare() -> Callable[[], object]:
        name, tokens = prompts.name(), prompts.tokens(_SHORT_TOKENS)

        def miss() -> None:
            chain = engine.root(tokens)
            hold = engine.client.acquire(name, chain.keys, chain.token_count)
            engine.client.release(hold.lease)

        return miss

    return prepare


def _next_turn(engine: Engine, prompts: _Prompts, tokens: Tokens) -> Callable[[], Callable[[], object]]:
    """A long conversation goes on, each time with another turn; its chain is kept, and the daemon knows the prompt."""
    kept = engine.root(tokens)
    engine.serve(prompts.name(), kept)

    def prepare() -> Callable[[], object]:
        name, turn, chain = prompts.name(), prompts.tokens(_TURN_TOKENS), kept.fork()

        def serve() -> None:
            chain.extend(turn)
            engine.serve(name, chain)

        return serve

    return prepare


def _by_size(directory: Path, rounds: int) -> Iterator[Result]:
    """The same requests by turns on two full pools, of about 10,000 blocks and of a million."""
    with ExitStack() as stack:
        pids, engines = [], []
        for slots in (_SLOTS, _MANY_SLOTS):
            place = directory / f"{slots}"
            pids.append(stack.enter_context(daemon_process(_replica(slots), place)).pid)
            engines.append(stack.enter_context(ManagedEngine(place / "run", "managed")))
            _fill(engines[-1], slots)
        for few, many in zip(*map(_sized, engines), strict=True):
            _alternate(few, many, pids, _WARM_UP_ROUNDS)
            times, cpu = _alternate(few, many, pids, rounds)
            best, spent = [min(each) for each in times], [min(each) for each in cpu]
            metric = f"{few.name}_1m_over_10k"
            yield judge("request", f"{metric}_ratio", best[1] / best[0], "ratio", target=_SIZE_RATIO_MAX)
            ratios = [other / one for one, other in zip(*times, strict=True)]
            yield judge("request", f"{metric}_median_ratio", median(ratios), "ratio")
            yield judge("request", f"{metric}_daemon_cpu_ratio", spent[1] / spent[0], "ratio")


def _fill(engine: ManagedEngine, slots: int) -> None:
    """Prompts that share nothing, until the first of them has been evicted."""
    prompts = _Prompts()
    for _ in range(slots * BLOCK_SIZE // _FILLING_TOKENS + 1):
        engine.serve(prompts.name(), engine.root(prompts.tokens(_FILLING_TOKENS)))


def _sized(engine: ManagedEngine) -> Iterator[_Case]:
    """Requests whose cost must not depend on the number of blocks."""
    prompts = _Prompts(first=_MANY_SLOTS)
    for kind, tokens in (("short", _SHORT_TOKENS), ("8k", _MEDIUM_TOKENS)):
        yield _Case(f"{kind}_managed", engine, _half_cached(engine, prompts, tokens))
    yield _Case("128k_turn", engine, _next_turn(engine, prompts, prompts.tokens(_LONG_TOKENS)))


def _alternate(few: _Case, many: _Case, pids: list[int], rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """Nanoseconds of a request on either pool, the median of each round; and the daemon's processor time for it."""
    times: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            requests = [(few.prepare(), many.prepare()) for _ in range(_REQUESTS_PER_ROUND)]
            before = [_cpu_ns(pid) for pid in pids]
            spent: list[list[int]] = [[], []]
            for turn, pair in enumerate(requests):
                for which in (0, 1) if turn % 2 else (1, 0):
                    start = perf_counter_ns()
                    pair[which]()
                    spent[which].append(perf_counter_ns() - start)
            for which, pid in enumerate(pids):
                cpu[which].append((_cpu_ns(pid) - before[which]) / _REQUESTS_PER_ROUND)
                times[which].append(median(spent[which]))
    finally:
        if collecting:
            gc.enable()
    return times, cpu


def _measure(case: _Case, echo: Echo, pid: int, rounds: int) -> _Times:
    """Requests and echoes by turns. The daemon's time is that of a round, for its clock is read from outside."""
    times = _Times()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            requests = [case.prepare() for _ in range(_REQUESTS_PER_ROUND)]
            before = _cpu_ns(pid)
            for request in requests:
                start, cpu = perf_counter_ns(), thread_time_ns()
                request()
                times.cpu.append(thread_time_ns() - cpu)
                times.request.append(perf_counter_ns() - start)
                start = perf_counter_ns()
                echo.exchange()
                times.echo.append(perf_counter_ns() - start)
            times.daemon.append((_cpu_ns(pid) - before) // _REQUESTS_PER_ROUND)
    finally:
        if collecting:
            gc.enable()
    return times


def _cpu_ns(pid: int) -> int:
    """How long a process's first thread has run on a processor."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


def _results(case: _Case, traffic: Traffic, times: _Times) -> Iterator[Result]:
    ratios = [one / other for one, other in zip(times.request, times.echo, strict=True)]
    rounds = [
        median(ratios[first : first + _REQUESTS_PER_ROUND]) for first in range(0, len(ratios), _REQUESTS_PER_ROUND)
    ]
    target = Target("value", "<=", case.limit) if case.limit else ()
    yield judge("request", f"{case.name}_over_echo_ratio", min(rounds), "ratio", target=target)
    yield judge("request", f"{case.name}_over_echo_median_ratio", median(ratios), "ratio")
    p50, p99 = median(times.request), quantiles(times.request, n=100)[98]
    yield judge("request", f"{case.name}_us", p50 / 1e3, "us", floor=median(times.echo) / 1e3)
    yield judge("request", f"{case.name}_p99_over_p50_ratio", p99 / p50, "ratio")
    yield judge("request", f"{case.name}_client_cpu_us", min(times.cpu) / 1e3, "us")
    yield judge("request", f"{case.name}_daemon_cpu_us", min(times.daemon) / 1e3, "us")
    yield judge("request", f"{case.name}_calls", traffic.calls, "calls")
