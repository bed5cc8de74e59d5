"""SIGTERM: engines finish what they hold, new work is refused; a deadline ends it, and a second signal at once."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcached_client import Admin, Client, DaemonFailure, DaemonUnreachable, ErrorCode
from tests.daemon.conftest import CONFIG, EngineProcess, RunningDaemon, started
from tests.daemon.supervised import supervised
from tests.daemon.test_deaths import children
from tests.line_process import LineProcess
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

PATIENCE_S = 20
#: Of a daemon that would wait for longer than any test if it waited to the end.
LONG_MS = 60_000


def config(deadline_ms: int) -> str:
    """The usual daemon with another deadline."""
    return f"shutdown_deadline_ms = {deadline_ms}\n{CONFIG}"


@contextmanager
def client_of(daemon: RunningDaemon) -> Iterator[Client]:
    with Client.connect(daemon.run_dir, deadline_ms=PATIENCE_S * 1000) as client:
        yield client


def state(daemon: RunningDaemon) -> str:
    """What the daemon says that it does."""
    with Admin.connect(daemon.run_dir) as admin:
        return admin.stats().state


def until_stopping(daemon: RunningDaemon) -> None:
    """Until the daemon has seen its signal."""
    deadline = time.monotonic() + PATIENCE_S
    while state(daemon) != "stopping":
        assert time.monotonic() < deadline


def dead(pidfds: list[int]) -> bool:
    """Whether all of these processes end before patience does."""
    deadline = time.monotonic() + PATIENCE_S
    return all(select.select([each], [], [], max(0, deadline - time.monotonic()))[0] for each in pidfds)


def test_daemon_waits_for_leases_and_answers_until_the_end(tmp_path: Path) -> None:
    """After SIGTERM an engine commits and releases as before, gets no new lease, and its release ends the daemon."""
    with started(tmp_path, config(LONG_MS)) as daemon, client_of(daemon) as client:
        chain = client.chain(range(16))
        lease = client.acquire("held", chain)
        daemon.process.terminate()
        until_stopping(daemon)
        with pytest.raises(DaemonFailure) as refused:
            client.acquire("new", chain)
        assert refused.value.code is ErrorCode.DRAINING
        with pytest.raises(DaemonFailure):
            Client.connect(daemon.run_dir)
        assert client.is_alive
        lease.commit(16)
        lease.release()

        assert daemon.process.wait(PATIENCE_S) == 0
        with pytest.raises(DaemonUnreachable):
            client.match(chain)


def test_idle_session_does_not_keep_the_daemon_up(tmp_path: Path) -> None:
    """An engine that holds no lease is not waited for, and it learns of the end at once."""
    with started(tmp_path, config(LONG_MS)) as daemon, client_of(daemon) as client:
        client.acquire("over", client.chain(range(16))).release()
        daemon.process.terminate()

        assert daemon.process.wait(PATIENCE_S) == 0


def test_daemon_ends_at_its_deadline(tmp_path: Path) -> None:
    """A lease that nobody gives back keeps the daemon up until the deadline, not longer; the status is 0."""
    with started(tmp_path, config(700)) as daemon:
        engine = EngineProcess(daemon.run_dir)
        start_s = time.monotonic()
        daemon.process.terminate()
        status = daemon.process.wait(PATIENCE_S)
        took_s = time.monotonic() - start_s
        engine.end()

    assert (status, took_s >= 0.7) == (0, True)
    assert "1 leases, 0 copies and 0 requests are left" in (tmp_path / "run.log").read_text()


def test_death_of_the_last_engine_ends_a_stopping_daemon(tmp_path: Path) -> None:
    """A lease whose engine is killed meanwhile is not waited for."""
    with started(tmp_path, config(LONG_MS)) as daemon:
        engine = EngineProcess(daemon.run_dir)
        daemon.process.terminate()
        until_stopping(daemon)
        engine.end()

        assert daemon.process.wait(PATIENCE_S) == 0


def test_second_signal_ends_daemon_and_workers_at_once(tmp_path: Path) -> None:
    """With a lease held and a minute left, a second SIGTERM ends the daemon with status 1, and its workers."""
    with started(tmp_path, config(LONG_MS)) as daemon, client_of(daemon) as client:
        client.acquire("held", client.chain(range(16)))
        workers = [os.pidfd_open(pid) for pid in children(daemon.process.pid)]
        daemon.process.terminate()
        until_stopping(daemon)
        daemon.process.terminate()

        assert daemon.process.wait(PATIENCE_S) == 1
        assert workers
        assert dead(workers)
        for each in workers:
            os.close(each)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_start_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """A daemon that is not ready ends by the signal, its workers with it, and the next one starts where it was."""
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(CONFIG)
    arguments = ["serve", "--config", str(path), "--run-dir", str(run_dir)]
    daemon = LineProcess("tests.daemon.endless_start", *arguments)
    try:
        assert daemon.hear() == "starting"
        workers = [os.pidfd_open(pid) for pid in children(daemon.process.pid)]
        os.kill(daemon.process.pid, number)
        assert daemon.process.wait(PATIENCE_S) == -number
        assert workers
        assert dead(workers)
        for each in workers:
            os.close(each)
    finally:
        daemon.end()
    with started(tmp_path) as again, client_of(again) as client:
        client.acquire("first", client.chain(range(16))).release()


SHARD = """
import sys
from kvcached_client import SessionGrant, map_pool
pool = map_pool(SessionGrant.from_bytes(bytes.fromhex(sys.argv[1])))
view = pool.pages(0)
if sys.argv[2] == "leaves":
    pool.close()
