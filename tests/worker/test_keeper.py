"""For whom a worker keeps its memory: daemons that come and go, spoken for by hand."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcached.seqpacket import listen, send
from kvcached.worker.geometry import pool_geometry
from kvcached.worker.host_memory import create_host_memory
from kvcached.worker.messages import (
    Abandon,
    Ack,
    Adopt,
    Command,
    Probe,
    Shutdown,
    WorkerConfig,
    WorkerRefusal,
    decode_worker_message,
    encode,
)
from tests.worker.groups import SLOTS, tiny_layout
from tests.worker.test_worker_process import HOST, PATIENCE_S, PROBE, Worker, ask, greeted, ready, worker_in

LONG_MS = 600_000


class Daemon:
    """A process that does nothing but live."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.pid = self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """The daemon whose pidfd the worker gets. This process speaks for it."""
    living = Daemon()
    yield living
    living.kill()


@contextmanager
def introduced(
    worker: Worker, config: WorkerConfig | None = None, descriptors: tuple[int, ...] = ()
) -> Iterator[socket.socket]:
    """A connection of this process as the next daemon, which has said what it expects."""
    own = os.pidfd_open(os.getpid())
    with worker.connect() as connection:
        send(connection, encode(Adopt(config=config or worker.config)), (own, *descriptors))
        os.close(own)
        yield connection


def refusal(connection: socket.socket) -> str:
    """Why the worker refuses; it has closed the connection then."""
    answer = decode_worker_message(connection.recv(10_000))
    assert isinstance(answer, WorkerRefusal)
    assert connection.recv(1) == b""
    return answer.reason


def test_worker_serves_one_daemon(run_dir: str) -> None:
    """While its daemon lives nobody else is served, nor disturbs it."""
    with worker_in(run_dir, grace_ms=LONG_MS) as worker, ready(worker) as (connection, _):
        with introduced(worker) as second:
            assert ask(connection, 1, PROBE) == Ack(sequence=1)
            assert refusal(second) == "the daemon that this worker serves is alive"
        assert ask(connection, 2, PROBE) == Ack(sequence=2)


def test_worker_waits_for_the_death_and_not_for_the_connection(run_dir: str, daemon: Daemon) -> None:
    """A closed connection makes a worker nobody's; another daemon is served once the pidfd says the last is dead."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS) as worker:
        with ready(worker):
            pass
        with introduced(worker) as early:
            assert refusal(early) == "the daemon that this worker serves is alive"
        with introduced(worker) as late:
            daemon.kill()
            with greeted(late):
                assert ask(late, 1, PROBE) == Ack(sequence=1)


def test_adopted_worker_begins_anew(run_dir: str, daemon: Daemon) -> None:
    """The next daemon gets the same memory, counts its commands from one, and finds no trace of loads in the page."""
    with ExitStack() as stack:
        worker = stack.enter_context(worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS))
        worker.wait_listening()
        connection = stack.enter_context(worker.connect())
        first = stack.enter_context(greeted(connection))
        for sequence in (1, 2, 3):
            assert ask(connection, sequence, Abandon(transfer=70 + sequence, progress=sequence)).error == ""
        os.pwrite(first[0], b"engine", 100)
        daemon.kill()
        with introduced(worker) as next_daemon, greeted(next_daemon) as second:
            assert [os.fstat(each).st_ino for each in second[:2]] == [os.fstat(each).st_ino for each in first[:2]]
            assert os.pread(second[0], 6, 100) == b"engine"
            assert not any(os.pread(second[1], 64 * 32, 0))
            assert ask(next_daemon, 1, PROBE) == Ack(sequence=1)


