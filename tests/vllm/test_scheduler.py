"""VLLM's own scheduler and the connector, with everything going wrong; the model needs no kernels, and shows mistakes.

`tests/vllm_connector/test_simulation.py` has the same world around a small vLLM of our own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from typing import Any

import pytest

from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT
from tests.vllm.scheduler.__main__ import KINDS
from tests.vllm.server import interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Of each kind of model; 20 of each took a quarter of an hour beside other tests.
SEEDS = 3


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """What was seen of each kind of model, and of each mistake."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONHASHSEED": "0",
    }
    environment = clean_environment() | variables | {"PYTHONPATH": os.fspath(ROOT)}
    command = [str(interpreter()), "-P", "-m", "tests.vllm.scheduler", "--seeds", "0", str(SEEDS)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_everything_goes_wrong_in_vllms_own_scheduler(told: dict[str, dict[str, Any]], kind: str) -> None:
    """Answers are right and end, engines adopt true blocks only, the daemon has true blocks only, nothing is left."""
    assert told[kind]["failure"] == ""
    assert told[kind]["seen"]["answers"] > 0
    assert told[kind]["seen"].get("adopted", 0) > 0 or KINDS[kind].drafts


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("blocks named before they are computed", "tokens: "),
        ("blocks of before a clear named after it", "is of epoch"),
        ("blocks not held until they are stored", "tokens: "),
        ("blocks held without end", "still held"),
    ],
)
def test_mistakes_are_found(told: dict[str, dict[str, Any]], fault: str, failure: str) -> None:
    """A connector with a mistake fails in the same world."""
    assert failure in told[fault]["failure"]


def test_everything_happens(told: dict[str, dict[str, Any]]) -> None:
    """Loads, failed ones, preemptions, resets, killed engines and killed daemons are among it."""
    seen: Counter[str] = Counter()
    for line in told.values():
        seen += Counter(line["seen"])
    whats = ("loads", "loads_failed", "preemptions", "resets", "killed inside", "killed", "expired")
    assert min(seen[what] for what in whats) >= SEEDS, seen
