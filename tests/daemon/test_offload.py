"""Engines in offload mode with real processes: what deaths and silence leave behind, and that no byte is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from kvcached_client import Admin, DaemonUnreachable
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.errors import DeadlineExceeded, RequestError, TransportError
from kvcached_client.offload import new_instance
from kvcached_client.protocol.engine import HostStats
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import DEADLINE_MS, LAYERS, Order, Scheduler, ShardMemory, keys_of
from tests.daemon.test_host_tier import host_memory
from tests.line_process import LineProcess
from tests.project.source_tree import ROOT

SHARDS, PAGE_BYTES = 2, 4096
SLABS, SLAB_BYTES = 4, 2 * 9 * LAYERS * PAGE_BYTES  # eight blocks in a slab
SLOTS = 8 * SLABS
#: A copy of these takes a while.
LARGE_PAGE_BYTES = 1 << 20
#: Longer than a busy machine keeps a process waiting.
TTL_MS = 20_000
SHORT_TTL_MS = 600


def config(page_bytes: int = PAGE_BYTES, *, ttl_ms: int = TTL_MS) -> str:
    slab_bytes = SLAB_BYTES // PAGE_BYTES * page_bytes
    return (
        f"heartbeat_interval_ms = 100\nsession_ttl_ms = {ttl_ms}\n"
        f"[host]\nsize_bytes = {SLABS * slab_bytes}\nslab_bytes = {slab_bytes}\n"
        'verify = "always"\n[offload]\n'
    )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon without a replica."""
    with started(tmp_path, config()) as running:
        yield running


class Engine:
    """An engine in this process: its scheduler and its shards."""

    def __init__(
        self, run_dir: Path, parts: ExitStack, page_bytes: int = PAGE_BYTES, deadline_ms: int = DEADLINE_MS
    ) -> None:
        self.scheduler = Scheduler(run_dir, new_instance(), SHARDS, page_bytes, deadline_ms)
        parts.enter_context(self.scheduler.client)
        self.shards = [ShardMemory(shard, page_bytes) for shard in range(SHARDS)]
        for shard in self.shards:
            shard.join(self.scheduler.client.session)
            assert shard.link is not None
            parts.enter_context(shard.link)

    def store(self, name: str, blocks: int) -> Order:
        """Compute a prompt and copy it to the host pool, as far as there is room."""
        plan, order = self.scheduler.prepare_store(name, blocks)
        for shard in self.shards if plan.transfer else ():
            shard.store(order)
        return order

    def load(self, name: str, blocks: int) -> int:
        """Copy a prompt back on every shard; how many blocks are good, which are what they must be."""
        if not self.scheduler.hit(name, blocks):
            return 0
        order = self.scheduler.prepare_load(name, blocks)
        found = [shard.load(order) for shard in self.shards]
        assert all(right for _, right in found)
        return min((bad[0] for bad, _ in found if bad), default=len(order.slots))


@contextmanager
def engine_on(
    daemon: RunningDaemon, page_bytes: int = PAGE_BYTES, *, deadline_ms: int = DEADLINE_MS
) -> Iterator[Engine]:
    with ExitStack() as parts:
        yield Engine(daemon.run_dir, parts, page_bytes, deadline_ms)


class Processes:
    """An engine's processes as children, which end with the test."""

    def __init__(self, run_dir: Path, page_bytes: int = PAGE_BYTES) -> None:
        self._run_dir = str(run_dir)
        self._page_bytes = str(page_bytes)
        self._all: list[LineProcess] = []

    def scheduler(self, *own: int) -> tuple[LineProcess, str]:
        """A scheduler with its own shards, and its session."""
        process = self._start(
            "scheduler", self._run_dir, os.urandom(16).hex(), str(SHARDS), self._page_bytes, *map(str, own)
        )
        return process, process.hear()

    def shard(self, shard: int, grant: str) -> LineProcess:
        """A shard process that has joined."""
        process = self._start("shard", self._run_dir, str(SHARDS), self._page_bytes, str(shard))
        assert process.ask(f"join {grant}") == "done"
        return process

    def _start(self, *arguments: str) -> LineProcess:
        self._all.append(LineProcess("tests.daemon.offload_process", *arguments))
        return self._all[-1]

    def end(self) -> None:
        for process in self._all:
            process.end()


