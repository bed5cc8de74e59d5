"""A copy process and a real daemon: every byte is right, and the engine's own process copies nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.client import CopyProcess
from kvcached_client.errors import BadRequest, DaemonUnreachable, ErrorCode, RequestError
from tests.client.offload_rig import layer
from tests.copy_process.engine import CONFIG, SLAB_BYTES, SLABS, Engine
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import job_of
from tests.daemon.test_host_tier import host_memory
from tests.daemon.test_offload import nothing_held, seconds_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with started(tmp_path, CONFIG) as running:
        yield running


@pytest.fixture
def engine(daemon: RunningDaemon) -> Iterator[Engine]:
    with Engine(daemon.run_dir) as made:
        yield made


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))  # noqa: PTH208


def host_pools() -> int:
    """How many parts of host pools this process maps."""
    return Path("/proc/self/maps").read_text().count("kvcached-host")


def test_blocks_come_back_byte_for_byte_and_the_engine_has_neither_thread_nor_host_pool(daemon: RunningDaemon) -> None:
    """Stores and loads are right; the engine's process has no new thread but the heartbeat's, and maps no host pool."""
    gc.collect()
    before, mapped = threads(), host_pools()  # those that other tests have left
    with Engine(daemon.run_dir) as engine:
        assert engine.store("a", 12) == ""
        assert engine.store("b", 8) == ""
        assert engine.load("a", 12) == "12 True"
        assert engine.load("b", 8) == "8 True"

        assert "kvcached-engine" in Path("/proc/self/maps").read_text()
        assert host_pools() == mapped
        assert "kvcached-host" in Path(f"/proc/{engine.copies.pid}/maps").read_text()
        new = [Path(f"/proc/self/task/{each}/comm").read_text().strip() for each in threads() - before]
        assert len(new) <= 1, new


def test_many_orders_end_each_once(engine: Engine) -> None:
    """Orders that are given without waiting have one outcome each, and all blocks are found."""
    numbers = [engine.begin_store(name, 2) for name in "abcdefgh"]
    ended: list[int] = []
    while len(ended) < len(numbers):
        ended += [outcome.number for outcome in engine.copies.outcomes() if not outcome.error]
    assert sorted(ended) == numbers
    assert [engine.scheduler.hit(name, 2) for name in "abcdefgh"] == [2] * 8


def test_changed_byte_is_named(daemon: RunningDaemon, engine: Engine) -> None:
    """A block whose bytes changed in host memory is in the load's outcome, and is never hit again."""
    assert engine.store("a", 6) == ""
    order = engine.scheduler.prepare_load("a", 6)
    geometry = HostGeometry(slabs=SLABS, slab_bytes=SLAB_BYTES, shards=1, block_bytes=engine.pages.block_bytes)
    memory = host_memory(daemon.process.pid, geometry.size_bytes)
    memory[geometry.block_offset(order.slots[3], 0)] ^= 1

    outcome = engine.outcome(engine.copies.load(job_of(order)))
    assert (outcome.bad, outcome.error) == ((3,), "")
    assert engine.is_right(order, outcome.bad)
    seconds_until(daemon.run_dir, nothing_held)  # nobody waits for the report of a load
    assert engine.scheduler.hit("a", 6) == 3


def test_refused_job_ends_with_its_reason_and_the_next_one_is_carried_out(engine: Engine) -> None:
    """A job that names blocks that do not exist fails alone."""
    _, order = engine.scheduler.prepare_store("a", 2)
    job = job_of(order)
    job.spans[0].blocks[0] = 1000  # type: ignore[index]
    outcome = engine.outcome(engine.copies.store([job]))
    assert (outcome.code, bool(outcome.fix)) == (ErrorCode.BAD_VALUE, True)
    assert ErrorCode.BAD_VALUE not in outcome.error
    assert outcome.fix not in outcome.error  # it would be told twice
    assert engine.store("a", 2) == ""
    assert engine.load("a", 2) == "2 True"


def test_tensors_outside_the_memory_are_refused(engine: Engine) -> None:
    """No process is started for tensors that it could not reach."""
    pages = EnginePages.of_tensors({"layer 0": layer(8, 64)})
    with pytest.raises(BadRequest, match="not in the memory"):
        CopyProcess.start(engine.scheduler.client.session, 0, pages, engine.memory)


def test_refusal_of_the_daemon_is_raised_by_the_start(engine: Engine) -> None:
    """A shard that the session does not have is refused with the daemon's own code; the process has ended."""
    with pytest.raises(RequestError) as refused:
        CopyProcess.start(engine.scheduler.client.session, 5, engine.pages, engine.memory)
    assert "shard" in refused.value.message


def test_closed_process_takes_no_orders(engine: Engine) -> None:
    """After `close` the process is dead, and an order raises."""
    _, order = engine.scheduler.prepare_store("a", 2)
    engine.copies.close()
    assert not Path(f"/proc/{engine.copies.pid}").exists()
    with pytest.raises(DaemonUnreachable):
        engine.copies.store([job_of(order)])
