"""Settings of vLLM under which blocks come and go differently."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import assert_same
from tests.vllm.server import VllmServer, ended

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

#: Where vLLM recomputes a preempted request it adds up in another order.
ROUNDING = 1e-4


@pytest.fixture
def small_daemon(tmp_path: Path) -> Iterator[CacheDaemon]:
    """A daemon of the test's own with a small host pool; the test starts it."""
    daemon = CacheDaemon(tmp_path, slabs=2)
    yield daemon
    daemon.stop()


def test_preemption_and_pressure(
    small_daemon: CacheDaemon, models: Path, reference: VllmServer, prompt: Prompts, tmp_path: Path
) -> None:
    """Requests that preempt each other, on a host pool that they overflow and that comes late, come out as without."""
    tight = VllmServer(
        tmp_path,
        "tight",
        models / "model",
        "--num-gpu-blocks-override=28",
        "--max-model-len=512",
        "--max-num-batched-tokens=96",
        run_dir=small_daemon.run_dir,
    )
    prompts = [prompt(5, number % 12) for number in range(24)]
    expected = [reference.complete(tokens, tokens=100) for tokens in prompts]
    with ended(tight):
        tight.wait_until_ready()
        assert tight.complete(prompts[0]).tokens == reference.complete(prompts[0]).tokens  # nobody to ask yet
        small_daemon.start()
        small_daemon.until_sessions(1)
        for _ in range(2):
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda tokens: tight.complete(tokens, tokens=100), prompts))
            assert max(map(type(answers[0]).distance, answers, expected)) < ROUNDING
        assert tight.metric("vllm:num_preemptions_total") > 0
        assert small_daemon.count("host_evicted_blocks") + small_daemon.count("store_refused_blocks") > 0
        small_daemon.until_idle()
    small_daemon.until_sessions(0)
    small_daemon.until_idle()


def test_without_prefix_caching_of_vllm(
    models: Path, daemon: CacheDaemon, reference: VllmServer, prompt: Prompts, tmp_path: Path
) -> None:
    """A server whose own prefix cache is off hits the daemon's all the same."""
    server = VllmServer(tmp_path, "uncached", models / "model", "--no-enable-prefix-caching", run_dir=daemon.run_dir)
    tokens = prompt(6)
    with ended(server):
        server.wait_until_ready()
        daemon.until_sessions(3)
        assert_same(server.complete(tokens), reference.complete(tokens))
        daemon.until_idle()
        assert_same(server.complete(tokens), reference.complete(tokens))
    daemon.until_sessions(2)


def test_tensor_parallel(
    models: Path, daemon: CacheDaemon, reference: VllmServer, prompt: Prompts, tmp_path: Path
) -> None:
    """Two shards store and load their halves of each block; a hit comes to the bits of a hit in vLLM's own cache."""
    server = VllmServer(tmp_path, "parallel", models / "model", "--tensor-parallel-size=2", run_dir=daemon.run_dir)
    tokens = prompt(9)
    with ended(server):
        server.wait_until_ready()
        daemon.until_sessions(3)
        cold, local = server.complete(tokens), server.complete(tokens)
        assert cold.distance(reference.complete(tokens)) < ROUNDING
        assert local.cached_tokens == 8 * BLOCK_SIZE
        server.forget()
        assert_same(server.complete(tokens), local)
    daemon.until_sessions(2)
