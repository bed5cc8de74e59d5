"""The suite cuda at a small size on the fake driver, whose figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import ROOT
from tests.cuda_driver import trace
from tests.cuda_driver.conftest import device, library
from tests.cuda_driver.device import live_granules, settings

__all__ = ["device", "library"]

_SMALL = """
import sys
from benchmarks.__main__ import main
from benchmarks.suites import cuda
cuda._COPY_BYTES, cuda._REGISTERED_BYTES, cuda._KERNEL_BYTES, cuda._ENGINE_S = 4 << 20, 1 << 20, 1 << 16, 0.001
main(["cuda", "--json", "--rounds", "10"])
"""
_ROWS = ("rows_512k", "rows_1m", "rows_2560k")
_PIECES = ("pieces_32k", "pieces_72k")
_SMALL_PIECES = ("small_8k", "small_16k")


def _cases(shapes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{shape}_{kind}" for shape in shapes for kind in ("store", "load", "bulk_load"))


_PROMISED = {
    **{f"{kind}_over_one_copy_ratio": "value >= 0.95" for kind in ("rows", *_cases(_ROWS))},
    **{f"{kind}_over_one_copy_ratio": "value >= 0.85" for kind in ("pieces", *_cases(_PIECES))},
    **{f"{shape}_both_ways_over_sum_ratio": "value >= 0.8" for shape in (*_ROWS, *_PIECES)},
    **{f"{shape}_layerwise_over_bulk": "value <= 1.1" for shape in _PIECES},
    **{f"{shape}_first_layer_beyond_its_bytes_ms": "value <= 1" for shape in _PIECES},
    "engine_device_copies_under_loads_ratio": "value <= 1.03",
}


@pytest.mark.full
@pytest.mark.timeout(180)
def test_cuda_suite_has_every_promised_metric(library: Path, device: Path, tmp_path: Path) -> None:
    """Every promise has a figure, each line names the device, no rule of the driver is broken, and nothing is left."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    driver = settings(directory=device, delay_us=20, register_us_per_mib=0, trace=tmp_path / "trace")
    done = subprocess.run(
        [sys.executable, "-c", _SMALL], cwd=ROOT, env={**os.environ, **driver, "LD_LIBRARY_PATH": str(library.parent)},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    lines = {line["metric"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {name: line["target"] for name, line in lines.items() if line["target"]} == _PROMISED
    unpromised = {f"{case}_gb_per_s" for case in _cases((*_ROWS, *_PIECES, *_SMALL_PIECES))}
    unpromised |= {
        f"{shape}_{kind}_gb_per_s"
        for shape in ("rows_1m", "pieces_32k", "small_8k")
        for kind in ("summed_store", "verified_load")
    }
    unpromised |= {f"{kind}_over_one_copy_ratio" for kind in ("small", *_cases(_SMALL_PIECES))}
    unpromised |= {
        f"{shape}_{figure}"
        for shape in _SMALL_PIECES
        for figure in ("both_ways_over_sum_ratio", "layerwise_over_bulk", "first_layer_beyond_its_bytes_ms")
    }
    unpromised |= {"short_pieces_32k_layerwise_over_bulk", "short_pieces_32k_load_us"}
    unpromised |= {"register_ms_per_gib", "unregister_ms_per_gib", "loads_beside_engine_gb_per_s"}
    assert set(lines) - set(_PROMISED) == unpromised
    assert {line["device"] for line in lines.values()} == {"Fake CUDA device 0, CUDA 13.0"}
    assert "suite cuda: on Fake CUDA device 0" in done.stderr
    assert trace.broken_rules(trace.read(tmp_path / "trace")) == []
    assert live_granules(device) == 0


def test_cuda_suite_without_a_device_says_what_to_do(library: Path, device: Path) -> None:
    """Where there is no device, the command fails and names the fix; nothing is on stdout."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    environment = {**os.environ, **settings(directory=device), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "cuda", "--json"],
        cwd=ROOT, env={**environment, "LD_LIBRARY_PATH": str(library.parent)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (1, "")
    assert "the suite cuda needs a CUDA device" in done.stderr
    assert "CUDA_VISIBLE_DEVICES" in done.stderr or "nvidia-smi" in done.stderr
