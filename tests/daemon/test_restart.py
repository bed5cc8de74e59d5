"""A daemon that is SIGKILLed comes back with the host pool as it was, and knows who may still write into it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvcached.recovery.state_file import LEDGER_NAME, read_ledger
from kvcached_client import Admin
from kvcached_client.blocks.header import pack_claim
from kvcached_client.offload import new_instance
from kvcached_client.protocol.engine import HostStats
from tests.daemon.offload_process import Scheduler, ShardMemory
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_deaths import children
from tests.daemon.test_host_tier import HOST_CONFIG, PATIENT_CONFIG, engine_on, host_memory, wait_stored
from tests.daemon.test_offload import (
    PAGE_BYTES,
    SHARDS,
    SLAB_BYTES,
    SLABS,
    Processes,
    config,
    kill,
    nothing_held,
    seconds_until,
)
from tests.host_pool_file import host_pool_file, mapped_bytes
from tests.project.source_tree import ROOT


class Engine:
    """An engine in this process that connects anew, under the same name, as often as it is told to."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._instance = new_instance()
        self._client = ExitStack()
        self.shards = [ShardMemory(shard, PAGE_BYTES) for shard in range(SHARDS)]
        self.connect()
        self.join()

    def connect(self) -> None:
        """Say hello."""
        self._client.close()
        self.scheduler = Scheduler(self._run_dir, self._instance, SHARDS, PAGE_BYTES)
        self._client.callback(self.scheduler.client.close)

    def join(self) -> None:
        """Have the shards enter the session."""
        for shard in self.shards:
            shard.join(self.scheduler.client.session)

    def close(self) -> None:
        self._client.close()
        for shard in self.shards:
            if shard.link is not None:
                shard.link.close()

    def store(self, name: str, blocks: int) -> set[int]:
        """Compute a prompt and copy it to the host pool; the slots that it got."""
        plan, order = self.scheduler.prepare_store(name, blocks)
        for shard in self.shards if plan.transfer else ():
            shard.store(order)
        return set(order.slots)

    def load(self, name: str, blocks: int) -> int:
        """Copy a prompt back; how many blocks were hit, all of which are what they must be."""
        if not self.scheduler.hit(name, blocks):
            return 0
        order = self.scheduler.prepare_load(name, blocks)
        assert [shard.load(order) for shard in self.shards] == [([], True)] * SHARDS
        return len(order.slots)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Supervised]:
    """A daemon without a replica, whose memory is kept."""
    with supervised(tmp_path, config()) as running:
        yield running


@pytest.fixture
def engine(daemon: Supervised) -> Iterator[Engine]:
    made = Engine(daemon.run_dir)
    yield made
    made.close()


@pytest.fixture
def processes(daemon: Supervised) -> Iterator[Processes]:
    made = Processes(daemon.run_dir)
    yield made
    made.end()


def host_of(daemon: Supervised) -> HostStats:
    """Where the only namespace's slots are; nothing is wrong with it."""
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        assert admin.check().violations == ()
        (host,) = admin.stats().hosts
    return host


def test_host_pool_outlives_the_daemon(daemon: Supervised, engine: Engine) -> None:
    """What was stored before a SIGKILL is hit after it, byte for byte, by the same engine and by another one."""
    engine.store("a", 5)
    engine.store("b", 3)
    daemon.kill_and_wait()

    engine.connect()
    engine.join()
    other = Engine(daemon.run_dir)
    assert [each.load(name, 5) for each in (engine, other) for name in "ab"] == [5, 3, 5, 3]
    other.close()
    engine.store("a-longer", 4)
    assert engine.load("a-longer", 4) == 4
    assert nothing_held(host_of(daemon))


def test_host_pool_outlives_daemon_after_daemon(daemon: Supervised, engine: Engine) -> None:
    """What one daemon took over the next one takes over, too, with what was stored in between."""
    for number in range(3):
        engine.store(f"prompt {number}", 2)
        daemon.kill_and_wait()
        engine.connect()
        engine.join()

    assert [engine.load(f"prompt {number}", 2) for number in range(3)] == [2, 2, 2]


