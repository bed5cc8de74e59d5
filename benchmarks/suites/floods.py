"""Suite ``floods``: what a good client of the daemon notices while another process floods its sockets."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns, sleep
from types import MappingProxyType
from typing import IO, Final, cast

from benchmarks.programs import daemon_process
from benchmarks.restart_rig import FullPool
from benchmarks.result import Result, Target, judge
from kvcached_client import Admin

_ROOT: Final = Path(__file__).resolve().parents[2]
_BLOCKS: Final = 64
#: The good client's loop in each case of a round.
SLICE_S: Final = 1.0
_WARM_UP_S: Final = 1.0
#: For a flood to say that it has begun, on a machine that does other work too.
_PATIENCE_S: Final = 60

_SLAB_BYTES: Final = 64 << 20
#: Offloading only: no replica, so the daemon starts no worker and imports no torch.
CONFIG: Final = f"[host]\nsize_bytes = {2 * _SLAB_BYTES}\nslab_bytes = {_SLAB_BYTES}\n[offload]\n"

#: A daemon that uses fewer ticks of its processor's time, of a hundredth of a second, in this time is idle.
_IDLE_TICKS: Final = 3
_LOOK_S: Final = 0.1
#: By metric: the kinds of `tests.daemon.flooder`.
FLOODS: Final = {
    "silent_rpc": "silent rpc",
    "half_open_attach": "silent attach",
    "endless_parts": "parts",
    "large_frames": "large parts",
    "no_requests": "no requests",
    "unread_replies": "unread",
}
#: Takes a processor and leaves the daemon alone: what one more busy process costs.
_NEIGHBOUR: Final = """
import select, sys
print("flooding", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    pass
"""

_P99: Final = Target("ratio", "<=", 2.0)
_GROWN: Final = Target("value", "<=", 32.0)
_LOGGED: Final = Target("value", "<=", 64 << 10)


@dataclass
class _Case:
    """What was measured under one flood, an entry for each round."""

    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    grown_bytes: list[int] = field(default_factory=list)
    logged_bytes: int = 0
    refused: int = 0


def run(rounds: int) -> Iterator[Result]:
    """Take turns between no flood, a busy neighbour and each flood; figures are medians over the rounds."""
    yield from measure(rounds, SLICE_S)


def measure(rounds: int, slice_s: float, floods: dict[str, str] = FLOODS) -> Iterator[Result]:
    """The same, with a good client's loop of `slice_s` seconds in each case of a round."""
    commands = {name: ["-m", "tests.daemon.flooder", "{run_dir}", kind] for name, kind in floods.items()}
    yield from measure_beside("floods", commands, rounds, slice_s)


def measure_beside(
    suite: str,
    floods: Mapping[str, Sequence[str]],
    rounds: int,
    slice_s: float,
    config: Callable[[Path], str] = lambda _: CONFIG,
    neighbours: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[Result]:
    """The same for floods by the arguments of their interpreters, in which ``{run_dir}`` stands for the daemon's.

    Args:
        suite: whose figures they are.
        floods: by the names of their metrics.
        rounds: how many.
        slice_s: as of `measure`.
        config: the daemon's, which may need files in its directory.
        neighbours: the same of processes that are no floods, for which nothing is promised.
    """
    commands = {"busy_neighbour": ["-c", _NEIGHBOUR], **neighbours, **floods}
    with tempfile.TemporaryDirectory(prefix="kvcached-") as temporary:
        directory, run_dir = Path(temporary), Path(temporary) / "run"
        with (
            daemon_process(config(directory), directory) as daemon,
            FullPool(run_dir, prompts=1) as client,
            Admin.connect(run_dir, deadline_ms=_PATIENCE_S * 1000) as admin,
        ):
            client.fill()
            _loop_ms(client, _WARM_UP_S)
            quiet, cases = _Case(), {name: _Case() for name in commands}
            start_bytes, log = _resident_bytes(daemon.pid), directory / "daemon.log"
            for _ in range(rounds):
                _measure(quiet, client, slice_s)
                for name, command in commands.items():
                    case, resident, logged = cases[name], _resident_bytes(daemon.pid), log.stat().st_size
                    refused = _refused(admin)
                    with _flooding([part.replace("{run_dir}", str(run_dir)) for part in command]):
                        _measure(case, client, slice_s)
                        case.grown_bytes.append(_resident_bytes(daemon.pid) - resident)
                    _wait_until_idle(daemon.pid)
                    case.refused += _refused(admin) - refused
                    case.logged_bytes += log.stat().st_size - logged
            grown_bytes, logged_bytes = _resident_bytes(daemon.pid) - start_bytes, log.stat().st_size
    yield judge(suite, "no_flood_p50_ms", median(quiet.p50_ms), "ms")
    yield judge(suite, "no_flood_p99_ms", median(quiet.p99_ms), "ms")
    for name, case in cases.items():
        yield from _results(suite, name, case, quiet, is_flood=name in floods)
    yield judge(suite, "rss_growth_mib", grown_bytes / (1 << 20), "MiB", target=_GROWN)
    yield judge(suite, "log_bytes", logged_bytes, "bytes", target=_LOGGED)


def _results(suite: str, name: str, case: _Case, quiet: _Case, *, is_flood: bool) -> Iterator[Result]:
    target = _P99 if is_flood else ()
    yield judge(suite, f"{name}_p50_ms", median(case.p50_ms), "ms", floor=median(quiet.p50_ms))
    yield judge(suite, f"{name}_p99_ms", median(case.p99_ms), "ms", floor=median(quiet.p99_ms), target=target)
    if is_flood:
        grown_mib = max(case.grown_bytes) / (1 << 20)
        yield judge(suite, f"{name}_rss_growth_mib", grown_mib, "MiB", target=_GROWN)
        yield judge(suite, f"{name}_log_bytes", case.logged_bytes, "bytes", target=_LOGGED)
        yield judge(suite, f"{name}_refused", case.refused, "messages")


def _refused(admin: Admin) -> int:
    """Messages that the daemon has refused, and connections that it has cut off at its TCP port."""
    counters = admin.stats().counters
    return sum(count for name, count in counters.items() if name.startswith(("errors_", "tcp_")))


def _measure(case: _Case, client: FullPool, slice_s: float) -> None:
    times_ms = _loop_ms(client, slice_s)
    percentiles = quantiles(times_ms, n=100)
    case.p50_ms.append(percentiles[49])
    case.p99_ms.append(percentiles[98])


def _loop_ms(client: FullPool, seconds: float) -> list[float]:
    """Acquire and release until the time is over; milliseconds of each turn."""
    times_ms: list[float] = []
    end_ns = (now_ns := perf_counter_ns()) + int(seconds * 1e9)
    while now_ns < end_ns or len(times_ms) < 2:  # two are the fewest that have percentiles
        start_ns = now_ns
        client.acquire(_BLOCKS)
        now_ns = perf_counter_ns()
        times_ms.append((now_ns - start_ns) / 1e6)
    return times_ms


@contextlib.contextmanager
def _flooding(arguments: list[str]) -> Iterator[None]:
    """A Python process that floods, from the moment it says so until the block ends. It ends with this process, too.

    Raises:
        RuntimeError: it does not say so.
    """
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as flooder:
        said = cast("IO[bytes]", flooder.stdout)
        try:
            if not select.select([said], [], [], _PATIENCE_S)[0] or said.readline() != b"flooding\n":
                raise RuntimeError(f"no flood from {arguments}")
            yield
        finally:
            flooder.kill()


def _wait_until_idle(pid: int) -> None:
    """Until the daemon has served what dead peers have left, which would be measured with the next flood.

    Raises:
        RuntimeError: it does not become idle.
    """
    used = -_IDLE_TICKS
    for _ in range(int(_PATIENCE_S / _LOOK_S)):
        before, used = used, sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        if used - before < _IDLE_TICKS:
            return
        sleep(_LOOK_S)
    raise RuntimeError("the daemon is busy for nobody")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
