"""When the backend `s3` says that the service is empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached.storage.backend import UNKNOWN_USAGE, Usage
from kvcached.storage.s3 import backend
from kvcached.storage.s3.backend import S3Storage
from kvcached.storage.s3.failures import S3Failure
from kvcached.storage.s3.opening import open_s3
from tests.storage.s3.service import FakeS3, fake_s3
from tests.storage.values import TIMEOUT_S, asked, key, stored

EMPTY, UNKNOWN = Usage(0, -1, -1), UNKNOWN_USAGE


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with fake_s3() as service:
        yield service


@pytest.fixture
def storage(fake: FakeS3, tmp_path: Path) -> Iterator[S3Storage]:
    """A backend of an empty service."""
    storage = open_s3(fake.settings(tmp_path))
    yield storage
    storage.close()


def test_empty_service_is_known_to_be_empty(tmp_path: Path, fake: FakeS3) -> None:
    """A service without blocks says so until something is written; one with blocks does not say how many."""
    fake.objects = {"kvcached/record": b"", "else/blocks": b"", "kvcached/blocks/readme": b""}
    storage = open_s3(fake.settings(tmp_path))

    assert storage.usage() == EMPTY
    storage.put([stored(1)], timeout_s=TIMEOUT_S)
    assert storage.usage() == UNKNOWN

    storage.close()
    again = open_s3(fake.settings(tmp_path))
    assert again.usage() == UNKNOWN
    again.close()


@pytest.mark.parametrize(
    "find",
    [
        lambda storage: storage.exists([key(2), key(1)], timeout_s=TIMEOUT_S),
        lambda storage: storage.get([asked(2), asked(1)], timeout_s=TIMEOUT_S),
    ],
    ids=["exists", "get"],
)
def test_block_of_another_daemon_ends_it(
    fake: FakeS3, storage: S3Storage, tmp_path: Path, find: Callable[[S3Storage], object]
) -> None:
    """A daemon that only reads does not say that there is nothing once it has found something."""
    other = open_s3(fake.settings(tmp_path))
    other.put([stored(1)], timeout_s=TIMEOUT_S)
    other.close()
    assert storage.usage() == EMPTY

    find(storage)

    assert storage.usage() == UNKNOWN


def test_it_is_said_for_a_moment(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write at any time, so what was seen at the opening is soon not known any more."""
    assert storage.usage() == EMPTY
    began_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_s + backend._EMPTY_S)

    assert storage.usage() == UNKNOWN


def test_lost_record_is_told_from_a_lost_service(fake: FakeS3, storage: S3Storage) -> None:
    """Where there is no record any more, it is looked whether there are blocks."""
    assert storage.write_record(b"a record", b"", timeout_s=TIMEOUT_S)
    storage.put([stored(1)], timeout_s=TIMEOUT_S)
    del fake.objects["kvcached/record"]

    assert storage.read_record(timeout_s=TIMEOUT_S) is None
    assert storage.usage() == UNKNOWN

    fake.objects.clear()
    assert storage.read_record(timeout_s=TIMEOUT_S) is None
    assert storage.usage() == EMPTY

    fake.objects["kvcached/blocks/" + "ab" * 16 + "/" + "cd" * 16] = b""
    assert storage.read_record(timeout_s=TIMEOUT_S) is None
    assert storage.usage() == UNKNOWN


def test_record_is_not_lost_where_nobody_can_look(fake: FakeS3, storage: S3Storage) -> None:
    """If the list fails, so does the read: else a daemon would go by what was true before."""
    fake.plan.extend([(403, "AccessDenied")] * 9)
    fake.is_planned = lambda method, name: not name

    with pytest.raises(S3Failure, match="AccessDenied"):
        storage.read_record(timeout_s=TIMEOUT_S)
