"""Copies between the tiers that are cut short, by whatever dies, stops or fails while they are under way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvcached_client import Admin
from kvcached_client.errors import LoadFailed
from kvcached_client.protocol.engine import StatsReport
from tests.daemon.conftest import RunningDaemon, pool_stats, seconds_until, started
from tests.daemon.faulty_daemon import FAULT
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_deaths import children
from tests.daemon.test_host_tier import (
    BLOCK_SIZE,
    HOST_CONFIG,
    PATIENCE_S,
    SLOTS,
    Engine,
    content,
    engine_on,
    host_memory,
    is_sound,
    losing_a_worker,
    wait_stored,
    wait_until,
    worker_of,
)
from tests.line_process import LineProcess

pytestmark = pytest.mark.slow

FAULTY = "tests.daemon.faulty_daemon"
#: A stopped engine's session is over while a test waits for that.
SHORT_SESSIONS = HOST_CONFIG.replace("session_ttl_ms = 20000", "session_ttl_ms = 3000")
TWO_SHARDS = HOST_CONFIG.replace("shards = 1", "shards = 2")
STATES = dict.fromkeys(("free", "leased", "filling", "cached", "fenced", "quarantined"), 0)


def with_second_replica(config: str) -> str:
    """The same with another replica, "second", of the same namespace."""
    pool, host = config[: config.index("[host]")], config[config.index("[host]") :]
    replica = pool[pool.index("[[replica]]") :].replace('"default"', '"second"')
    return pool + replica + host


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def fault(daemon: RunningDaemon, worker: int, what: str) -> Iterator[None]:
    """Something befalls a worker of a faulty daemon meanwhile; one that it has stopped goes on afterwards."""
    path = daemon.run_dir / FAULT
    path.write_text(f"{worker} {what}")
    try:
        yield
    finally:
        path.unlink()
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)


def wait_stopped(pid: int) -> None:
    """Until a process is stopped; fails where it never is."""
    start = time.monotonic()
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() - start < PATIENCE_S


@contextmanager
def process(*arguments: str) -> Iterator[LineProcess]:
    """`loading_engine.py` in one of its roles."""
    child = LineProcess("tests.daemon.loading_engine", *arguments)
    try:
        yield child
    finally:
        child.end()


def only_in_host(engine: Engine, daemon: RunningDaemon | Supervised) -> list[bytes]:
    """Four blocks of which the host pool alone has a copy; returns each shard's bytes."""
    written = engine.compute("a", 4)
    wait_stored(daemon.run_dir, 4)
    engine.evict_all(SLOTS)
    return written


def loads(engine: Engine, written: list[bytes], blocks: int = 4) -> bool:
    """Whether blocks come out of the host pool as they were written, all of them, on every shard."""
    with engine.acquire("a", blocks) as lease:
        assert (lease.hit_blocks, lease.is_loading) == (blocks, True)
        assert lease.wait_loaded() == blocks * BLOCK_SIZE
        return [content(pool, lease) for pool in engine.pools] == written


def states(**slots: int) -> dict[str, int]:
    return {**STATES, **slots}


def host_states(stats: StatsReport) -> dict[str, int]:
    """What the host slots are that the namespace has, those in no use apart."""
    (host,) = stats.hosts
    return {name: count for name, count in host.states.items() if count and name not in ("free", "absent")}


def read_stats(daemon: RunningDaemon) -> StatsReport:
    with Admin.connect(daemon.run_dir) as admin:
        return admin.stats()


def wait_quiet(daemon: RunningDaemon) -> None:
    """Until no copy is under way."""
    wait_until(daemon.run_dir, lambda stats: not any(stats.transfers.values()))


def assert_successor_hits(daemon: RunningDaemon, written: list[bytes]) -> None:
    """The next session finds the four blocks on the device, as they were written."""
    with engine_on(daemon) as engine, engine.acquire("a", 4) as lease:
        assert (lease.hit_blocks, lease.is_loading) == (4, False)
        assert [content(pool, lease) for pool in engine.pools] == written
    assert pool_stats(daemon.run_dir).states == states(free=12, cached=4)
    assert is_sound(daemon)


