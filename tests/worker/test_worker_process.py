from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import create_host_memory
from kvcached.memory.sealed import sealed_memfd
from kvcached.process.seqpacket import send
from kvcached.worker.messages import (
    Done,
    Probe,
    Ready,
    Request,
    Shutdown,
    Work,
    WorkerConfig,
    decode_report,
    encode,
)
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import pool_geometry
from tests.worker.groups import NAMESPACE, SLOTS, tiny_layout

PATIENCE_S = 20


class Worker:
    """A worker process of this one, spoken to by hand."""

    def __init__(self, run_dir: str, host: HostGeometry | None, host_memory: tuple[int, ...], size_bytes: int) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(PATIENCE_S)
        geometry = pool_geometry(tiny_layout(), SLOTS)
        config = WorkerConfig(
            replica="default",
            shard=0,
            geometry=geometry,
            pretouch_bytes=0,
            host=host,
            namespace=NAMESPACE[:16],
            fingerprint=bytes(16),
        )
        memory = ShardMemory.make("test", size_bytes or geometry.size_bytes)
        send(self.connection, encode(config), (*memory.for_worker, *host_memory))
        memory.close()
        with Path(f"{run_dir}/worker.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvcached.worker.main", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=log,
            )
        theirs.close()

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def worker_in(
    run_dir: str,
    *,
    host: HostGeometry | None = None,
    host_memory: tuple[int, ...] = (),
    size_bytes: int = 0,
) -> Iterator[Worker]:
    worker = Worker(run_dir, host, host_memory, size_bytes)
    try:
        yield worker
    finally:
        worker.close()


def ready(worker: Worker) -> socket.socket:
    """A connection past its greeting."""
    assert isinstance(decode_report(worker.connection.recv(1000)), Ready)
    return worker.connection


def ask(connection: socket.socket, sequence: int, work: Work) -> Done:
    connection.sendall(encode(Request(sequence=sequence, work=work)))
    ack = decode_report(connection.recv(10_000))
    assert isinstance(ack, Done)
    return ack


PROBE = Probe(source=0, target=1, seed=3)


def test_worker_shows_nothing_on_its_command_line(run_dir: str) -> None:
    """The command line holds the number of a descriptor and nothing of the configuration."""
    with worker_in(run_dir) as worker:
        ready(worker)
        arguments = Path(f"/proc/{worker.process.pid}/cmdline").read_bytes().split(b"\0")

    assert [argument.isdigit() for argument in arguments[1:-1]] == [False, False, True]
    assert arguments[1:3] == [b"-m", b"kvcached.worker.main"]


def test_worker_acknowledges_a_command_out_of_sequence_as_failed(run_dir: str) -> None:
    """A sequence number that is not the next one is refused, and the right one is served after that."""
    with worker_in(run_dir) as worker:
        connection = ready(worker)
        assert ask(connection, 2, PROBE) == Done(sequence=2, error="sequence 2 after 0")
        assert ask(connection, 1, PROBE) == Done(sequence=1)
        assert ask(connection, 1, PROBE) == Done(sequence=1, error="sequence 1 after 1")


def test_worker_ends_after_shutdown(run_dir: str) -> None:
    """Shutdown is acknowledged, and the worker ends with status 0."""
    with worker_in(run_dir) as worker:
        connection = ready(worker)
        assert ask(connection, 1, Shutdown()) == Done(sequence=1)
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_ends_when_its_connection_closes(run_dir: str) -> None:
    """A worker whose daemon closes the connection ends."""
    with worker_in(run_dir) as worker:
        ready(worker).close()
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_ends_on_bytes_that_are_no_command(run_dir: str) -> None:
    """What cannot be decoded has no number to acknowledge: the worker says so in its log and ends."""
    with worker_in(run_dir) as worker:
        connection = ready(worker)
        connection.sendall(b"\xc1nonsense")
        assert worker.process.wait(PATIENCE_S) == 0

    assert "cannot be decoded" in Path(f"{run_dir}/worker.log").read_text()


def test_worker_that_cannot_have_its_memory_says_so(run_dir: str) -> None:
    """Memory that is smaller than the pool ends the worker with status 3 and one line of log."""
    with worker_in(run_dir, size_bytes=4096) as worker:
        assert worker.process.wait(PATIENCE_S) == 3

    lines = Path(f"{run_dir}/worker.log").read_text().splitlines()
    assert len(lines) == 1
    assert "shared memory of 4096 bytes" in lines[0]


HOST = HostGeometry(slabs=2, slab_bytes=8192, shards=1, block_bytes=tiny_layout().bytes_per_block())


def test_worker_serves_with_a_host_pool(run_dir: str) -> None:
    """A worker that got the memory of its host pool starts and serves."""
    memory = create_host_memory(HOST.slabs, HOST.slab_bytes)
    with worker_in(run_dir, host=HOST, host_memory=(memory.descriptor,)) as worker:
        connection = ready(worker)
        assert ask(connection, 1, PROBE) == Done(sequence=1)
    memory.close()


@pytest.mark.parametrize("slabs", [0, 1], ids=["no memory", "half of it"])
def test_worker_without_its_host_pool_says_so(run_dir: str, slabs: int) -> None:
    """A worker whose host pool is not there, or smaller than it was told, ends with status 3 and a line of log."""
    descriptor = sealed_memfd("half", max(slabs, 1) * HOST.slab_bytes)
    descriptors = (descriptor,) if slabs else ()
    with worker_in(run_dir, host=HOST, host_memory=descriptors) as worker:
        assert worker.process.wait(PATIENCE_S) == 3
    os.close(descriptor)

    assert len(Path(f"{run_dir}/worker.log").read_text().splitlines()) == 1


@pytest.mark.parametrize("module", ["kvcached.worker.main", "kvcached.worker.client", "kvcached.server.attach"])
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
from tests.worker.groups import tiny_pool, workers_of

async def daemon():
    workers = workers_of(tiny_pool(2), {run_dir!r}, print)
    await workers.open()
    print(workers.pid(0), workers.pid(1), flush=True)
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
