"""Clear and set_weights on real daemons: live engines, copies under way, and a SIGKILL right after the answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin, ErrorCode, RequestError
from kvcached_client.errors import Stale
from kvcached_client.protocol.engine import ReplicaInfo
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_host_tier import HOST_CONFIG, LARGE_BLOCKS, LARGE_CONFIG, PATIENCE_S, SLOTS, Engine
from tests.project.source_tree import ROOT

pytestmark = pytest.mark.slow

WEIGHTS = "step 2000"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon with a host tier."""
    with started(tmp_path, HOST_CONFIG) as running:
        yield running


def admin_of(run_dir: Path) -> Admin:
    return Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000)


def replica(run_dir: Path) -> ReplicaInfo:
    """What the daemon serves, whose books are right."""
    with admin_of(run_dir) as admin:
        assert admin.check().violations == ()
        (info,) = admin.describe().replicas
    return info


def until_stored(run_dir: Path) -> None:
    """Until nothing is on its way to the host pool."""
    with admin_of(run_dir) as admin:
        while any(admin.stats().transfers.values()):
            pass


def hit(engine: Engine, name: str, blocks: int) -> int:
    """Blocks of a prompt that are found."""
    with engine.acquire(name, blocks) as lease:
        lease.wait_loaded()
        return lease.hit_blocks


def test_live_engine_of_a_cleared_replica_comes_back(daemon: RunningDaemon) -> None:
    """Its lease is void and it is told so; after its next hello it finds nothing, and stores and hits anew."""
    engine = Engine(daemon.run_dir, 1)
    engine.compute("text", 4)
    held = engine.acquire("more", 4, "held")
    before, generation = engine.client.namespace, replica(daemon.run_dir).generation
    with admin_of(daemon.run_dir) as admin:
        cleared = admin.clear("default")
    assert (cleared.replicas, cleared.generation > generation, cleared.blocks) == (("default",), True, 4)
    with pytest.raises(Stale):
        held.commit(16)
    assert not engine.client.is_alive
    engine.close()

    engine = Engine(daemon.run_dir, 1)
    assert engine.client.namespace == cleared.namespace != before
    assert hit(engine, "text", 4) == 0
    engine.compute("text", 4)
    until_stored(daemon.run_dir)
    engine.evict_all(SLOTS)
    assert hit(engine, "text", 4) == 4
    assert replica(daemon.run_dir).generation == cleared.generation
    engine.close()


def test_clear_while_blocks_are_copied(tmp_path: Path) -> None:
    """A clear in the middle of stores is answered after them, and neither tier has a block of before."""
    with started(tmp_path, LARGE_CONFIG) as daemon:
        engine = Engine(daemon.run_dir, 1)
        engine.compute("text", LARGE_BLOCKS)
        with admin_of(daemon.run_dir) as admin:
            assert any(admin.stats().transfers.values())
            assert admin.clear("default").blocks == LARGE_BLOCKS
            stats = admin.stats()
        assert not any(stats.transfers.values())
        assert (stats.runs, stats.hosts[0].states["cached"], stats.hosts[0].states["filling"]) == (0, 0, 0)
        engine.close()


def test_copies_stop_and_go_on(daemon: RunningDaemon) -> None:
    """While paused nothing reaches the host pool; after the end of the pause it does."""
    engine = Engine(daemon.run_dir, 1)
    with admin_of(daemon.run_dir) as admin:
        paused = admin.pause()
        assert (paused.under_way, paused.holds, admin.health().ok) == (0, True, True)
        engine.compute("text", 4)
        assert admin.stats().hosts[0].states["cached"] == 0
        assert admin.resume().state == "serving"
        until_stored(daemon.run_dir)
        assert admin.stats().hosts[0].states["cached"] == 4
    engine.close()


def test_commands_reach_the_daemon(daemon: RunningDaemon) -> None:
    """The command line clears, sets weights, drains and resumes a real daemon."""

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "kvcached", *arguments, "--run-dir", str(daemon.run_dir)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert run("clear", "default") == f"0 blocks of default; generation {replica(daemon.run_dir).generation}\n"
    told = run("set-weights", "default", WEIGHTS)
    generation = replica(daemon.run_dir).generation
    assert told == f"weights {WEIGHTS} of default; 0 blocks; generation {generation}\n"
    assert run("drain").startswith("draining; left: 0 leases")
    with pytest.raises(RequestError) as refused:
        Engine(daemon.run_dir, 1)
    assert refused.value.code is ErrorCode.DRAINING
    assert run("resume") == "resumed; the daemon is serving\n"
    assert replica(daemon.run_dir).weights_version == WEIGHTS


def test_weights_outlive_the_daemon(tmp_path: Path) -> None:
    """SIGKILL after the answer: the next daemon has the weights and the generation, and hits nothing of before."""
    with supervised(tmp_path, HOST_CONFIG) as daemon:
        before = Engine(daemon.run_dir, 1)
        before.compute("old", 4)
        until_stored(daemon.run_dir)
        with admin_of(daemon.run_dir) as admin:
            done = admin.set_weights("default", WEIGHTS)
        assert done.blocks == 4
        before.close()
        engine = Engine(daemon.run_dir, 1)
        engine.compute("new", 3)
        until_stored(daemon.run_dir)
        daemon.kill_and_wait()
        engine.close()

        info = replica(daemon.run_dir)
        assert (info.generation, info.weights_version, info.namespace) == (
            done.generation, WEIGHTS, done.namespace.hex(),
        )  # fmt: skip
        assert blocks_in_host(daemon) == 3
        engine = Engine(daemon.run_dir, 1)
        assert (hit(engine, "old", 4), hit(engine, "new", 3)) == (0, 3)
        with admin_of(daemon.run_dir) as admin:
            assert admin.set_weights("default", WEIGHTS).generation == done.generation
        engine.close()


def blocks_in_host(daemon: Supervised) -> int:
    with admin_of(daemon.run_dir) as admin:
        return admin.stats().hosts[0].states["cached"]
