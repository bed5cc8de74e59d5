"""Settings of vLLM under which blocks come and go differently, and one that cannot work."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached_client.blocks.host_layout import slots_per_slab
from tests.vllm.cache_daemon import SLAB_BYTES, CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, ROUNDING
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import assert_same
from tests.vllm.server import CONNECTOR, VllmServer, ended

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class Setting(NamedTuple):
    """A server of its own kind, and its daemon."""

    server: VllmServer
    daemon: CacheDaemon


class Settings(NamedTuple):
    """All of them: they start at the same time, for each leaves a core idle most of the while."""

    tight: Setting  #: few blocks in vLLM and in the host pool; its daemon is not there at first
    uncached: Setting
    parallel: Setting
    replicated: Setting  #: of a model whose K and V are the same on both shards
    refused: VllmServer
    prefix_lm: VllmServer  #: of a model with attention to the whole prompt
    pooling: VllmServer  #: of embeddings that are means over the whole prompt


#: A Prefix LM, of which nothing is computed.
PREFIX_LM = {
    "architectures": ["HrmTextForCausalLM"],
    "model_type": "hrm_text",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers_per_stack": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, models: Path, one_head_model: Path) -> Iterator[Settings]:
    """The servers, not ready yet."""
    folder = tmp_path_factory.mktemp("settings")
    with contextlib.ExitStack() as stack:

        def daemon(name: str, slabs: int) -> CacheDaemon:
            (folder / name).mkdir()
            made = CacheDaemon(folder / name, slabs=slabs)
            stack.callback(made.stop)
            return made

        def server(
            name: str,
            run_dir: Path,
            *options: str,
            connector: object = CONNECTOR,
            model: Path | None = None,
        ) -> VllmServer:
            made = VllmServer(folder, name, model or models / "model", *options, run_dir=run_dir, connector=connector)
            return stack.enter_context(ended(made))

        small, large, one_head = daemon("small", 2), daemon("large", 64), daemon("one-head", 8)
        large.start()
        one_head.start()
        two_shards = "--tensor-parallel-size=2"
        few_blocks = ("--num-gpu-blocks-override=28", "--max-model-len=512", "--max-num-batched-tokens=96")
        policy = "kv_load_failure_policy"
        (folder / "prefix-lm").mkdir()
        (folder / "prefix-lm" / "config.json").write_text(json.dumps(PREFIX_LM))
        short = "--max-model-len=512"  # a prompt in one pass
        made_up = ("--load-format=dummy", "--skip-tokenizer-init", short)
        means = ("--runner=pooling", "--convert=embed", '--pooler-config={"seq_pooling_type": "MEAN"}')
        yield Settings(
            tight=Setting(server("tight", small.run_dir, *few_blocks), small),
            uncached=Setting(server("uncached", large.run_dir, "--no-enable-prefix-caching"), large),
            parallel=Setting(server("parallel", large.run_dir, two_shards), large),
            replicated=Setting(server("replicated", one_head.run_dir, two_shards, model=one_head_model), one_head),
            refused=server("refused", large.run_dir, connector={k: v for k, v in CONNECTOR.items() if k != policy}),
            prefix_lm=server("prefix-lm", large.run_dir, *made_up, model=folder / "prefix-lm"),
            pooling=server("pooling", large.run_dir, *means, short),
        )


def test_preemption_and_pressure(settings: Settings, reference: VllmServer, prompt: Prompts) -> None:
    """Requests that preempt each other, on a host pool that they overflow and that comes late, come out as without."""
    server, daemon = settings.tight
    prompts = [prompt(5, number % 12) for number in range(24)]
    expected = [reference.complete(tokens, tokens=100) for tokens in prompts]
    server.wait_until_ready()
    assert server.complete(prompts[0]).tokens == reference.complete(prompts[0]).tokens  # nobody to ask yet
    daemon.start()
    daemon.until_sessions(1)
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda tokens: server.complete(tokens, tokens=100), prompts))
        assert max(answer.distance(right) for answer, right in zip(answers, expected, strict=True)) < ROUNDING
    assert server.metric("vllm:num_preemptions_total") > 0
    assert daemon.count("loaded_blocks") > 0
    assert daemon.count("host_evicted_blocks") + daemon.count("store_refused_blocks") > 0
    daemon.until_idle()


def test_without_prefix_caching_of_vllm(settings: Settings, reference: VllmServer, prompt: Prompts) -> None:
    """A server whose own prefix cache is off hits the daemon's all the same."""
    server, daemon = settings.uncached
    tokens = prompt(6)
    server.wait_until_ready()
    daemon.until(lambda stats: stats.sessions > 0, "attached")
    assert_same(server.complete(tokens), reference.complete(tokens))
    daemon.until_idle()
    assert_same(server.complete(tokens), reference.complete(tokens))