def test_cleared_blocks_stay_cleared(daemon: Supervised, engine: Engine) -> None:
    """A clear that was answered holds after a SIGKILL: nothing of before is hit, what came after it is."""
    engine.store("a", 5)
    generation = engine.scheduler.client.clear()
    engine.store("b", 2)
    daemon.kill_and_wait()
    engine.connect()
    engine.join()

    assert (engine.load("a", 5), engine.load("b", 2)) == (0, 2)
    assert host_of(daemon).generation == generation


def test_slots_of_a_living_engine_are_set_aside(daemon: Supervised, processes: Processes) -> None:
    """Slots that an engine was given before the SIGKILL, and may be writing, are nobody's until it is dead."""
    scheduler, _ = processes.scheduler(0, 1)
    given = set(json.loads(scheduler.ask("prepare mine 4"))["slots"])
    daemon.kill_and_wait()

    assert host_of(daemon).states["quarantined"] == 4
    crowd = Engine(daemon.run_dir)
    got = crowd.store("crowd", 30)
    assert not got & given
    kill(scheduler)
    assert seconds_until(daemon.run_dir, nothing_held) <= 1
    assert host_of(daemon).states["quarantined"] == 0
    crowd.close()


def claim_as_a_takeover_that_died(daemon: Supervised, slots: set[int]) -> None:
    """Rename the claims to the only session's slots, as a next daemon does before it writes its ledger."""
    ledger = read_ledger(daemon.run_dir / LEDGER_NAME)
    assert ledger is not None
    with host_memory(daemon.daemon_pid, SLABS * SLAB_BYTES) as memory:
        (record,) = ledger.sessions
        claim, renamed = pack_claim(record.epoch, record.id), pack_claim(ledger.epoch + 1, 1)
        places = [match.start() for match in re.finditer(re.escape(claim), memory)]
        assert len(places) == SHARDS * len(slots)
        for place in places:
            memory[place : place + len(claim)] = renamed


def test_slots_stay_aside_where_a_takeover_died(daemon: Supervised, processes: Processes) -> None:
    """A daemon that took over wrote its claims and died before its ledger: the slots are set aside all the same."""
    scheduler, _ = processes.scheduler(0, 1)
    given = set(json.loads(scheduler.ask("prepare mine 4"))["slots"])
    claim_as_a_takeover_that_died(daemon, given)
    daemon.kill_and_wait()

    assert host_of(daemon).states["quarantined"] == len(given)
    crowd = Engine(daemon.run_dir)
    assert not crowd.store("crowd", 30) & given
    kill(scheduler)
    assert seconds_until(daemon.run_dir, nothing_held) <= 1
    crowd.close()


def test_slots_of_a_takeover_that_died_are_free_when_the_engine_has_reconnected(
    daemon: Supervised, processes: Processes
) -> None:
    """They wait for each of the shards to join a later session, also over a further restart; the engine lives on."""
    scheduler, grant = processes.scheduler()
    shards = [processes.shard(shard, grant) for shard in range(SHARDS)]
    claim_as_a_takeover_that_died(daemon, set(json.loads(scheduler.ask("prepare mine 4"))["slots"]))
    daemon.kill_and_wait()
    grant, left = scheduler.ask("reconnect"), []
    assert shards[0].ask(f"join {grant}") == "done"
    left.append(host_of(daemon).states["quarantined"])
    daemon.kill_and_wait()

    grant = scheduler.ask("reconnect")
    for shard in shards:
        left.append(host_of(daemon).states["quarantined"])
        assert shard.ask(f"join {grant}") == "done"
    assert left == [4, 4, 4]
    assert nothing_held(host_of(daemon))
    assert b"instance" not in members_in(daemon)  # which earlier versions refuse to read


