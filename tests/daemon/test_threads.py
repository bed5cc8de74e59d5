"""How many threads the daemon's processes have: it is the daemon's business, and not that of the machine's cores."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.conftest import CONFIG
from tests.daemon.test_deaths import children
from tests.project.daemon_process import running_daemon
from tests.project.source_tree import ROOT

VARIABLE = "OPENBLAS_NUM_THREADS"
STORAGE = """
[host]
size_bytes = "8MiB"
slab_bytes = "1MiB"
[storage.settings]
directory = "{disk}"
capacity_bytes = "64MiB"
free_space_floor_bytes = 0
"""


def variable_of(pid: int) -> str | None:
    found = re.search(rb"\0OPENBLAS_NUM_THREADS=(\w*)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    return found[1].decode() if found is not None else None


@pytest.mark.parametrize("given", ["", "2"])
def test_no_process_starts_a_thread_for_each_core(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's library starts none in the daemon, and workers and storage inherit that; an operator's own wish stays."""
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "kvcached.toml"
    path.write_text(CONFIG + STORAGE.replace("{disk}", str(tmp_path / "disk")))

    variables = {VARIABLE: given} if given else {}
    with running_daemon(path, tmp_path / "run", variables=variables) as daemon:
        assert [variable_of(pid) for pid in children(daemon.pid)] == [given or "1"] * 2


@pytest.mark.parametrize("module", ["kvcached.__main__", "kvcached_client.offload"])
def test_only_the_command_says_how_many_threads(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command can still say it when it begins, for NumPy is not loaded by then; the SDK, in engines, never does."""
    monkeypatch.delenv(VARIABLE, raising=False)
    code = f"import os, sys, {module}; print('numpy' in sys.modules, os.environ.get('{VARIABLE}'))"

    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    assert said == f"{module != 'kvcached.__main__'} None\n"
