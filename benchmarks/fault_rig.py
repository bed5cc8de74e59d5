"""Parts that die on purpose, and how long it takes until that is over for everybody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import IO, Final, Literal, cast

from benchmarks.configurations import small_replica
from benchmarks.fault_engine import BLOCK_BYTES, BLOCK_SIZE, BLOCKS, hold_slots, hold_store
from benchmarks.programs import daemon_process
from kvcached_client import Admin
from kvcached_client.errors import DaemonUnreachable
from kvcached_client.protocol.engine import HostStats, PoolStats, StatsReport

Kind = Literal["managed", "attached"]

_PATIENCE_S: Final = 60
_SLAB_BYTES: Final = 1 << 20
#: Workers that outlive a killed daemon end soon: nobody comes for them.
CONFIG: Final = f"""
{small_replica("default", model="benchmark", block_size=BLOCK_SIZE, slots=4 * BLOCKS)}
[host]
size_bytes = {16 * _SLAB_BYTES}
slab_bytes = {_SLAB_BYTES}

[offload]
"""
assert BLOCKS * BLOCK_BYTES <= _SLAB_BYTES
#: States of slots that a dead engine may still write.
_HELD: Final = ("leased", "filling", "fenced", "quarantined")


def slots_freed_s(run_dir: Path, kind: Kind) -> float:
    """SIGKILL of an engine that may write slots; seconds from the signal until anybody may have them."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.fault_engine", kind, str(run_dir)]
    with (
        Admin.connect(run_dir) as admin,
        subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine,
    ):
        assert cast("IO[bytes]", engine.stdout).readline() == b"holds\n"
        assert _held(admin.stats()) >= BLOCKS
        start = perf_counter()
        engine.kill()
        while _held(admin.stats()):
            assert perf_counter() - start < _PATIENCE_S, "slots of a dead engine are never free"
        return perf_counter() - start


def unblocked_s(directory: Path, kind: Kind) -> float:
    """SIGKILL of a daemon that owes an answer; seconds from the signal until the client knows."""
    with daemon_process(CONFIG, directory) as daemon, ThreadPoolExecutor(1) as thread:
        ask, close = _question(directory / "run", kind)
        daemon.send_signal(signal.SIGSTOP)
        waiting: SimpleQueue[int] = SimpleQueue()
        answer = thread.submit(_seconds_when_unreachable, ask, waiting)
        _wait_asleep(waiting.get())
        start = perf_counter()
        daemon.kill()
        until = answer.result(_PATIENCE_S)
        close()
        return until - start


def worker_back_s(directory: Path) -> float:
    """SIGKILL of a worker; seconds from the signal until its replica takes an engine and serves it."""
    with daemon_process(CONFIG, directory) as daemon, Admin.connect(directory / "run") as admin:
        (worker,) = map(int, Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split())
        start = perf_counter()
        os.kill(worker, signal.SIGKILL)
        for is_back in (False, True):  # first its loss is seen, then the next one
            while admin.stats().pools[0].healthy != is_back:
                assert perf_counter() - start < _PATIENCE_S, "the worker is never replaced"
        hold_slots(str(directory / "run")).close()
        return perf_counter() - start


def _question(run_dir: Path, kind: Kind) -> tuple[Callable[[], int], Callable[[], None]]:
    """A call that needs an answer, and what closes the client that makes it."""
    if kind == "managed":
        managed = hold_slots(str(run_dir))
        chain = managed.chain(range(BLOCK_SIZE))
        return lambda: managed.match(chain), managed.close
    attached = hold_store(str(run_dir))
    return lambda: attached.match(b"", 0), attached.close


def _held(stats: StatsReport) -> int:
    parts: list[PoolStats | HostStats] = [*stats.pools, *stats.hosts]
    return sum(part.states.get(state, 0) for part in parts for state in _HELD)


def _seconds_when_unreachable(ask: Callable[[], int], waiting: SimpleQueue[int]) -> float:
    waiting.put(threading.get_native_id())
    try:
        ask()
    except DaemonUnreachable:
        return perf_counter()
    raise AssertionError("a dead daemon answered")


def _wait_asleep(thread: int) -> None:
    """Until a thread of this process waits for something."""
    while Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(") ")[2][0] != "S":
        pass
