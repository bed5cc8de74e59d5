"""One short chaos run; `python -m tests.chaos` plays longer ones."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from tests.project.source_tree import ROOT


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_short_run_is_clean() -> None:
    """In 20 seconds of kills, stops and orders every hit has its bytes; afterwards nothing is held for the dead."""
    with tempfile.TemporaryDirectory(prefix="chaos") as directory:  # a socket's path is short
        command = [sys.executable, "-m", "tests.chaos", "--seeds", "1", "--seconds", "20", "--directory", directory]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
