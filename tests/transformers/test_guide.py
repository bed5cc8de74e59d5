"""The program in docs/transformers.md, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvcached_client.transformers import PromptCache
from tests.project.daemon_process import clean_environment, running_daemon
from tests.project.source_tree import ROOT
from tests.transformers.models import llama, tokens

GUIDE = (ROOT / "docs/transformers.md").read_text()
((PROGRAM, OUTPUT),) = re.findall(r"```python complete\n(.*?)```.*?```text\n(.*?)```", GUIDE, re.DOTALL)

(SNIPPET,) = re.findall(r"```python transformers\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def said(directory: Path) -> str:
    """What the program prints."""
    environment = {**clean_environment(), "KVCACHED_RUN_DIR": str(directory / "run")}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    """The second prompt finds what the first one has stored; run again, both find it."""
    with running_daemon(ROOT / "configs/offload-cpu.toml", tmp_path / "run"):
        assert said(tmp_path) == OUTPUT
        assert said(tmp_path) == OUTPUT.replace("0 of 203", "192 of 203")


def test_readme_says_how_to_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines in the README, run twice, find what they have stored."""
    monkeypatch.setenv("KVCACHED_RUN_DIR", str(tmp_path / "run"))
    names = {"model": llama(9), "input_ids": tokens(100)}
    with running_daemon(ROOT / "configs/offload-cpu.toml", tmp_path / "run"):
        exec(SNIPPET, names)  # noqa: S102 - as it stands in the README
        with PromptCache.connect(names["model"]) as prompts:
            assert prompts.load(names["input_ids"]).get_seq_length() == 96