@contextmanager
def children_of(daemon: RunningDaemon, page_bytes: int = PAGE_BYTES) -> Iterator[Processes]:
    made = Processes(daemon.run_dir, page_bytes)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def processes(daemon: RunningDaemon) -> Iterator[Processes]:
    with children_of(daemon) as made:
        yield made


def kill(process: LineProcess) -> None:
    process.process.kill()
    process.process.wait()


def host(run_dir: Path) -> HostStats:
    """Where the slots of the one namespace are."""
    with Admin.connect(run_dir, deadline_ms=10_000) as admin:
        (named,) = (each for each in admin.stats().hosts if each.label)
        return named


def seconds_until(run_dir: Path, reached: Callable[[HostStats], bool], limit_s: float = 10) -> float:
    """How long until the host pool is as wanted; fails where it never is."""
    start = time.monotonic()
    while not reached(stats := host(run_dir)):
        assert time.monotonic() - start < limit_s, stats
    return time.monotonic() - start


def nothing_held(stats: HostStats) -> bool:
    return (stats.states["filling"], stats.states["quarantined"], stats.leases) == (0, 0, 0)


def is_sound(daemon: RunningDaemon) -> bool:
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        return admin.check().violations == () and admin.health().ok


def on_command_line(daemon: RunningDaemon, *arguments: str) -> str:
    """What a command prints that does what it is asked for."""
    command = [sys.executable, "-m", "kvcached", *arguments, "--run-dir", str(daemon.run_dir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def crowd_out(daemon: RunningDaemon, count: int) -> set[int]:
    """Fill the pool from another engine; the slots that it got."""
    with engine_on(daemon) as engine:
        return set(engine.store("crowd", count).slots)


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.end_to_end
def test_blocks_come_back_byte_for_byte_in_another_engine(daemon: RunningDaemon) -> None:
    """What one engine stored another one loads, on each shard its own part, as much of it as others left room for."""
    with engine_on(daemon) as first, engine_on(daemon) as second:
        first.store("a", 12)

        assert second.load("a", 12) == 12
        first.store("b", SLOTS - 4)
        assert second.load("b", SLOTS - 4) == first.scheduler.hit("b", SLOTS) > 0
        assert second.load("a", 12) == first.scheduler.hit("a", 12)
    assert is_sound(daemon)


def test_changed_byte_is_a_miss_for_everybody(daemon: RunningDaemon) -> None:
    """A block whose bytes changed in host memory is found out by the shard that has it, and never hit again."""
    with engine_on(daemon) as engine:
        order = engine.store("a", 6)
        geometry = HostGeometry(
            slabs=SLABS, slab_bytes=SLAB_BYTES, shards=SHARDS, block_bytes=engine.shards[0].pages.block_bytes
        )
        memory = host_memory(daemon.process.pid, geometry.size_bytes)
        memory[geometry.block_offset(order.slots[3], 1)] ^= 1

        assert engine.load("a", 6) == 3
        seconds_until(daemon.run_dir, lambda host: host.states["cached"] == 3)  # nobody waits for a load's report
        assert engine.scheduler.hit("a", 6) == 3
        engine.store("a", 6)
        assert engine.load("a", 6) == 6
    with Admin.connect(daemon.run_dir) as admin:
        assert admin.stats().counters["corrupt_blocks"] == 1


def test_clear_is_heard_by_engines_at_once(daemon: RunningDaemon) -> None:
    """After a clear nobody hits what was stored, and what is stored then is found under the new generation."""
    with engine_on(daemon) as first, engine_on(daemon) as second:
        first.store("a", 4)
        stale = second.scheduler.acquire("a", 4)
        generation = first.scheduler.client.clear()

        assert (second.scheduler.hit("a", 4), host(daemon.run_dir).generation) == (0, generation)
        with pytest.raises(RequestError, match="hit_gone"):
            second.scheduler.client.prepare_load(stale[0], 0, stale[1])
        second.store("a", 4)
        assert first.load("a", 4) == 4


def test_people_clear_the_namespace_of_an_engine_by_its_label(daemon: RunningDaemon) -> None:
    """`kvcached clear LABEL` ends the hits of engines in it: their loads are refused, and stores work again."""
    with engine_on(daemon) as first, engine_on(daemon) as second:
        first.store("a", 4)
        stale = second.scheduler.acquire("a", 4)
        told = on_command_line(daemon, "clear", "tiny")
        now = host(daemon.run_dir)

        assert told == f"4 blocks of tiny ({now.namespace}); generation {now.generation}\n"
        with pytest.raises(RequestError, match="hit_gone"):
            second.scheduler.client.prepare_load(stale[0], 0, stale[1])
        assert (first.scheduler.hit("a", 4), second.scheduler.hit("a", 4)) == (0, 0)
        second.store("a", 4)
        assert first.load("a", 4) == 4
    assert is_sound(daemon)


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_killed_engine_leaves_its_blocks_and_nothing_else(daemon: RunningDaemon, processes: Processes) -> None:
    """SIGKILL between prepare and copy: the store's slots are free within a second, earlier blocks are warm."""
    process, _ = processes.scheduler(0, 1)
    process.ask("prepare a 4")
    assert [process.ask("copy"), process.hear()] == ["begins", "done"]
    process.ask("prepare a 12")
    assert host(daemon.run_dir).states["filling"] == 8
    kill(process)

    assert seconds_until(daemon.run_dir, nothing_held) <= 1
    assert host(daemon.run_dir).states["cached"] == 4
    with engine_on(daemon) as engine:
        assert engine.load("a", 12) == 4
        assert len(engine.store("b", SLOTS).slots) == SLOTS
    assert is_sound(daemon)


@pytest.mark.parametrize("delay_ms", [5, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0, 20))])
def test_engine_killed_while_it_copies_leaves_no_wrong_byte(tmp_path: Path, delay_ms: int) -> None:
    """SIGKILL in the middle of a copy: its slots are free within a second, and whatever is found later is right."""
    with started(tmp_path, config(LARGE_PAGE_BYTES)) as daemon, children_of(daemon, LARGE_PAGE_BYTES) as processes:
        process, grant = processes.scheduler(0)
        other = processes.shard(1, grant)
        order = process.ask("prepare a 8")
        assert other.ask(f"copy {order}") == "begins"
        assert process.ask("copy") == "begins"
        deadline = time.monotonic() + delay_ms / 1000
        while time.monotonic() < deadline:
            host(daemon.run_dir)
        kill(process)
        kill(other)

        assert seconds_until(daemon.run_dir, nothing_held) <= 1
        with engine_on(daemon, LARGE_PAGE_BYTES) as engine:
            assert engine.load("a", 8) in {0, 8}
            engine.store("a", 8)
            assert engine.load("a", 8) == 8
        assert is_sound(daemon)