def test_load_of_a_killed_engine_ends_for_its_successor(tmp_path: Path) -> None:
    """SIGKILL in the middle of a load: what the engine could write is free at once, what is loaded stays cached."""
    with started(tmp_path, HOST_CONFIG, program=FAULTY) as daemon:
        with engine_on(daemon) as engine:
            written = only_in_host(engine, daemon)
        with process("hold", str(daemon.run_dir)) as holder:
            worker = worker_of(daemon)
            with fault(daemon, worker, "stop"):
                assert holder.ask("a 6") == "hit 4 of 6, loading"
                wait_stopped(worker)
                assert pool_stats(daemon.run_dir).states == states(free=10, leased=2, filling=4)
                holder.process.kill()
                assert seconds_until(daemon.run_dir, lambda pool: pool.states["leased"] == 0, 2) <= 1
                assert pool_stats(daemon.run_dir).states == states(free=12, filling=4)
            wait_quiet(daemon)
        assert_successor_hits(daemon, written)


def test_load_of_a_stopped_engine_ends_while_its_slots_are_set_aside(tmp_path: Path) -> None:
    """SIGSTOP in the middle of a load: the session expires, the load ends, and what the engine could write waits."""
    with started(tmp_path, SHORT_SESSIONS, program=FAULTY) as daemon:
        with engine_on(daemon) as engine:
            written = only_in_host(engine, daemon)
        with process("hold", str(daemon.run_dir)) as holder:
            worker = worker_of(daemon)
            with fault(daemon, worker, "stop"):
                assert holder.ask("a 6") == "hit 4 of 6, loading"
                wait_stopped(worker)
                holder.process.send_signal(signal.SIGSTOP)
                assert seconds_until(daemon.run_dir, lambda pool: pool.leases == 0, PATIENCE_S) < PATIENCE_S
                assert pool_stats(daemon.run_dir).states == states(free=10, quarantined=2, filling=4)
            wait_quiet(daemon)
            assert pool_stats(daemon.run_dir).states == states(free=10, quarantined=2, cached=4)
            holder.process.kill()
            assert seconds_until(daemon.run_dir, lambda pool: pool.states["quarantined"] == 0, 2) <= 1
        assert_successor_hits(daemon, written)


def test_wait_for_a_layer_outlives_a_stopped_worker(tmp_path: Path) -> None:
    """A worker stopped in the middle of a load: waits end by their deadline; when it goes on, so does the load."""
    with started(tmp_path, HOST_CONFIG, program=FAULTY) as daemon, engine_on(daemon) as engine:
        (written,) = only_in_host(engine, daemon)
        with process("shard", engine.client.session.to_bytes().hex()) as shard:
            assert shard.hear() == "joined"
            worker = worker_of(daemon)
            with fault(daemon, worker, "stop"):
                lease = engine.acquire("a", 4)
                wait_stopped(worker)
                (ticket,) = lease.loads
                load = f"{ticket.transfer} {ticket.progress}"
                assert shard.ask(f"{load} 0 {PATIENCE_S * 1000}") == "there"
                first = engine.pools[0].pages(0)[lease.block_table]
                assert first.tobytes() == np.frombuffer(written, np.uint8).reshape(4, 2, -1)[:, 0].tobytes()
                assert shard.ask(f"{load} 1 50") == "DeadlineExceeded"
                shard.say(f"{load} 1 {PATIENCE_S * 1000}")
            assert shard.hear() == "there"
            assert content(engine.pools[0], lease) == written
            assert lease.wait_loaded() == 4 * BLOCK_SIZE
            lease.release()
        assert is_sound(daemon)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_worker_that_stays_stopped_in_a_load_ends_every_wait(tmp_path: Path) -> None:
    """A worker that never goes on with a load is killed: the load fails, the session goes on, its replica serves."""
    with started(tmp_path, HOST_CONFIG, program=FAULTY) as daemon:
        with losing_a_worker(daemon) as worker, engine_on(daemon) as engine:
            written = only_in_host(engine, daemon)
            with process("shard", engine.client.session.to_bytes().hex()) as shard, fault(daemon, worker, "stop"):
                assert shard.hear() == "joined"
                (ticket,) = engine.acquire("a", 4).loads
                assert shard.ask(f"{ticket.transfer} {ticket.progress} 1 90000") == "LoadFailed"
        with engine_on(daemon) as engine:
            assert loads(engine, written)
        assert is_sound(daemon)


