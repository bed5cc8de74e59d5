"""Metrics and health of a real daemon over HTTP, while an engine works."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcached.recovery.supervise import serve_command
from kvcached_client import Admin, Client
from kvcached_client.protocol.key_files import write_key_file
from tests.daemon.conftest import CONFIG, RunningDaemon, started
from tests.project.daemon_process import START_TIMEOUT_S, clean_environment
from tests.project.source_tree import ROOT

HOST = '\n[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n'
BLOCK_BYTES = 2 * 4 * (8 + 8) * 4
GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


class UnixConnection(http.client.HTTPConnection):
    """A connection of the standard library's client to a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("here", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))
        self.sock.settimeout(20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "http.sock"


@pytest.fixture
def daemon(tmp_path: Path, path: Path) -> Iterator[RunningDaemon]:
    with started(tmp_path, f'{CONFIG}{HOST}\n[http]\nlisten = "unix:{path}"\n') as running:
        yield running


def get(path: Path, target: str) -> tuple[int, str]:
    with closing(UnixConnection(path)) as connection:
        connection.request("GET", target)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def samples(path: Path) -> dict[tuple[str, ...], float]:
    """Every sample, by its name and the values of its labels."""
    status, text = get(path, "/metrics")
    assert status == HTTPStatus.OK
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(path: Path, reached: Callable[[dict[tuple[str, ...], float]], bool]) -> dict[tuple[str, ...], float]:
    """The first samples that are as wanted; the test's timeout bounds it."""
    while not reached(found := samples(path)):
        pass
    return found


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_metrics_of_an_engine_at_work(daemon: RunningDaemon, path: Path) -> None:
    """Counters are 0 before, and afterwards say what an engine has done: hits, misses, bytes copied, latencies."""
    before = samples(path)
    assert before["kvcached_acquires_total",] == before["kvcached_errors_total", "internal"] == 0
    assert before["kvcached_request_duration_seconds_count", "acquire"] == 0
    assert before["kvcached_device_slots", "default", "free"] == 16
    with Client.connect(daemon.run_dir) as client:
        chain = client.chain(range(8))
        for name in ("one", "two"):
            with client.acquire(name, chain) as lease:
                lease.finish(computed_tokens=8)
        stored = ("kvcached_copied_bytes_total", "worker", "store")
        after = until(path, lambda now: now[stored] > 0 and now["kvcached_releases_total",] == 2)

        assert after["kvcached_acquires_total",] == 2
        assert after["kvcached_request_duration_seconds_count", "acquire"] == 2
        assert 0 < after["kvcached_request_duration_seconds_sum", "acquire"] < 10
        assert after["kvcached_hit_blocks_total", "device"] == 1  # the block of the last token is computed again
        assert after["kvcached_device_slots", "default", "cached"] == 2
        assert after["kvcached_device_bytes", "default", "cached"] == 2 * BLOCK_BYTES
        assert after[stored] == 2 * BLOCK_BYTES
        assert after["kvcached_copy_duration_seconds_count", "worker", "store"] >= 1
        assert after["kvcached_device_engines", "default"] == 1
        assert after["kvcached_workers_healthy", "default"] == 1
    until(path, lambda now: now["kvcached_sessions",] == 0)


def test_metrics_of_storage(tmp_path: Path, path: Path) -> None:
    """With a disk, what is written to it counts in blocks and bytes, and its state and capacity are told."""
    disk = f'\n[storage]\n[storage.settings]\ndirectory = "{tmp_path / "disk"}"\ncapacity_bytes = "64MiB"\n'
    with started(tmp_path, f'{CONFIG}{HOST}{disk}\n[http]\nlisten = "unix:{path}"\n') as daemon:
        before = samples(path)
        assert before["kvcached_storage_state", "ready"] == 1
        assert (
            before["kvcached_storage_written_blocks_total",] == before["kvcached_backup_blocks_total", "written"] == 0
        )
        with Client.connect(daemon.run_dir) as client, client.acquire("one", client.chain(range(8))) as lease:
            lease.finish(computed_tokens=8)
        written = ("kvcached_storage_written_blocks_total",)
        after = until(path, lambda now: now[written] == now["kvcached_backup_blocks_total", "written"] == 2)

    assert after["kvcached_copied_bytes_total", "storage", "store"] == 2 * BLOCK_BYTES
    assert after["kvcached_copy_duration_seconds_count", "storage", "store"] >= 1
    assert after["kvcached_copies_in_flight", "storage", "store"] == 0
    assert after["kvcached_storage_blocks",] == 2
    assert after["kvcached_storage_capacity_bytes",] == 64 << 20


def test_pages_say_what_the_commands_say(daemon: RunningDaemon, path: Path) -> None:
    """/livez and /readyz are 200, and /status.json tells all that `kvcached stats --json` does, and more."""
    assert get(path, "/livez") == (HTTPStatus.OK, "ok\n")
    status, text = get(path, "/readyz")
    assert (status, text.splitlines()[:2]) == (HTTPStatus.OK, ["ok default/acquire", "ok default/workers"])
    command = [sys.executable, "-m", "kvcached", "stats", "--json", "--run-dir", str(daemon.run_dir)]
    printed = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, check=True, timeout=30)
    told, served = json.loads(printed.stdout), json.loads(get(path, "/status.json")[1])
    for moved in ("counters", "uptime_ms"):
        assert told.pop(moved)
        assert served.pop(moved)
    assert told == {name: served.get(name) for name in told}
    assert served["storage"] is None
    assert served["replicas"][0]["block_bytes"] == BLOCK_BYTES


