"""Suite ``events``: what a daemon that tells three routers of every block loses, against one that tells nobody."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Final

from benchmarks.configurations import small_replica
from benchmarks.programs import daemon_process, running
from benchmarks.result import Result, Target, judge
from kvcached_client import Client
from kvcached_client.protocol.zmtp import GREETING, SUBSCRIBER, subscribe

_BLOCK_SIZE: Final = 16
#: A prompt of 2048 tokens; the pool holds 32 of them, so that each new one evicts another.
_BLOCKS: Final = 128
_SLOTS: Final = 32 * _BLOCKS
#: In a row to one daemon: about as long as it waits between two batches.
_REQUESTS: Final = 30
_PAIRS_PER_ROUND: Final = 10
_WARM_UP_ROUNDS: Final = 4
#: By the number of new blocks in each prompt.
_KINDS: Final = {"cached": 0, "half": _BLOCKS // 2, "new": _BLOCKS}
_READERS: Final = 2
_DEADLINE_MS: Final = 10_000
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def run(rounds: int) -> Iterator[Result]:
    """Requests (acquire, commit, release) whose prompts are cached, or new in part or whole, and evict others.

    Each new block is told as stored, and another one as removed.
    Two subscribers read, one never does. The two daemons take turns, thirty requests each.
    """
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name, contextlib.ExitStack() as stack:
        plain = stack.enter_context(_Engine(Path(name) / "plain", ""))
        told = stack.enter_context(_Engine(Path(name) / "told", "[events]\n"))
        endpoint = told.run_dir / "events.sock"
        for number in range(_READERS):
            reader = ["benchmarks.event_reader", f"ipc://{endpoint}"]
            stack.enter_context(running(f"reader-{number}", reader, Path(name)))
        stalled = stack.enter_context(socket.socket(socket.AF_UNIX))
        stalled.connect(str(endpoint))
        stalled.sendall(GREETING + SUBSCRIBER.ready + subscribe(b""))
        for kind, new_blocks in _KINDS.items():
            _rounds(plain, told, _WARM_UP_ROUNDS, new_blocks)
            before = plain.processor_s(), told.processor_s()
            ratios, plain_ns = _rounds(plain, told, rounds, new_blocks)
            used = plain.processor_s() - before[0], told.processor_s() - before[1]
            yield from _results(kind, ratios, plain_ns, used[1] / used[0])


def _results(kind: str, ratios: list[float], plain_ns: list[int], processor_ratio: float) -> Iterator[Result]:
    tenths = quantiles(ratios, n=10)
    target = Target("value", "<=", 1.02) if kind == "cached" else ()
    yield judge("events", f"{kind}_ratio", median(ratios), "ratio", target=target)
    yield judge("events", f"{kind}_p10_ratio", tenths[0], "ratio")
    yield judge("events", f"{kind}_p90_ratio", tenths[-1], "ratio")
    yield judge("events", f"{kind}_processor_ratio", processor_ratio, "ratio")
    yield judge("events", f"{kind}_us", median(plain_ns) / _REQUESTS / 1e3, "us")


def _rounds(plain: _Engine, told: _Engine, rounds: int, new_blocks: int) -> tuple[list[float], list[int]]:
    """Of each pair of turns, the time of one daemon's requests over that of the other's; and the other's time."""
    ratios: list[float] = []
    plain_ns: list[int] = []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds * _PAIRS_PER_ROUND):
            spent: dict[_Engine, int] = {}
            for engine in (told, plain) if number % 2 else (plain, told):
                spent[engine] = sum(engine.request(new_blocks) for _ in range(_REQUESTS))
            ratios.append(spent[told] / spent[plain])
            plain_ns.append(spent[plain])
    finally:
        if collecting:
            gc.enable()
    return ratios, plain_ns


class _Engine(contextlib.AbstractContextManager["_Engine"]):
    """A daemon with these further tables, and its only client."""

    def __init__(self, directory: Path, tables: str) -> None:
        self._stack = contextlib.ExitStack()
        replica = small_replica("default", model="benchmark", block_size=_BLOCK_SIZE, slots=_SLOTS)
        self._pid = self._stack.enter_context(daemon_process(tables + replica, directory)).pid
        self.run_dir = directory / "run"
        self._client = self._stack.enter_context(Client.connect(self.run_dir, deadline_ms=_DEADLINE_MS))
        self._requests = 0

    def request(self, new_blocks: int) -> int:
        """Serve a prompt that ends with so many new blocks; nanoseconds of its calls."""
        self._requests += 1
        known = (_BLOCKS - new_blocks) * _BLOCK_SIZE
        first = self._requests * _BLOCKS * _BLOCK_SIZE
        chain = self._client.chain([*range(known), *range(first, first + new_blocks * _BLOCK_SIZE)])
        start = perf_counter_ns()
        lease = self._client.acquire(f"request-{self._requests}", chain, full=True)
        lease.finish(_BLOCKS * _BLOCK_SIZE)
        return perf_counter_ns() - start

    def processor_s(self) -> float:
        """Processor time of the daemon so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def __exit__(self, *_: object) -> None:
        self._stack.close()