def test_store_that_fails_on_one_shard_leaves_nothing_to_find(tmp_path: Path) -> None:
    """A store that one shard of two fails half-way is as if it had never been, until it is done again in full."""
    with started(tmp_path, TWO_SHARDS, program=FAULTY) as daemon, engine_on(daemon, 2) as engine:
        before = engine.compute("a", 4)
        wait_stored(daemon.run_dir, 4)
        with fault(daemon, worker_of(daemon, shard=1), "fail"):
            engine.compute("a", 8)
            wait_until(daemon.run_dir, lambda stats: stats.counters.get("store_failed_blocks", 0) >= 4)
            engine.evict_all(SLOTS)
            wait_quiet(daemon)
            assert host_states(read_stats(daemon)) == {"cached": 4}
            with engine.acquire("a", 8) as lease:
                assert (lease.hit_blocks, lease.is_loading) == (4, True)
                assert lease.wait_loaded() == 4 * BLOCK_SIZE
                for pool, blocks in zip(engine.pools, before, strict=True):
                    assert content(pool, lease)[: len(blocks)] == blocks
        written = engine.compute("a", 8)
        wait_stored(daemon.run_dir, 8)
        engine.evict_all(SLOTS)
        assert loads(engine, written, 8)
        assert is_sound(daemon)


def test_two_replicas_that_store_one_prompt_share_its_host_copy(tmp_path: Path) -> None:
    """What two replicas compute at the same time is stored once, and each loads it as it was written."""
    with (
        started(tmp_path, with_second_replica(HOST_CONFIG)) as daemon,
        engine_on(daemon) as first,
        engine_on(daemon, replica="second") as second,
    ):
        with stopped(*children(daemon.process.pid)):
            leases = [engine.acquire("a", 4) for engine in (first, second)]
            written, again = [engine.write(lease, "a") for engine, lease in zip((first, second), leases, strict=True)]
            assert written == again
            for lease in leases:
                lease.finish(4 * BLOCK_SIZE)
            stats = read_stats(daemon)
            assert (stats.transfers["running_stores"], host_states(stats)) == (1, {"filling": 4})
        wait_quiet(daemon)
        stats = read_stats(daemon)
        assert (stats.counters["stored_blocks"], host_states(stats)) == (4, {"cached": 4})
        for engine in (first, second):
            engine.evict_all(SLOTS)
            assert loads(engine, written)
        assert host_states(read_stats(daemon)) == {"cached": 4}
        assert is_sound(daemon)


def test_waiter_takes_over_when_a_store_dies_with_its_worker(tmp_path: Path) -> None:
    """Who waits for blocks that another replica was storing when its worker was killed computes and stores them."""
    with (
        started(tmp_path, with_second_replica(HOST_CONFIG)) as daemon,
        engine_on(daemon) as first,
        engine_on(daemon, replica="second") as second,
    ):
        with losing_a_worker(daemon) as worker:
            os.kill(worker, signal.SIGSTOP)
            written = first.compute("a", 4)
            lease = second.acquire("a", 4)
            assert (lease.hit_blocks, lease.is_loading) == (4, True)
            assert read_stats(daemon).transfers["queued_loads"] == 1
            os.kill(worker, signal.SIGKILL)
            assert lease.wait_loaded() == 0
            assert read_stats(daemon).counters["corrupt_blocks"] == 0
        assert second.write(lease, "a") == written
        lease.finish(4 * BLOCK_SIZE)
        wait_stored(daemon.run_dir, 4)
        second.evict_all(SLOTS)
        assert loads(second, written)
        assert host_states(read_stats(daemon)) == {"cached": 4}
        assert is_sound(daemon)


