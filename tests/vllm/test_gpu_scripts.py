"""The scripts that try vLLM on a GPU run on the CPU as well."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.server import environment, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_TIMEOUT_S = 800


def script(*arguments: str) -> Any:
    """What a script writes to stdout. It imports the daemon from the checkout, and the client, too."""
    variables = environment(None)
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), variables["PYTHONPATH"]))
    command = [str(interpreter()), "-m", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


def test_answers_are_those_of_vllm_alone() -> None:
    """Answers after a reset, after deaths of engine and daemon are vLLM's own to the last bit; wrong loads are seen."""
    report = script("tests.gpu.vllm_answers", "--kinds", "windows-daemon", "states", "--prompts", "3")

    for kind, count in (("windows-daemon", 5), ("states", 4)):
        turns = [each for each in report[kind].values() if isinstance(each, dict)]
        assert [turn["right_to_the_last_bit"] for turn in turns] == [3] * count
        assert all(turn["tokens_found"] >= 3 * 288 for turn in turns[1:])
    assert report["control"]["right_to_the_last_bit"] == 0 < report["control"]["tokens_found"]


def test_times_are_compared() -> None:
    """Each case has its times, and a ratio where both engines have it."""
    small = ("--layers", "1", "--heads", "4", "--tokens", "256", "--cache-gib", "0.25", "--host-gib", "0.25")
    report = script("tests.gpu.vllm_speed", "--rounds", "2", *small)

    assert report["with_over_without"].keys() == {"computed", "own_cache", "unknown_prompts"}
    assert all(len(all_ms) == 2 for all_ms in report["rounds_ms"].values())
    assert report["found_of_a_prompt"] > 0
