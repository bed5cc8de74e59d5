"""Objects below the prefix whose names the library does not take: a list that has one of them cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvcached.storage.backend import DONE, UNKNOWN_USAGE
from kvcached.storage.s3.failures import S3Failure
from kvcached.storage.s3.opening import open_s3
from tests.storage.s3.service import FakeS3, fake_s3
from tests.storage.values import KIND, TIMEOUT_S, asked, key, stored

NAMES = [
    "kvcached/blocks//aa",
    "kvcached/blocks/./a",
    "kvcached/blocks/a\nb",
    "kvcached/blocks/zz//a",
    "kvcached/probe//a",
]


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with fake_s3() as service:
        yield service


@pytest.mark.parametrize("name", NAMES)
def test_object_with_an_odd_name_locks_nobody_out(tmp_path: Path, fake: FakeS3, name: str) -> None:
    """Storage is opened beside it, blocks are found, a namespace is cleared, and it is not known how much there is."""
    fake.objects[name] = b""
    with closing(open_s3(fake.settings(tmp_path))) as storage:
        assert storage.usage().blocks == (0 if "probe" in name else UNKNOWN_USAGE.blocks)
        assert storage.put([stored(1)], timeout_s=TIMEOUT_S) == [DONE]
        assert storage.get([asked(1)], timeout_s=TIMEOUT_S) == [DONE]

    with closing(open_s3(fake.settings(tmp_path))) as storage:
        assert storage.clear(KIND.prefix(), timeout_s=TIMEOUT_S) == 1
        assert storage.exists([key(1)], timeout_s=TIMEOUT_S) == [False]
    assert [each for each in fake.objects if "probe/" in each] == [name] * ("probe" in name)


@pytest.mark.parametrize("name", NAMES[:4])
def test_clear_names_the_object_that_is_in_its_way(tmp_path: Path, fake: FakeS3, name: str) -> None:
    """Who clears everything is told which object to delete, and everything is cleared when that is gone."""
    with closing(open_s3(fake.settings(tmp_path))) as storage:
        storage.put([stored(1)], timeout_s=TIMEOUT_S)
        fake.objects[name] = b""

        with pytest.raises(S3Failure) as error:
            storage.clear(b"", timeout_s=TIMEOUT_S)
        said = name.replace("\n", "\\n")
        assert f'the object "{said}" cannot be listed; delete that object' in str(error.value)

        del fake.objects[name]
        assert storage.clear(b"", timeout_s=TIMEOUT_S) == 1
