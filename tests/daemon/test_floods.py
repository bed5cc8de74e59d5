"""Peers without end: the daemon lives, serves others, and keeps its memory, its descriptors and its log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin, Client
from tests.daemon.conftest import CONFIG, EngineProcess, RunningDaemon, started
from tests.daemon.few_descriptors import DESCRIPTORS
from tests.daemon.flooder import KINDS
from tests.line_process import LineProcess

pytestmark = pytest.mark.slow  # seconds each

GROWN_BYTES_MAX = 32 << 20
LOGGED_BYTES_MAX = 16 << 10
#: Workers may need some more, for a moment.
DESCRIPTORS_LEFT_MIN = 32


@pytest.fixture(scope="module")
def small_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon that may open few files, for every flood: it must survive them all."""
    directory = tmp_path_factory.mktemp("flood")
    # A flood and its daemon leave the other processes of a small machine little time: that is no silence of theirs.
    patient = CONFIG.replace("session_ttl_ms = 600", "session_ttl_ms = 20000")
    assert patient != CONFIG
    with started(directory, patient, program="tests.daemon.few_descriptors") as daemon:
        yield daemon


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("kind", KINDS)
def test_flood_of_one_process_harms_no_other(small_daemon: RunningDaemon, kind: str) -> None:
    """A process that connects, or sends, on and on: an engine attaches, computes and goes while it does."""
    run_dir, pid = small_daemon.run_dir, small_daemon.process.pid
    log = run_dir.with_suffix(".log")
    with Admin.connect(run_dir) as admin:
        assert admin.health().ok
    resident, logged = resident_bytes(pid), log.stat().st_size
    flooder = LineProcess("tests.daemon.flooder", str(run_dir), kind)
    try:
        assert flooder.hear() == "flooding"
        engine = EngineProcess(run_dir)
        try:
            with Admin.connect(run_dir) as admin:
                assert admin.health().ok
                assert admin.stats().pools[0].leases == 1
                assert descriptors(pid) < DESCRIPTORS - DESCRIPTORS_LEFT_MIN
        finally:
            engine.end()
        assert resident_bytes(pid) - resident < GROWN_BYTES_MAX
    finally:
        flooder.end()
    with Admin.connect(run_dir) as admin:
        assert admin.health().ok
        assert admin.check().violations == ()
    assert small_daemon.process.poll() is None
    assert log.stat().st_size - logged < LOGGED_BYTES_MAX


@pytest.mark.parametrize("kind", ["idle rpc", "no zmtp"])
def test_clients_connect_while_the_listener_is_full(small_daemon: RunningDaemon, kind: str) -> None:
    """A process that takes each place of the listener that becomes free keeps no client out."""
    flooder = LineProcess("tests.daemon.flooder", str(small_daemon.run_dir), kind)
    try:
        assert flooder.hear() == "flooding"
        for _ in range(15):
            Client.connect(small_daemon.run_dir).close()
    finally:
        flooder.end()


def test_running_engine_connects_again_during_a_flood(small_daemon: RunningDaemon) -> None:
    """Half-open attach connections keep out neither a new engine nor one that was there."""
    with Client.connect(small_daemon.run_dir) as client:
        client.acquire("before", client.chain(range(8))).release()
        flooder = LineProcess("tests.daemon.flooder", str(small_daemon.run_dir), "silent attach")
        try:
            assert flooder.hear() == "flooding"
            client.acquire("meanwhile", client.chain(range(8))).release()
            client.close()
            with Client.connect(small_daemon.run_dir) as again:
                again.acquire("after", again.chain(range(8))).release()
        finally:
            flooder.end()
