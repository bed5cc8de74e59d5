from __future__ import annotations

import pytest

from kvcached.server import listener
from tests.worker.conftest import run, run_dir

__all__ = ["run", "run_dir"]


@pytest.fixture(autouse=True)
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers may send descriptors, as on kernels that know no option against it."""
    monkeypatch.setattr(listener, "_SO_PASSRIGHTS", 1 << 16)
