"""Suite ``faults``: how long everybody else is held up when a part dies by SIGKILL."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from benchmarks.fault_rig import CONFIG, Kind, slots_freed_s, unblocked_s, worker_back_s
from benchmarks.programs import daemon
from benchmarks.restart_rig import BLOCK_BYTES, restart
from benchmarks.result import Result, Target, judge

_FREED: Final = Target("value", "<=", 1.0)
_UNBLOCKED: Final = Target("value", "<=", 1.0)
_FIRST_HIT: Final = Target("value", "<=", 5.0)
_USABLE: Final = Target("value", ">=", 0.95)
#: A million blocks are stored for each.
_RESTARTS: Final = 3


def run(rounds: int) -> Iterator[Result]:
    """Kill an engine, a daemon and a worker, so many times each; the daemon of a full host pool three times."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name:
        yield from _engines(Path(name) / "engines", rounds)
        for kind in get_args(Kind):
            times = [unblocked_s(Path(name) / f"{kind}-{number}", kind) for number in range(rounds)]
            yield from _best_and_worst(f"client_unblocked_{kind}", times, _UNBLOCKED)
        times = [worker_back_s(Path(name) / f"worker-{number}") for number in range(rounds)]
        yield from _best_and_worst("worker_back", times)
        yield from _restart(Path(name) / "restart")


def _engines(directory: Path, rounds: int) -> Iterator[Result]:
    directory.mkdir()
    with daemon(CONFIG, directory) as run_dir:
        for kind in get_args(Kind):
            times = [slots_freed_s(run_dir, kind) for _ in range(rounds)]
            yield from _best_and_worst(f"slots_freed_{kind}", times, _FREED)


def _restart(directory: Path) -> Iterator[Result]:
    directory.mkdir()
    found = [restart(directory / str(number)) for number in range(_RESTARTS)]
    yield judge("faults", "restart_blocks", min(each.blocks for each in found), "blocks")
    yield judge("faults", "restart_block_bytes", BLOCK_BYTES, "bytes")
    yield from _best_and_worst("restart_first_hit", [each.first_hit_s for each in found], _FIRST_HIT)
    yield judge("faults", "restart_usable_ratio", min(each.usable for each in found), "ratio", target=_USABLE)


def _best_and_worst(name: str, times: list[float], target: Target | tuple[Target, ...] = ()) -> Iterator[Result]:
    """Two figures; the promise is about the worst."""
    yield judge("faults", f"{name}_best_s", min(times), "s")
    yield judge("faults", f"{name}_worst_s", max(times), "s", target=target)
