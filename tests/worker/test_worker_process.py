from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvcached.seqpacket import receive, send
from kvcached.worker.connection import READY_DESCRIPTORS
from kvcached.worker.geometry import PoolGeometry, pool_geometry
from kvcached.worker.host_memory import create_host_memory
from kvcached.worker.messages import (
    Ack,
    Command,
    Probe,
    Shutdown,
    Work,
    WorkerConfig,
    WorkerListening,
    WorkerReady,
    decode_worker_message,
    encode,
)
from kvcached_client.host_geometry import HostGeometry
from tests.worker.groups import NAMESPACE, SLOTS, tiny_layout

PATIENCE_S = 20


class Worker:
    """A worker process of this one, spoken to by hand."""

    def __init__(
        self,
        run_dir: str,
        geometry: PoolGeometry,
        daemon: int,
        host: HostGeometry | None,
        descriptors: tuple[int, ...],
        grace_ms: int,
    ) -> None:
        self.socket_path = f"{run_dir}/worker.sock"
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(PATIENCE_S)
        daemon_pidfd = os.pidfd_open(daemon)
        self.config = WorkerConfig(
            replica="default",
            shard=0,
            device="cpu",
            geometry=geometry,
            socket_path=self.socket_path,
            pretouch_bytes=0,
            grace_ms=grace_ms,
            daemon_pidfd=daemon_pidfd,
            host=host,
            namespace=NAMESPACE[:16],
            fingerprint=bytes(16),
        )
        send(self.control, encode(self.config), descriptors)
        with Path(f"{run_dir}/worker.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvcached.worker.main", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), daemon_pidfd),
                stderr=log,
            )
        theirs.close()
        os.close(daemon_pidfd)

    def wait_listening(self) -> None:
        assert isinstance(decode_worker_message(self.control.recv(1000)), WorkerListening)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(PATIENCE_S)
        try:
            connection.connect(self.socket_path)
        except OSError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def worker_in(
    run_dir: str,
    *,
    slots: int = SLOTS,
    daemon: int | None = None,
    host: HostGeometry | None = None,
    descriptors: tuple[int, ...] = (),
    grace_ms: int = 0,
) -> Iterator[Worker]:
    worker = Worker(run_dir, pool_geometry(tiny_layout(), slots), daemon or os.getpid(), host, descriptors, grace_ms)
    try:
        yield worker
    finally:
        worker.close()


@contextmanager
def ready(worker: Worker) -> Iterator[tuple[socket.socket, int]]:
    """A connection past its greeting, and the pool's memory."""
    worker.wait_listening()
    with worker.connect() as connection, greeted(connection) as descriptors:
        yield connection, descriptors[0]


@contextmanager
def greeted(connection: socket.socket) -> Iterator[list[int]]:
    """What the greeting on a connection brings."""
    select.select([connection], [], [], PATIENCE_S)
    packet = receive(connection, 1000, READY_DESCRIPTORS + 1)
    assert packet is not None
    assert isinstance(decode_worker_message(packet.data), WorkerReady)
    assert len(packet.descriptors) == READY_DESCRIPTORS
    yield packet.descriptors
    packet.close()


def ask(connection: socket.socket, sequence: int, work: Work) -> Ack:
    connection.sendall(encode(Command(sequence=sequence, work=work)))
    ack = decode_worker_message(connection.recv(10_000))
    assert isinstance(ack, Ack)
    return ack


PROBE = Probe(source=0, target=1, seed=3)


def test_worker_sends_its_sealed_memory(run_dir: str) -> None:
    """What a worker hands out has the pool's size and all three seals."""
    with worker_in(run_dir) as worker, ready(worker) as (_, memory):
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)

        assert os.fstat(memory).st_size == tiny_layout().pool_bytes(SLOTS)
        assert seals & 7 == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def test_worker_socket_is_its_users_alone(run_dir: str) -> None:
    """The socket gives no permission to group and others, though the process umask would."""
    previous = os.umask(0)
    try:
        with worker_in(run_dir) as worker:
            worker.wait_listening()
            mode = Path(worker.socket_path).stat().st_mode
    finally:
        os.umask(previous)

    assert mode & 0o077 == 0


