from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from kvcached.storage.backend import DONE, Outcome, StorageUnusable
from kvcached.storage.disk import catalog as disk_catalog
from kvcached.storage.disk import opening as disk_opening
from kvcached.storage.disk.backend import open_disk
from kvcached.storage.disk.index import DiskIndex, IndexDamaged
from kvcached.storage.disk.space import DiskSpace
from tests.storage.disks import get, opened, put, there
from tests.storage.values import TIMEOUT_S, key

BLOCKS = range(20)


def test_nobody_waits_while_the_index_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the index is not there every block is absent and every put FULL; then all blocks are there."""
    may_go_on = threading.Event()

    def open_late(path: Path, space: DiskSpace) -> DiskIndex:
        may_go_on.wait()
        return disk_opening.open_index(path, space)

    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    monkeypatch.setattr(disk_catalog, "_PATIENCE_S", 0)
    monkeypatch.setattr(disk_catalog, "open_index", open_late)
    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set()
        assert get(storage, 1).outcome is Outcome.ABSENT
        assert put(storage, 100) == [Outcome.FULL]
        assert storage.usage().blocks == len(BLOCKS)
        with pytest.raises(TimeoutError, match="still being made"):
            storage.delete([key(1)], timeout_s=0)
        may_go_on.set()

        assert storage.delete([key(1)], timeout_s=TIMEOUT_S) == 1
        assert there(storage, BLOCKS) == {*BLOCKS} - {1}
        assert get(storage, 2) == DONE
        assert put(storage, 100) == [Outcome.DONE]


def test_index_that_cannot_be_made_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there can be no index, opening fails with the reason, and the directory is free for the next attempt."""

    def fail(path: Path, space: DiskSpace) -> DiskIndex:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(disk_catalog, "open_index", fail)
        with pytest.raises(StorageUnusable, match="database or disk is full"):
            open_disk({"directory": str(tmp_path / "d"), "capacity_bytes": 4 << 20})

    with opened(tmp_path / "d") as storage:
        assert put(storage, 1) == [Outcome.DONE]


def test_index_that_could_not_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there was no room for a new index one call fails; when there is room again every block is found."""

    def fail(path: Path, space: DiskSpace, reason: str) -> DiskIndex:
        raise sqlite3.OperationalError("database or disk is full")

    def damaged(_: object) -> None:
        raise IndexDamaged("injected")

    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        with monkeypatch.context() as patch:
            patch.setattr(disk_catalog, "new_index", fail)
            patch.setattr(storage._catalog._index, "find", damaged)
            with pytest.raises(IndexDamaged):
                get(storage, 1)
            for _ in range(3):
                storage._catalog._opener.join()
                with pytest.raises(sqlite3.OperationalError, match="full"):
                    get(storage, 1)
            storage._catalog._opener.join()
        with pytest.raises(sqlite3.OperationalError, match="full"):
            get(storage, 1)
        storage.wait_until_ready(TIMEOUT_S)

        assert there(storage, BLOCKS) == set(BLOCKS)
        assert get(storage, 1) == DONE


def test_index_that_cannot_be_changed_costs_no_reads(tmp_path: Path) -> None:
    """Where the index has no room for changes, blocks are read on, and puts are FULL."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        database = storage._catalog._index._database
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages}")

        outcomes = [put(storage, number)[0] for number in range(100, 190)]

        assert outcomes[-1] is Outcome.FULL
        assert set(outcomes) == {Outcome.DONE, Outcome.FULL}
        stored = outcomes.count(Outcome.DONE)
        assert storage.usage().blocks == len(BLOCKS) + stored
        assert all(get(storage, number) == DONE for number in BLOCKS)
        assert there(storage, range(100, 190)) == set(range(100, 100 + stored))