"""


@pytest.mark.parametrize("ends", ["leaves", "just ends"])
def test_shard_that_leaves_is_no_death(ends: str, tmp_path: Path) -> None:
    """A shard process that closes its pool and ends leaves its session as it is; one that only ends takes it along."""
    with started(tmp_path) as daemon, Client.connect(daemon.run_dir, reserve_blocks=4, failures="miss") as client:
        grant = client.session.to_bytes().hex()
        subprocess.run([sys.executable, "-c", SHARD, grant, ends], cwd=ROOT, check=True, timeout=PATIENCE_S)
        lease = client.acquire("after", client.chain(range(8)))
        assert lease.granted is (ends == "leaves")
        lease.release()
        client.close()
        with Admin.connect(daemon.run_dir) as admin:
            assert admin.check().ok
    assert ("WARNING" in (tmp_path / "run.log").read_text()) is (ends != "leaves")


def test_hangup_does_not_end_the_daemon(tmp_path: Path) -> None:
    """SIGHUP to `serve` is logged with what to do instead; engines are served on, and SIGTERM then ends it with 0."""
    with started(tmp_path) as daemon, client_of(daemon) as client:
        daemon.process.send_signal(signal.SIGHUP)
        client.acquire("after the signal", client.chain(range(16))).release()
        daemon.process.terminate()

        assert daemon.process.wait(PATIENCE_S) == 0
    assert "SIGHUP does nothing" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_daemon_runs_without_a_standard_stream(closed: int, tmp_path: Path) -> None:
    """A daemon that is started with stdin, stdout or stderr closed has /dev/null there, serves, and ends with 0."""
    (path := tmp_path / "kvcached.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "kvcached", "serve", "--config", str(path), "--run-dir", str(tmp_path / "run")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, (tmp_path / "log").open("wb") as log:
        notices.bind(str(tmp_path / "notify"))
        notices.settimeout(PATIENCE_S)
        environment = {**clean_environment(), "NOTIFY_SOCKET": str(tmp_path / "notify")}
        within = ["sh", "-c", f'exec "$@" {closed}<&-', "sh"]
        with subprocess.Popen([*within, *command], cwd=ROOT, env=environment, stdout=log, stderr=log) as process:
            try:
                while notices.recv(4096) != b"READY=1":
                    pass  # what the daemon gives the service manager to keep
                assert Path(f"/proc/{process.pid}/fd/{closed}").readlink() == Path("/dev/null")
                with Client.connect(tmp_path / "run") as client:
                    client.acquire("served", client.chain(range(16))).release()
                process.terminate()

                assert process.wait(PATIENCE_S) == 0
            finally:
                process.kill()


def test_start_behind_a_stop_in_order_warns_of_no_loss(tmp_path: Path) -> None:
    """After a stop of the supervisor, by which its memory ends, the next start says so, and not as a warning."""
    for _ in range(2):
        with supervised(tmp_path, CONFIG) as running:
            pass

    assert "INFO kvcached.recovery.inheritance: the daemon before was stopped, and nobody has kept" in running.log
    assert "WARNING" not in running.log
