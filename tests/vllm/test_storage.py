"""What storage keeps for a server outlives every process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin
from tests.storage.redis.servers import Server
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, ROUNDING
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import assert_same
from tests.vllm.server import VllmServer, ended

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCKS = 8
TWO_RANKS = "--tensor-parallel-size=2"


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a path that is short enough for sockets."""
    return tmp_path_factory.mktemp("disk")


@contextlib.contextmanager
def everything(
    directory: Path, model: Path, *options: str, layout: str = "engine"
) -> Iterator[tuple[CacheDaemon, VllmServer]]:
    """A daemon with storage and a server on it; both end in order, the server first."""
    daemon = CacheDaemon(directory, has_storage=True, storage_layout=layout)
    daemon.start()
    try:
        with ended(VllmServer(directory, "server", model, *options, run_dir=daemon.run_dir)) as server:
            server.wait_until_ready()
            daemon.until_sessions(1)
            yield daemon, server
    finally:
        daemon.stop()


def test_hits_come_from_disk_after_all_was_stopped(directory: Path, models: Path, prompt: Prompts) -> None:
    """After server and daemon were stopped, and started on empty memory, a prompt is hit on disk, the answer as ever.

    It is compared with the one that the server gave when it had the same blocks in its own prefix cache.
    """
    tokens, others = prompt(BLOCKS), prompt(BLOCKS, "never stored")
    with everything(directory, models / "model") as (daemon, server):
        computed = server.complete(tokens)
        expected = server.complete(tokens)
        daemon.until_stored(BLOCKS)
    assert (computed.cached_tokens, expected.cached_tokens) == (0, (BLOCKS - 1) * BLOCK_SIZE)
    with everything(directory, models / "model") as (daemon, server):
        assert daemon.stats().hosts[0].states["cached"] == 0
        assert_same(server.complete(tokens), expected)
        assert daemon.count("prefetched_blocks") == BLOCKS - 1
        assert server.metric("vllm:kvcached_loaded_blocks_total") == BLOCKS - 1
        assert server.complete(others).cached_tokens == 0
        daemon.until_idle()


def test_servers_of_two_machines_share_what_storage_has(directory: Path, models: Path, prompt: Prompts) -> None:
    """A server hits what one on another machine has computed, with its answer, until that machine clears it."""
    tokens = prompt(BLOCKS)
    with contextlib.ExitStack() as parts:
        service = parts.enter_context(contextlib.closing(Server()))
        one, two = (CacheDaemon(_made(directory / name), shared_url=service.url) for name in ("one", "two"))
        for daemon in (one, two):
            daemon.start()
            parts.callback(daemon.stop)
        with ended(VllmServer(directory, "first", models / "model", run_dir=one.run_dir)) as server:
            server.wait_until_ready()
            server.complete(tokens)
            expected = server.complete(tokens)
            one.until_written(BLOCKS)
        with ended(VllmServer(directory, "second", models / "model", run_dir=two.run_dir)) as server:
            server.wait_until_ready()
            assert_same(server.complete(tokens), expected)
            assert two.count("prefetched_blocks") == BLOCKS - 1
            with Admin.connect(one.run_dir) as admin:
                (space,) = (host.namespace for host in admin.stats().hosts if host.label)
                admin.clear(space)
            two.until(lambda stats: not any(host.states["cached"] for host in stats.hosts), "cleared by the other")
            assert server.complete(tokens, cache_salt="another").cached_tokens == 0
            two.until_idle()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_server_with_other_ranks_hits_what_is_on_disk(directory: Path, models: Path, prompt: Prompts) -> None:
    """After all was stopped, a server with two ranks answers from what one rank has stored as one that computes it.

    Ranks add up in another order, so that the last bits of what was stored are not those that the server computes.
    """
    tokens = prompt(BLOCKS)
    with everything(directory, models / "model", layout="canonical") as (daemon, server):
        server.complete(tokens)
        daemon.until_stored(BLOCKS)
    with everything(directory, models / "model", TWO_RANKS, layout="canonical") as (daemon, server):
        hit = server.complete(tokens)
        assert (hit.cached_tokens, daemon.count("prefetched_blocks")) == ((BLOCKS - 1) * BLOCK_SIZE, BLOCKS - 1)
        computed = server.complete(tokens, cache_salt="another")
        assert computed.cached_tokens == 0
        assert hit.distance(computed) < ROUNDING
        daemon.until_idle()
