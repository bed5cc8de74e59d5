"""The suite of storage, as far as it is about the disk alone, with few and small blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.suites import storage


def test_disk_throughput_is_compared_with_raw_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts and gets each have a speed, a floor from the same rounds, a promise, and the median of the pairs."""
    monkeypatch.setattr(storage, "_PART_BYTES", 4096)
    monkeypatch.setattr(storage, "_VALUE_BYTES", 4096 + storage._SHARDS * 4096)

    results = {each.metric: each for each in storage._throughput(tmp_path, 10)}

    for name in ("put", "get"):
        assert results[f"disk_{name}_gb_per_s"].floor is not None
        assert results[f"disk_{name}_gb_per_s"].target == "ratio >= 0.8"
        assert results[f"disk_{name}_over_raw_median_ratio"].value > 0


def test_service_is_compared_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts and gets of the backend `redis` have a speed, and that of redis-py at the same server as floor."""
    monkeypatch.setattr(storage, "_PART_BYTES", 4096)

    results = {each.metric: each for each in storage._service(tmp_path, 10)}

    assert set(results) == {"redis_put_gb_per_s", "redis_get_gb_per_s"}
    assert all(each.floor and each.value > 0 for each in results.values())


def test_starts_are_measured_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is opened by a process of its own, which finds all its blocks."""
    monkeypatch.setattr(storage, "_BLOCKS", 2000)
    monkeypatch.setattr(storage, "_STARTS", 1)

    results = {each.metric: each.value for each in storage._starts(tmp_path)}

    assert set(results) == {
        "open_1m_s",
        "open_1m_grown_mib",
        "index_bytes_per_block",
    }
    assert all(value > 0 for value in results.values())