def test_killed_shard_ends_the_session_but_its_slots_wait_for_the_others(
    daemon: RunningDaemon, processes: Processes
) -> None:
    """Where one process of an engine is dead and others may still copy, nobody gets the slots before all are dead."""
    scheduler, grant = processes.scheduler()
    shards = [processes.shard(index, grant) for index in range(SHARDS)]
    order = msgspec.json.decode(scheduler.ask("prepare a 8"), type=Order)
    kill(shards[1])
    seconds_until(daemon.run_dir, lambda stats: stats.states["quarantined"] == 8)

    assert scheduler.ask("hit a 8").startswith("Stale")
    assert crowd_out(daemon, SLOTS).isdisjoint(order.slots)
    kill(scheduler)
    assert host(daemon.run_dir).states["quarantined"] == 8
    kill(shards[0])
    assert seconds_until(daemon.run_dir, nothing_held) <= 1
    assert is_sound(daemon)


def test_shard_that_closes_and_ends_takes_nothing_along(daemon: RunningDaemon, processes: Processes) -> None:
    """The session goes on, and what other shards are still storing is found."""
    scheduler, grant = processes.scheduler()
    shards = [processes.shard(number, grant) for number in range(SHARDS)]
    order = scheduler.ask("prepare a 4")
    assert [shards[0].ask(f"copy {order}"), shards[0].hear()] == ["begins", "done"]
    assert shards[0].ask("close") == "done"
    shards[0].finish()
    assert shards[0].process.wait(10) == 0
    host(daemon.run_dir)  # when it has answered, the daemon has seen that end

    assert [shards[1].ask(f"copy {order}"), shards[1].hear()] == ["begins", "done"]
    assert scheduler.ask("hit a 4") == "4"
    shards[1].ask("close")
    assert scheduler.ask("bye") == "bye"
    seconds_until(daemon.run_dir, nothing_held)
    with engine_on(daemon) as other:
        assert other.load("a", 4) == 4


