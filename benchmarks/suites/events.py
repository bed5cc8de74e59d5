"""Suite ``events``: what a daemon that tells three routers of every block loses, against one that tells nobody."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from benchmarks.programs import running
from benchmarks.result import Result, Target, judge
from benchmarks.turns_rig import BLOCKS, REQUESTS, TurnEngine, take_turns
from kvcached_client.protocol.zmtp import GREETING, SUBSCRIBER, subscribe

_WARM_UP_ROUNDS: Final = 4
#: By the number of new blocks in each prompt.
_KINDS: Final = {"cached": 0, "half": BLOCKS // 2, "new": BLOCKS}
_READERS: Final = 2


def run(rounds: int) -> Iterator[Result]:
    """Requests (acquire, commit, release) whose prompts are cached, or new in part or whole, and evict others.

    Each new block is told as stored, and another one as removed.
    Two subscribers read, one never does. The two daemons take turns, thirty requests each.
    """
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name, contextlib.ExitStack() as stack:
        plain = stack.enter_context(TurnEngine(Path(name) / "plain", ""))
        told = stack.enter_context(TurnEngine(Path(name) / "told", "[events]\n"))
        endpoint = told.run_dir / "events.sock"
        for number in range(_READERS):
            reader = ["benchmarks.event_reader", f"ipc://{endpoint}"]
            stack.enter_context(running(f"reader-{number}", reader, Path(name)))
        stalled = stack.enter_context(socket.socket(socket.AF_UNIX))
        stalled.connect(str(endpoint))
        stalled.sendall(GREETING + SUBSCRIBER.ready + subscribe(b""))
        for kind, new_blocks in _KINDS.items():
            take_turns(plain, told, _WARM_UP_ROUNDS, new_blocks)
            before = plain.processor_s(), told.processor_s()
            ratios, plain_ns = take_turns(plain, told, rounds, new_blocks)
            used = plain.processor_s() - before[0], told.processor_s() - before[1]
            yield from _results(kind, ratios, plain_ns, used[1] / used[0])


def _results(kind: str, ratios: list[float], plain_ns: list[int], processor_ratio: float) -> Iterator[Result]:
    tenths = quantiles(ratios, n=10)
    target = Target("value", "<=", 1.02) if kind == "cached" else ()
    yield judge("events", f"{kind}_ratio", median(ratios), "ratio", target=target)
    yield judge("events", f"{kind}_p10_ratio", tenths[0], "ratio")
    yield judge("events", f"{kind}_p90_ratio", tenths[-1], "ratio")
    yield judge("events", f"{kind}_processor_ratio", processor_ratio, "ratio")
    yield judge("events", f"{kind}_us", median(plain_ns) / REQUESTS / 1e3, "us")
