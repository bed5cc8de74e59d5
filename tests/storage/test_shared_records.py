"""The record of generations on its way between the daemon and a shared backend."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from kvcached.storage.backend import SHARED_RECORD_BYTES_MAX, RecordUnusable, StorageUnusable, VersionedRecord
from kvcached.storage.messages import Done, ReadRecord, WriteRecord
from kvcached.storage.record_exchange import RecordExchange
from kvcached.storage.shared_records import VERSION_BYTES_MAX, SharedRecords
from tests.service.fleet import FakeShelf

READ = ReadRecord(sequence=1, known=b"")


class Rig:
    """The storage process's side at a service, with its memory."""

    def __init__(self) -> None:
        self.shelf = FakeShelf()
        self.memory = memoryview(bytearray(SHARED_RECORD_BYTES_MAX))
        self.records = SharedRecords(self.memory, self.shelf, 1.0)  # type: ignore[arg-type]

    def write(self, data: bytes, after: bytes) -> Done:
        self.memory[: len(data)] = data
        return self.records.carry_out(WriteRecord(sequence=1, size_bytes=len(data), after=after))


def test_record_is_read_once() -> None:
    """Its bytes are copied into the memory, and not again for who knows its version."""
    rig = Rig()
    version = rig.write(b"a record", b"").version
    rig.memory[:8] = bytes(8)
    done = rig.records.carry_out(READ)
    assert (done.count, done.version, bytes(rig.memory[:8])) == (8, version, b"a record")
    rig.memory[:8] = bytes(8)
    done = rig.records.carry_out(ReadRecord(sequence=1, known=version))

    assert (done.count, done.version, bytes(rig.memory[:8])) == (0, version, bytes(8))


def test_record_of_another_key_is_told_from_a_service_that_fails() -> None:
    """The daemon must not use storage whose clears it cannot follow; a service that is away it tries again."""
    rig = Rig()
    version = rig.write(b"a record", b"").version
    rig.shelf.is_foreign = True

    for done in (rig.records.carry_out(READ), rig.write(b"another", b"not " + version)):
        assert not done.failed
        assert done.error == "it is not encrypted with this key"
    rig.shelf.has_no_password = True
    with pytest.raises(StorageUnusable, match="empty"):
        rig.records.carry_out(READ)
    rig.shelf.is_away = True
    with pytest.raises(OSError, match="away"):
        rig.records.carry_out(READ)


def test_record_of_another_key_is_no_news_to_who_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that has begun storage anew knows the version of what it replaces: that alone does not stop it."""
    rig = Rig()
    version = rig.write(b"a record", b"").version
    foreign = RecordUnusable("it is not encrypted with this key", version)
    monkeypatch.setattr(rig.shelf, "read_record", Mock(side_effect=foreign))

    assert rig.records.carry_out(READ) == Done(sequence=1, version=version, error=str(foreign))
    assert rig.records.carry_out(ReadRecord(sequence=1, known=version)) == Done(sequence=1, version=version)
    assert rig.write(b"another", version).written == 1


def test_who_was_overtaken_gets_the_other_record() -> None:
    """Nothing is written, and what is there comes with the same answer."""
    rig = Rig()
    version = rig.write(b"the first", b"").version
    done = rig.write(b"the other", b"")

    assert (done.written, done.version, bytes(rig.memory[: done.count])) == (0, version, b"the first")


def test_no_record_has_no_version() -> None:
    """A service without a record says so, also to who wants to replace one."""
    rig = Rig()

    assert (rig.records.carry_out(READ).version, rig.write(b"x", b"gone").version) == (b"", b"")


@pytest.mark.parametrize(
    "record",
    [
        VersionedRecord(b"x", b""),
        VersionedRecord(b"x", bytes(VERSION_BYTES_MAX + 1)),
    ],
    ids=["without a version", "of a version that fits into no message"],
)
def test_what_is_no_record_is_refused(record: VersionedRecord) -> None:
    """A backend may return anything: it is an error of the call, and nothing is written into the memory."""
    rig = Rig()
    rig.shelf.record = record

    with pytest.raises(ValueError, match=r"of \d+ bytes"):
        rig.records.carry_out(READ)
    assert bytes(rig.memory) == bytes(SHARED_RECORD_BYTES_MAX)


def test_record_that_is_too_large_can_be_replaced() -> None:
    """It is told with its version, and nothing is written into the memory."""
    rig = Rig()
    rig.shelf.record = VersionedRecord(bytes([1]) * (SHARED_RECORD_BYTES_MAX + 1), b"1")

    done = rig.records.carry_out(READ)
    assert (done.failed, done.count, done.version) == (False, 0, b"1")
    assert f"it has {SHARED_RECORD_BYTES_MAX + 1} bytes" in done.error
    assert bytes(rig.memory) == bytes(SHARED_RECORD_BYTES_MAX)
    assert rig.records.carry_out(ReadRecord(sequence=1, known=b"1")) == Done(sequence=1, version=b"1")
    assert rig.write(b"a record", b"1").written == 1


class Wire:
    """A link that answers when a test says so."""

    def __init__(self) -> None:
        self.is_there = True
        self.asked: deque[tuple[ReadRecord | WriteRecord, Callable[[Done], None]]] = deque()

    def ask(self, request: Callable[[int], ReadRecord | WriteRecord], tell: Callable[[Done], None]) -> bool:
        if self.is_there:
            self.asked.append((request(7), tell))
        return self.is_there

    def answer(self, done: Done) -> None:
        _, tell = self.asked.popleft()
        tell(done)


def test_requests_share_the_memory_one_after_the_other() -> None:
    """What is to be written is put there when the answer to the request before it was taken out."""
    exchange, wire = RecordExchange(), Wire()
    exchange.use(wire)
    told: list[bytes] = []
    exchange.read(b"", lambda _, data: told.append(data))
    exchange.write(b"new", b"1", lambda _, data: told.append(data))
    assert len(wire.asked) == 1
    exchange._mapped[:3] = b"old"
    wire.answer(Done(sequence=7, count=3, version=b"1"))
    ((request, _),) = wire.asked

    assert (told, request) == ([b"old"], WriteRecord(sequence=7, size_bytes=3, after=b"1"))
    assert exchange._mapped[:3] == b"new"
    wire.answer(Done(sequence=7, written=1, version=b"2"))
    assert told == [b"old", b""]
    exchange.close()


def test_requests_fail_while_there_is_no_process() -> None:
    """Each is told so at once, and the next one is made."""
    exchange, wire = RecordExchange(), Wire()
    exchange.use(wire)
    wire.is_there = False
    told: list[Done] = []
    exchange.read(b"", lambda done, _: told.append(done))
    exchange.write(b"new", b"", lambda done, _: told.append(done))

    assert [each.error for each in told] == ["storage is not open"] * 2
    exchange.close()
