"""The suite `storage` beside a real daemon, on few and small blocks: it measures what it says it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import attached_rig, storage_daemon
from benchmarks.attached_rig import PageShape


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_match_is_timed_beside_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round times matches until the burst has been written, by storage or by the other writer."""
    monkeypatch.setattr(storage_daemon, "_BURST", PageShape("burst", layers=2, page_bytes=16 << 10, blocks=16))
    rows = list(storage_daemon.match_beside_writes(tmp_path, rounds=2))

    assert [row.metric for row in rows] == ["match_while_writing_us", "match_while_writing_p99_us"]
    assert all(row.value > 0 and row.floor for row in rows)
    assert rows[0].target == "ratio <= 1.2"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_choices_are_compared_with_an_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice is weighed against the better one, so that regret is never negative by more than noise."""
    monkeypatch.setattr(storage_daemon, "_PROMPT", PageShape("prompt", layers=2, page_bytes=16 << 10, blocks=8))
    monkeypatch.setattr(storage_daemon, "_PROMPTS", 12)
    monkeypatch.setattr(attached_rig, "_SLAB_BYTES", 1 << 20)  # of which the host pool has room for some prompts only
    monkeypatch.setattr(storage_daemon, "_RATES", (0.1, 10.0))
    regret, wrong, crossover = storage_daemon.regret(tmp_path)

    assert regret.value >= 0
    assert 0 <= wrong.value <= 1
    assert crossover.value > 0
