from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
    """The first 30 lines say what this is and which kvcached, and hold a block's life, a session and both commands."""
    start = "\n".join(README.splitlines()[:30])

    for part in (
        "A daemon that owns the KV cache",
        "not the other kvcached",
        "FREE",
        "CACHED",
        "make demo",
        "make test",
    ):
        assert part in start
    assert python_block() in start
