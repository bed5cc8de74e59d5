"""Scenarios of docs/faults.md that no other test shows: idleness, clocks, storms, impatience."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvcached.core.messages import Ticked
from kvcached_client.protocol import engine as wire
from kvcached_client.transport.attach import identify
from tests.daemon.conftest import RunningDaemon
from tests.daemon.test_deaths import children
from tests.daemon.test_transfer_faults import stopped
from tests.faults.harness import daemon_with, footprint, stats_of, wait_footprint, wait_nothing_held, warm_up
from tests.project.source_tree import ROOT, modules
from tests.service.office import FakePeer, Office, key_chain

DAY_MS = 24 * 3600 * 1000
DEADLINE_MS = 20_000


def test_idle_engine_stays_for_a_day() -> None:
    """A day of nothing but heartbeats leaves a session and its lease as they were; a second of silence more ends it."""
    office = Office()
    welcome = office.enter(FakePeer(10))
    lease = office.ask(office.acquire(key_chain(4)), key_chain(4)).header
    assert isinstance(lease, wire.Acquired)
    beat = wire.Heartbeat(id=1, session=welcome.session, token=welcome.token)
    while office.now_ms < DAY_MS:
        office.now_ms += 900
        office.expect(wire.Alive, beat)
        office.service.on_event(Ticked(office.now_ms))

    assert office.cache.counters["sessions_expired"] == 0
    release = wire.Release(id=office.next_id(), epoch=welcome.epoch, lease=lease.lease)
    assert office.expect(wire.Released, release).adopted == 0
    for _ in range(4):
        office.now_ms += 400
        office.service.on_event(Ticked(office.now_ms))
    assert office.cache.counters["sessions_expired"] == 1


def test_daemon_looks_at_the_wall_clock_in_one_place() -> None:
    """Setting the clock changes no deadline: it is read for epochs, times that others see, and the age of files."""
    readers = {
        path: {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        & {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
        for path, tree in modules("kvcached", "kvcached_client")
    }

    assert {path: calls for path, calls in readers.items() if calls} == {
        "kvcached/cli/control.py": {"datetime.now"},  # until when, in words for people
        "kvcached/events_start.py": {"time.time"},  # when events were published, as vLLM says it
        "kvcached/storage/s3/credentials.py": {"datetime.now"},  # until when a library uses keys
        "kvcached/recovery/run_dir.py": {"time.time_ns"},
        "kvcached/storage/disk/backend.py": {
            "time.time_ns"
        },  # of the storage process: blocks outlive the machine's uptime
        "kvcached_client/engines/weights.py": {"time.time_ns"},  # how long ago a weight file has changed
        "kvcached_client/sglang/loaded_weights.py": {"time.time_ns"},  # whether that was before the process began
    }


def test_epoch_grows_though_the_wall_clock_was_set_back(tmp_path: Path) -> None:
    """A start on a clock that is a day behind that of the start before has a larger epoch all the same."""
    tomorrow = time.time_ns() // 1_000_000 + DAY_MS
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "daemon.lock").write_text(f"{tomorrow:<20}")
    with daemon_with(tmp_path) as daemon:
        assert stats_of(daemon.run_dir).daemon_epoch > tomorrow


def test_second_signal_ends_the_daemon_at_once(tmp_path: Path) -> None:
    """While a first SIGTERM waits for workers that do not react, a second one ends the daemon, and then its workers."""
    with daemon_with(tmp_path) as daemon, stopped(*children(daemon.process.pid)):
        daemon.process.terminate()
        _wait_log(tmp_path, "a second signal ends it at once")
        start = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)

        assert daemon.process.wait(DEADLINE_MS / 1000) == 1
        assert time.monotonic() - start <= 1


def _wait_log(directory: Path, words: str) -> None:
    start = time.monotonic()
    while words not in (directory / "run.log").read_text():
        assert time.monotonic() - start < DEADLINE_MS / 1000


@contextmanager
def crowd(daemon: RunningDaemon, engines: int) -> Iterator[None]:
    """A process with so many engines."""
    command = [sys.executable, "-m", "tests.faults.crowd", str(daemon.run_dir), str(engines)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        yield
        process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("processes", "comings"), [(1, 50), pytest.param(20, 1000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_storm_leaves_nothing(tmp_path: Path, processes: int, comings: int) -> None:
    """Two hundred engines at once, and a thousand processes that come and go, leave no descriptor and no thread."""
    with daemon_with(tmp_path) as daemon:
        warm_up(daemon, tmp_path)
        before = footprint(daemon.process.pid)
        with ExitStack() as parts:
            for _ in range(processes):
                parts.enter_context(crowd(daemon, engines=10))
            for _ in range(comings):
                identify(daemon.run_dir, deadline_ms=DEADLINE_MS)[0].close()
        wait_nothing_held(daemon.run_dir)
        wait_footprint(daemon.process.pid, before)
