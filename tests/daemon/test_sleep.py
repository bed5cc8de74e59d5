"""A pool in this machine's memory sleeps: no process has it meanwhile, and the host pool gives its blocks later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvcached_client import Admin, Client
from kvcached_client.errors import DaemonFailure, ErrorCode
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_rejoin import HOST, Engine

BLOCKS = 4


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Supervised]:
    with supervised(tmp_path, CONFIG + HOST, pause_min_s=0.01, pause_max_s=0.01) as running:
        yield running


def has_pool(pid: int) -> bool:
    """Whether a process has the memory of the device pool, as a descriptor or mapped."""
    places = [*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()]
    names = []
    for place in places:
        with suppress(FileNotFoundError):
            names.append(str(place.readlink()))
    return any(name.startswith("/memfd:kvcached-default-0 ") for name in names)


def holders(daemon: Supervised) -> list[bool]:
    """Of supervisor and daemon."""
    return [has_pool(daemon.process.pid), has_pool(daemon.daemon_pid)]


def computed(daemon: Supervised) -> None:
    """An engine that has cached a prompt, and has left."""
    with ExitStack() as parts:
        engine = Engine(daemon.run_dir, parts)
        chain = engine.chain(0, BLOCKS)
        with engine.client.acquire("compute", chain, full=True) as lease:
            engine.compute(lease, chain)
            lease.commit(chain.token_count)


def assert_in_host_pool(daemon: Supervised) -> None:
    """An engine hits the prompt, from the host pool, and its bytes are right."""
    with ExitStack() as parts:
        engine = Engine(daemon.run_dir, parts)
        chain = engine.chain(0, BLOCKS)
        with engine.client.acquire("use", chain, full=True) as lease:
            assert lease.wait_loaded() == chain.token_count
            assert engine.is_right(lease, chain)


@pytest.mark.parametrize("killed", ["", "daemon", "supervisor restarts"])
def test_memory_of_a_sleeping_pool_is_nobodys(daemon: Supervised, killed: str) -> None:
    """Neither daemon nor service manager has it, nor the next daemon; awake, its blocks are in the host pool."""
    computed(daemon)
    assert holders(daemon) == [True, True]
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        assert admin.sleep("default").replicas == ("default",)
        assert holders(daemon) == [False, False]
        with pytest.raises(DaemonFailure) as refused:
            Client.connect(daemon.run_dir, deadline_ms=10_000)
        assert refused.value.code == ErrorCode.ASLEEP
    if killed == "daemon":
        daemon.kill_and_wait()
    elif killed:
        os.kill(daemon.process.pid, signal.SIGHUP)
        daemon.await_ready()
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        assert (admin.stats().pools[0].state, holders(daemon)) == ("asleep", [False, False])
        assert admin.wake("default").replicas == ("default",)
        assert admin.health().ok
        assert admin.check().ok
    assert holders(daemon) == [True, True]
    assert_in_host_pool(daemon)


def test_daemon_stops_while_its_pool_sleeps(daemon: Supervised) -> None:
    """A clean stop ends in order with a pool asleep, and no error is logged."""
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        admin.sleep("default")
    daemon.process.terminate()
    assert daemon.process.wait(20) == 0
    assert "ERROR" not in daemon.log
