"""What the backend `s3` makes of a service that refuses, is full, hangs, dies or loses answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import obstore
import pytest
from obstore.store import S3Store

from kvcached.storage.backend import ABSENT, DONE, WRONG, Outcome, Result, VersionedRecord
from kvcached.storage.frame import FRAME_BYTES
from kvcached.storage.s3 import backend
from kvcached.storage.s3.backend import S3Storage
from kvcached.storage.s3.failures import S3Failure
from kvcached.storage.s3.opening import open_s3
from tests.storage.s3.servers import server
from tests.storage.s3.service import FakeS3, fake_s3
from tests.storage.values import KIND, TIMEOUT_S, asked, is_right, key, kind, stored

#: What a call may take that has a limit of a second: the machine may be busy.
LIMIT_S = 1.0
AT_MOST_S = 4.0


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with fake_s3() as service:
        yield service


@pytest.fixture
def faked(fake: FakeS3, tmp_path: Path) -> Iterator[S3Storage]:
    """A backend of the service in this process."""
    storage = open_s3(fake.settings(tmp_path))
    fake.requests.clear()
    yield storage
    storage.close()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[S3Storage]:
    """A backend of SeaweedFS."""
    storage = open_s3(server().settings(tmp_path))
    yield storage
    storage.close()


def path(storage: S3Storage, number: int) -> str:
    return storage._path(key(number))


@contextmanager
def takes_about_the_limit() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert LIMIT_S * 0.9 < time.monotonic() - began_s < AT_MOST_S


def test_one_block_is_one_object(fake: FakeS3, faked: S3Storage) -> None:
    """A block is written by one request, under its key, with the bytes of its parts in order."""
    block = stored(1)

    assert faked.put([block], timeout_s=TIMEOUT_S) == [DONE]

    prefix, name = block.key[:16].hex(), block.key[16:].hex()
    assert fake.objects == {f"kvcached/blocks/{prefix}/{name}": b"".join(block.parts)}
    assert [method for method, _ in fake.requests] == ["PUT"]


def test_large_block_is_one_request(fake: FakeS3, faked: S3Storage) -> None:
    """A block that other programs would write in pieces, which lie around where one fails, is written in one."""
    large = kind(part_bytes=6 << 20, shards=1)

    assert faked.put([stored(1, large)], timeout_s=TIMEOUT_S) == [DONE]

    assert [method for method, _ in fake.requests] == ["PUT"]


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (403, "AccessDenied", Outcome.FAILED),
        (400, "ExpiredToken", Outcome.FAILED),
        (503, "SlowDown", Outcome.FAILED),
        (500, "InternalError", Outcome.FAILED),
        (403, "QuotaExceeded", Outcome.FULL),
        (507, "XMinioStorageFull", Outcome.FULL),
    ],
)
def test_refused_writes_say_why(fake: FakeS3, faked: S3Storage, status: int, code: str, outcome: Outcome) -> None:
    """A refusal is that block's alone; it is told by status and code, without what else the service says."""
    fake.plan.extend([(status, code)] * 9)
    fake.is_planned = lambda method, name: name == path(faked, 2)

    results = faked.put([stored(1), stored(2), stored(3)], timeout_s=TIMEOUT_S)

    assert [each.outcome for each in results] == [Outcome.DONE, outcome, Outcome.DONE]
    assert f"{status}" in results[1].detail
    assert code in results[1].detail
    assert "secret" not in results[1].detail


def test_refused_reads_are_no_absence(fake: FakeS3, faked: S3Storage) -> None:
    """A read that fails is a failure, and does not say that there is no block."""
    faked.put([stored(1)], timeout_s=TIMEOUT_S)
    fake.plan.extend([(403, "AccessDenied")] * 2)

    (result,) = faked.get([asked(1)], timeout_s=TIMEOUT_S)

    assert result == Result(Outcome.FAILED, "the service answers 403 Forbidden (AccessDenied)")
    with pytest.raises(S3Failure, match="403"):
        faked.exists([key(1)], timeout_s=TIMEOUT_S)


