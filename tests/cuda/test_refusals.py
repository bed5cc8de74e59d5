"""Whichever call of the driver is refused: what was made before it is given up again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cuda.conftest import ROOT
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules, settings

#: What makes something, and what ends it.
PAIRS = {
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
    "cuMemHostRegister": "cuMemHostUnregister",
    "cuStreamCreate": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
}


def test_refused_call_leaves_nothing(library: Path, device: Path, tmp_path: Path) -> None:
    """Memory, gates, fences, copies: each call that makes them is refused once; all but the rig is ended afterwards."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    driver = {"directory": device, "delay_us": 0, "register_us_per_mib": 0, "trace": tmp_path / "trace"}
    environment = {**os.environ, **settings(**driver), "LD_LIBRARY_PATH": str(library.parent)}
    command = [sys.executable, "-m", "tests.cuda.refusals"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    assert all(count >= 8 for count in json.loads(done.stdout).values()), done.stdout
    records = trace.read(tmp_path / "trace")
    assert trace.broken_rules(records) == []
    names = Counter(record.name.removesuffix("_v2") for record in records if record.result == "CUDA_SUCCESS")
    left = {made: names[made] - names[ended] for made, ended in PAIRS.items()}
    assert left == {**dict.fromkeys(PAIRS, 0), **RIG}
    assert names["cuMemCreate"] + names["cuMemImportFromShareableHandle"] - names["cuMemRelease"] == 1
    assert live_granules(device) == 0


#: What the rig of the program has until it ends.
RIG = {"cuDevicePrimaryCtxRetain": 1, "cuMemAddressReserve": 1, "cuMemMap": 1, "cuStreamCreate": 1}
