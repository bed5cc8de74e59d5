from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from unittest.mock import Mock

import pytest

from kvcached.storage.backend import DONE, LocalDisk, Outcome, Usage
from kvcached.storage.encryption.backend import EncryptedStorage
from kvcached.storage.tiers import backend, full_pauses, refills
from kvcached.storage.tiers.backend import TieredStorage
from kvcached.storage.tiers.side import FIRST_PAUSE_S
from tests.storage.tiers.away import Clock, FakeStorage
from tests.storage.values import KIND, TIMEOUT_S, asked, is_right, key, stored

AWAY = OSError("it is away")


class Tiers:
    """Both backends, and the one of both."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.disk, self.far = FakeStorage(), FakeStorage(is_shared=True)
        self.both = TieredStorage(self.disk, self.far, "far", self.clock)

    def put(self, *numbers: int) -> list[Outcome]:
        return [each.outcome for each in self.both.put([stored(number) for number in numbers], timeout_s=TIMEOUT_S)]

    def get(self, *numbers: int) -> list[Outcome]:
        """Outcomes; what is DONE has the right bytes, and what came from the service is on the disk, too."""
        blocks = [asked(number) for number in numbers]
        results = self.both.get(blocks, timeout_s=TIMEOUT_S)
        for number, block, result in zip(numbers, blocks, results, strict=True):
            assert result != DONE or is_right(block, number)
        self.both.refills.wait()
        return [each.outcome for each in results]

    def exists(self, *numbers: int) -> list[bool]:
        return self.both.exists([key(number) for number in numbers], timeout_s=TIMEOUT_S)

    def missing(self, *numbers: int) -> list[bool]:
        return self.both.missing([key(number) for number in numbers], timeout_s=TIMEOUT_S)

    def forget_calls(self) -> None:
        self.disk.calls.clear()
        self.far.calls.clear()

    def close(self) -> None:
        self.both.close()


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    with closing(Tiers()) as tiers:
        yield tiers


def test_it_is_shared_as_the_service_is(tiers: Tiers) -> None:
    """Threads and the record are those of the service; a batch is one that both take."""
    assert tiers.both.capabilities == tiers.far.capabilities


def test_both_say_how_full_they_are(tiers: Tiers) -> None:
    """And what was read from the disk counts, not what it lacked. The disk is not asked: it may hang."""

    def stuck() -> Usage:
        raise AssertionError("the disk was asked")

    tiers.put(1)
    tiers.far.values[key(2)] = b"of another machine"
    tiers.get(1, 3)
    tiers.disk.usage = stuck  # type: ignore[method-assign]

    assert tiers.both.usage() == Usage(2, -1, -1, LocalDisk(1, -1, -1, read_blocks=1))


def test_blocks_are_written_to_both(tiers: Tiers) -> None:
    """So they outlive this machine, and the service."""
    assert tiers.put(1, 2) == [Outcome.DONE] * 2
    assert tiers.disk.values == tiers.far.values
    assert len(tiers.far.values) == 2


def test_what_the_disk_has_is_not_asked_of_the_service(tiers: Tiers) -> None:
    """Neither whether it is there, nor its bytes."""
    tiers.put(1, 2)
    tiers.forget_calls()

    assert tiers.exists(1, 2) == [True, True]
    assert tiers.get(1, 2) == [Outcome.DONE] * 2
    assert tiers.far.calls == []


def test_what_the_disk_lacks_comes_from_the_service_once(tiers: Tiers) -> None:
    """It is on the disk from then on."""
    tiers.put(1, 2, 3)
    tiers.disk.values = {key(2): tiers.disk.values[key(2)]}

    assert tiers.exists(1, 2, 3, 4) == [True, True, True, False]
    assert tiers.get(1, 2, 3, 4) == [Outcome.DONE] * 3 + [Outcome.ABSENT]
    tiers.forget_calls()
    assert tiers.get(1, 2, 3) == [Outcome.DONE] * 3
    assert tiers.far.calls == []


def test_what_is_missing_the_service_says(tiers: Tiers) -> None:
    """A block that only the disk has is written again, for others look in the service; not the other way round."""
    tiers.put(1, 2)
    del tiers.far.values[key(1)], tiers.disk.values[key(2)]

    assert tiers.missing(1, 2, 3) == [True, False, True]
    tiers.far.error = AWAY
    assert tiers.missing(1, 2, 3) == [False, True, True]


def test_disk_goes_on_while_the_service_is_away(tiers: Tiers) -> None:
    """Its blocks are found and read, and others written; the service is not waited for each time."""
    tiers.put(1)
    tiers.far.error = AWAY

    assert tiers.exists(1, 2) == [True, False]
    assert tiers.put(2) == [Outcome.DONE]
    tiers.forget_calls()
    assert tiers.get(1, 2, 3) == [Outcome.DONE] * 2 + [Outcome.ABSENT]
    assert tiers.far.calls == []
    tiers.far.error = None
    tiers.clock.now_s += FIRST_PAUSE_S
    assert tiers.missing(1, 2) == [False, True]


def test_block_that_fails_leaves_the_service_out(tiers: Tiers) -> None:
    """A backend that answers FAILED for each block is as little use as one that raises."""
    tiers.far.failing = True

    for _ in range(3):
        assert tiers.put(1) == [Outcome.DONE]
        assert tiers.get(1, 2) == [Outcome.DONE, Outcome.ABSENT]
    assert tiers.far.calls == ["put", "get"]


def test_service_goes_on_while_the_disk_is_broken(tiers: Tiers) -> None:
    """A disk that died costs time, and nothing else."""
    tiers.put(1)
    tiers.disk.error = OSError(5, "input/output error")

    assert tiers.exists(1, 2) == [True, False]
    assert tiers.get(1) == [Outcome.DONE]
    assert tiers.put(2) == [Outcome.DONE]
    assert key(2) in tiers.far.values


def test_block_that_the_disk_cannot_read_comes_from_the_service(tiers: Tiers) -> None:
    """A bad sector costs nothing, either."""
    tiers.put(1)
    tiers.disk.failing = True

    assert tiers.get(1) == [Outcome.DONE]


def test_what_is_left_out_is_told(tiers: Tiers) -> None:
    """Storage works, so only this tells people of a disk that has died, or of a service that is away."""
    assert tiers.both.trouble() == ""
    tiers.disk.error = OSError("no disk")
    tiers.exists(1)
    assert tiers.both.trouble() == "reads from the local disk are left out: OSError: no disk"
    tiers.far.error = AWAY
    with pytest.raises(OSError, match="away"):
        tiers.exists(1)
    assert tiers.both.trouble().endswith("; reads from storage 'far' are left out: OSError: it is away")
    tiers.disk.error = tiers.far.error = None
    tiers.clock.now_s += FIRST_PAUSE_S
    tiers.exists(1)
    assert tiers.both.trouble() == ""


def test_failure_of_both_is_an_error(tiers: Tiers) -> None:
    """The daemon suspends storage, as it does without a local disk."""
    tiers.disk.error, tiers.far.error = OSError("no disk"), AWAY

    for call in (tiers.exists, tiers.missing, tiers.get, tiers.put):
        with pytest.raises(OSError, match=r"the local disk are left out: OSError: no disk; .* it is away"):
            call(1)


def test_service_that_is_full_says_so_and_a_disk_does_not(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    """What others do not find is not stored; a disk without room is in the log, once."""
    tiers.disk.full = True
    assert tiers.put(1) == tiers.put(2) == [Outcome.DONE]
    tiers.far.full = True
    assert tiers.put(3) == [Outcome.FULL]

    assert tiers.get(1, 2) == [Outcome.DONE] * 2
    assert tiers.put(4) == [Outcome.FULL]
    assert caplog.text.count("writes to the local disk: it accepts no blocks: put went wrong") == 1


def test_service_that_is_full_is_tried_once_in_a_while(tiers: Tiers) -> None:
    """Meanwhile the disk takes blocks, and the answer is that of the service."""
    tiers.far.full = True
    assert [tiers.put(number) for number in range(4)] == [[Outcome.FULL]] * 4
    assert (tiers.far.calls.count("put"), tiers.disk.calls.count("put")) == (1, 4)

    tiers.far.full = False
    tiers.clock.now_s += full_pauses.FIRST_PAUSE_S
    assert tiers.put(5) == tiers.put(6) == [Outcome.DONE]


def test_deleted_blocks_are_gone_from_both(tiers: Tiers) -> None:
    """However many either had."""
    tiers.put(1, 2, 3)
    del tiers.disk.values[key(1)]

    assert tiers.both.delete([key(1), key(2)], timeout_s=TIMEOUT_S) == 2
    assert tiers.exists(1, 2, 3) == [False, False, True]
    assert tiers.both.clear(KIND.prefix(), timeout_s=TIMEOUT_S) == 1
    assert not tiers.disk.values
    assert not tiers.far.values


def test_block_that_is_wrong_on_the_disk_stays_in_the_service(tiers: Tiers) -> None:
    """A disk that returns other bytes than it got must not cost all machines the block; one that lacks it is spared."""
    tiers.put(1, 2)
    del tiers.disk.values[key(2)]
    assert tiers.get(1, 2) == [Outcome.DONE] * 2
    tiers.both.discard([key(1), key(2)], timeout_s=TIMEOUT_S)

    assert not tiers.disk.values
    assert set(tiers.far.values) == {key(1)}
    assert tiers.get(1) == [Outcome.DONE]  # from the service, and to the disk
    assert tiers.get(1) == [Outcome.DONE]  # from the disk
    tiers.both.discard([key(1)], timeout_s=TIMEOUT_S)
    assert set(tiers.far.values) == {key(1)}


def test_wrong_block_is_deleted_on_the_disk_of_a_service_that_deletes_nothing() -> None:
    """The disk can, and the next read is of the service."""
    disk, far = FakeStorage(), FakeStorage()
    far.capabilities = far.capabilities._replace(deletes=False)
    with closing(TieredStorage(disk, far, "far")) as both:
        both.put([stored(1)], timeout_s=TIMEOUT_S)
        both.discard([key(1)], timeout_s=TIMEOUT_S)
        far.discard([key(1)], timeout_s=TIMEOUT_S)

    assert not disk.values
    assert set(far.values) == {key(1)}


def test_where_blocks_came_from_is_remembered_for_a_while(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the last ones, which are compared at once: memory does not grow with the blocks that were ever read."""
    monkeypatch.setattr(backend, "CAME_MAX", 2)
    tiers.put(1, 2, 3)
    tiers.disk.values.clear()
    for number in (1, 2, 3):
        tiers.get(number)
    tiers.both.discard([key(1), key(2), key(3)], timeout_s=TIMEOUT_S)

    assert set(tiers.far.values) == {key(1)}