def test_busy_service_is_asked_again(fake: FakeS3, faked: S3Storage) -> None:
    """A service that is busy for a moment costs a moment, not the block."""
    fake.plan.append((503, "SlowDown"))

    assert faked.put([stored(1)], timeout_s=TIMEOUT_S) == [DONE]


def test_record_whose_answer_was_lost_is_found(fake: FakeS3, faked: S3Storage) -> None:
    """A record that was written, though the answer failed and the next attempt was refused, counts as written."""
    fake.plan.append("lost")
    first = faked.write_record(b"first", b"", timeout_s=TIMEOUT_S)
    fake.plan.append("lost")

    assert first
    second = faked.write_record(b"second", first, timeout_s=TIMEOUT_S)

    assert second
    assert faked.read_record(timeout_s=TIMEOUT_S) == VersionedRecord(b"second", second)


def test_record_of_the_same_bytes_has_another_version(faked: S3Storage) -> None:
    """Where a service makes ETags of the content alone, a record that is written again still has another one."""
    first = faked.write_record(b"same", b"", timeout_s=TIMEOUT_S)
    assert first

    assert faked.write_record(b"same", first, timeout_s=TIMEOUT_S) not in {first, None}


@pytest.mark.parametrize("after", [b"", b'"00000000000000000000000000000000"'])
def test_conflict_of_writers_is_no_write(fake: FakeS3, faked: S3Storage, after: bytes) -> None:
    """A service may answer 409 to two writes at the same time: neither has written what it meant to."""
    fake.plan.extend([(409, "ConditionalRequestConflict")] * 9)
    fake.is_planned = lambda method, name: method == "PUT"

    assert faked.write_record(b"mine", after, timeout_s=TIMEOUT_S) is None


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (403, "AccessDenied"), (404, "NoSuchBucket")])
def test_record_that_cannot_be_read_is_not_absent(fake: FakeS3, faked: S3Storage, status: int, code: str) -> None:
    """A failure is told as one: a daemon must not begin with an empty record."""
    fake.plan.extend([(status, code)] * 9)

    with pytest.raises(S3Failure, match=code):
        faked.read_record(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(("room_bytes", "expected"), [(1, 1), (3 * stored(0).size_bytes, 3), (1 << 20, 8)])
def test_blocks_wait_for_room(
    faked: S3Storage, monkeypatch: pytest.MonkeyPatch, room_bytes: int, expected: int
) -> None:
    """No more requests are under way than there is room for, and all blocks are written and read."""
    monkeypatch.setattr(backend, "IN_FLIGHT_BYTES_MAX", room_bytes)
    written, read = [counted(monkeypatch, name) for name in ("put_async", "get_async")]
    blocks = [asked(number) for number in range(8)]

    assert faked.put([stored(number) for number in range(8)], timeout_s=TIMEOUT_S) == [DONE] * 8
    assert faked.get(blocks, timeout_s=TIMEOUT_S) == [DONE] * 8

    assert all(is_right(block, number) for number, block in enumerate(blocks))
    assert (max(written), max(read)) == (expected, expected)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How many of these requests were under way as each of them began."""
    counts: list[int] = []
    real = getattr(obstore, name)
    under_way: set[object] = set()

    async def request(*arguments: Any, **how: Any) -> object:
        mine = object()
        under_way.add(mine)
        counts.append(len(under_way))
        try:
            return await real(*arguments, **how)
        finally:
            under_way.remove(mine)

    monkeypatch.setattr(obstore, name, request)
    return counts


def test_object_of_another_size_is_wrong(storage: S3Storage) -> None:
    """What somebody else wrote under the name is not copied over the end of a block, nor a part of it."""
    for size in (0, FRAME_BYTES + KIND.part_bytes, 100_000):
        obstore.put(server().store(), path(storage, 1), bytes(size))
        assert storage.get([asked(1)], timeout_s=TIMEOUT_S) == [WRONG]


def test_clear_goes_through_many_pages(storage: S3Storage) -> None:
    """Thousands of blocks are cleared and counted; others, the record and objects that are no blocks stay."""
    owner = server().store()
    cleared = [f"{storage._blocks}{'ab' * 16}/{number:032x}" for number in range(3000)]
    kept = [f"{storage._blocks}readme", f"{storage._prefix}else", f"{storage._blocks}{'ac' * 16}/{7:032x}"]
    version = storage.write_record(b"a record", b"", timeout_s=TIMEOUT_S)

    async def make() -> None:
        gate = asyncio.Semaphore(32)

        async def put(name: str) -> None:
            async with gate:
                await obstore.put_async(owner, name, b"x", use_multipart=False)

        await asyncio.gather(*(put(name) for name in cleared + kept))

    asyncio.run(make())

    pages = Mock()
    assert storage.clear(b"\xab" * 16, timeout_s=TIMEOUT_S, progress=pages) == 3000
    assert pages.call_count >= 3
    assert storage.clear(b"\xab" * 16, timeout_s=TIMEOUT_S) == 0
    there = {each["path"] for page in obstore.list(owner, storage._prefix) for each in page}
    assert there == {*kept, storage._record}
    assert storage.clear(b"", timeout_s=TIMEOUT_S) == 1
    assert version
    assert storage.read_record(timeout_s=TIMEOUT_S) == VersionedRecord(b"a record", version)


def test_hung_service_costs_the_time_limit(storage: S3Storage) -> None:
    """Calls of a service that answers nothing return after their limit, and those afterwards are right."""
    storage.put([stored(1)], timeout_s=TIMEOUT_S)
    with server().paused():
        with takes_about_the_limit():
            got = storage.get([asked(1), asked(2)], timeout_s=LIMIT_S)
        with takes_about_the_limit():
            put = storage.put([stored(2), stored(3)], timeout_s=LIMIT_S)
        with takes_about_the_limit(), pytest.raises(S3Failure, match="no answer within 1 s"):
            storage.exists([key(1)], timeout_s=LIMIT_S)
        with takes_about_the_limit(), pytest.raises(S3Failure, match="no answer within 1 s"):
            storage.write_record(b"a record", b"", timeout_s=LIMIT_S)

    assert got == put == [Result(Outcome.FAILED, "no answer within 1 s")] * 2
    block = asked(1)
    assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
    assert is_right(block, 1)


def test_late_write_does_not_read_what_is_there_then(storage: S3Storage) -> None:
    """A write that ended late never stores what the memory holds after its call: another block may be there."""
    block = stored(1)
    with server().paused():
        (result,) = storage.put([block], timeout_s=LIMIT_S)
        for part in block.parts:
            part[:] = b"\xff" * part.nbytes
    again = asked(1)

    (read,) = storage.get([again], timeout_s=TIMEOUT_S)

    assert result.outcome is Outcome.FAILED
    assert read == ABSENT or is_right(again, 1)


def test_bodies_of_writes_are_copies(faked: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gets memory of its own, so an ended request that it still sends reads nothing of the host pool."""
    bodies: list[object] = []
    real = obstore.put_async

    async def put(store: S3Store, path: str, body: bytes, **how: Any) -> object:
        bodies.append(body)
        return await real(store, path, body, **how)

    monkeypatch.setattr(obstore, "put_async", put)

    faked.put([stored(1)], timeout_s=TIMEOUT_S)

    assert [type(body) for body in bodies] == [bytes]


def test_late_read_writes_nothing(storage: S3Storage) -> None:
    """The parts of a read that took too long stay as they are once its call has returned."""
    storage.put([stored(1)], timeout_s=TIMEOUT_S)
    block = asked(1)
    with server().paused():
        (late,) = storage.get([block], timeout_s=LIMIT_S)
    (read,) = storage.get([asked(1)], timeout_s=TIMEOUT_S)

    assert (late.outcome, read) == (Outcome.FAILED, DONE)
    assert not any(any(part) for part in block.parts)


def test_service_that_died_comes_back(storage: S3Storage) -> None:
    """While the service is gone calls fail at once; afterwards they find what it has kept."""
    storage.put([stored(1)], timeout_s=TIMEOUT_S)
    with server().killed():
        (result,) = storage.get([asked(1)], timeout_s=TIMEOUT_S)
        with pytest.raises(S3Failure, match="Connection refused"):
            storage.exists([key(1)], timeout_s=TIMEOUT_S)

    block = asked(1)
    assert result.outcome is Outcome.FAILED
    assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
    assert is_right(block, 1)
