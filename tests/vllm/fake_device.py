"""The fake CUDA device for programs that import vLLM."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.cuda_driver.device import settings


def offer_device(patch: pytest.MonkeyPatch, library: Path, device: Path, directory: Path, **values: object) -> Path:
    """Let programs that are started from now on see the device; returns where the driver traces its calls."""
    found = importlib.util.find_spec("cuda.bindings")
    if found is None or found.origin is None:
        pytest.skip("cuda-bindings is not installed")
    bindings = directory / "bindings"  # vLLM's environment has none
    bindings.mkdir()
    (bindings / "cuda").symlink_to(Path(found.origin).parents[1])
    trace = directory / "trace"
    for name, value in settings(directory=device, trace=trace, memory_mib=256, **values).items():
        patch.setenv(name, value)
    patch.setenv("LD_LIBRARY_PATH", str(library.parent))
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(bindings), os.environ.get("PYTHONPATH")))))
    return trace