def test_service_that_cannot_be_written_is_read(tiers: Tiers) -> None:
    """As with credentials that may only read: what it has is found, and what is written goes to the disk."""
    tiers.put(1)
    tiers.disk.values.clear()
    tiers.far.failing_puts = True
    for number in range(2, 6):
        assert tiers.put(number) == [Outcome.DONE]
        assert tiers.exists(1) == [True]
    assert tiers.far.calls.count("put") == 2
    assert tiers.both.trouble() == "writes to storage 'far' are left out: put went wrong"


def test_disk_is_cleared_when_the_service_has_lost_everything(tiers: Tiers) -> None:
    """The service has lost what others have cleared, too: blocks of before that clear may be on the disk."""
    tiers.put(1)
    assert tiers.both.read_record(timeout_s=TIMEOUT_S) is None
    assert len(tiers.disk.values) == 1
    tiers.far.values.clear()
    assert tiers.both.read_record(timeout_s=TIMEOUT_S) is None
    assert not tiers.disk.values
    tiers.far.failing_puts = True  # nobody can fill it again
    tiers.put(2)
    assert tiers.both.read_record(timeout_s=TIMEOUT_S) is None
    assert set(tiers.disk.values) == {key(2)}
    tiers.far.values[key(3)] = b"of another machine"
    assert tiers.both.read_record(timeout_s=TIMEOUT_S) is None
    tiers.far.values.clear()
    assert tiers.both.read_record(timeout_s=TIMEOUT_S) is None
    assert not tiers.disk.values


