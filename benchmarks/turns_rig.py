"""Two daemons that serve the same requests by turns, so that what one of them does beside can be weighed."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from benchmarks.configurations import small_replica
from benchmarks.programs import daemon_process
from kvcached_client import Client

_BLOCK_SIZE: Final = 16
#: A prompt of 2048 tokens; the pool holds 32 of them, so that each new one evicts another.
BLOCKS: Final = 128
_SLOTS: Final = 32 * BLOCKS
#: In a row to one daemon: about as long as it waits between two batches of events.
REQUESTS: Final = 30
PAIRS_PER_ROUND: Final = 10
_DEADLINE_MS: Final = 10_000
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class TurnEngine(contextlib.AbstractContextManager["TurnEngine"]):
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
        known = (BLOCKS - new_blocks) * _BLOCK_SIZE
        first = self._requests * BLOCKS * _BLOCK_SIZE
        chain = self._client.chain([*range(known), *range(first, first + new_blocks * _BLOCK_SIZE)])
        start = perf_counter_ns()
        lease = self._client.acquire(f"request-{self._requests}", chain, full=True)
        lease.finish(BLOCKS * _BLOCK_SIZE)
        return perf_counter_ns() - start

    def processor_s(self) -> float:
        """Processor time of the daemon so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def take_turns(plain: TurnEngine, other: TurnEngine, rounds: int, new_blocks: int) -> tuple[list[float], list[int]]:
    """Of each pair of turns, the time of one daemon's requests over that of the other's; and the other's time."""
    ratios: list[float] = []
    plain_ns: list[int] = []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds * PAIRS_PER_ROUND):
            spent: dict[TurnEngine, int] = {}
            for engine in (other, plain) if number % 2 else (plain, other):
                spent[engine] = sum(engine.request(new_blocks) for _ in range(REQUESTS))
            ratios.append(spent[other] / spent[plain])
            plain_ns.append(spent[plain])
    finally:
        if collecting:
            gc.enable()
    return ratios, plain_ns
