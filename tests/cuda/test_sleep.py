"""Device pools that sleep: their memory is really given back, and comes again; daemon, worker, engine are processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvcached.worker.cuda_maker import WantedMemory, make_cuda_memory
from kvcached_client import Admin
from kvcached_client.errors import DaemonFailure, ErrorCode, RequestError, TransportError
from kvcached_client.protocol.engine import Slept
from tests.cuda.test_pool import BLOCKS, WHOLE, OnDevice, ended, on_device, prompts
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules
from tests.daemon import supervised
from tests.faults.harness import armed
from tests.project.daemon_process import clean_environment

__all__ = ["on_device"]

PROMPTS = 8
FROM_HOST = f"hit {BLOCKS} ready 0 wrong 0"


def admin(on_device: OnDevice) -> Admin:
    return Admin.connect(on_device.daemon.run_dir, deadline_ms=20_000)


def sleep(on_device: OnDevice, *, deadline_ms: int = 30_000) -> Slept:
    """As soon as the daemon has seen that the last engine is gone."""
    with admin(on_device) as asked:
        while True:
            try:
                return asked.sleep("default", deadline_ms=deadline_ms)
            except RequestError as error:
                if error.code != ErrorCode.POOL_BUSY:
                    raise


def state(on_device: OnDevice) -> str:
    with admin(on_device) as asked:
        return asked.stats().pools[0].state


def wake(on_device: OnDevice) -> None:
    with admin(on_device) as asked:
        asked.wake("default")
        assert asked.health().ok
        assert asked.check().ok


def cache_some(on_device: OnDevice) -> None:
    with ended(on_device.engine()) as engine:
        prompts(engine, range(PROMPTS))


def assert_hit(on_device: OnDevice, *said: str) -> None:
    """What an engine finds of each prompt."""
    with ended(on_device.engine()) as engine:
        assert {engine.ask(f"look {number}") for number in range(PROMPTS)} <= set(said)


@pytest.mark.parametrize("on_device", [1, 2], indirect=True)
def test_memory_is_given_back_and_comes_again(on_device: OnDevice) -> None:
    """No granule is alive while the pool sleeps; awake, it has every block from the host pool; and so once more."""
    cache_some(on_device)
    for _ in range(2):
        assert live_granules(on_device.device) == 1
        slept = sleep(on_device)
        assert (slept.blocks > 0, slept.dropped) == (True, 0)
        assert live_granules(on_device.device) == 0
        assert state(on_device) == "asleep"
        with admin(on_device) as asked:
            assert asked.health().ok
            assert asked.check().ok
        wake(on_device)
        assert_hit(on_device, FROM_HOST, WHOLE)


def test_engine_keeps_its_pool(on_device: OnDevice) -> None:
    """While an engine has a session, sleep is refused with its process id, and the engine goes on."""
    with ended(on_device.engine()) as engine, admin(on_device) as asked:
        prompts(engine, range(3))
        with pytest.raises(RequestError, match=str(engine.process.pid)) as refused:
            asked.sleep("default")
        assert refused.value.code == ErrorCode.POOL_BUSY
        prompts(engine, range(3, 6))
        assert engine.ask("look 1") == WHOLE


@pytest.mark.parametrize("on_device", [{"memory_mib": 2}], indirect=True)
def test_wake_fails_while_somebody_else_has_the_device(on_device: OnDevice) -> None:
    """Another process has the memory while the pool sleeps: wake says so, and succeeds when that process has gone."""
    cache_some(on_device)
    sleep(on_device)
    (taken,) = asyncio.run(make_cuda_memory([WantedMemory(0, 1 << 20)]))
    with admin(on_device) as asked:
        with pytest.raises(DaemonFailure, match=r"replica 'default' stays asleep: CUDA device 0: .* free") as refused:
            asked.wake("default")
        assert refused.value.code == ErrorCode.ASLEEP
        assert asked.health().ok
    assert state(on_device) == "asleep"
    (refused_by_driver,) = trace.broken_rules(trace.read(on_device.trace_path))
    assert refused_by_driver == "cuMemCreate: the device has no 2097152 bytes left"
    os.truncate(on_device.trace_path, 0)
    os.close(taken.descriptor)
    wake(on_device)
    assert_hit(on_device, FROM_HOST, WHOLE)


def test_pool_sleeps_on_in_the_next_daemon(on_device: OnDevice) -> None:
    """A daemon that is killed while its pool sleeps is followed by one that takes no memory until it is asked to."""
    cache_some(on_device)
    sleep(on_device)
    on_device.daemon.kill_and_wait()
    assert (state(on_device), live_granules(on_device.device)) == ("asleep", 0)
    wake(on_device)
    assert_hit(on_device, FROM_HOST, WHOLE)


@pytest.fixture
def killed_at(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first daemon that comes to a failpoint dies there."""
    faults = armed(tmp_path, request.param, "kill")
    monkeypatch.setattr(supervised, "clean_environment", lambda: {**clean_environment(), **faults.variables})
    return str(request.param)


@pytest.mark.parametrize(
    ("killed_at", "then"),
    [("daemon.emptied", "awake"), ("daemon.asleep", "asleep"), ("daemon.made", "asleep")],
    indirect=["killed_at"],
)
def test_death_in_between_leaves_a_whole_pool_or_none(killed_at: str, on_device: OnDevice, then: str) -> None:
    """A daemon that is killed while a pool falls asleep or wakes is followed by one whose pool is whole, or asleep."""
    cache_some(on_device)
    if killed_at == "daemon.made":
        sleep(on_device)
    with pytest.raises(TransportError):
        (wake if killed_at == "daemon.made" else sleep)(on_device)
    on_device.daemon.await_ready()

    assert state(on_device) == then, killed_at
    assert live_granules(on_device.device) == (then == "awake")
    if then == "awake":
        sleep(on_device)
    wake(on_device)
    assert_hit(on_device, FROM_HOST, WHOLE)
