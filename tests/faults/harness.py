"""The crash harness: daemons and engines with armed failpoints, and what must be true after each fault."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvcached_client import Admin
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.failpoints import FAILPOINTS, LOG_VARIABLE, VARIABLE
from kvcached_client.protocol.engine import HostStats, PoolStats, Slept, StatsReport
from tests.daemon.conftest import CONFIG, RunningDaemon
from tests.daemon.test_deaths import children
from tests.faults.engine import ENGINES, OffloadEngine
from tests.line_process import LineProcess
from tests.project.daemon_process import clean_environment, running_daemon

PATIENCE_S = 40
#: As soon as a dead engine's slots have to be free.
PROMISE_S = 1
TTL_MS = 1000
ACTIONS = ("kill", "stop", "raise")
#: A device pool and offload mode above one host pool.
BOTH_MODES = (
    CONFIG.replace("session_ttl_ms = 600", f"session_ttl_ms = {TTL_MS}")
    + "\n[host]\nsize_bytes = 1048576\nslab_bytes = 65536\n[offload]\n"
)
#: States of slots in which nobody may hold one when no engine is there.
HELD = ("leased", "filling", "fenced", "quarantined")


class Armed(NamedTuple):
    """Failpoints that are armed in some process, and the file that says which were reached."""

    text: str
    log: Path

    @property
    def variables(self) -> dict[str, str]:
        """For the process's environment."""
        return {VARIABLE: self.text, LOG_VARIABLE: str(self.log)}

    def reached(self) -> list[str]:
        """The names that were reached, in their order."""
        return self.log.read_text().split() if self.log.exists() else []

    def wait(self) -> None:
        """Until something was reached; fails where nothing ever is."""
        until(lambda: bool(self.reached()), f"{self.text} was never reached")


def armed(directory: Path, failpoint: str, action: str, at: int = 1) -> Armed:
    """One failpoint."""
    return Armed(f"{failpoint}={action}@{at}", directory / "reached")


def all_noted(directory: Path) -> Armed:
    """Every failpoint, each to be noted only."""
    return Armed(",".join(f"{name}=pass" for name in FAILPOINTS), directory / "reached")


class Engine(LineProcess):
    """`engine.py` as a child. Its record of what was stored is `record`."""

    def __init__(self, kind: str, run_dir: Path, record: Path, faults: Armed | None = None) -> None:
        self.kind = kind
        self.run_dir = run_dir
        self.record = record
        environment = {**clean_environment(), **(faults.variables if faults else {})}
        super().__init__("tests.faults.engine", kind, str(run_dir), str(record), environment=environment)
        assert self.hear() == "ready"

    def stored(self) -> list[str]:
        """Prompts whose commit was answered."""
        return self.record.read_text().split() if self.record.exists() else []

    def wait_killed(self) -> None:
        assert self.process.wait(PATIENCE_S) == -signal.SIGKILL


@contextmanager
def engine_process(kind: str, run_dir: Path, record: Path, faults: Armed | None = None) -> Iterator[Engine]:
    """An engine as a child, killed at the end of the block if it still lives."""
    engine = Engine(kind, run_dir, record, faults)
    try:
        yield engine
    finally:
        engine.end()


@contextmanager
def daemon_with(
    directory: Path, faults: Armed | None = None, *, supervised: bool = False, config: str = BOTH_MODES
) -> Iterator[RunningDaemon]:
    """A daemon of both modes from ready to stopped; one after another may use the same directory.

    One that is supervised is started again when it dies; the process is its supervisor's then.
    """
    path, run_dir = directory / "kvcached.toml", directory / "run"
    path.write_text(config)
    run_dir.with_suffix(".notify").unlink(missing_ok=True)
    command = "supervise" if supervised else "serve"
    variables = faults.variables if faults else None
    with running_daemon(path, run_dir, command=command, variables=variables) as process:
        yield RunningDaemon(process, run_dir)


def until(reached: Callable[[], bool], failure: str, limit_s: float = PATIENCE_S) -> float:
    """How long until something is so; fails where it never is."""
    start = time.monotonic()
    while not reached():
        assert time.monotonic() - start < limit_s, failure
    return time.monotonic() - start