def test_readyz_fails_while_a_worker_is_stopped(daemon: RunningDaemon, path: Path) -> None:
    """A worker that does not answer makes the daemon not ready; it and its state are named. The daemon still lives."""
    (worker,) = workers_of(daemon.process.pid)
    os.kill(worker, signal.SIGSTOP)
    try:
        status, text = get(path, "/readyz")
        assert status == HTTPStatus.SERVICE_UNAVAILABLE
        words = f"shard 0 (process {worker}) is stopped (SIGSTOP, or a debugger); continue it with kill -CONT {worker}"
        assert f"FAILED default/workers no answer for 3 s: {words}" in text
        assert get(path, "/livez")[0] == HTTPStatus.OK
    finally:
        os.kill(worker, signal.SIGCONT)


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"kvcached.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def opened(path: Path, data: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))  # waits while the backlog is full; with a timeout it would not
    connection.settimeout(20)
    with suppress(OSError):  # closed before it had said everything
        connection.sendall(data)
    return connection


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"", 200),  # half-open
        (b"GET /metrics HTTP/1.1\r\nHo", 200),  # a header that does not end
        (GET, 200),  # answers that nobody reads
        (GET.replace(b"metrics", b"tree.json"), 200),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 100_000, 50),
        (b"\x16\x03\x01 no HTTP\r\n\r\n", 200),
        (GET.replace(b"GET", b"PUT"), 200),
    ],
    ids=["silent", "slow", "unread", "unread tree", "oversized", "garbage", "method"],
)
def test_bad_peers_cost_an_engine_nothing(data: bytes, count: int, daemon: RunningDaemon, path: Path) -> None:
    """While hundreds of connections misbehave, an engine's requests go on; afterwards no descriptor is left."""
    get(path, "/livez")
    before = descriptors(daemon.process.pid)
    with Client.connect(daemon.run_dir, deadline_ms=5000) as client:
        connections: list[socket.socket] = []
        for number in range(count):
            connections.append(opened(path, data))
            if number % 10 == 0:
                client.acquire(f"request-{number}", client.chain(range(8))).release()
        assert descriptors(daemon.process.pid) < before + 50
        for connection in connections:
            connection.close()
    with Admin.connect(daemon.run_dir) as admin:
        assert admin.health().ok
        assert admin.check().violations == ()
    while descriptors(daemon.process.pid) > before:
        get(path, "/livez")
    assert daemon.process.poll() is None


def test_tcp_port_is_served_and_a_taken_one_fails_the_start(tmp_path: Path) -> None:
    """The daemon serves a loopback port; a second daemon with the same port does not start, and says why."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    config = f'{CONFIG}\n[http]\nlisten = "127.0.0.1:{port}"\n'
    with started(tmp_path, config) as first:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("GET", "/livez")
            assert connection.getresponse().read() == b"ok\n"
        assert f"metrics and health at http://127.0.0.1:{port}/" in first.run_dir.with_suffix(".log").read_text()
        second = tmp_path / "second.toml"
        second.write_text(config)
        command = [sys.executable, "-m", "kvcached", "serve", "--config", str(second), "--run-dir", str(tmp_path / "b")]
        ended = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, check=False, timeout=60)
    assert ended.returncode == 3
    error = f"kvcached: [http] listen: Address already in use: 127.0.0.1, port {port}; stop what listens there, or"
    assert error.encode() in ended.stderr


@pytest.mark.parametrize("table", ["http", "tcp", "events"])
def test_every_start_fails_while_nothing_is_taken_over(table: str, tmp_path: Path) -> None:
    """The empty pools that a failed start has left to its supervisor are no reason to serve without a table's port."""
    path, key = tmp_path / "kvcached.toml", tmp_path / "daemon.key"
    write_key_file(key, bytes(32))
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        client = f'[[tcp.client]]\nname = "x"\npublic_key = "{"0" * 40}"\nrole = "look"\n'
        tables = {
            "http": f'[http]\nlisten = "127.0.0.1:{port}"\n',
            "tcp": f'[tcp]\nlisten = "127.0.0.1:{port}"\nkey_file = "{key}"\n{client}',
            "events": f'[events]\nendpoint = "tcp://127.0.0.1:{port}"\n',
        }
        path.write_text(f"{CONFIG}{HOST}\n{tables[table]}")
        options = serve_command(["--config", str(path), "--run-dir", str(tmp_path / "run")])
        command = [sys.executable, "-m", "tests.recovery.supervised", '{"failed_starts_max": 2}', *options]
        log_path = tmp_path / "run.log"
        with (
            log_path.open("wb") as log,
            subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stderr=log) as supervisor,
        ):
            try:
                status = supervisor.wait(START_TIMEOUT_S)
            finally:
                supervisor.terminate()
    assert status == 3
    assert log_path.read_text().count(f"kvcached: [{table}] ") == 2


def test_next_daemon_serves_the_same_path(daemon: RunningDaemon, path: Path, tmp_path: Path) -> None:
    """The socket of a killed daemon is in nobody's way: the next one serves at its path."""
    daemon.process.kill()
    daemon.process.wait()
    assert path.is_socket()

    with started(tmp_path, (tmp_path / "kvcached.toml").read_text()):
        assert get(path, "/livez")[0] == HTTPStatus.OK
    assert not path.exists()
