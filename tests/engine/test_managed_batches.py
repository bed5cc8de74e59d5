"""The example engine's managed cache puts the commits and finishes of a step into one batch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from examples.llama_engine.managed_cache import ManagedCache, ManagedLease
from kvcached_client import Client
from kvcached_client.protocol.engine import Commit, Release
from kvcached_client.transport.attach import SessionGrant
from tests.client.fake_daemon import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    run_dir = Path(tempfile.mkdtemp(prefix="kvc"))
    fake = FakeDaemon(run_dir)
    yield fake
    fake.stop()
    shutil.rmtree(run_dir)


@pytest.fixture
def cache(daemon: FakeDaemon) -> Iterator[ManagedCache]:
    with Client.connect(daemon.run_dir, deadline_ms=2000, heartbeat=False) as client:
        yield ManagedCache(client, _not_told)


def _not_told(_: SessionGrant) -> None:
    raise AssertionError("there was no rejoin")


def two_leases(cache: ManagedCache) -> tuple[ManagedLease, ManagedLease]:
    return cache.acquire("a", cache.chain(range(8))), cache.acquire("b", cache.chain(range(8)))


def test_step_waits_once_for_all_its_commits(daemon: FakeDaemon, cache: ManagedCache) -> None:
    """A daemon that answers only when both calls have come serves a step; afterwards calls wait one by one again."""
    first, second = two_leases(cache)
    daemon.replies_together = 2
    with cache.together():
        first.commit(8)
        second.finish(8)
    daemon.replies_together = 1
    first.finish(8)
    assert [type(request) for request, _ in daemon.requests[-3:]] == [Commit, Release, Release]


def test_step_goes_on_without_the_daemon(daemon: FakeDaemon, cache: ManagedCache) -> None:
    """A daemon that dies before it has answered, or before it was asked, costs a step its commits and nothing else."""
    first, second = two_leases(cache)
    daemon.replies_together = 99
    with cache.together():
        first.commit(8)
        daemon.stop()
        second.finish(8)
    with cache.together():
        first.finish(8)
    assert daemon.of(Release) == []