def test_tensor_parallel(settings: Settings, reference: VllmServer, prompt: Prompts) -> None:
    """Two shards store and load their halves of each block; a hit comes to the bits of a hit in vLLM's own cache."""
    server, daemon = settings.parallel
    tokens = prompt(9)
    server.wait_until_ready()
    settings.uncached.server.wait_until_ready()
    daemon.until_sessions(2)
    cold, local = server.complete(tokens), server.complete(tokens)
    assert cold.distance(reference.complete(tokens)) < ROUNDING
    assert local.cached_tokens == 8 * BLOCK_SIZE
    server.forget()
    assert_same(server.complete(tokens), local)
    daemon.until_idle()


def test_tensor_parallel_over_one_head(settings: Settings, prompt: Prompts) -> None:
    """Two shards with the same K and V share one copy of each block, and a hit on it comes to the same bits."""
    server, daemon = settings.replicated
    tokens = prompt(9)
    server.wait_until_ready()
    daemon.until_sessions(1)
    server.complete(tokens)
    local = server.complete(tokens)
    assert local.cached_tokens == 8 * BLOCK_SIZE
    server.forget()
    assert_same(server.complete(tokens), local)
    daemon.until_idle()
    layers, kv, head_dim, float_bytes = 2, 2, 32, 4
    block_bytes = layers * kv * BLOCK_SIZE * head_dim * float_bytes
    assert daemon.stats().hosts[0].slots == 8 * slots_per_slab(SLAB_BYTES, block_bytes, 1)


def test_consumer_loads_and_stores_nothing(
    settings: Settings, reference: VllmServer, models: Path, tmp_path: Path, prompt: Prompts
) -> None:
    """With `kv_role` `kv_consumer` a server hits what another one has stored, and stores nothing."""
    writer, daemon = settings.uncached
    stored, own = prompt(6, "of the writer"), prompt(6, "of the reader")
    for server in (writer, settings.parallel.server):
        server.wait_until_ready()
    daemon.until_sessions(2)
    assert_same(writer.complete(stored), reference.complete(stored))
    daemon.until_idle()
    connector = {**CONNECTOR, "kv_role": "kv_consumer"}
    server = VllmServer(tmp_path, "reader", models / "model", run_dir=daemon.run_dir, connector=connector)
    with ended(server) as reader:
        reader.wait_until_ready()
        daemon.until_sessions(3)
        before = daemon.count("stored_blocks")
        hit = reader.complete(stored)
        assert_same(hit, reference.complete(stored))
        assert hit.cached_tokens > 0
        assert_same(reader.complete(own), reference.complete(own))
        reader.forget()
        daemon.until_idle()
        assert daemon.count("stored_blocks") == before


def test_failing_requests_for_failed_loads_is_refused(settings: Settings) -> None:
    """Without kv_load_failure_policy=recompute vLLM does not start, and says what to set."""
    assert settings.refused.wait_until_ended() != 0
    assert "kv_load_failure_policy is 'fail'" in settings.refused.log()
    assert "set it to 'recompute'" in settings.refused.log()


def test_prompts_of_which_no_part_can_be_cached_are_refused(settings: Settings) -> None:
    """A model that attends to the whole prompt, or pools all of its tokens, would get wrong blocks, or end vLLM."""
    for server, words in (
        (settings.prefix_lm, "attend to tokens behind them"),
        (settings.pooling, "no part of this model's prompts may come from a cache"),
    ):
        assert server.wait_until_ended() != 0
        assert words in server.log()
