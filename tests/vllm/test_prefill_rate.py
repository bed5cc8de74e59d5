"""How fast vLLM computes prompts is measured, and decides whether blocks come from storage or are computed."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, Completion, random_tokens
from tests.vllm.fleet import assert_same
from tests.vllm.server import CONNECTOR, VllmServer, ended, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Large enough for a prompt to take much longer than all that a request takes beside it.
MODEL = ("--layers=8", "--heads=8", "--kv-heads=2", "--head-dim=64")
BLOCKS = 8
#: Of a long prompt: four steps of vLLM, as many as a rate needs.
LONG_BLOCKS = 60
LONG_PROMPTS = 3
#: What storage takes for a call: many times what it takes to compute so few blocks.
DELAY_S = 2.0
#: Requests wait for storage as long as it takes.
PATIENT = CONNECTOR | {"kv_connector_extra_config": {"hold_deadline_ms": 10_000, "prefetch": "wait_complete"}}
RATE = "vllm:kvcached_prefill_tokens_per_s"
#: Two prompts; storage has both.
FETCHED, COMPUTED = random_tokens("comes from storage", BLOCKS), random_tokens("is computed", BLOCKS)


class FirstRun(NamedTuple):
    """What a server with storage said, which was then stopped.

    Attributes:
        model, directory: of it, and of the daemon with its storage.
        fetched: to the first prompt, with its blocks in vLLM's own prefix cache.
        computed: to the other one, computed.
        rates: tokens of long prompts computed in a second: as the server had them at first and at the end, and as was
            measured from outside.
    """

    model: Path
    directory: Path
    fetched: Completion
    computed: Completion
    rates: tuple[float, float, float]


@contextlib.contextmanager
def everything(directory: Path, model: Path, *, delay_s: float = 0.0) -> Iterator[tuple[CacheDaemon, VllmServer]]:
    """A daemon with storage and a server on it; both end in order, the server first."""
    daemon = CacheDaemon(directory, has_storage=True, storage_delay_s=delay_s)
    daemon.start()
    try:
        with ended(VllmServer(directory, "server", model, run_dir=daemon.run_dir, connector=PATIENT)) as server:
            server.wait_until_ready()
            daemon.until_sessions(1)
            yield daemon, server
    finally:
        daemon.stop()


def compute_long(server: VllmServer, run: str) -> float:
    """Have long prompts computed that nobody has; how many tokens of them in a second."""
    prompts = [random_tokens(f"{run} {number}", LONG_BLOCKS) for number in range(LONG_PROMPTS)]
    began = time.monotonic()
    for tokens in prompts:
        assert server.complete(tokens, tokens=1).cached_tokens == 0
    return LONG_PROMPTS * LONG_BLOCKS * BLOCK_SIZE / (time.monotonic() - began)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """A server has computed the two prompts, storage has their blocks, and all is stopped."""
    folder = tmp_path_factory.mktemp("wide")
    subprocess.run([interpreter(), ROOT / "tests/vllm/tiny_model.py", folder, *MODEL], check=True)
    model, directory = folder / "model", tmp_path_factory.mktemp("disk")
    with everything(directory, model) as (daemon, server):
        server.complete(FETCHED)
        fetched, computed = server.complete(FETCHED), server.complete(COMPUTED)
        daemon.until_stored(2 * BLOCKS)
        rate = server.metric(RATE)
        measured = compute_long(server, "first")
        return FirstRun(model, directory, fetched, computed, (rate, server.metric(RATE), measured))


def test_rate_is_what_long_prompts_get(first_run: FirstRun) -> None:
    """After two short prompts the rate is unknown; after long ones it is within a factor of 2 of what they took."""
    unknown, rate, measured = first_run.rates
    assert unknown == 0
    assert measured / 2 < rate < measured * 2


def test_what_is_computed_sooner_is_not_fetched(first_run: FirstRun) -> None:
    """Once vLLM's rate and the time of a slow fetch are known, a stored prompt is computed; outputs are as ever.

    The one that was fetched is compared with an answer from vLLM's own prefix cache, the other with a computed one.
    """
    with everything(first_run.directory, first_run.model, delay_s=DELAY_S) as (daemon, server):
        compute_long(server, "second")
        assert server.metric(RATE) > 0
        assert_same(server.complete(FETCHED), first_run.fetched)
        assert (daemon.count("prefetched_blocks"), daemon.count("prefetches_recompute")) == (BLOCKS - 1, 0)
        assert_same(server.complete(COMPUTED), first_run.computed)
        assert (daemon.count("prefetched_blocks"), daemon.count("prefetches_recompute")) == (BLOCKS - 1, 1)
        daemon.until_idle()
