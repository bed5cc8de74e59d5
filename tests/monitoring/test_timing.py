"""Durations of requests and of copies."""

from __future__ import annotations

from kvcached.core.messages import (
    BackupSettled,
    FetchSettled,
    Span,
    StartBackup,
    StartFetch,
    StorageLost,
    TransferKind,
    span_of,
)
from kvcached.core.slots.ranges import no_ranges
from kvcached.core.slots.states import TransferState
from kvcached.monitoring.timing import COPY_BOUNDS_NS, CopyTimes, Durations, Executor, RequestTimes
from kvcached_client.types import SessionId, TransferId

ONE, TWO, THREE = (TransferId(number) for number in (1, 2, 3))
STORAGE_LOAD, STORAGE_STORE = (Executor.STORAGE, TransferKind.LOAD), (Executor.STORAGE, TransferKind.STORE)
ENGINE_LOAD = (Executor.ENGINE, TransferKind.LOAD)


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def span(blocks: int) -> Span:
    return span_of(0, bytes(16 * blocks), no_ranges(), no_ranges())


def test_duration_is_in_the_first_bucket_that_holds_it() -> None:
    """A duration that equals a bound is within it; one beyond the last bound is in the bucket without one."""
    durations = Durations((10, 20))
    for duration_ns in (0, 10, 11, 20, 21, 1_000):
        durations.note(duration_ns)

    assert durations.counts == [2, 2, 2]
    assert durations.sum_ns == 1_062


def test_late_reply_is_timed_when_it_is_sent() -> None:
    """A reply that comes later counts once, when it is sent."""
    times, sent = RequestTimes([int]), list[str]()
    respond = times.timed(sent.append, int, 0)
    assert sum(times.by_verb[int].counts) == 0

    respond("answer")

    assert sent == ["answer"]
    assert sum(times.by_verb[int].counts) == 1


def test_copies_of_storage_count_what_has_come() -> None:
    """Of a fetch that is cut short, and of a backup, the blocks that were copied count; a lost storage counts none."""
    clock = Clock()
    times = CopyTimes(clock)
    times.ordered(StartFetch(ONE, b"n", 0, span(4)), 100)
    times.ordered(StartBackup(TWO, b"n", 0, (span(2), span(1))), 100)
    times.ordered(StartBackup(THREE, b"n", 0, (span(8),)), 100)
    assert (times.count(*STORAGE_LOAD), times.count(*STORAGE_STORE)) == (1, 2)

    clock.now_ns = COPY_BOUNDS_NS[0] + 1
    times.heard(FetchSettled(ONE, 3, 0))
    times.heard(BackupSettled(TWO, 3))
    times.heard(StorageLost())

    assert not times.under_way
    assert (times.copied_bytes[STORAGE_LOAD], times.copied_bytes[STORAGE_STORE]) == (300, 300)
    assert times.durations[STORAGE_LOAD].counts[:3] == [0, 1, 0]
    assert sum(times.durations[STORAGE_STORE].counts) == 1


def test_copies_of_an_engine_end_with_its_session() -> None:
    """A copy counts when its last shard is done, whole or failed; those of an engine that is gone count no more."""
    times = CopyTimes(Clock())
    for number in (ONE, TWO, THREE):
        times.begin(number, *ENGINE_LOAD, 2, 100, SessionId(7))

    times.reported(ONE, TransferState.RUNNING)
    assert times.count(*ENGINE_LOAD) == 3
    times.reported(ONE, TransferState.DONE)
    times.reported(TWO, TransferState.FAILED)
    times.reported(TWO, None)
    times.session_over(SessionId(7))

    assert not times.under_way
    assert times.copied_bytes[ENGINE_LOAD] == 200
    assert sum(times.durations[ENGINE_LOAD].counts) == 2
