"""The suite faults, each of its cases once and with little."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from benchmarks.fault_rig import CONFIG, Kind, slots_freed_s, unblocked_s, worker_back_s
from benchmarks.programs import daemon
from benchmarks.restart_rig import restart

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", get_args(Kind))
def test_slots_and_clients_are_free_soon(tmp_path: Path, kind: Kind) -> None:
    """A killed engine's slots, and a client of a killed daemon, are free within the promised second."""
    (tmp_path / "engine").mkdir()
    with daemon(CONFIG, tmp_path / "engine") as run_dir:
        assert 0 < slots_freed_s(run_dir, kind) <= 1
    assert 0 < unblocked_s(tmp_path / "client", kind) <= 1


def test_worker_is_back_soon(tmp_path: Path) -> None:
    """A worker that died by chance is replaced without a pause."""
    assert 0 < worker_back_s(tmp_path) <= 5


def test_blocks_are_usable_after_a_restart(tmp_path: Path) -> None:
    """Blocks of a supervised daemon that was killed are found again, and are the same."""
    found = restart(tmp_path, prompts=3)

    assert (found.blocks, found.usable) == (3 * 1024, 1)
    assert found.first_hit_s > 0
