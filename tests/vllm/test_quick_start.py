"""The quick start for vLLM: the daemon and the transfer configuration of docs/quick-start.md, with a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.project.documented_commands import in_blocks
from tests.project.quick_start import daemon_of, section
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.conftest import Prompts
from tests.vllm.server import VllmServer, ended
from tests.vllm.test_reuse import HITS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_server_of_the_quick_start_finds_its_prompt_again(models: Path, tmp_path: Path, prompt: Prompts) -> None:
    """What vLLM stored with the section's configuration, it loads from the section's daemon."""
    (words,) = [each for each in in_blocks(section("vLLM")) if each[0] == "python"]
    option, connector = words[-2:]
    assert option == "--kv-transfer-config"
    with daemon_of("vLLM", tmp_path):
        model, run_dir = models / "model", tmp_path / "run"
        with ended(VllmServer(tmp_path, "quick", model, run_dir=run_dir, connector=json.loads(connector))) as server:
            server.wait_until_ready()
            tokens = prompt(5)
            server.complete(tokens)
            server.forget()
            server.complete(tokens)

            assert server.metric(HITS) == 4 * BLOCK_SIZE