def test_what_is_read_during_a_clear_is_cleared(tiers: Tiers) -> None:
    """A service takes minutes for it. What is read from it meanwhile is on the disk only until the end."""
    tiers.put(1)
    tiers.disk.values.clear()

    def read() -> None:
        tiers.far.on_call = lambda: None
        assert tiers.get(1) == [Outcome.DONE]

    tiers.far.on_call = read
    tiers.both.clear(b"", timeout_s=TIMEOUT_S)

    assert not tiers.disk.values
    assert not tiers.far.values


def test_half_a_clear_is_not_repeated(tiers: Tiers) -> None:
    """The service lists all its keys for one: it does that once for a prefix, however often the disk fails."""
    tiers.put(1)
    tiers.disk.error = AWAY
    for _ in range(3):
        with pytest.raises(OSError, match="it is away"):
            tiers.both.clear(KIND.prefix(), timeout_s=TIMEOUT_S)
    tiers.disk.error = None
    assert tiers.both.clear(KIND.prefix(), timeout_s=TIMEOUT_S) == 1
    assert tiers.far.calls.count("clear") == 1
    assert tiers.both.clear(KIND.prefix(), timeout_s=TIMEOUT_S) == 0
    assert tiers.far.calls.count("clear") == 2


def test_clear_gets_on_in_both(tiers: Tiers) -> None:
    """Whoever waits hears of each part, also behind encryption."""
    storage, parts = EncryptedStorage(tiers.both, bytes(32)), Mock()
    storage.put([stored(1)], timeout_s=TIMEOUT_S)

    assert storage.clear(KIND.prefix(), timeout_s=TIMEOUT_S, progress=parts) == 1
    assert parts.call_count == 2


