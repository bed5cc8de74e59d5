"""Processes of engines, forked from one that has everything imported: a new engine takes milliseconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.chaos.managed import EnginePlan, ManagedEngine, SessionOver
from tests.chaos.offload import OffloadEngine
from tests.chaos.reporting import Report
from tests.chaos.shard import Shard
from tests.chaos.shards import ShardDied, Shards

_MESSAGE_BYTES_MAX = 1 << 16


class Spawn(msgspec.Struct, frozen=True):
    """An engine that is wanted. `kind`: "processes", "threads" or "offload"."""

    kind: str
    plan: EnginePlan


class Nursery:
    """The process that forks. Make it while this one has one thread and no connections.

    Args:
        reports: where engines write what they tell.
        stories: folder of their stories.
    """

    def __init__(self, reports: int, stories: Path) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._link.close()
            _end_with(lambda: _fork_on_demand(theirs, reports, stories))
        theirs.close()

    def spawn(self, wanted: Spawn) -> dict[str, int]:
        """Fork an engine: its process ids by what they are, "scheduler" and "shard 0" and so on."""
        self._link.send(msgspec.msgpack.encode(wanted))
        return msgspec.msgpack.decode(self._link.recv(_MESSAGE_BYTES_MAX), type=dict[str, int])

    def close(self) -> None:
        """End the process. Engines go on."""
        self._link.close()
        os.waitpid(self.pid, 0)


def _fork_on_demand(link: socket.socket, reports: int, stories: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for engines: they vanish when they die
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while data := link.recv(_MESSAGE_BYTES_MAX):
        wanted = msgspec.msgpack.decode(data, type=Spawn)
        link.send(msgspec.msgpack.encode(_fork_engine(wanted, link, reports, stories)))


def _fork_engine(wanted: Spawn, link: socket.socket, reports: int, stories: Path) -> dict[str, int]:
    plan = wanted.plan
    count = plan.shards if wanted.kind == "processes" else 0
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    report = (reports, stories / f"{plan.name}.story", f"{plan.name}#{plan.number}")
    pids: dict[str, int] = {}
    for shard, (_, theirs) in enumerate(pairs):
        pids[f"shard {shard}"] = _fork(
            lambda shard=shard, theirs=theirs: Shard(shard, theirs).work(),  # type: ignore[misc]
            report,
            [link, *(each for pair in pairs for each in pair if each is not theirs)],
        )
    pids["scheduler"] = _fork(
        lambda: _run_scheduler(wanted, [ours for ours, _ in pairs], Report(*report)),
        report,
        [link, *(theirs for _, theirs in pairs)],
    )
    for pair in pairs:
        for each in pair:
            each.close()
    return pids


def _fork(work: Callable[[], None], report: tuple[int, Path, str], foreign: list[socket.socket]) -> int:
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in foreign:
            each.close()
        _end_with(work, report)
    return pid


def _end_with(work: Callable[[], None], report: tuple[int, Path, str] | None = None) -> None:
    """Do it, and end the process, with a word about an error that nobody expected."""
    status = 0
    try:
        work()
    except BaseException:  # noqa: BLE001  whatever it is, the process ends here
        status = 1
        text = traceback.format_exc()
        if report is not None:
            Report(*report).tell("crash", error=text[-3000:])
        sys.stderr.write(text)
    finally:
        os._exit(status)


def _run_scheduler(wanted: Spawn, links: list[socket.socket], report: Report) -> None:
    plan = wanted.plan
    if wanted.kind == "offload":
        OffloadEngine(plan, report).serve()
        return
    if wanted.kind == "threads":
        links = _shard_threads(plan.shards)
    engine = None
    try:
        engine = ManagedEngine(plan, Shards(links), report)
        engine.serve()
    except ShardDied:
        report.note("a shard is gone")
    except SessionOver:
        if engine is not None and plan.number % 2:
            engine.client.close()
            report.note("said goodbye")
    report.tell_counts(now=True)


def _shard_threads(count: int) -> list[socket.socket]:
    """Shards in this process: it is the only one of its session."""
    ours = []
    for shard in range(count):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=Shard(shard, theirs).work, daemon=True).start()
        ours.append(mine)
    return ours