def test_worker_replaces_the_socket_of_a_dead_one(run_dir: str) -> None:
    """A socket file that an earlier worker left behind does not keep a new one from starting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(f"{run_dir}/worker.sock")

    with worker_in(run_dir) as worker, ready(worker) as (connection, _):
        assert ask(connection, 1, PROBE) == Ack(sequence=1)


def test_worker_shows_nothing_on_its_command_line(run_dir: str) -> None:
    """The command line holds the number of a descriptor and nothing of the configuration."""
    with worker_in(run_dir) as worker:
        worker.wait_listening()
        arguments = Path(f"/proc/{worker.process.pid}/cmdline").read_bytes().split(b"\0")

    assert [argument.isdigit() for argument in arguments[1:-1]] == [False, False, True]
    assert arguments[1:3] == [b"-m", b"kvcached.worker.main"]


def test_worker_acknowledges_a_command_out_of_sequence_as_failed(run_dir: str) -> None:
    """A sequence number that is not the next one is refused, and the right one is served after that."""
    with worker_in(run_dir) as worker, ready(worker) as (connection, _):
        assert ask(connection, 2, PROBE) == Ack(sequence=2, error="sequence 2 after 0")
        assert ask(connection, 1, PROBE) == Ack(sequence=1)
        assert ask(connection, 1, PROBE) == Ack(sequence=1, error="sequence 1 after 1")


def test_worker_ends_after_shutdown(run_dir: str) -> None:
    """Shutdown is acknowledged, and the worker ends with status 0."""
    with worker_in(run_dir) as worker, ready(worker) as (connection, _):
        assert ask(connection, 1, Shutdown()) == Ack(sequence=1)
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_ends_when_its_connection_closes(run_dir: str) -> None:
    """A worker whose daemon closes the connection ends."""
    with worker_in(run_dir) as worker:
        with ready(worker):
            pass
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_ends_on_bytes_that_are_no_command(run_dir: str) -> None:
    """What cannot be decoded has no number to acknowledge: the worker says so in its log and ends."""
    with worker_in(run_dir) as worker, ready(worker) as (connection, _):
        connection.sendall(b"\xc1nonsense")
        assert worker.process.wait(PATIENCE_S) == 0

    assert "cannot be decoded" in Path(f"{run_dir}/worker.log").read_text()


@pytest.mark.parametrize("connected", [False, True])
def test_worker_ends_when_its_daemon_is_killed(run_dir: str, connected: bool) -> None:
    """A worker ends when the process that its pidfd names is dead, even if the connection stays open."""
    with ExitStack() as stack:
        daemon = stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        worker = stack.enter_context(worker_in(run_dir, daemon=daemon.pid))
        if connected:
            stack.enter_context(ready(worker))
        else:
            worker.wait_listening()
        daemon.kill()
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_that_cannot_have_its_memory_says_so(run_dir: str) -> None:
    """A pool that the machine cannot hold ends the worker with status 3 and one line of log."""
    with worker_in(run_dir, slots=1 << 36) as worker:
        assert worker.process.wait(PATIENCE_S) == 3

    lines = Path(f"{run_dir}/worker.log").read_text().splitlines()
    assert len(lines) == 1
    assert "pool kvcached-default-0 needs" in lines[0]


HOST = HostGeometry(slabs=2, slab_bytes=8192, shards=1, block_bytes=tiny_layout().bytes_per_block())


def test_worker_serves_with_a_host_pool(run_dir: str) -> None:
    """A worker that got the memory of its host pool starts and serves."""
    memory = create_host_memory(HOST.slabs, HOST.slab_bytes)
    with (
        worker_in(run_dir, host=HOST, descriptors=(memory.descriptor,)) as worker,
        ready(worker) as (connection, _),
    ):
        assert ask(connection, 1, PROBE) == Ack(sequence=1)
    memory.close()


@pytest.mark.parametrize("slabs", [0, 1], ids=["no memory", "half of it"])
def test_worker_without_its_host_pool_says_so(run_dir: str, slabs: int) -> None:
    """A worker whose host pool is not there, or smaller than it was told, ends with status 3 and a line of log."""
    memory = create_host_memory(max(slabs, 1), HOST.slab_bytes)
    descriptors = (memory.descriptor,) if slabs else ()
    with worker_in(run_dir, host=HOST, descriptors=descriptors) as worker:
        assert worker.process.wait(PATIENCE_S) == 3
    memory.close()

    assert len(Path(f"{run_dir}/worker.log").read_text().splitlines()) == 1


@pytest.mark.parametrize("module", ["kvcached.worker.main", "kvcached.worker.supervisor", "kvcached.attach.server"])
def test_module_never_imports_torch(module: str) -> None:
    """Neither workers nor the daemon's side of them import torch; a worker imports nothing else that is slow either."""
    heavy = ["torch", "zmq", "numpy", "uvloop", "asyncio"] if module == "kvcached.worker.main" else ["torch"]
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout

    assert printed == "[]\n"


def test_workers_end_when_the_daemon_is_killed(run_dir: str) -> None:
    """When a daemon is SIGKILLed, the workers that its supervisor started are gone soon after."""
    program = f"""
import asyncio
from kvcached.worker.supervisor import WorkerGroup
from tests.worker.groups import tiny_pool

async def daemon():
    group = WorkerGroup(tiny_pool(2), {run_dir!r}, print)
    await group.start()
    print(group.pid(0), group.pid(1), flush=True)
    await asyncio.Event().wait()

asyncio.run(daemon())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        workers = [os.pidfd_open(int(pid)) for pid in daemon.stdout.readline().split()]
        daemon.send_signal(signal.SIGKILL)
        ended = [select.select([worker], [], [], PATIENCE_S)[0] for worker in workers]
    for worker in workers:
        os.close(worker)

    assert len(ended) == 2
    assert all(ended)
