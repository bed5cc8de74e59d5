"""Real daemons with small pools."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached_client import Admin
from kvcached_client.protocol.engine import PoolStats
from tests.line_process import LineProcess
from tests.project.daemon_process import running_daemon

CONFIG = """
heartbeat_interval_ms = 100
session_ttl_ms = 600

[[replica]]
name = "default"
model = "tiny"
block_size = 4
shards = 1
slots = 16
[[replica.group]]
layers = 2
kv_heads = 1
head_dim = 8
v_head_dim = 8
dtype = "float32"
"""


class RunningDaemon(NamedTuple):
    """A daemon and where it is."""

    process: subprocess.Popen[bytes]
    run_dir: Path


@contextmanager
def started(directory: Path, config: str = CONFIG, *, program: str = "kvcached") -> Iterator[RunningDaemon]:
    """A daemon from ready to stopped; `program` as `running_daemon` takes it."""
    path = directory / "kvcached.toml"
    path.write_text(config)
    with running_daemon(path, directory / "run", program=program) as process:
        yield RunningDaemon(process, directory / "run")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon of this test's own."""
    with started(tmp_path) as running:
        yield running


@pytest.fixture
def engine(daemon: RunningDaemon) -> Iterator[EngineProcess]:
    """An engine process that holds four slots."""
    process = EngineProcess(daemon.run_dir)
    yield process
    process.end()


class EngineProcess(LineProcess):
    """`engine_process.py` as a child."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__("tests.daemon.engine_process", str(run_dir))
        if (said := self.hear()) != "holds 4":
            self.end()
            raise AssertionError(f"the engine process said {said!r}")


def pool_stats(run_dir: Path, replica: str = "default") -> PoolStats:
    """Where a replica's slots are."""
    with Admin.connect(run_dir) as admin:
        (pool,) = (pool for pool in admin.stats().pools if pool.replica == replica)
        return pool


def seconds_until(
    run_dir: Path, reached: Callable[[PoolStats], bool], limit_s: float, *, replica: str = "default"
) -> float:
    """How long until the pool is as wanted; more than `limit_s` where it never was."""
    start = time.monotonic()
    while not reached(pool_stats(run_dir, replica)) and time.monotonic() - start < limit_s:
        pass
    return time.monotonic() - start
