"""The quick start for a GPU, walked on the fake driver, with pools that fit its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.quick_start import walk

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


def test_commands_for_a_gpu_work(use_device: Callable[..., None], tmp_path: Path) -> None:
    """Each command of the section ends with 0, and the daemon of its configuration is healthy."""
    use_device(memory_mib=256)
    walk("A GPU", tmp_path, {"KVCACHED_REPLICA__0__POOL_BYTES": "64MiB", "KVCACHED_HOST__MEMORY_PERCENT": "1"})