def members_in(daemon: Supervised) -> bytes:
    """The members of all sessions in the ledger."""
    ledger = json.loads((daemon.run_dir / LEDGER_NAME).read_bytes())
    return json.dumps([session["members"] for session in ledger["sessions"]]).encode()


def test_engine_that_connects_anew_has_its_slots_back(daemon: Supervised, processes: Processes) -> None:
    """An engine that lives on gets back what it had claimed once its shards have joined its next session."""
    scheduler, grant = processes.scheduler()
    shards = [processes.shard(shard, grant) for shard in range(SHARDS)]
    scheduler.ask("prepare mine 4")
    daemon.kill_and_wait()
    grant = scheduler.ask("reconnect")

    left = []
    for shard in shards:
        left.append(host_of(daemon).states["quarantined"])
        assert shard.ask(f"join {grant}") == "done"
    assert left == [4, 4]
    assert nothing_held(host_of(daemon))


def test_stopped_engine_writes_into_nobodys_blocks(daemon: Supervised, processes: Processes) -> None:
    """An engine that is stopped in a copy, while its daemon is killed and others fill the pool, harms nobody after."""
    scheduler, _ = processes.scheduler(0, 1)
    scheduler.ask("prepare mine 4")
    os.kill(scheduler.process.pid, signal.SIGSTOP)
    daemon.kill_and_wait()
    crowd = Engine(daemon.run_dir)
    crowd.store("crowd", 30)
    os.kill(scheduler.process.pid, signal.SIGCONT)
    scheduler.say("copy")
    assert scheduler.hear() == "begins"
    scheduler.hear()  # the daemon that it asks is another one: it fails, or its word is not taken

    hit = crowd.scheduler.hit("crowd", 30)
    assert hit
    assert crowd.load("crowd", hit) == hit
    crowd.close()


def test_stopped_engine_writes_into_nobodys_blocks_without_offload_mode(tmp_path: Path) -> None:
    """Where the next configuration serves no such engine, the pool that it may write is dropped for a new one."""
    with supervised(tmp_path, HOST_CONFIG + "[offload]\n") as daemon:
        processes = Processes(daemon.run_dir)
        scheduler, _ = processes.scheduler(0, 1)
        scheduler.ask("prepare mine 4")
        before = read_ledger(daemon.run_dir / LEDGER_NAME)
        os.kill(scheduler.process.pid, signal.SIGSTOP)
        (tmp_path / "kvcached.toml").write_text(HOST_CONFIG)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.await_ready()
        with engine_on(daemon) as engine:
            engine.compute("a", 4)
            wait_stored(daemon.run_dir, 4)
        after = read_ledger(daemon.run_dir / LEDGER_NAME)
        assert before is not None
        assert after is not None
        assert before.host is not None
        assert after.host is not None
        assert before.host.inode != after.host.inode
        assert "engines in offload mode that may be writing to it" in daemon.log
        os.kill(scheduler.process.pid, signal.SIGCONT)
        processes.end()


def test_dead_engine_is_not_waited_for(daemon: Supervised, processes: Processes) -> None:
    """What an engine had claimed that died together with the daemon is free at once."""
    scheduler, _ = processes.scheduler(0, 1)
    scheduler.ask("prepare mine 4")
    daemon.kill()
    kill(scheduler)
    daemon.await_ready()

    assert nothing_held(host_of(daemon))


def kept_bytes(daemon: Supervised) -> int:
    """Of host pools that the supervisor keeps."""
    files = [Path(entry) for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir()]
    return sum(file.stat().st_size for file in files if is_host_pool(file))


def test_host_pool_that_is_no_longer_configured_is_given_back(tmp_path: Path) -> None:
    """Its memory is free after the restart: the supervisor keeps it no longer."""
    with supervised(tmp_path, HOST_CONFIG) as daemon:
        assert kept_bytes(daemon)
        (tmp_path / "kvcached.toml").write_text(PATIENT_CONFIG)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.await_ready()
        end_s = time.monotonic() + 10
        while kept_bytes(daemon):
            assert time.monotonic() < end_s