def test_dead_scheduler_is_survived_by_its_shards_slots(daemon: RunningDaemon, processes: Processes) -> None:
    """When the scheduler dies, a living shard's words are refused and its slots set aside until it is dead, too."""
    scheduler, grant = processes.scheduler()
    shard = processes.shard(0, grant)
    order = scheduler.ask("prepare a 8")
    kill(scheduler)
    seconds_until(daemon.run_dir, lambda stats: stats.states["quarantined"] == 8)

    assert shard.ask(f"copy {order}") == "begins"
    assert shard.hear().startswith("Stale")
    assert host(daemon.run_dir).states["quarantined"] == 8
    kill(shard)
    assert seconds_until(daemon.run_dir, nothing_held) <= 1
    with engine_on(daemon) as engine:
        assert engine.scheduler.hit("a", 8) == 0


def test_stopped_engine_disturbs_nobody_when_it_goes_on(tmp_path: Path) -> None:
    """A stopped engine's slots are set aside after its TTL; going on it may write them, and is told that it is late."""
    with started(tmp_path, config(ttl_ms=SHORT_TTL_MS)) as daemon, children_of(daemon) as processes:
        process, _ = processes.scheduler(0, 1)
        order = msgspec.json.decode(process.ask("prepare a 8"), type=Order)
        process.process.send_signal(signal.SIGSTOP)
        took_s = seconds_until(daemon.run_dir, lambda stats: stats.states["quarantined"] == 8)
        crowd = crowd_out(daemon, SLOTS)
        process.process.send_signal(signal.SIGCONT)
        assert process.ask("copy") == "begins"
        assert process.hear().startswith("Stale")

        assert took_s >= SHORT_TTL_MS / 2000
        assert (len(crowd), crowd & set(order.slots)) == (SLOTS - 8, set())
        with engine_on(daemon) as engine:
            assert (engine.load("crowd", SLOTS), engine.scheduler.hit("a", 8)) == (SLOTS - 8, 0)
        assert host(daemon.run_dir).states["quarantined"] == 8
        kill(process)
        assert seconds_until(daemon.run_dir, nothing_held) <= 1


