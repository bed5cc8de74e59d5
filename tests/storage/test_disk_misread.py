"""Reads of the index that fail, which SQLite calls damage: they cost no block."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvcached.storage.backend import DONE, Outcome, StorageUnusable
from kvcached.storage.disk import index as disk_index
from kvcached.storage.disk.backend import DiskStorage, open_disk
from kvcached.storage.disk.index import IndexDamaged
from tests.storage.disks import get, opened, put, there

BLOCKS = range(40)
SETTINGS: dict[str, object] = {"capacity_bytes": 4 << 20, "free_space_floor_bytes": 0}


def misread(*_: object) -> Any:
    """What SQLite makes of a read that fails with EIO or ENXIO."""
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    raise error


def unreadable(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Misreading:
    """A connection whose statements all come across a read that fails."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.execute = self.executemany = misread
        self.in_transaction = False
        self.close = database.close


def break_reads(storage: DiskStorage) -> None:
    """From now on, until the index is opened again."""
    index = storage._catalog._index
    index._database = Misreading(index._database)  # type: ignore[assignment]


def test_one_failed_read_of_the_index_costs_no_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The call that comes across it fails, and all blocks are there for the next one; the log says why."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        break_reads(storage)
        with caplog.at_level(logging.WARNING), pytest.raises(IndexDamaged, match="malformed"):
            get(storage, 1)

        assert there(storage, BLOCKS) == set(BLOCKS)
        assert all(get(storage, number) == DONE for number in BLOCKS)
        assert put(storage, 100) == [Outcome.DONE]
        assert storage.usage().blocks == len(BLOCKS) + 1
    assert "it is whole" in caplog.text


def test_one_failed_read_at_the_start_costs_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that SQLite calls malformed when it is opened is read again before anything is deleted."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    connect, calls = disk_index._connect, list[Path]()

    def fail_once(path: Path) -> sqlite3.Connection:
        calls.append(path)
        return connect(path) if len(calls) > 1 else misread()

    monkeypatch.setattr(disk_index, "_connect", fail_once)
    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set(BLOCKS)
        assert all(get(storage, number) == DONE for number in BLOCKS)


def test_index_that_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its device fails, calls and starts fail and nothing is deleted; when it works all blocks are there."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        break_reads(storage)
        with monkeypatch.context() as patch:
            patch.setattr(os, "readv", unreadable)
            for _ in range(3):
                with pytest.raises(OSError, match="Input/output error"):
                    get(storage, 1)
        with pytest.raises(IndexDamaged):
            get(storage, 1)
        assert there(storage, BLOCKS) == set(BLOCKS)

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", unreadable)
        with pytest.raises(StorageUnusable, match="Input/output error"):
            open_disk({"directory": str(tmp_path / "d"), **SETTINGS})
    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set(BLOCKS)


def test_slot_being_written_stays_taken_when_the_index_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index does not know of a value under way: its slot is given to no other block."""
    write = os.pwritev
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)

        def write_late(descriptor: int, parts: list[memoryview], offset: int) -> int:
            monkeypatch.setattr(os, "pwritev", write)
            break_reads(storage)
            with pytest.raises(IndexDamaged):
                get(storage, 1)
            put(storage, 101)
            return write(descriptor, parts, offset)

        monkeypatch.setattr(os, "pwritev", write_late)

        assert put(storage, 100) == [Outcome.DONE]
        assert [get(storage, number) for number in (100, 101)] == [DONE, DONE]
        assert there(storage, BLOCKS) == set(BLOCKS)
