"""A daemon that hangs, here by SIGSTOP: its manager notices, and its engines lose one deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvcached_client import Admin, Client, FailureReason
from tests.daemon.conftest import CONFIG, RunningDaemon, pool_stats, started
from tests.daemon.supervised import supervised
from tests.daemon.test_offload import config as offload_config
from tests.daemon.test_restart import Engine
from tests.faults.engine import OFFLOAD_BLOCKS, OffloadEngine
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

PATIENCE_S = 20


def test_daemon_says_that_its_loop_turns(tmp_path: Path) -> None:
    """With `$WATCHDOG_USEC` set the daemon sends WATCHDOG=1 again and again from READY on, and none before."""
    (path := tmp_path / "kvcached.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "kvcached", "serve", "--config", str(path), "--run-dir", str(tmp_path / "run")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(tmp_path / "notify"))
        notices.settimeout(PATIENCE_S)
        environment = {**clean_environment(), "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
            try:
                while (notice := notices.recv(4096)) != b"READY=1":
                    # what the daemon gives the service manager to keep, or waits for it to have carried out
                    assert notice.startswith(b"FDSTORE") or notice == b"BARRIER=1"
                assert [notices.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            finally:
                process.kill()


def test_load_is_reported_before_its_shard_closes(tmp_path: Path) -> None:
    """The shard's first message to a daemon that does not run at that moment: the slots are free when it goes on."""
    run_dir = tmp_path / "run"
    with started(tmp_path, offload_config()) as daemon:
        with closing(OffloadEngine(run_dir)) as writer:
            writer.store("a")
        with closing(OffloadEngine(run_dir)) as reader, Admin.connect(run_dir, deadline_ms=10_000) as admin:
            assert reader.scheduler.hit("a", OFFLOAD_BLOCKS)
            order = reader.scheduler.prepare_load("a", OFFLOAD_BLOCKS)
            link = reader.shard.link
            assert link is not None
            daemon.process.send_signal(signal.SIGSTOP)
            reader.shard.load(order)
            threading.Timer(0.3, daemon.process.send_signal, [signal.SIGCONT]).start()
            link.close()
            deadline_s = time.monotonic() + PATIENCE_S
            while any(admin.stats().transfers.values()):
                assert time.monotonic() < deadline_s


@pytest.mark.slow
def test_hung_daemon_is_replaced_with_the_host_pool(tmp_path: Path) -> None:
    """A supervised daemon that hangs is ended; the next one serves, and what was stored is hit, read and proved."""
    with supervised(tmp_path, offload_config(), silence_max_s=4.0, kill_after_s=0.2) as daemon:
        engine = Engine(daemon.run_dir)
        try:
            engine.store("a", 4)
            hung = daemon.daemon_pid
            assert "has not said" not in daemon.log
            os.kill(hung, signal.SIGSTOP)

            daemon.await_ready()

            assert daemon.daemon_pid != hung
            engine.connect()
            engine.join()
            assert engine.load("a", 4) == 4
        finally:
            engine.close()
    assert f"daemon {hung} has not said for" in daemon.log


def test_hang_costs_an_engine_one_deadline(daemon: RunningDaemon) -> None:
    """An engine that goes on calling a hung daemon loses one deadline; when the daemon goes on, it is served again."""
    with Client.connect(daemon.run_dir, deadline_ms=300, failures="miss") as client:
        chain = client.chain(range(8))
        held = client.acquire("held", chain)
        held.commit(8)
        daemon.process.send_signal(signal.SIGSTOP)
        begun_s = time.monotonic()
        reasons = [client.acquire(f"r{number}", chain).reason for number in range(50)]
        held.release()
        assert reasons == [FailureReason.DEADLINE] + [FailureReason.CIRCUIT_OPEN] * 49
        assert time.monotonic() - begun_s < 5 * 0.3
        daemon.process.send_signal(signal.SIGCONT)
        deadline_s = time.monotonic() + PATIENCE_S
        lease = client.acquire("after", chain)
        while not lease.granted:
            assert time.monotonic() < deadline_s
            lease = client.acquire("after", chain)

        assert (lease.hit_blocks, client.is_alive) == (1, True)
        lease.release()
        assert pool_stats(daemon.run_dir).leases == 0
