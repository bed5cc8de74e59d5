"""Models whose groups of layers have caches of their own, on memory of the daemon: killed, vLLM comes back warm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.server import interpreter
from tests.vllm.test_states import CONVOLUTIONS, DELTA_NETS, WIDTH, Kind
from tests.vllm.warm_loop import AT_ONCE, Groups, WarmLoop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WINDOW = 2 * BLOCK_SIZE
KILLS = 3
PROMPTS = 20
SHARE_MIN = 0.95


def states(kind: Kind, *, at_once: int = AT_ONCE, **options: Any) -> Groups:
    """Those of a kind of model with states."""
    return Groups(kind.family, kind.block, kind.options | options, at_once)


def windows(family: str, *, blocks: int = 1, **options: Any) -> Groups:
    """Those of a family with windows, whose hits are multiples of so many blocks of the configured size."""
    return Groups(family, blocks * BLOCK_SIZE, options)


@pytest.mark.parametrize(
    ("family", "ranks", "window"),
    [
        pytest.param(windows("gemma3"), 2, WINDOW, id="windows beside full attention, two ranks"),
        pytest.param(windows("gemma3", pipeline_parallel_size=2), 1, WINDOW, id="windows in two pipeline stages"),
        pytest.param(windows("gemma4", blocks=2), 1, WINDOW, id="windows in larger blocks"),
        pytest.param(windows("mistral"), 1, WINDOW, id="windows only"),
        pytest.param(windows("gpt_oss", load_format="dummy"), 1, WINDOW, id="attention sinks"),
        pytest.param(windows("llama4"), 1, WINDOW, id="chunks"),
        pytest.param(states(CONVOLUTIONS), 1, WIDTH, id="short convolutions"),
        pytest.param(states(CONVOLUTIONS), 2, WIDTH, id="two shards of states"),
        pytest.param(states(DELTA_NETS, at_once=1), 1, WIDTH, id="delta nets"),
        pytest.param(
            states(DELTA_NETS, at_once=1, prefix_match_unit=BLOCK_SIZE), 1, WIDTH, id="hits inside blocks of states"
        ),
    ],
)
def test_killed_engine_comes_back_warm(tmp_path: Path, family: Groups, ranks: int, window: int) -> None:
    """All answers are stock vLLM's, and what was computed before a kill is found, in all groups of layers."""
    script = ("-m", "tests.vllm.tiny_hybrid", tmp_path, family.name, "--window", str(window))
    subprocess.run([interpreter(), *script], cwd=ROOT, check=True)
    # Stages have several steps under way by themselves, and this runner of vLLM's no other queue beside them.
    faults = [] if "pipeline_parallel_size" in family.options else ["async_scheduling"]
    loop = WarmLoop(tmp_path, tmp_path / "model", prompts=PROMPTS, ranks=ranks, seed=3, faults=faults, groups=family)
    with loop.running(tmp_path):
        for number in range(KILLS):
            loop.kill_once(number)
        loop.finish()
    outcome = loop.outcome
    assert outcome.wrong == 0, outcome
    assert outcome.completed > 50, outcome
    assert outcome.share >= SHARE_MIN, outcome
