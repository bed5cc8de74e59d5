"""`tests/gpu/run.sh`, which is for real GPUs, runs from end to end on the fake driver, whose speeds mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import Distribution, entry_points
from pathlib import Path

import pytest

from tests.cuda.conftest import ROOT
from tests.cuda.test_demo import CPU_TORCH
from tests.cuda_driver.device import live_granules, settings

_TIMEOUT_S = 900  # one machine plays device and processors


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S)
def test_script_for_gpus_runs(library: Path, device: Path, tmp_path: Path) -> None:
    """Every step passes and leaves its result, and nothing is left on the device."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    driver = settings(directory=device, delay_us=50, register_us_per_mib=0, memory_mib=2048)
    environment = {
        **os.environ, **driver,
        "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(CPU_TORCH), "PYTHON": sys.executable,
        "GPU_MIB": "16", "GPU_ROUNDS": "10", "GPU_FILLS": "2", "GPU_WARM_FILLS": "200",
        "GPU_LIMIT_S": str(_TIMEOUT_S - 30),
    }  # fmt: skip
    done = subprocess.run(
        [str(ROOT / "tests/gpu/run.sh"), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((tmp_path / "checks.json").read_text())
    assert all(each["ok"] for each in checks.values() if isinstance(each, dict))
    assert checks["batched_copy"]["as_of_12080"]
    assert checks["batched_copy"]["as_of_13000"]
    assert checks["crossover"]["triton_over_large"].startswith("no Triton")
    copying = json.loads((tmp_path / "copying.json").read_text())
    assert copying["ok"]
    assert copying["ipc_after_death"]["bytes_kept"]
    assert json.loads((tmp_path / "connector.json").read_text())["device"] == "cpu"
    assert json.loads((tmp_path / "warm.json").read_text())["ok"]
    graphs = json.loads((tmp_path / "graphs.json").read_text())
    assert graphs["ok"]
    assert not graphs["by_graph"]
    figures = [json.loads(line) for line in (tmp_path / "cuda.json").read_text().splitlines()]
    assert {figure["device"] for figure in figures} == {"Fake CUDA device 0, CUDA 13.0"}
    for demo in ("demo-tp2", "demo-graphs"):
        assert json.loads((tmp_path / f"{demo}.json").read_text())["outputs_identical"]
    assert live_granules(device) == 0
    named = Distribution.at(tmp_path / "packages" / "kvcached_daemon-0.dist-info").entry_points
    assert set(named) >= set(entry_points(group="kvcached.storage"))  # a tree that is not installed has its backends


def test_script_says_what_is_missing(tmp_path: Path) -> None:
    """Without a package that it needs, the script says which, and tries nothing."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['safetensors'] = None\n")
    script = [str(ROOT / "tests/gpu/run.sh"), str(tmp_path / "out")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 3
    assert "lacks safetensors" in done.stderr
