"""The storage process's answers, without a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached.storage.backend import Usage
from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.main import finished
from kvcached.storage.messages import ERROR_SIZE_CHARS_MAX, REPLY_SIZE_BYTES_MAX, Done, decode_report, encode
from tests.storage.disks import opened, put


def test_answer_says_how_full_the_backend_is(tmp_path: Path) -> None:
    """Whatever was asked, the answer has the backend's present usage."""
    with opened(tmp_path / "d") as storage:
        put(storage, 1)
        over = finished(Done(sequence=1, count=3), storage)

        assert (over.count, over.usage) == (3, storage.usage())


def test_usage_that_fails_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that cannot say how full it is has done what was ordered all the same."""

    def fail(_: DiskStorage) -> Usage:
        raise OSError("no answer")

    monkeypatch.setattr(DiskStorage, "usage", fail)
    with opened(tmp_path / "d") as storage:
        assert finished(Done(sequence=1, count=3), storage) == Done(sequence=1, count=3)


@pytest.mark.parametrize("error", ["no such file: \udcff", "x" * 10**6, "ü" * 10**6])
def test_every_error_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """Whatever text an error or a backend's trouble has, the answer can be sent, and fits."""
    monkeypatch.setattr(DiskStorage, "trouble", lambda _: error)
    with opened(tmp_path / "d") as storage:
        sent = encode(finished(Done(sequence=1, failed=True, error=error), storage))

    told = decode_report(sent)
    assert isinstance(told, Done)
    assert 0 < len(told.error) <= ERROR_SIZE_CHARS_MAX
    assert told.trouble == told.error
    assert len(sent) < REPLY_SIZE_BYTES_MAX
