"""Programs on the fake CUDA driver: each runs in a process of its own, on a device of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cuda_driver import trace
from tests.cuda_driver.conftest import device, library
from tests.cuda_driver.device import live_granules, settings

__all__ = ["device", "library"]

ROOT = Path(__file__).parents[2]


class Ran(NamedTuple):
    """What a program printed as JSON, its log, what the driver recorded, and the granules that are left."""

    said: Any
    log: str
    records: list[trace.Record]
    granules: int


RunProgram = Callable[..., Ran]


@pytest.fixture
def run_program(library: Path, device: Path, tmp_path: Path) -> RunProgram:
    """Run a function of `tests.cuda.programs` on the fake driver: `run_program("round_trip", seed=3)`.

    Arguments by position are the function's, those by name are the driver's.
    """
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

    def run(name: str, *arguments: object, **values: object) -> Ran:
        traced = tmp_path / f"trace-{len(list(tmp_path.iterdir()))}"
        driver = {"directory": device, "delay_us": 200, "register_us_per_mib": 0, "memory_mib": 64, "trace": traced}
        environment = {**os.environ, **settings(**{**driver, **values}), "LD_LIBRARY_PATH": str(library.parent)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.cuda.programs", name, json.dumps(arguments)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Ran(json.loads(done.stdout), done.stderr, trace.read(traced), live_granules(device))

    return run


@pytest.fixture
def use_device(library: Path, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the processes that a test starts have a device whose streams are late; what is given is the driver's."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))

    def use(**given: object) -> None:
        values = {"directory": device, "delay_us": 500, "register_us_per_mib": 0, "trace": tmp_path / "trace"}
        for name, value in settings(**{**values, "seed": 1, **given}).items():
            monkeypatch.setenv(name, value)

    return use
