"""Why a block is not taken: full, with the reason in words."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvcached.storage.backend import Outcome
from tests.storage.disks import MIB, opened, put, there
from tests.storage.values import TIMEOUT_S, kind, stored


def io_error(*_: object) -> Any:
    """What SQLite makes of a write that a quota, a limit or a read-only file system refuses."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    raise error


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EROFS, errno.EIO])
def test_index_that_cannot_be_written_for_lack_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A quota, a limit of file sizes or a read-only file system is FULL with its reason; a failing device is none."""

    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with opened(tmp_path / "d") as storage:
        put(storage, 1)
        with monkeypatch.context() as patch:
            patch.setattr(storage._catalog._index, "add", io_error)
            patch.setattr(os, "pwrite", refused)
            if number == errno.EIO:
                with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
                    put(storage, 2)
            else:
                (result,) = storage.put([stored(2)], timeout_s=TIMEOUT_S)
                assert result == (Outcome.FULL, f"{tmp_path / 'd'}: {os.strerror(number)}")
        assert not (tmp_path / "d" / "probe").exists()
        assert put(storage, 2) == [Outcome.DONE]
        assert there(storage, range(5)) == {1, 2}


def test_block_larger_than_the_capacity_says_so(tmp_path: Path) -> None:
    """Sizes are in the reason, also beside a block that is stored."""
    huge = kind(part_bytes=2 * MIB)
    with opened(tmp_path / "d") as storage:
        results = storage.put([stored(1, huge), stored(2)], timeout_s=TIMEOUT_S)

    assert [each.outcome for each in results] == [Outcome.FULL, Outcome.DONE]
    assert results[0].detail.startswith(f"a block takes {4 * MIB + 4096} bytes, and capacity_bytes is {4 * MIB}")


def test_start_on_a_full_file_system_keeps_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing can be written does not tell whether the page cache can be bypassed."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path / "a") as storage:
        before = storage._catalog._space._direct
    monkeypatch.setattr(os, "pwritev", full)
    with opened(tmp_path / "d") as storage:
        assert storage._catalog._space._direct == before
