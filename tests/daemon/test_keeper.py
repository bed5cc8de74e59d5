"""A container with the daemon is replaced by another one, while that of the keeper goes on.

A container is a pid namespace here, whose first process is the supervisor, and whose end kills all in it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvcached_client.errors import RequestError
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_host_tier import HOST_CONFIG, SLOTS, content, engine_on, is_sound, wait_stored
from tests.daemon.test_offload import PAGE_BYTES, SHARDS, Processes
from tests.daemon.test_offload import config as offload_config
from tests.daemon.test_rejoin import Engine as RejoiningEngine
from tests.daemon.test_restart import Engine as OffloadEngine
from tests.daemon.test_restart import host_of
from tests.recovery.keepers import keeper_process

CONTAINER = ("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
TIMEOUT_S = 30


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Only root makes namespaces, and some sandboxes forbid it even to root."""
    if subprocess.run(["/usr/bin/env", *CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespaces can be made here")


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Path]:
    with keeper_process(tmp_path) as running:
        yield running.path


@contextmanager
def container(directory: Path, keeper: Path, config: str = HOST_CONFIG) -> Iterator[Supervised]:
    """A daemon in a container, which ends at the latest with the block."""
    with supervised(directory, config, keeper=keeper, within=CONTAINER) as running:
        try:
            yield running
        finally:
            if running.process.poll() is None:
                end(running, signal.SIGTERM)


def end(running: Supervised, number: signal.Signals) -> None:
    """End the first process of a container, as container runtimes do; returns when nothing of it is left."""
    (first,) = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    os.kill(int(first), number)
    running.process.wait(TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_next_container_finds_the_blocks(tmp_path: Path, keeper: Path, number: signal.Signals) -> None:
    """Whether a container is stopped or killed, the next one's daemon hits all blocks, on the device and the host."""
    with container(tmp_path, keeper) as first:
        with engine_on(first) as engine:
            written = engine.compute("a", 4)
            wait_stored(first.run_dir, 4)
        end(first, number)

    with container(tmp_path, keeper) as second, engine_on(second) as engine:
        assert "4 blocks of the host pool, 4 blocks of device pools" in second.log
        with engine.acquire("a", 4) as lease:
            assert (lease.hit_blocks, lease.is_loading) == (4, False)
            assert [content(pool, lease) for pool in engine.pools] == written
        engine.evict_all(SLOTS)
        with engine.acquire("a", 4) as lease:
            assert (lease.hit_blocks, lease.is_loading) == (4, True)
            lease.wait_loaded()
            assert [content(pool, lease) for pool in engine.pools] == written
        assert is_sound(second)


def test_container_without_a_keeper_starts_empty(tmp_path: Path) -> None:
    """Without a keeper the next container starts with empty pools: it is the keeper that makes the difference."""
    missing = tmp_path / "keeper.sock"
    with container(tmp_path, missing) as first:
        with engine_on(first) as engine:
            engine.compute("a", 4)
            wait_stored(first.run_dir, 4)
        end(first, signal.SIGTERM)

    with container(tmp_path, missing) as second, engine_on(second) as engine, engine.acquire("a", 4) as lease:
        assert lease.hit_blocks == 0


def test_lease_goes_on_over_a_replaced_container(tmp_path: Path, keeper: Path) -> None:
    """An engine of another container goes on in its slots while the daemon's container is killed and replaced."""
    with ExitStack() as parts:
        with container(tmp_path, keeper) as first:
            engine = RejoiningEngine(first.run_dir, parts)
            chain = engine.chain(0, 4)
            lease = engine.client.acquire("r", chain)
            engine.compute(lease, chain)
            lease.commit(8)
            end(first, signal.SIGKILL)
        with container(tmp_path, keeper) as second:
            engine.client.rejoin()
            lease.commit(16)
            lease.release()

            again = engine.client.acquire("s", chain, full=True)
            assert (again.hit_blocks, engine.is_right(again, chain)) == (4, True)
            again.release()
            assert is_sound(second)


def test_engine_that_is_not_seen_is_not_taken_for_dead(tmp_path: Path, keeper: Path) -> None:
    """A container that no longer sees the host's processes sets aside the slots of an engine that it cannot see."""
    with supervised(tmp_path, offload_config(), keeper=keeper) as first:
        processes = Processes(first.run_dir)
        scheduler, _ = processes.scheduler(0, 1)
        given = set(json.loads(scheduler.ask("prepare mine 4"))["slots"])
        first.process.kill()
        first.process.wait(TIMEOUT_S)
    with container(tmp_path, keeper, offload_config()) as second:
        assert host_of(second).states["quarantined"] == 4
        crowd = OffloadEngine(second.run_dir)
        assert not crowd.store("crowd", 30) & given
        crowd.close()
        assert "the earlier daemon ran in another pid namespace" in second.log
    processes.end()


def test_replica_is_busy_while_an_engine_that_is_not_seen_may_write(tmp_path: Path, keeper: Path) -> None:
    """Another engine gets no slots of one that lives in a lease, and gets in when that one has come back and gone."""
    with ExitStack() as parts:
        with container(tmp_path, keeper) as first:
            engine = RejoiningEngine(first.run_dir, parts)
            chain = engine.chain(0, 4)
            lease = engine.client.acquire("r", chain)
            engine.compute(lease, chain)
            end(first, signal.SIGKILL)
        with container(tmp_path, keeper) as second:
            with pytest.raises(RequestError, match="process 0 is not seen here"):
                RejoiningEngine(second.run_dir, parts, failures="raise")
            engine.client.rejoin()
            lease.commit(16)
            lease.release()
            engine.client.close()
            other = RejoiningEngine(second.run_dir, parts, failures="raise")
            again = other.client.acquire("s", chain, full=True)
            assert (again.hit_blocks, other.is_right(again, chain)) == (4, True)


def test_engine_that_is_not_seen_limits_no_other_one(tmp_path: Path, keeper: Path) -> None:
    """Its namespaces are not those of every process that comes."""
    config = offload_config() + "namespaces_max = 2\n"
    with container(tmp_path, keeper, config) as first:
        processes = Processes(first.run_dir)
        scheduler, _ = processes.scheduler(0, 1)
        scheduler.ask("prepare mine 4")
        end(first, signal.SIGKILL)
    with container(tmp_path, keeper, config) as second:
        layout = OffloadLayout(block_size=4, shards=SHARDS, block_bytes=PAGE_BYTES, fingerprint=b"f" * 16)
        with OffloadClient.connect(
            second.run_dir, engine="other", instance=new_instance(), keyspace=b"o" * 32, label="other", layout=layout
        ) as other:
            assert other.generation
    processes.end()
