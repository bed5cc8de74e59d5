"""kvcached beside another connector of vLLM's, joined by `MultiConnector`; and what workers tell of their blocks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.conftest import Prompts
from tests.vllm.server import CONNECTOR, VllmServer, ended, environment, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_prompt_comes_from_the_daemon_beside_another_connector(models: Path, prompt: Prompts, tmp_path: Path) -> None:
    """With a connector beside it that has nothing, kvcached serves what it has, and vLLM publishes its counters."""
    daemon = CacheDaemon(tmp_path, slabs=8)
    daemon.start()
    files = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }
    joined = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [CONNECTOR, files]},
    }
    tokens = prompt(6)
    server = VllmServer(tmp_path, "joined", models / "model", run_dir=daemon.run_dir, connector=joined)
    try:
        with ended(server):
            server.wait_until_ready()
            daemon.until_sessions(1)
            first = server.complete(tokens)
            server.forget()
            again = server.complete(tokens)
            assert (again, again.cached_tokens) == (first, 5 * BLOCK_SIZE)
            assert server.metric("vllm:external_prefix_cache_hits_total") == 5 * BLOCK_SIZE
            assert server.metric("vllm:kvcached_loaded_blocks_total") == 5
    finally:
        daemon.stop()


#: What kvcached is told of workers' blocks: by another connector, and by ranks of a model with one head and states.
CHECKS = """
from types import SimpleNamespace
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from kvcached_client.vllm.daemon.connect import common_layout
from kvcached_client.vllm.messages import KvcachedPages

def config(ranks, stages=1):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages),
        model_config=SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 1),
        cache_config=SimpleNamespace(block_size=16),
        speculative_config=None,
    )

attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
state = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
pages = {(0, rank): KvcachedPages(4, 4096, (4096,), bytes(16), b"", None) for rank in range(2)}
for specs in ([attention], [attention, state]):
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    print(common_layout(pages, config(2), cache).replicated)
stages = {(stage, rank): page for stage in range(2) for (_, rank), page in pages.items()}
layout = common_layout(stages, config(2, stages=2), cache)
print(layout.shards, layout.replicated)
longer = stages | {(1, rank): KvcachedPages(4, 8192, (4096, 4096), bytes(16), b"", None) for rank in range(2)}
for told in (longer, {(0, 0): SimpleNamespace(agent="of another connector")}):
    try:
        common_layout(told, config(2, stages=2), cache)
    except ValueError as error:
        print(error)
"""


def test_workers_blocks_are_what_their_ranks_have() -> None:
    """Ranks with states and stages share no blocks; stages with unlike layers, and other words, are refused."""
    done = subprocess.run(
        [interpreter(), "-P", "-c", CHECKS], env=environment(None), capture_output=True, text=True, check=True
    )
    alike, divided, staged, unlike, refused = done.stdout.splitlines()[-5:]
    assert (alike, divided, staged) == ("True", "False", "4 False")
    assert unlike.startswith("the workers' blocks differ (0: 4096 bytes, ")
    assert unlike.endswith("a pipeline_parallel_size that divides its layers")
    assert refused.startswith("the workers have told of SimpleNamespace instead of their KV tensors: MultiConnector")
