"""The command ``python -m benchmarks soak``: an hour of ordinary work, and whether anything of the daemon grows.

A managed engine, whose blocks a worker copies to the host pool and back, and an engine in offload mode, which compares
what it loads, share a daemon with storage on disk. The managed engine ends its session now and then, and opens another.
Each interval notes memory, descriptors and threads of the daemon's processes, and how long a round of work took beside
an echo.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from benchmarks.attached_rig import AttachedRig, PageShape
from benchmarks.configurations import small_replica
from benchmarks.programs import running
from benchmarks.request_rig import BLOCK_SIZE, Echo, ManagedEngine, Traffic
from benchmarks.result import Result, Target, judge
from kvcached_client import Admin

NAME: Final = "soak"
_MINUTES: Final = 60.0
#: Intervals in which figures are noted.
INTERVALS: Final = 40
_SHAPE: Final = PageShape("soak", layers=4, page_bytes=16 * 1024, blocks=16)
_SLOTS: Final = 4096
_TOKENS: Final = 512
_PROMPTS: Final = 400
#: Rounds of work in a second, so that the machine is neither idle nor full.
_ROUNDS_PER_S: Final = 20
#: A session of the managed engine ends after so many rounds, and another one begins.
_ROUNDS_PER_SESSION: Final = 200
_ECHO: Final = Traffic(2, 2048, 512)
_GROWTH_MAX: Final = Target("ratio", "<=", 1.03)
_MORE_MAX: Final = Target("value", "<=", 0.0)
_SLOWER_MAX: Final = Target("ratio", "<=", 1.3)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; see its help."""

    minutes: float
    json: bool


@dataclass(slots=True)
class Interval:
    """What was seen in one: of all processes of the daemon together, and of each round the time beside an echo."""

    memory_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    over_echo: list[float] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line, after its name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {NAME}",
        description="Work on a daemon for an hour, and say whether its memory, descriptors, threads or times grow.",
    )
    parser.add_argument("--minutes", type=float, default=_MINUTES, help=f"default: {_MINUTES:g}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args(arguments)
    return Options(options.minutes, options.json)


def run(options: Options) -> Iterator[Result]:
    """Work, and compare the last quarter of the time with the second one; the first one fills pools and tables."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name, ExitStack() as stack:
        directory = Path(name)
        endpoint = f"ipc://{directory / 'echo.sock'}"
        stack.enter_context(running("echo", ["benchmarks.echo", endpoint], directory))
        rig = stack.enter_context(AttachedRig(_SHAPE, directory / "daemon", verify=True, more=_tables(directory)))
        with Admin.connect(rig.run_dir) as admin:
            pid = admin.describe().pid
        echo = stack.enter_context(Echo(endpoint, _ECHO))
        intervals = list(_intervals(_Work(rig, stack), echo, pid, options.minutes * 60 / INTERVALS))
    yield from results(intervals)


def results(intervals: Sequence[Interval]) -> Iterator[Result]:
    """The last quarter of the intervals beside the second one."""
    quarter = len(intervals) // 4
    before, after = intervals[quarter : 2 * quarter], intervals[-quarter:]

    def middle(part: Sequence[Interval], value: Callable[[Interval], float]) -> float:
        return median(map(value, part))

    yield judge(
        NAME, "memory", middle(after, attrgetter("memory_bytes")), "bytes",
        floor=middle(before, attrgetter("memory_bytes")), target=_GROWTH_MAX,
    )  # fmt: skip
    for metric in ("descriptors", "threads"):
        grown = middle(after, attrgetter(metric)) - middle(before, attrgetter(metric))
        yield judge(NAME, f"more_{metric}", grown, metric, target=_MORE_MAX)
    times = [[over for each in part for over in each.over_echo] for part in (before, after)]
    yield judge(
        NAME, "round_over_echo", median(times[1]), "echoes", floor=median(times[0]), target=_SLOWER_MAX
    )  # fmt: skip
    yield judge(NAME, "rounds", sum(len(each.over_echo) for each in intervals), "rounds")


def _tables(directory: Path) -> str:
    storage = f"""
[storage]
[storage.settings]
directory = "{directory / "disk"}"
capacity_bytes = {1 << 30}
free_space_floor_bytes = 0
"""
    return storage + small_replica("managed", model="soak", block_size=BLOCK_SIZE, slots=_SLOTS)


class _Work:
    """Rounds of work of both engines."""

    def __init__(self, rig: AttachedRig, stack: ExitStack) -> None:
        self._rig = rig
        self._random = np.random.default_rng(0)
        self._prompts = [self._random.integers(0, 32_000, _TOKENS, dtype=np.int32) for _ in range(_PROMPTS)]
        self._stack = stack
        self._rounds = 0
        self._managed = ManagedEngine(rig.run_dir, "managed")
        stack.callback(lambda: self._managed.__exit__(None, None, None))

    def round(self) -> None:
        """A request of each engine; now and then another session."""
        self._rounds += 1
        if self._rounds % _ROUNDS_PER_SESSION == 0:
            self._managed.__exit__(None, None, None)
            self._managed = ManagedEngine(self._rig.run_dir, "managed")
        known = self._prompts[int(self._random.zipf(1.3)) % _PROMPTS]
        new = self._random.integers(0, 32_000, _TOKENS // 4, dtype=np.int32)
        chain = self._managed.root(np.concatenate([known, new]))
        with self._managed.client.acquire(f"request-{self._rounds}", chain) as lease:
            lease.wait_loaded()
            lease.finish(chain.token_count)
        self._rig.prepare_store()
        self._rig.store()
        self._rig.prepare_load()
        self._rig.load()
        self._rig.compare()


def _intervals(work: _Work, echo: Echo, pid: int, seconds: float) -> Iterator[Interval]:
    for _ in range(INTERVALS):
        interval, end_s = Interval(), time.monotonic() + seconds
        while (begun_s := time.monotonic()) < end_s or not interval.over_echo:
            work.round()
            worked_s = time.monotonic()
            echo.exchange()
            echoed_s = time.monotonic()
            interval.over_echo.append((worked_s - begun_s) / (echoed_s - worked_s))
            time.sleep(max(0.0, 1 / _ROUNDS_PER_S - (echoed_s - begun_s)))
        for process in _family(pid):
            status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            interval.memory_bytes += int(status["RssAnon"].split()[0]) * 1024
            interval.threads += int(status["Threads"])
            interval.descriptors += len(list((process / "fd").iterdir()))
        yield interval


def _family(pid: int) -> Iterator[Path]:
    """The directories of a process and its descendants in /proc."""
    process = Path("/proc") / str(pid)
    yield process
    for task in (process / "task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))
