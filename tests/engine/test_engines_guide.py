"""What docs/engines.md and docs/sdk.md say of offload mode, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kvcached.config.schema import load_config
from tests.project.daemon_process import clean_environment, running_daemon
from tests.project.source_tree import ROOT

GUIDE = (ROOT / "docs/engines.md").read_text()
((PROGRAM, OUTPUT),) = re.findall(r"```python complete\n(.*?)```.*?```text\n(.*?)```", GUIDE, re.DOTALL)
FRAGMENTS = re.findall(r"```python attached\n(.*?)```", (ROOT / "docs/sdk.md").read_text(), re.DOTALL)

#: What the fragments take for granted, and what shows that they did what the page says.
BEFORE = """
import numpy as np
import torch
from kvcached_client import (
    Admin, DaemonFailure, EnginePages, KeyChain, OffloadClient, OffloadLayout, OffloadShard, Refused, new_instance
)
keyspace, prompt, table = bytes(32), range(50), np.arange(8)
"""
BETWEEN = """
for tensor in kv.values():
    tensor[:] = 0
"""
AFTER = """
print(hold.hit, loaded_blocks, [int(tensor[:3].sum()) for tensor in kv.values()])
shard.close()
client.close()
"""


def output_of(program: str, directory: Path) -> tuple[str, str]:
    """What a program prints to stdout and stderr, beside a daemon with the configuration that the guide names."""
    with running_daemon(ROOT / "configs/offload-cpu.toml", directory / "run"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**clean_environment(), "KVCACHED_RUN_DIR": str(directory / "run")},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    return done.stdout, done.stderr


def test_guide_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    """The engine in docs/engines.md prints what the page says: its successor loads what it stored."""
    assert output_of(PROGRAM, tmp_path) == (OUTPUT, "")


def test_fragments_store_and_load(tmp_path: Path) -> None:
    """The fragments of docs/sdk.md connect, miss and store; run again, they load what they stored before."""
    connect, load, store = FRAGMENTS
    fill = "for tensor in kv.values():\n    tensor[:] = 1\n"
    program = BEFORE + connect + fill + load + store + BETWEEN + load + AFTER

    assert output_of(program, tmp_path) == ("3 3 [1536, 1536]\n", "")


def test_guide_program_computes_while_copies_are_paused(tmp_path: Path) -> None:
    """The engine in docs/engines.md computes what it may not load, and its output is the same."""
    successor = 'run("second"'
    paused = f"from kvcached_client import Admin\nAdmin.connect().pause()\n{successor}"
    expected = OUTPUT.replace("second 0: 20 of 22", "second 0: 0 of 22")
    assert expected != OUTPUT

    assert output_of(PROGRAM.replace(successor, paused), tmp_path) == (expected, "")


def test_fragments_compute_while_copies_are_paused(tmp_path: Path) -> None:
    """The fragments of docs/sdk.md load nothing of a hit while copies are paused, and give their lease back."""
    connect, load, store = FRAGMENTS
    pause = "Admin.connect().pause()\n"
    leases = "print([each.leases for each in Admin.connect().stats().hosts])\n"
    program = BEFORE + connect + load + store + BETWEEN + pause + load + store + leases + AFTER

    assert output_of(program, tmp_path) == ("[0]\n3 0 [0, 0]\n", "")


def test_guide_starts_the_configuration_that_is_shipped() -> None:
    """The command for the daemon names a configuration that serves engines in offload mode, and nothing else."""
    (path,) = set(re.findall(r"kvcached supervise --config (\S+)", GUIDE))
    config = load_config(ROOT / path, environment={})

    assert config.offload is not None
    assert not config.replica
