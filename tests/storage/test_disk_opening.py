from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest

from kvcached.storage.backend import DONE, Outcome, StorageUnusable
from kvcached.storage.disk import catalog as disk_catalog
from kvcached.storage.disk.backend import open_disk
from kvcached.storage.disk.index import DiskIndex, IndexDamaged
from tests.storage.disks import get, opened, put, there

BLOCKS = range(20)


def fail(path: Path) -> DiskIndex:
    raise sqlite3.OperationalError("database or disk is full")


def damaged(*_: object) -> None:
    raise IndexDamaged("injected")


def test_index_that_cannot_be_opened_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device fails, opening fails with the reason, and the next attempt finds all blocks."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    with monkeypatch.context() as patch:
        patch.setattr(disk_catalog, "DiskIndex", fail)
        with pytest.raises(StorageUnusable, match="database or disk is full"):
            open_disk({"directory": str(tmp_path / "d"), "capacity_bytes": 4 << 20})

    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set(BLOCKS)


def test_index_that_cannot_be_created_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for an index, opening fails with the reason; the next attempt may succeed."""
    with monkeypatch.context() as patch:
        patch.setattr(disk_catalog, "create_index", fail)
        with pytest.raises(StorageUnusable, match="database or disk is full"):
            open_disk({"directory": str(tmp_path / "d"), "capacity_bytes": 4 << 20})

    with opened(tmp_path / "d") as storage:
        assert put(storage, 1) == [Outcome.DONE]


def test_index_that_could_not_be_replaced_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for an empty index calls fail; when there is room again blocks can be stored."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        with monkeypatch.context() as patch:
            patch.setattr(disk_catalog, "create_index", fail)
            patch.setattr(storage._catalog._index, "find", damaged)
            for _ in range(3):
                with pytest.raises(sqlite3.OperationalError, match="full"):
                    get(storage, 1)
        with pytest.raises(IndexDamaged, match="closed database"):
            get(storage, 1)

        assert there(storage, BLOCKS) == set()
        assert put(storage, 1) == [Outcome.DONE]
        assert get(storage, 1) == DONE


def test_damage_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why all blocks are gone; a new directory is nothing to tell."""
    with caplog.at_level(logging.WARNING), opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        assert caplog.text == ""
    (tmp_path / "d" / "index.db").unlink()

    with opened(tmp_path / "d") as storage:
        assert storage.usage().blocks == 0

    assert "all blocks are forgotten" in caplog.text
    assert "there is none" in caplog.text


def test_damage_at_the_end_leaves_the_directory_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that finds its index damaged when it is closed closes it all the same: the directory can be opened."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        get(storage, 1)
        monkeypatch.setattr(storage._catalog._index, "touch", damaged)

    with opened(tmp_path / "d") as again:
        assert put(again, 100) == [Outcome.DONE]
    assert storage._catalog is not again._catalog


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
