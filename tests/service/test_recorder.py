"""The record of generations, kept up to date."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.generations import Edition, Generations
from kvcached.core.messages import StorageLost, StorageReady
from kvcached.recovery.generations import EditionRecord, Record
from kvcached.recovery.recorder import WRITE_DEADLINE_S, Recorder
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol import engine as wire
from tests.service.office import EPOCH, ONE, TWO, FakePeer, FakeTimers, Office
from tests.service.offload_office import OffloadOffice

ROOT = b"r" * 32


class FakeWriter:
    """A device that is through with a write when a test says so.

    Attributes:
        records: all that it was given.
        under_way: those that it is not through with.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.under_way: list[Callable[[str], None]] = []

    def write(self, record: Record, done: Callable[[str], None]) -> None:
        self.records.append(record)
        self.under_way.append(done)

    def end(self, why: str = "") -> None:
        self.under_way.pop(0)(why)


class Rig:
    """A recorder of one namespace, in generation 5, whose storage is open."""

    def __init__(self) -> None:
        self.generations = Generations(100, {ROOT: Edition(5)})
        self.timers, self.writer = FakeTimers(), FakeWriter()
        self.recorder = Recorder(self.generations, self.timers.later)
        self.recorder.use(self.writer)
        self.recorder.open()

    def clear(self) -> int:
        self.generations.renew(ROOT)
        self.recorder.keep()
        return self.recorder.version


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.writer.end()
    return rig


def told(record: Record) -> list[int]:
    return [each.generation for each in record.editions]


def test_nothing_is_written_before_storage_is_there() -> None:
    """The directory may be another daemon's, or not be mounted: until storage was opened a clear is not durable."""
    generations, writer = Generations(100), FakeWriter()
    recorder = Recorder(generations, FakeTimers().later)
    recorder.use(writer)
    generations.renew(ROOT)
    recorder.keep()
    assert (writer.records, recorder.failed(recorder.version)) == ([], True)
    recorder.open()

    assert (told(writer.records[0]), recorder.failed(recorder.version)) == ([100], False)


def test_nothing_is_written_while_storage_is_away(rig: Rig) -> None:
    """Another daemon may have the directory: a clear is not durable, and it is written when storage is there again."""
    rig.recorder.close()
    version, count = rig.clear(), len(rig.writer.records)
    rig.recorder.again()
    assert (count, rig.writer.under_way, rig.recorder.failed(version)) == (1, [], True)
    with pytest.raises(RequestError, match="is not open"):
        rig.recorder.check(version)
    rig.recorder.open()
    rig.writer.end()

    assert (rig.recorder.holds(version), rig.recorder.why) == (True, "")


def test_write_that_ends_after_storage_is_lost_is_the_last_one(rig: Rig) -> None:
    """It had begun before, and holds; what changed meanwhile is not written, and whoever waits for it is told."""
    first, second = rig.clear(), rig.clear()
    rig.recorder.close()
    rig.writer.end()

    assert (rig.recorder.holds(first), rig.recorder.failed(second), rig.writer.under_way) == (True, True, [])
    with pytest.raises(RequestError, match="is not open"):
        rig.recorder.check(second)


def test_without_storage_nothing_is_to_be_written() -> None:
    """Nothing remembers an old generation: everything holds at once."""
    recorder = Recorder(Generations(), FakeTimers().later)
    recorder.keep()

    assert recorder.holds(recorder.version)


def test_one_write_at_a_time_and_the_last_one_says_all(rig: Rig) -> None:
    """What changes during a write is written by the next one; each holds for what it said."""
    first, second, third = rig.clear(), rig.clear(), rig.clear()
    assert len(rig.writer.under_way) == 1
    rig.writer.end()
    assert (rig.recorder.holds(first), rig.recorder.holds(second), rig.recorder.failed(third)) == (True, False, False)
    rig.writer.end()

    assert (rig.recorder.holds(third), rig.writer.under_way) == (True, [])
    assert told(rig.writer.records[-1]) == [102]


def test_same_record_is_not_written_again(rig: Rig) -> None:
    """Requests that change nothing in it cost no write."""
    count = len(rig.writer.records)
    for _ in range(3):
        rig.recorder.keep()

    assert len(rig.writer.records) == count


def test_failed_write_is_tried_again_when_somebody_asks(rig: Rig) -> None:
    """A device that fails is not written to for each request, but when the next clear waits for it."""
    version = rig.clear()
    rig.writer.end("no space")
    rig.recorder.keep()
    assert (rig.recorder.failed(version), rig.recorder.why, rig.writer.under_way) == (True, "no space", [])
    rig.recorder.again()
    rig.writer.end()

    assert (rig.recorder.holds(version), rig.recorder.why) == (True, "")


def test_device_that_hangs_fails_those_who_wait(rig: Rig) -> None:
    """After the deadline a write has failed for whoever waits; it holds if it comes about in the end."""
    version = rig.clear()
    timer = rig.timers[-1]
    assert timer.delay_s == WRITE_DEADLINE_S
    timer.ring()
    assert (rig.recorder.failed(version), "not answered" in rig.recorder.why) == (True, True)
    rig.writer.end()

    assert rig.recorder.holds(version)