def test_block_corrupt_on_one_shard_is_stored_again_from_a_device_that_has_it(tmp_path: Path) -> None:
    """One flipped bit on one shard cuts the hit on both; then another replica's copy is stored in its place."""
    with (
        started(tmp_path, with_second_replica(TWO_SHARDS) + 'verify = "always"\n') as daemon,
        engine_on(daemon, 2) as first,
        engine_on(daemon, 2, replica="second") as second,
    ):
        written = only_in_host(first, daemon)
        assert loads(second, written)
        size = first.client.layout.bytes_per_block()
        memory = host_memory(daemon.process.pid)
        memory[memory.find(written[1][2 * size : 3 * size])] ^= 1
        with first.acquire("a", 4) as lease:
            assert lease.hit_blocks == 4
            with pytest.raises(LoadFailed):
                first.pools[1].wait_layer(lease.loads, 0, deadline_ms=PATIENCE_S * 1000)
            assert lease.wait_loaded() == 2 * BLOCK_SIZE
            for pool, blocks in zip(first.pools, written, strict=True):
                assert content(pool, lease)[: 2 * size] == blocks[: 2 * size]
        wait_stored(daemon.run_dir, 5)
        assert read_stats(daemon).counters["corrupt_blocks"] == 1
        first.evict_all(SLOTS)
        assert loads(first, written)
        assert host_states(read_stats(daemon)) == {"cached": 4}
        assert is_sound(daemon)


@pytest.mark.parametrize("verify", ["inherited", "never"])
def test_block_that_changed_is_found_after_a_restart(tmp_path: Path, verify: str) -> None:
    """The next daemon's first load of a block compares its bytes, unless the configuration says that nobody does."""
    with supervised(tmp_path, HOST_CONFIG + f'verify = "{verify}"\n') as daemon:
        with engine_on(daemon) as engine:
            (written,) = only_in_host(engine, daemon)
            size = engine.client.layout.bytes_per_block()
        daemon.kill_and_wait()
        memory = host_memory(daemon.daemon_pid)
        memory[memory.find(written[2 * size : 3 * size])] ^= 1
        with engine_on(daemon) as engine, engine.acquire("a", 4) as lease:
            assert lease.hit_blocks == 4
            assert lease.wait_loaded() == (2 if verify == "inherited" else 4) * BLOCK_SIZE
            assert content(engine.pools[0], lease)[: 2 * size] == written[: 2 * size]
        with Admin.connect(daemon.run_dir) as admin:
            assert admin.stats().counters.get("corrupt_blocks", 0) == (verify == "inherited")


def test_health_tells_busy_from_ill(tmp_path: Path) -> None:
    """A full pool with a load under way is busy; a replica that waits for its next worker is not in order."""
    log = tmp_path / "run" / "worker-default-0.log"
    with started(tmp_path, HOST_CONFIG, program=FAULTY) as daemon:
        with engine_on(daemon) as engine, Admin.connect(daemon.run_dir) as admin:
            only_in_host(engine, daemon)
            worker = worker_of(daemon)
            with fault(daemon, worker, "stop"):
                engine.acquire("a", SLOTS)
                wait_stopped(worker)
                assert pool_stats(daemon.run_dir).states == states(leased=12, filling=4)
                busy = admin.health()
            assert busy.ok
            assert [part.part for part in busy.parts if part.detail.startswith("skipped")] == ["default/acquire"]
        with losing_a_worker(daemon) as worker, Admin.connect(daemon.run_dir) as admin:
            log.rename(log.with_suffix(".old"))
            log.mkdir()  # no worker can be started now
            os.kill(worker, signal.SIGKILL)
            seconds_until(daemon.run_dir, lambda pool: not pool.healthy, PATIENCE_S)
            ill = admin.health()
            assert not ill.ok
            assert [part.part for part in ill.parts if not part.ok] == ["default/workers"]
            log.rmdir()
        assert is_sound(daemon)


def test_host_copies_outlive_a_crash_loop(tmp_path: Path) -> None:
    """A worker that dies again and again is started after longer and longer pauses; then the host pool serves."""
    with started(tmp_path, HOST_CONFIG) as daemon:
        with engine_on(daemon) as engine:
            written = only_in_host(engine, daemon)
        for _ in range(3):
            with losing_a_worker(daemon) as worker:
                os.kill(worker, signal.SIGKILL)
        with engine_on(daemon) as engine:
            assert loads(engine, written)
        assert is_sound(daemon)
        log = (tmp_path / "run.log").read_text()
    pauses = [log.find(f"started again in {seconds} s") for seconds in ("0", "0.5", "1")]
    assert -1 not in pauses
    assert pauses == sorted(pauses)
