"""The demo with `--device cuda`: its daemon, workers and engines on the fake driver, each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import ROOT
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules, settings

pytestmark = pytest.mark.full

CPU_TORCH = Path(__file__).parent / "cpu_torch"
_TIMEOUT_S = 300


@pytest.mark.timeout(_TIMEOUT_S)
def test_demo_on_a_device(library: Path, device: Path, tmp_path: Path) -> None:
    """Engines on the device, with pools of the daemon and with memory of their own, are killed, and so is the daemon.

    They hit what was stored, every output has the bits of the computed one, and nothing is left on the device. Decode
    steps are graphs here; without graphs, the demo is a step of the script for GPUs (`test_gpu_script`).
    """
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    traced = tmp_path / "trace"
    driver = settings(directory=device, delay_us=200, register_us_per_mib=0, memory_mib=1024, trace=traced)
    environment = {**os.environ, **driver, "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(CPU_TORCH)}
    done = subprocess.run(
        [sys.executable, "-m", "kvcached", "demo", "--device", "cuda", "--tp", "2", "--cuda-graphs", "--json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outputs_identical"]
    assert {each["name"] for each in report["rounds"] if any(each["loaded_tokens"])} >= {"evicted", "daemon back"}
    records = trace.read(traced)
    assert trace.broken_rules(records) == []
    assert trace.calls(records, "cuMemcpyBatchAsync")
    assert trace.calls(records, "cuGraphLaunch")
    assert live_granules(device) == 0
