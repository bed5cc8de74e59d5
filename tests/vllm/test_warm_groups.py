"""Models whose groups of layers have caches of their own, on memory of the daemon: killed, vLLM comes back warm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.server import interpreter
from tests.vllm.warm_loop import Groups, WarmLoop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WINDOW = 2 * BLOCK_SIZE
KILLS = 3
PROMPTS = 20
SHARE_MIN = 0.95


@pytest.mark.parametrize(
    ("family", "ranks", "blocks", "options"),
    [
        pytest.param("gemma3", 2, 1, {}, id="windows beside full attention, two ranks"),
        pytest.param("gemma4", 1, 2, {}, id="windows in larger blocks"),
        pytest.param("mistral", 1, 1, {}, id="windows only"),
        pytest.param("gpt_oss", 1, 1, {"load_format": "dummy"}, id="attention sinks"),
        pytest.param("llama4", 1, 1, {}, id="chunks"),
    ],
)
def test_killed_engine_comes_back_warm(
    tmp_path: Path, family: str, ranks: int, blocks: int, options: dict[str, Any]
) -> None:
    """All answers are stock vLLM's, and what was computed before a kill is found, in all groups of layers."""
    script = ("-m", "tests.vllm.tiny_hybrid", tmp_path, family, "--window", str(WINDOW))
    subprocess.run([interpreter(), *script], cwd=ROOT, check=True)
    loop = WarmLoop(
        tmp_path, tmp_path / "model", prompts=PROMPTS, ranks=ranks, seed=3, faults=["async_scheduling"],
        groups=Groups(family, blocks * BLOCK_SIZE, options),
    )  # fmt: skip
    with loop.running(tmp_path):
        for number in range(KILLS):
            loop.kill_once(number)
        loop.finish()
    outcome = loop.outcome
    assert outcome.wrong == 0, outcome
    assert outcome.completed > 50, outcome
    assert outcome.share >= SHARE_MIN, outcome