def test_clear_that_one_of_both_fails_at_is_an_error(tiers: Tiers) -> None:
    """It comes again; and the other one is cleared all the same, also while it is left out."""
    for broken, other in ((tiers.disk, tiers.far), (tiers.far, tiers.disk)):
        tiers.put(1)
        broken.error = AWAY
        with pytest.raises(OSError, match="it is away"):
            tiers.both.clear(b"", timeout_s=TIMEOUT_S)
        assert not other.values
        broken.error = None
        assert tiers.both.clear(b"", timeout_s=TIMEOUT_S) == 1


@pytest.mark.parametrize("prefix", [b"", KIND.prefix()])
def test_what_is_cleared_while_it_is_read_does_not_come_back(tiers: Tiers, prefix: bytes) -> None:
    """A block that the service gave before a clear is not written to the disk after it."""
    tiers.put(1)
    tiers.disk.values.clear()

    def clear() -> None:
        tiers.far.on_call = lambda: None
        tiers.both.clear(prefix, timeout_s=TIMEOUT_S)
        tiers.far.values[key(1)] = b"".join(map(bytes, stored(1).parts))  # as it was read before

    tiers.far.on_call = clear
    assert tiers.get(1) == [Outcome.DONE]
    assert not tiers.disk.values


def test_blocks_that_wait_for_the_disk_are_bounded(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond it are not kept on the disk this time, and are read all the same."""
    monkeypatch.setattr(refills, "REFILL_BYTES_MAX", 2 * stored(1).size_bytes)
    tiers.put(1, 2, 3)
    tiers.disk.values.clear()
    writes = threading.Event()

    def hold_writes() -> None:
        tiers.disk.on_call = lambda: None if writes.wait(10) else pytest.fail("nobody lets it write")

    tiers.far.on_call = hold_writes
    blocks = [asked(number) for number in (1, 2, 3)]
    assert tiers.both.get(blocks, timeout_s=TIMEOUT_S) == [DONE] * 3
    writes.set()
    tiers.both.refills.wait()
    assert set(tiers.disk.values) == {key(1), key(2)}
    assert tiers.get(3) == [Outcome.DONE]
    assert len(tiers.disk.values) == 3


def test_both_have_one_limit_together(tiers: Tiers) -> None:
    """The service has the time that the disk has left. Is that too little, the disk is at fault, and is left out."""

    def take(seconds: float) -> None:
        tiers.clock.now_s += seconds

    tiers.disk.on_call = lambda: take(1.0)
    assert tiers.get(1) == [Outcome.ABSENT]
    assert tiers.far.limits_s == [TIMEOUT_S - 1.0]
    tiers.disk.on_call = lambda: take(TIMEOUT_S)
    assert tiers.get(1) == [Outcome.ABSENT]
    assert tiers.far.calls == ["get"]
    assert tiers.both.trouble() == f"reads from the local disk are left out: a call took {TIMEOUT_S} s"
    tiers.far.values[key(1)] = b"".join(map(bytes, stored(1).parts))
    assert tiers.get(1) == [Outcome.DONE]


def test_empty_service_is_asked_for_nothing(tiers: Tiers) -> None:
    """A batch without blocks is none for either."""
    assert tiers.exists() == []
    assert tiers.get() == []
    assert tiers.put() == []


def test_both_are_closed(tiers: Tiers) -> None:
    """The disk can be opened by another process."""
    tiers.both.close()
    assert tiers.disk.is_closed
    assert tiers.far.is_closed