def put_to_sleep(run_dir: Path) -> Slept:
    """Give the memory of the device pool back, as soon as the daemon has seen that its last engine is gone."""
    with Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        while True:
            try:
                return admin.sleep("default")
            except RequestError as error:
                assert error.code == ErrorCode.POOL_BUSY, error


def stats_of(run_dir: Path) -> StatsReport:
    with Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        return admin.stats()


def held(stats: StatsReport) -> dict[str, int]:
    """What somebody holds: sessions, leases, copies, and slots that are not to be given away."""
    parts: list[PoolStats | HostStats] = [*stats.pools, *stats.hosts]
    counts = {name: sum(part.states.get(name, 0) for part in parts) for name in HELD}
    counts |= {"leases": sum(part.leases for part in parts), "transfers": sum(stats.transfers.values())}
    return {name: count for name, count in counts.items() if count} | (
        {"sessions": stats.sessions} if stats.sessions else {}
    )


def wait_nothing_held(run_dir: Path, limit_s: float = PATIENCE_S) -> float:
    """How long until nobody holds anything; fails where that never is."""
    start = time.monotonic()
    with Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        while left := held(admin.stats()):
            assert time.monotonic() - start < limit_s, left
    return time.monotonic() - start


def assert_sound(run_dir: Path) -> None:
    """No invariant is broken, and a real request goes through every worker."""
    with Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        assert admin.check().violations == ()
        health = admin.health()
        assert health.ok, health


def wait_stopped(pid: int) -> None:
    """Until a process is stopped; fails where it never is."""
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: stat.read_text().rpartition(") ")[2][0] == "T", f"{pid} was never stopped")


@contextmanager
def going_on(pid: int) -> Iterator[None]:
    """A process that has stopped itself, which goes on after the block."""
    wait_stopped(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --- what is read back ----------------------------------------------------------------------------------------------


def expired(run_dir: Path) -> int:
    """How many sessions have expired."""
    return stats_of(run_dir).counters.get("sessions_expired", 0)


def read_back(kind: str, run_dir: Path, names: list[str]) -> list[int]:
    """Read prompts under a new session: the hits of each. Other bytes than were stored raise WrongBytes."""
    with closing(ENGINES[kind](run_dir)) as engine:
        return [engine.read(name) for name in names]


def assert_others_go_on(run_dir: Path, names: list[str]) -> None:
    """Another engine stores and reads back as if nothing had happened; requests that need no session are answered."""
    with closing(OffloadEngine(run_dir)) as engine:
        for name in names:
            engine.store(name)
            engine.forget()
            assert engine.read(name) > 0
    stats_of(run_dir)


# --- leaks ----------------------------------------------------------------------------------------------------------


def footprint(pid: int) -> Counter[str]:
    """What a process holds of the system, by kind: descriptors, threads, children, mappings of shared memory."""
    found: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found[re.sub(r":\[\d+\]", "", str(path.readlink()))] += 1
    found["threads"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
    found["children"] = len(children(pid))
    found["mappings"] = Path(f"/proc/{pid}/maps").read_text().count("memfd:")
    return found


def wait_footprint(pid: int, before: Counter[str]) -> None:
    """Until a process holds no more than before; fails where it never does."""
    start = time.monotonic()
    while more := footprint(pid) - before:
        assert time.monotonic() - start < PATIENCE_S, more


@contextmanager
def no_leaks(daemon: RunningDaemon) -> Iterator[None]:
    """A block after which no engine is there, and the daemon holds what it held before it."""
    before = footprint(daemon.process.pid)
    yield
    wait_nothing_held(daemon.run_dir)
    wait_footprint(daemon.process.pid, before)


def warm_up(daemon: RunningDaemon, directory: Path) -> None:
    """Let one engine of each kind come and go: what the daemon makes at the first use is there afterwards."""
    with ExitStack() as parts:
        for kind in ENGINES:
            engine = parts.enter_context(engine_process(kind, daemon.run_dir, directory / f"warm {kind}"))
            assert engine.ask(f"work warm-{kind}").startswith("done")
            assert engine.ask("end") == "ended"
    wait_nothing_held(daemon.run_dir)