def test_engine_settles_what_a_daemon_granted_too_late(daemon: RunningDaemon) -> None:
    """What a daemon that was stopped grants when it goes on, to calls that have failed, is given back by settling."""
    with engine_on(daemon, deadline_ms=500) as engine:
        client = engine.scheduler.client
        lease, *_ = engine.scheduler.acquire("a", 4)
        daemon.process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            client.prepare_store(lease, 0, keys_of("a", 4))
        with pytest.raises(DeadlineExceeded):
            engine.scheduler.acquire("b", 4)
        daemon.process.send_signal(signal.SIGCONT)
        seconds_until(daemon.run_dir, lambda stats: (stats.leases, stats.states["filling"]) == (2, 4))

        client.settle()
        client.release(lease)
        seconds_until(daemon.run_dir, nothing_held)
        assert is_sound(daemon)


def test_engine_that_connects_anew_has_its_slots_back_when_its_shards_have(
    daemon: RunningDaemon, processes: Processes
) -> None:
    """A session of the same engine ends the one before; what that was copying is free once each shard has joined."""
    scheduler, grant = processes.scheduler()
    shards = [processes.shard(index, grant) for index in range(SHARDS)]
    order = scheduler.ask("prepare a 8")
    anew = scheduler.ask("reconnect")

    assert host(daemon.run_dir).states["quarantined"] == 8
    assert shards[0].ask(f"copy {order}") == "begins"
    assert shards[0].hear().startswith("Stale")
    for shard, quarantined in zip(shards, (8, 0), strict=True):
        assert shard.ask(f"join {anew}") == "done"
        assert host(daemon.run_dir).states["quarantined"] == quarantined
    with Admin.connect(daemon.run_dir) as admin:
        assert admin.stats().sessions == 1
    again = scheduler.ask("prepare a 8")
    for shard in shards:
        assert [shard.ask(f"copy {again}"), shard.hear()] == ["begins", "done"]
    assert scheduler.ask("hit a 8") == "8"
    assert is_sound(daemon)


def test_goodbye_leaves_the_slots_of_living_shards_alone(daemon: RunningDaemon, processes: Processes) -> None:
    """A scheduler that says goodbye, and lives on, does not speak for its shards' copies; their deaths do."""
    scheduler, grant = processes.scheduler()
    shard = processes.shard(0, grant)
    scheduler.ask("prepare a 8")

    assert scheduler.ask("bye") == "bye"
    assert host(daemon.run_dir).states["quarantined"] == 8
    kill(shard)
    assert seconds_until(daemon.run_dir, nothing_held) <= 1
    assert scheduler.process.poll() is None


def test_killed_daemon_unblocks_its_engines(tmp_path: Path) -> None:
    """After SIGKILL of the daemon every call of scheduler and shards fails within a second, and says why."""
    with started(tmp_path, config()) as daemon, ExitStack() as parts:
        engine = Engine(daemon.run_dir, parts)
        engine.store("a", 4)
        _, store = engine.scheduler.prepare_store("b", 4)
        load = engine.scheduler.prepare_load("a", 4)
        daemon.process.kill()
        daemon.process.wait()
        start = time.monotonic()
        with pytest.raises(DaemonUnreachable):
            engine.scheduler.hit("a", 4)
        with pytest.raises(TransportError):
            engine.shards[0].store(store)
        with pytest.raises(TransportError):
            engine.shards[1].load(load)
        with pytest.raises(DaemonUnreachable):
            Scheduler(daemon.run_dir, new_instance(), SHARDS, PAGE_BYTES)

        assert time.monotonic() - start <= 1
        assert not engine.scheduler.client.is_alive


def test_engines_find_a_restarted_daemon_cold(tmp_path: Path) -> None:
    """A new daemon in the same place knows no session and no block; an engine that connects anew goes on."""
    with started(tmp_path, config()) as daemon, ExitStack() as parts:
        engine = Engine(daemon.run_dir, parts)
        engine.store("a", 4)
        daemon.process.kill()
        daemon.process.wait()
    (tmp_path / "run.notify").unlink()
    with started(tmp_path, config()) as daemon, engine_on(daemon) as engine:
        assert engine.scheduler.hit("a", 4) == 0
        engine.store("a", 4)
        assert engine.load("a", 4) == 4