DIFFERENT: dict[str, dict[str, Any]] = {
    "geometry": {"geometry": pool_geometry(tiny_layout(), SLOTS + 1)},
    "replica": {"replica": "other"},
    "shard": {"shard": 1},
    "host": {"host": HOST},
    "namespace, fingerprint": {"namespace": bytes(16), "fingerprint": b"f" * 16},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_worker_refuses_who_expects_something_else(run_dir: str, daemon: Daemon, what: str) -> None:
    """A daemon with another configuration is told what differs; the memory is kept for one with the same."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS) as worker, ready(worker):
        daemon.kill()
        with introduced(worker, msgspec.structs.replace(worker.config, **DIFFERENT[what])) as stranger:
            assert refusal(stranger) == f"not the same: {what}"
        with introduced(worker) as next_daemon, greeted(next_daemon):
            pass


def test_worker_refuses_another_host_pool(run_dir: str, daemon: Daemon) -> None:
    """The host pool is recognised by its memory, not by its size: blocks stored elsewhere would be lost."""
    own, other = (create_host_memory(HOST.slabs, HOST.slab_bytes) for _ in range(2))
    with (
        worker_in(run_dir, daemon=daemon.pid, host=HOST, descriptors=(own.descriptor,), grace_ms=LONG_MS) as worker,
        ready(worker),
    ):
        daemon.kill()
        for descriptors in ((), (other.descriptor,)):
            with introduced(worker, descriptors=descriptors) as stranger:
                assert refusal(stranger) == "not the same: the host pool's memory"
        with introduced(worker, descriptors=(own.descriptor,)) as next_daemon, greeted(next_daemon):
            pass
    own.close()
    other.close()


def test_worker_refuses_what_is_no_introduction(run_dir: str, daemon: Daemon) -> None:
    """Who sends no message, nonsense, or no pidfd of its own within a second is refused; the next one is heard."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS) as worker, ready(worker), worker.connect() as silent:
        daemon.kill()
        with worker.connect() as babbling:
            babbling.sendall(b"\xc1nonsense")
            assert refusal(silent) == "it did not say what it expects"
            assert refusal(babbling).startswith("it sent what cannot be decoded: ")
        with worker.connect() as nameless:
            nameless.sendall(encode(Adopt(config=worker.config)))
            assert refusal(nameless) == f"the first descriptor is no pidfd of process {os.getpid()}"
        with introduced(worker) as next_daemon, greeted(next_daemon):
            pass


def test_who_goes_away_again_changes_nothing(run_dir: str, daemon: Daemon) -> None:
    """A daemon that dies while it waits for a worker leaves the worker for the one after it."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS) as worker, ready(worker):
        with introduced(worker):
            pass
        with introduced(worker) as next_daemon:
            daemon.kill()
            with greeted(next_daemon):
                pass


@pytest.mark.parametrize("is_dead", [True, False], ids=["daemon dead", "connection closed"])
def test_worker_ends_after_its_grace_period(run_dir: str, daemon: Daemon, is_dead: bool) -> None:
    """Where no other daemon comes the worker ends by itself, not before its time, and takes its socket along."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=400) as worker:
        with ready(worker):
            if is_dead:
                daemon.kill()
                with pytest.raises(subprocess.TimeoutExpired):
                    worker.process.wait(0.2)
        assert worker.process.wait(PATIENCE_S) == 0

    assert not Path(worker.socket_path).exists()
    assert "no other daemon came within 400 ms" in Path(f"{run_dir}/worker.log").read_text()


def test_worker_leaves_the_socket_of_its_successor(run_dir: str, daemon: Daemon) -> None:
    """A worker that nobody found does not take away, when it ends, what listens in its place by then."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=200) as worker, ready(worker):
        Path(worker.socket_path).unlink()
        with listen(worker.socket_path, 1):
            daemon.kill()
            assert worker.process.wait(PATIENCE_S) == 0
            assert Path(worker.socket_path).is_socket()


def test_worker_that_was_told_to_end_waits_for_nobody(run_dir: str, daemon: Daemon) -> None:
    """Where the daemon dies after it has ordered the end, the worker ends at once, whatever the grace period."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS) as worker, ready(worker) as (connection, _):
        os.kill(worker.process.pid, signal.SIGSTOP)
        connection.sendall(encode(Command(sequence=1, work=PROBE)))
        connection.sendall(encode(Command(sequence=2, work=Shutdown())))
        daemon.kill()
        os.kill(worker.process.pid, signal.SIGCONT)
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_without_a_daemon_obeys_sigterm(run_dir: str, daemon: Daemon) -> None:
    """SIGTERM ends a worker that waits for the next daemon."""
    with worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS) as worker, ready(worker):
        daemon.kill()
        worker.process.terminate()
        assert worker.process.wait(PATIENCE_S) == -signal.SIGTERM


def test_commands_of_a_dead_daemon_are_not_begun(run_dir: str, daemon: Daemon) -> None:
    """What the worker has not read when its daemon dies is never carried out, and a load among it fails in the page."""
    with ExitStack() as stack:
        worker = stack.enter_context(worker_in(run_dir, daemon=daemon.pid, grace_ms=LONG_MS))
        worker.wait_listening()
        connection = stack.enter_context(worker.connect())
        pool, page, *events = stack.enter_context(greeted(connection))
        os.pwrite(pool, b"kept", 0)
        os.kill(worker.process.pid, signal.SIGSTOP)
        connection.sendall(encode(Command(sequence=1, work=Probe(source=0, target=1, seed=1))))
        connection.sendall(encode(Command(sequence=2, work=Abandon(transfer=70, progress=3))))
        daemon.kill()
        os.kill(worker.process.pid, signal.SIGCONT)
        assert select.select([events[3]], [], [], PATIENCE_S)[0]

        assert os.pread(pool, 4, 0) == b"kept"
        assert int.from_bytes(os.pread(page, 8, 3 * 64), "little") == 70
