from __future__ import annotations

from tests.worker.conftest import run, run_dir

__all__ = ["run", "run_dir"]