def test_write_that_is_over_is_not_late(rig: Rig) -> None:
    """Each write has its own time, which ends with it."""
    rig.clear()
    rig.writer.end()

    assert all(timer.cancelled for timer in rig.timers)


def test_what_is_to_be_forgotten_is_written_with_the_generation(rig: Rig) -> None:
    """One record says both, and is written again when storage has forgotten it."""
    due = [b"p" * 16]
    rig.recorder.forgets = lambda: due
    rig.clear()
    assert rig.writer.records[-1].forgets == (due[0].hex(),)
    rig.writer.end()
    due.clear()
    rig.recorder.keep()

    assert not rig.writer.records[-1].forgets


# --- requests -------------------------------------------------------------------------------------------------------


def with_storage(office: Office) -> FakeWriter:
    """Its storage has been opened, and the record is on the device."""
    writer = FakeWriter()
    office.service.state_writer.recorder.use(writer)
    office.service.on_event(StorageReady())
    while writer.under_way:
        writer.end()
    return writer


def code(header: wire.Header) -> ErrorCode:
    assert isinstance(header, wire.ErrorReply), header
    return ErrorCode(header.code)


@pytest.mark.parametrize("weights", ["", "step 1"])
def test_replica_is_told_when_the_record_is_written(weights: str) -> None:
    """A clear, or other weights, is answered when generation and weights are on the device, and not before."""
    office = Office("a", host_slabs=2)
    office.enter(FakePeer(1))
    writer = with_storage(office)
    answers: list[wire.Header] = []
    request: wire.Request = wire.ClearNamespace(id=7, target="a")
    if weights:
        request = wire.SetWeights(id=7, target="a", version=weights)
    office.service.submit(TWO, request, [], lambda answer: answers.append(answer.header))
    assert answers == []
    writer.end()

    (reply,) = answers
    assert isinstance(reply, wire.NamespaceCleared)
    (edition,) = writer.records[-1].editions
    assert edition == EditionRecord(
        namespace=reply.namespace.hex(), generation=reply.generation, weights_version=weights
    )


def test_engine_is_told_when_the_record_is_written() -> None:
    """So is the clear of an engine in offload mode; its retry meanwhile clears nothing more, and both are answered."""
    office = OffloadOffice()
    office.ask(office.hello_offload(FakePeer(1)))
    writer = with_storage(office)
    answers: list[wire.Header] = []
    request = wire.Clear(id=office.next_id(), epoch=EPOCH)
    for _ in range(2):
        office.service.submit(ONE, request, [], lambda answer: answers.append(answer.header))
    assert answers == []
    writer.end()

    first, second = answers
    assert isinstance(first, wire.Cleared)
    assert first == second
    assert [each.generation for each in writer.records[-1].editions] == [first.generation]


def test_clear_that_is_not_written_down_is_an_error_until_it_is() -> None:
    """Whoever clears is told that a restart would bring the blocks back; the same request later finds it done."""
    office = OffloadOffice()
    office.ask(office.hello_offload(FakePeer(1)))
    writer = with_storage(office)
    answers: list[wire.Header] = []
    request = wire.Clear(id=office.next_id(), epoch=EPOCH)
    office.service.submit(ONE, request, [], lambda answer: answers.append(answer.header))
    writer.end("read-only file system")
    assert (code(answers[0]), "read-only file system" in str(answers[0])) == (ErrorCode.INTERNAL, True)
    office.service.submit(ONE, request, [], lambda answer: answers.append(answer.header))
    writer.end()

    assert isinstance(answers[1], wire.Cleared)


def test_clear_is_not_written_down_after_storage_is_lost() -> None:
    """Storage that is detached, or whose process has died: the clear is an error until storage is there again."""
    office = OffloadOffice()
    office.ask(office.hello_offload(FakePeer(1)))
    writer = with_storage(office)
    office.service.on_event(StorageLost())
    answers: list[wire.Header] = []
    request = wire.Clear(id=office.next_id(), epoch=EPOCH)
    office.service.submit(ONE, request, [], lambda answer: answers.append(answer.header))
    assert (code(answers[0]), writer.under_way) == (ErrorCode.INTERNAL, [])
    office.service.on_event(StorageReady())
    writer.end()
    office.service.submit(ONE, request, [], lambda answer: answers.append(answer.header))

    assert isinstance(answers[1], wire.Cleared)


def test_weights_that_are_set_already_are_written_down_too() -> None:
    """Whoever asks again for the weights that could not be written down is not told that all is well."""
    office = Office("a", host_slabs=2)
    writer = with_storage(office)
    answers: list[wire.Header] = []
    for number in (7, 8):
        request = wire.SetWeights(id=number, target="a", version="step 1")
        office.service.submit(TWO, request, [], lambda answer: answers.append(answer.header))
        writer.end("no space" if number == 7 else "")

    assert code(answers[0]) == ErrorCode.INTERNAL
    assert isinstance(answers[1], wire.NamespaceCleared)