@pytest.mark.parametrize("slabs", [SLABS // 2, 2 * SLABS], ids=["larger slabs", "smaller slabs"])
def test_other_slabs_of_the_same_memory_start_empty(tmp_path: Path, slabs: int) -> None:
    """The blocks of each namespace are numbered by slabs: with others, no block would be where it was."""
    text = config()
    with supervised(tmp_path, text) as daemon:
        engine = Engine(daemon.run_dir)
        engine.store("a", 5)
        other = f"slab_bytes = {SLABS * SLAB_BYTES // slabs}"
        (tmp_path / "kvcached.toml").write_text(text.replace(f"slab_bytes = {SLAB_BYTES}", other))
        daemon.kill_and_wait()
        engine.connect()
        assert (engine.scheduler.hit("a", 5), "the ledger has another one" in daemon.log) == (0, True)
        engine.join()
        engine.store("b", 5)
        assert engine.load("b", 5) == 5
        engine.close()


def resized(text: str, slabs: int) -> str:
    """A configuration whose host pool has another number of slabs."""
    return text.replace(f"[host]\nsize_bytes = {SLABS * SLAB_BYTES}", f"[host]\nsize_bytes = {slabs * SLAB_BYTES}")


def test_larger_pool_keeps_its_blocks(tmp_path: Path) -> None:
    """With a larger `size_bytes`, a living engine finds all that it had, and has room for more."""
    text = config()
    with supervised(tmp_path, text) as daemon:
        engine = Engine(daemon.run_dir)
        engine.store("a", 5)
        (tmp_path / "kvcached.toml").write_text(resized(text, 4 * SLABS))
        daemon.kill_and_wait()
        engine.connect()
        engine.join()
        names = [f"more {number}" for number in range(2 * SLABS)]  # a slab has eight blocks
        for name in names:
            engine.store(name, 5)
        assert {engine.load(name, 5) for name in ("a", *names)} == {5}
        assert f"the host pool has {4 * SLABS} slabs now, and had {SLABS}: all that it holds is kept" in daemon.log
        engine.close()


def test_smaller_pool_keeps_what_its_slabs_hold(tmp_path: Path) -> None:
    """With a smaller `size_bytes`, blocks in the slabs that are left are hit, and the rest of the memory is free."""
    text = config()
    with supervised(tmp_path, text) as daemon:
        engine = Engine(daemon.run_dir)
        engine.store("a", 5)
        (tmp_path / "kvcached.toml").write_text(resized(text, SLABS - 1))
        daemon.kill_and_wait()
        engine.connect()
        engine.join()
        assert engine.load("a", 5) == 5
        assert f"the host pool has {SLABS - 1} slabs now, and had {SLABS}: all that it holds is kept" in daemon.log
        names = ("b", "c", "d")
        for name in names:
            engine.store(name, 5)
        (tmp_path / "kvcached.toml").write_text(resized(text, 1))
        daemon.kill_and_wait()
        engine.connect()
        engine.join()
        assert "that held blocks are no longer used" in daemon.log
        assert [engine.load(name, 5) for name in ("a", *names)] == [5, 3, 0, 0]  # a slab has eight blocks
        engine.close()


def test_memory_behind_the_pool_is_given_back_at_its_writers_death(daemon: Supervised, processes: Processes) -> None:
    """The file of the pool is longer than the pool; what lies there is freed when a process of an engine dies."""
    scheduler, _ = processes.scheduler(0, 1)
    (path,) = (each for each in Path(f"/proc/{daemon.process.pid}/fd").iterdir() if is_host_pool(each))
    descriptor = os.open(path, os.O_RDWR)
    before = os.fstat(descriptor).st_blocks
    os.pwrite(descriptor, b"stray", SLABS * SLAB_BYTES + (1 << 30))
    assert os.fstat(descriptor).st_blocks > before
    kill(scheduler)
    end_s = time.monotonic() + 10
    while os.fstat(descriptor).st_blocks > before:
        assert time.monotonic() < end_s
    os.close(descriptor)


def test_no_process_maps_more_than_the_pool(tmp_path: Path) -> None:
    """The daemon, its workers, its storage process and shards of engines map the pool, not the length of its file."""
    disk = f'[storage]\n[storage.settings]\ndirectory = "{tmp_path / "disk"}"\ncapacity_bytes = "64MiB"\n'
    with supervised(tmp_path, config() + disk) as daemon:
        engine = Engine(daemon.run_dir)
        engine.store("a", 5)
        pids = (daemon.daemon_pid, *children(daemon.daemon_pid), os.getpid())
        pool = host_pool_file(daemon.daemon_pid)
        sizes = [mapped_bytes(pid, pool) for pid in pids]
        assert sizes == [SLABS * SLAB_BYTES, SLABS * SLAB_BYTES, SHARDS * SLABS * SLAB_BYTES]
        engine.close()


def is_host_pool(entry: Path) -> bool:
    """Whether a descriptor is of a host pool's memory."""
    return "kvcached-host" in str(entry.readlink())


def test_another_pool_of_larger_blocks_starts_empty(tmp_path: Path) -> None:
    """With slabs of another size in the configuration the start is cold, and the log says so in one line."""
    with supervised(tmp_path, config()) as daemon:
        engine = Engine(daemon.run_dir)
        engine.store("a", 5)
        (tmp_path / "kvcached.toml").write_text(config(2 * PAGE_BYTES))
        daemon.kill_and_wait()
        engine.connect()
        assert engine.scheduler.hit("a", 5) == 0
        assert "its blocks are lost" in daemon.log
        engine.close()


#: Has every process take what a file says for the memory that is left, and for shared memory in use.
_LITTLE_MEMORY = """
import json, os
from pathlib import Path
from kvcached_client.doctor import memory_bounds

def bounds(root=None):
    left, shared = json.loads(Path(os.environ["BOUNDS"]).read_text())
    return [memory_bounds.MemoryBound(1 << 40, left, "a limit", shared)]

memory_bounds.memory_bounds = bounds
"""


def host_pools(pid: int) -> dict[int, int]:
    """How much of each host pool that a process has a descriptor of has been written, by inode."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "kvcached-host" in str(entry.readlink()):
                found[entry.stat().st_ino] = entry.stat().st_blocks * 512
    return found


def test_pool_that_engines_still_map_is_no_reason_to_refuse_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for two pools the start is cold: the engine goes on, joins, and gives the old one back."""
    site, bounds = tmp_path / "site", tmp_path / "bounds"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_LITTLE_MEMORY)
    bounds.write_text(json.dumps([1 << 40, 0]))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT}")
    monkeypatch.setenv("BOUNDS", str(bounds))
    text, size_bytes = config(), (SLABS + 2) * SLAB_BYTES
    with supervised(tmp_path, text) as daemon:
        engine = Engine(daemon.run_dir)
        engine.store("a", 5)
        ((earlier, written_bytes),) = host_pools(daemon.daemon_pid).items()
        bounds.write_text(json.dumps([size_bytes - written_bytes, written_bytes]))
        larger_slabs = resized(text, SLABS + 2).replace(f"slab_bytes = {SLAB_BYTES}", f"slab_bytes = {2 * SLAB_BYTES}")
        (tmp_path / "kvcached.toml").write_text(larger_slabs)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.await_ready()

        assert f"its {written_bytes} bytes are free when each process" in daemon.log
        assert f"(pid {os.getpid()})" in daemon.log
        assert str(earlier) in Path("/proc/self/maps").read_text()
        engine.connect()
        engine.join()
        assert engine.load("a", 5) == 0
        engine.store("b", 5)
        assert engine.load("b", 5) == 5
        assert str(earlier) not in Path("/proc/self/maps").read_text()
        assert earlier not in {**host_pools(daemon.process.pid), **host_pools(daemon.daemon_pid)}
        engine.close()
