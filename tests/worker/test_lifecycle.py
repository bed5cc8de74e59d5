from __future__ import annotations

import pytest

from kvcached.worker.lifecycle import (
    BREAKER_LOSSES,
    FailedStarts,
    IllegalTransition,
    Lifecycle,
    WorkersState,
    restart_pauses,
)
from kvcached.worker.lifecycle import breaker as new_breaker
from kvcached_client.errors import ErrorCode, request_error

S = WorkersState


def lifecycle_in(*states: WorkersState) -> Lifecycle:
    """One that has passed through these states."""
    lifecycle = Lifecycle("default")
    for state in states:
        lifecycle.go(state)
    return lifecycle


@pytest.mark.parametrize(
    "path",
    [
        (S.STARTING, S.RUNNING, S.LOST, S.WAITING, S.STARTING, S.RUNNING, S.STOPPING, S.STOPPED),
        (S.STARTING, S.RUNNING, S.LOST, S.DEGRADED, S.STARTING, S.DEGRADED, S.STARTING, S.PROBATION, S.RUNNING),
        (S.STARTING, S.PROBATION, S.LOST, S.DEGRADED, S.STOPPING),
        (S.STOPPING, S.STOPPED),
        (S.STARTING, S.STOPPING, S.STOPPED),
    ],
)
def test_lives_of_workers(path: tuple[WorkersState, ...]) -> None:
    """Workers start, are lost, wait and start again, on probation after many losses, and can be stopped meanwhile."""
    assert lifecycle_in(*path).state is path[-1]


@pytest.mark.parametrize(
    "path",
    [
        (S.RUNNING,),
        (S.STARTING, S.LOST),
        (S.STARTING, S.RUNNING, S.STARTING),
        (S.STARTING, S.RUNNING, S.WAITING),
        (S.STARTING, S.RUNNING, S.LOST, S.STARTING),
        (S.STARTING, S.RUNNING, S.LOST, S.RUNNING),
        (S.STARTING, S.RUNNING, S.LOST, S.WAITING, S.RUNNING),
        (S.STARTING, S.RUNNING, S.STOPPING, S.LOST),
        (S.STARTING, S.RUNNING, S.STOPPING, S.RUNNING),
        (S.STOPPING, S.STOPPED, S.STARTING),
    ],
)
def test_what_cannot_follow_is_refused(path: tuple[WorkersState, ...]) -> None:
    """A group is never started before the last one is confirmed dead, nor after a stop; such a step is a bug."""
    lifecycle = lifecycle_in(*path[:-1])
    before = lifecycle.state
    with pytest.raises(IllegalTransition, match=f"replica default: {before.value} to {path[-1].value}"):
        lifecycle.go(path[-1])
    assert lifecycle.state is before


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("a/0 ended with status 3; its log x ends:\n1 INFO device\n2 ERROR no memory", "no memory"),
        (
            "a/0 was ended by SIGKILL; its log x ends:\n1 INFO device",
            "a/0 was ended by SIGKILL; its log x (start again)",
        ),
        ("a/0 was not ready; its log x is empty", "a/0 was not ready; its log x is empty (start again)"),
    ],
)
def test_failed_start_is_told_by_an_error_of_the_worker_or_by_its_end(message: str, why: str) -> None:
    """The last line of the log says why only if it is an error; one that was killed has logged of something else."""
    starts = FailedStarts()
    starts.add(request_error(ErrorCode.WORKER_LOST, message, "start again"), is_memory_gone=False)
    assert starts.why == why


def test_failed_start_without_a_message_is_told_by_its_kind() -> None:
    """An error with an empty text does not break the restarts."""
    starts = FailedStarts()
    starts.add(OSError(), is_memory_gone=False)
    assert starts.why == "OSError"


def test_back_off_doubles_and_begins_anew_after_health() -> None:
    """There is no first pause; the next go from half a second to four seconds, and anew only after a minute of life."""
    back_off = restart_pauses()

    assert [back_off.pause_s() for _ in range(7)] == [0, 0.5, 1, 2, 4, 4, 4]
    back_off.lived(59)
    assert back_off.pause_s() == 4
    back_off.lived(60)
    assert [back_off.pause_s() for _ in range(3)] == [0, 0.5, 1]


def test_breaker_opens_after_short_lives_in_a_row() -> None:
    """Five short lives in a row open it, failed starts counted; a long one among them starts the count anew."""
    breaker = new_breaker()
    for lived_s in (0, 59, 3, 60, 0, 0, 0):
        breaker.ended(lived_s)
    assert not breaker.is_open
    breaker.ended(0)
    assert breaker.is_open
    breaker.ended(59)
    assert breaker.is_open
    breaker.close()
    assert not breaker.is_open
    for _ in range(BREAKER_LOSSES):
        assert not breaker.is_open
        breaker.ended(0)
    assert breaker.is_open
