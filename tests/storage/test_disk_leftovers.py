"""Files that cannot be opened or deleted: none of them takes space that nobody counts."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvcached.storage.backend import DONE, Outcome
from kvcached.storage.disk import catalog
from kvcached.storage.disk.slots import SlotFile
from tests.storage.disks import MIB, get, opened, put, size_on_disk, there
from tests.storage.values import KIND, TIMEOUT_S, kind, stored

LARGE = kind(part_bytes=65536)


def in_use(path: object, *_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_file_that_cannot_be_opened_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a new file has its space and then no descriptor is left, puts are FULL, and the space is free again."""

    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with opened(tmp_path / "d") as storage:
        put(storage, 1)
        before = size_on_disk(tmp_path / "d")
        with monkeypatch.context() as patch:
            patch.setattr(SlotFile, "_open", exhausted)
            for number in range(5):
                (result,) = storage.put([stored(number, LARGE)], timeout_s=TIMEOUT_S)
                assert (result.outcome, "Too many open files" in result.detail) == (Outcome.FULL, True)

        assert len([*(tmp_path / "d").glob("*.slots")]) == 1
        assert size_on_disk(tmp_path / "d") <= before
        assert storage.put([stored(1, LARGE)], timeout_s=TIMEOUT_S) == [DONE]


@pytest.mark.parametrize("is_cut", [True, False])
def test_file_that_cannot_be_deleted_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_cut: bool
) -> None:
    """It takes part of the capacity until it is deleted, which each put tries again; the log has it once."""
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(200))
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(Path, "unlink", in_use)
            if not is_cut:
                patch.setattr(os, "ftruncate", in_use)
            for number in range(5):
                storage.put([stored(number, LARGE)], timeout_s=TIMEOUT_S)
                assert size_on_disk(tmp_path / "d") <= 4 * MIB
        gone = caplog.text.count("cannot be deleted")
        assert gone == len({record.args for record in caplog.records})
        known = len(storage._catalog._space.files)
        assert len([*(tmp_path / "d").glob("*.slots")]) == known + gone > known

        assert storage.put([stored(5, LARGE)], timeout_s=TIMEOUT_S) == [DONE]
        assert len([*(tmp_path / "d").glob("*.slots")]) == len(storage._catalog._space.files)
        assert all(get(storage, number) == DONE for number in there(storage, range(200)))


def test_clear_of_a_namespace_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done in parts, others have their turn between two of them, and whoever waits hears of each."""
    monkeypatch.setattr(catalog, "_CLEARED_AT_A_TIME", 8)
    parts = Mock()
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(20))

        assert storage.clear(KIND.prefix(), timeout_s=TIMEOUT_S, progress=parts) == 20
    assert parts.call_count == 3


def test_clear_forgets_blocks_whose_file_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are gone, the file takes no space, and after a restart it takes blocks again or is deleted."""
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(20))
        with monkeypatch.context() as patch:
            patch.setattr(SlotFile, "retire", in_use)
            assert storage.clear(b"", timeout_s=TIMEOUT_S) == 20
            assert there(storage, range(20)) == set()

    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        assert there(storage, range(20)) == set()
        assert put(storage, *range(60)) == [Outcome.DONE] * 60
        assert size_on_disk(tmp_path / "d") <= 4 * MIB
