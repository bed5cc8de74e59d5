from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.demo_figure import draw
from examples.demo.report import Report, sentence
from tests.project.daemon_process import clean_environment, running_daemon
from tests.project.source_tree import ROOT

README = (ROOT / "README.md").read_text()


def python_block() -> str:
    """The session in the README."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return str(block)


def test_readme_session_runs(tmp_path: Path) -> None:
    """The README's session, run against a daemon as the README starts it, prints what the README says."""
    block = python_block()
    expected = re.findall(r"print\(.*\)  # (.*)", block)
    with running_daemon(ROOT / "configs/cpu-tp1.toml", tmp_path / "run"):
        session = subprocess.run(
            [sys.executable, "-c", block],
            cwd=ROOT,
            env={**clean_environment(), "KVCACHED_RUN_DIR": str(tmp_path / "run")},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    assert (session.stdout.split(), session.stderr) == (expected, "")


def test_readme_begins_with_what_it_is() -> None:
    """The first screen says what this is, for whom, which kvcached, what it does not do, and what it gives."""
    start = "\n".join(README.splitlines()[:36])

    for part in (
        "A daemon that owns the KV cache",
        "Not to be confused with",
        "vLLM",
        "your own engine",
        "**Alpha.**",
        "ran on one GPU",
        "Not supported yet",
        "First token",
        "docs/figures/demo.svg",
    ):
        assert part in start


def test_readme_figures_are_those_of_a_run() -> None:
    """The README's sentence and its bars are what the committed output of `kvcached demo --json` comes to."""
    figures = ROOT / "docs/figures"
    report = msgspec.json.decode((figures / "demo.json").read_bytes(), type=Report)

    assert report.outputs_identical
    assert all(each.hits for each in report.rounds)
    assert sentence(report) in README
    assert (figures / "demo.svg").read_text() == draw(report)
