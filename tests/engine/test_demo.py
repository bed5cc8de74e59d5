"""`kvcached demo`, whole, and what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcached import demo


def test_demo_without_torch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where torch is missing nothing is started, and the message names the extra that brings it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    assert demo.run_demo(json_output=True) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pip install 'kvcached-daemon[examples]'" in printed.err.replace("\n", " ")


def test_demo_without_the_examples_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An installed daemon has no examples beside it; the message says to use a checkout."""
    monkeypatch.setattr(demo, "_ROOT", tmp_path)
    assert demo.run_demo(json_output=False) == 3
    assert "checkout" in capsys.readouterr().err


def test_demo_never_imports_torch() -> None:
    """The demo's own process stays without torch: the engine is a program of its own."""
    code = "import sys, kvcached.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tp", [1, 2])
def test_demo_outputs_are_identical(tp: int) -> None:
    """Device hit and restarted engine give the cold run's tokens and logits, and compute one token of the prompt."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "kvcached", "demo", "--json", "--tp", str(tp)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report = json.loads(finished.stdout)
    assert report["outputs_identical"] is True
    cold, *warm = report["rounds"]
    assert cold["hit_tokens"] == [0, 0]
    assert [each["hit_tokens"] for each in warm] == [[1024, 1024], [1024, 1024]]
