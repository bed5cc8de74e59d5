"""Workers whose daemon is killed, and whoever has mapped their memory."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from kvcached.ledger import ProcessIdentity, open_process
from kvcached.seqpacket import receive
from kvcached.worker.connection import READY_DESCRIPTORS
from kvcached.worker.host_memory import HostMemory
from kvcached.worker.messages import Load, Store
from kvcached_client.types import ShardIndex
from tests.worker.gated_worker import ENTERED, GATED, RELEASED
from tests.worker.groups import PATIENCE_S, SLOTS, tiny_layout
from tests.worker.mortal_daemon import Orders, Task, Told

ROOT = Path(__file__).parents[2]
GATED_WORKER = str(Path(__file__).with_name("gated_worker.py"))


class Mortal:
    """A daemon in a process of its own, and its workers.

    Attributes:
        adoptable: its workers, as it would have written them down.
        descriptors: of each shard, what an engine's process maps.
    """

    def __init__(self, made: ExitStack, task: Task, engine: socket.socket, passed: Sequence[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.mortal_daemon"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=passed,
        )
        made.enter_context(self.process)
        made.callback(self.process.kill)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(task) + b"\n")
        self.process.stdin.flush()
        told = msgspec.json.decode(self.process.stdout.readline(), type=Told)
        self.adopted = told.adopted
        self.adoptable = {ShardIndex(shard): process for shard, process in told.processes.items()}
        made.callback(end_all, self.adoptable.values())
        self.descriptors: list[tuple[int, ...]] = []
        for _ in self.adoptable:
            packet = receive(engine, 100, READY_DESCRIPTORS)
            assert packet is not None
            made.callback(packet.close)
            self.descriptors.append(tuple(packet.descriptors))

    def order(self, *works: Store | Load, wait: bool = False) -> None:
        """Let it give orders, and wait for their end where that is asked for."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(Orders(works=list(works), wait=wait)) + b"\n")
        self.process.stdin.flush()
        assert int(self.process.stdout.readline()) == len(works)

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead."""
        self.process.kill()
        self.process.wait()

    def memory(self, shard: int = 0) -> mmap.mmap:
        """A shard's pool, mapped as its engine has it."""
        return mmap.mmap(self.descriptors[shard][0], tiny_layout(shards=len(self.descriptors)).pool_bytes(SLOTS))

    def entry(self, index: int, shard: int = 0) -> tuple[int, int]:
        """Transfer and state of an entry of a shard's progress page."""
        content = os.pread(self.descriptors[shard][1], 16, index * 64)
        return int.from_bytes(content[:8], "little"), int.from_bytes(content[12:], "little")


@contextmanager
def mortal(
    run_dir: str,
    shards: int = 1,
    *,
    grace_ms: int = 30_000,
    host: HostMemory | None = None,
    gated: bool = False,
    adoptable: dict[ShardIndex, ProcessIdentity] | None = None,
) -> Iterator[Mortal]:
    """A daemon that has started its workers. In the end it is dead, and so are they."""
    command = [sys.executable, GATED_WORKER, run_dir] if gated else []
    with ExitStack() as made:
        engine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.enter_context(engine)
        made.enter_context(theirs)
        inherited = -1 if host is None else host.descriptor
        task = Task(
            run_dir=run_dir,
            shards=shards,
            grace_ms=grace_ms,
            engine=theirs.fileno(),
            host=inherited,
            command=command,
            adoptable={int(shard): each for shard, each in (adoptable or {}).items()},
        )
        passed = [number for number in (theirs.fileno(), inherited) if number >= 0]
        yield Mortal(made, task, engine, passed)


class Gate:
    """Holds the next copy of a `gated_worker.py` from now on, on one shard, until `release`."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        for name in (ENTERED, RELEASED):
            os.mkfifo(self._run_dir / name)
        (self._run_dir / GATED).touch()

    def wait_entered(self) -> ShardIndex:
        """Wait for a worker to be in the middle of a copy; returns its shard."""
        return ShardIndex(int((self._run_dir / ENTERED).read_text()))

    def release(self) -> None:
        """Let it go on."""
        (self._run_dir / RELEASED).open("wb").close()


def end_all(processes: Iterable[ProcessIdentity]) -> None:
    """Kill processes, and wait until they are dead."""
    for process in processes:
        pidfd = open_process(process.pid, process.started)
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert is_dead_within(pidfd, PATIENCE_S)
            os.close(pidfd)


def is_alive(process: ProcessIdentity) -> bool:
    """Whether it lives, a zombie not counted."""
    pidfd = open_process(process.pid, process.started)
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is not None


def is_dead_within(pidfd: int, seconds: float) -> bool:
    """Wait for a death."""
    return bool(select.select([pidfd], [], [], seconds)[0])
