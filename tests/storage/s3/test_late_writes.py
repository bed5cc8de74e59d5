"""Writes that got no answer, and that the service carries out after the block was deleted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvcached.storage.backend import DONE, Outcome
from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.disk.directory import DiskSettings
from kvcached.storage.encryption.backend import EncryptedStorage
from kvcached.storage.s3 import late_writes
from kvcached.storage.s3.backend import S3Storage
from kvcached.storage.s3.late_writes import LATE_S, LateWrites
from kvcached.storage.s3.opening import open_s3
from kvcached.storage.tiers.backend import TieredStorage
from tests.storage.s3.service import FakeS3, fake_s3
from tests.storage.values import TIMEOUT_S, key, stored


class Clock:
    """Of a test."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with fake_s3() as service:
        yield service


@pytest.fixture
def storage(fake: FakeS3, tmp_path: Path) -> Iterator[S3Storage]:
    with closing(open_s3(fake.settings(tmp_path))) as storage:
        yield storage


def put_late(fake: FakeS3, storage: S3Storage) -> None:
    """The write of block 1 gets no answer in time."""
    fake.plan.append("late")
    (result,) = storage.put([stored(1)], timeout_s=0.2)
    assert result.outcome is Outcome.FAILED


def test_late_write_is_told_after_a_deletion(fake: FakeS3, storage: S3Storage) -> None:
    """The block comes back, so a deletion says that it may; repeated when the write can come no more, it is the end."""
    clock = Clock()
    storage._late = LateWrites(clock)
    put_late(fake, storage)
    assert storage.put([stored(2)], timeout_s=TIMEOUT_S) == [DONE]

    assert storage.delete([key(1), key(2)], timeout_s=TIMEOUT_S) == 1
    assert "writes of 1 blocks got no answer" in storage.unsettled([key(1), key(2)])
    assert storage.unsettled([key(2)]) == ""

    fake.resumed.set()
    until_s = time.monotonic() + TIMEOUT_S
    while not storage.exists([key(1)], timeout_s=TIMEOUT_S)[0]:
        assert time.monotonic() < until_s
    clock.now_s += LATE_S
    assert storage.delete([key(1)], timeout_s=TIMEOUT_S) == 1
    assert storage.unsettled([key(1)]) == ""


def test_late_write_is_deleted_though_nobody_has_seen_it(fake: FakeS3, storage: S3Storage) -> None:
    """It may arrive between the question whether the block is there and the deletion."""
    put_late(fake, storage)
    fake.requests.clear()
    asked = storage.delete([key(1), key(2)], timeout_s=TIMEOUT_S)

    assert (asked, [method for method, _ in fake.requests]) == (0, ["HEAD", "HEAD", "POST"])


@pytest.mark.parametrize("refusal", [(400, "InvalidRequest"), (403, "AccessDenied"), (507, "XMinioStorageFull")])
def test_refused_writes_are_settled(fake: FakeS3, storage: S3Storage, refusal: tuple[int, str]) -> None:
    """A service that refuses a write does not carry it out later."""
    fake.plan.extend([refusal] * 3)
    (result,) = storage.put([stored(1)], timeout_s=TIMEOUT_S)

    assert result.outcome is not Outcome.DONE
    assert storage.unsettled([key(1)]) == ""


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_answer_of_a_gateway_settles_nothing(fake: FakeS3, storage: S3Storage, status: int) -> None:
    """It has passed the write on, and gives up: the service behind it may carry it out all the same."""
    fake.plan.extend([(status, "")] * 3)
    (result,) = storage.put([stored(1)], timeout_s=TIMEOUT_S)
    assert (result.outcome, str(status) in result.detail) == (Outcome.FAILED, True)
    assert storage.delete([key(1), key(2)], timeout_s=TIMEOUT_S) == 0

    assert "writes of 1 blocks got no answer" in storage.unsettled([key(1), key(2)])


def test_stages_before_the_service_pass_it_on(fake: FakeS3, storage: S3Storage, tmp_path: Path) -> None:
    """Behind encryption and a local disk, the keys are those that the service has."""
    disk = DiskStorage(DiskSettings(directory=tmp_path / "disk", capacity_bytes=8 << 20, free_space_floor_bytes=0))
    with closing(disk):
        whole = EncryptedStorage(TieredStorage(disk, storage, "s3"), bytes(32))
        fake.plan.append("late")
        fake.is_planned = lambda method, name: method == "PUT"
        whole.put([stored(1)], timeout_s=0.5)

        assert "no answer" in whole.unsettled([key(1)])
        assert whole.unsettled([key(2)]) == ""


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit it may be any key, until the last one that was dropped can be written no more."""
    monkeypatch.setattr(late_writes, "LATE_MAX", 2)
    clock = Clock()
    late = LateWrites(clock)
    late.add([b"a", b"b"])
    assert late.among([b"a", b"c"]) == {b"a"}
    late.add([b"c"])
    assert late.among([b"d"]) == {b"d"}

    clock.now_s += LATE_S
    assert late.among([b"a", b"b", b"c", b"d"]) == set()
