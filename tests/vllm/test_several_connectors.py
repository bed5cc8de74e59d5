"""kvcached beside another connector of vLLM's, joined by `MultiConnector`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.conftest import Prompts
from tests.vllm.server import CONNECTOR, VllmServer, ended

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
