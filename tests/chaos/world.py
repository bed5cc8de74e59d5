"""The processes of a run: a supervised daemon with everything configured, its workers, its storage, and the engines."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kvcached.process.identity import arguments_of
from kvcached_client import Admin
from tests.chaos.managed import EnginePlan
from tests.chaos.nursery import Nursery, Spawn
from tests.daemon.supervised import Supervised

SESSION_TTL_MS = 800
#: Longer than a daemon takes to start on a busy machine: engines find their pool again.
_ADMIN_DEADLINE_MS = 1500

CONFIG = """
heartbeat_interval_ms = 100
session_ttl_ms = {ttl_ms}
worker_ready_deadline_ms = 60000

[host]
size_bytes = {host_bytes}
slab_bytes = 65536
eviction_policy = "slru"

[offload]

[storage]
backend = "disk"
prefetch_threshold_blocks = 1
timeout_ms = 1000
[storage.settings]
directory = "{directory}/storage"
capacity_bytes = 16777216
"""

REPLICA = """
[[replica]]
name = "{name}"
model = "{model}"
block_size = 4
shards = 2
page_order = "{order}"
slots = {slots}
eviction_policy = "slru"
load_threshold_blocks = 1
free_watermark_percent = 10
[[replica.group]]
layers = 3
kv_heads = 1
head_dim = 8
v_head_dim = 8
dtype = "float32"
"""

REPLICAS = ("a", "b", "c")
#: Engines by name: how they run, and the replica that they use.
ENGINES = {"a": ("processes", "a"), "b": ("processes", "b"), "c": ("threads", "c"), "d": ("offload", "")}


def config_text(directory: Path, random: Random) -> str:
    """A configuration of two replicas under one tree, one with its own, engines in offload mode, and storage."""
    parts = [
        CONFIG.format(
            ttl_ms=SESSION_TTL_MS,
            host_bytes=65536 * random.choice([6, 8, 12]),
            directory=directory,
        )
    ]
    for name, model, order in (("a", "one", "block_first"), ("b", "one", "block_first"), ("c", "other", "layer_first")):
        parts.append(REPLICA.format(name=name, model=model, order=order, slots=random.choice([32, 40, 56])))
    return "".join(parts)


class EngineGroup:
    """An engine's processes, and those of its successors.

    Attributes:
        name: of the engine.
        pids: of the incarnation that lives, by what they are.
        number: of incarnations so far.
    """

    def __init__(self, name: str, seed: int, run_dir: Path) -> None:
        self.name = name
        self.kind, self._replica = ENGINES[name]
        self._seed = seed
        self._run_dir = run_dir
        self.number = 0
        self.pids: dict[str, int] = {}
        self._pidfds: dict[str, int] = {}

    def spawn(self, nursery: Nursery) -> None:
        """Start the next incarnation."""
        self.number += 1
        seed = f"{self._seed}/{self.name}/{self.number}"
        plan = EnginePlan(
            self.name, self.number, seed, str(self._run_dir), self._replica, 2, Random(seed).choice([0, 4, 8])
        )
        self.pids = nursery.spawn(Spawn(self.kind, plan))
        for what, pid in self.pids.items():
            with contextlib.suppress(ProcessLookupError):
                self._pidfds[what] = os.pidfd_open(pid)

    def living(self) -> list[str]:
        """What of it lives."""
        dead, _, _ = select.select(list(self._pidfds.values()), [], [], 0)
        for what, pidfd in list(self._pidfds.items()):
            if pidfd in dead:
                os.close(pidfd)
                del self._pidfds[what]
        return list(self._pidfds)

    def send(self, what: str, number: signal.Signals) -> bool:
        """Signal one of its processes; whether it lives."""
        if what not in self.living():
            return False
        signal.pidfd_send_signal(self._pidfds[what], number)
        return True

    def end(self) -> None:
        """Kill what is left of it, and wait for that."""
        for what in self.living():
            self.send(what, signal.SIGKILL)
        for pidfd in self._pidfds.values():
            select.select([pidfd], [], [], 10)
        self.living()


class Daemon:
    """The supervised daemon, and who belongs to it."""

    def __init__(self, running: Supervised) -> None:
        self.running = running
        self.run_dir = running.run_dir

    def is_ready(self) -> bool:
        """Whether engines can connect."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as trial:
            return trial.connect_ex(str(self.run_dir / "attach.sock")) == 0

    @property
    def pid(self) -> int | None:
        """Whoever the supervisor runs now; None between two daemons."""
        found = children(self.running.process.pid)  # workers of a dead daemon are among them
        return next((child for child in found if " kvcached serve " in command_of(child)), None)

    @property
    def storage_pid(self) -> int | None:
        """The storage process."""
        pid = self.pid
        for child in children(pid) if pid else []:
            if "kvcached.storage.main" in command_of(child):
                return child
        return None

    def workers(self) -> list[tuple[str, int]]:
        """Living workers: their replica, and their pid."""
        found = []
        for lock in self.run_dir.glob("worker-*.lock"):
            replica, pid = lock.stem.removeprefix("worker-").rpartition("-")[0], int(lock.read_text() or 0)
            if f"{replica}/".encode() in b" ".join(arguments_of(pid)):
                found.append((replica, pid))
        return found

    @contextlib.contextmanager
    def admin(self) -> Iterator[Admin]:
        """A connection for orders."""
        with Admin.connect(self.run_dir, deadline_ms=_ADMIN_DEADLINE_MS) as admin:
            yield admin


def children(pid: int) -> list[int]:
    """Its child processes."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def command_of(pid: int) -> str:
    """Its command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def description(pid: int) -> str:
    """What a process is, and what it waits for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return f"{pid} {state} {command_of(pid)} in {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return f"{pid} is gone"
