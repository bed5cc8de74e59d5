from __future__ import annotations

import threading

import pytest

from kvcached.storage.backend import StorageGone
from kvcached.storage.tiers.side import FIRST_PAUSE_S, LONGEST_PAUSE_S, Side
from tests.storage.tiers.away import Clock, FakeStorage


def asked(side: Side) -> bool:
    """Whether a call reaches the backend."""
    before = len(backend_of(side).calls)
    side.call(lambda storage: storage.exists([], timeout_s=1.0))
    return len(backend_of(side).calls) > before


def backend_of(side: Side) -> FakeStorage:
    assert isinstance(side._backend, FakeStorage)
    return side._backend


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def side(clock: Clock) -> Side:
    return Side("reads from it", FakeStorage(), clock)


def test_pauses_become_longer_until_a_call_succeeds(side: Side, clock: Clock) -> None:
    """Each is twice the one before it, up to half a minute, and the first one again after a success."""
    backend_of(side).error = OSError("away")
    assert asked(side)
    pause_s = FIRST_PAUSE_S
    for _ in range(10):
        clock.now_s += pause_s - 0.01
        assert not asked(side)
        clock.now_s += 0.01
        assert asked(side)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    backend_of(side).error = None
    clock.now_s += LONGEST_PAUSE_S
    assert asked(side)
    assert asked(side)
    backend_of(side).error = OSError("away")
    assert asked(side)
    clock.now_s += FIRST_PAUSE_S
    assert asked(side)


def test_backend_that_has_to_be_opened_anew_is_not_left_out(side: Side) -> None:
    """Only another process can do that: it is told, and nothing pretends that the other backend were enough."""
    backend_of(side).error = StorageGone("it was removed")

    with pytest.raises(StorageGone, match="it was removed"):
        asked(side)
    assert not side.is_out


def test_backend_that_cannot_be_opened_anew_is_left_out(side: Side, clock: Clock) -> None:
    """Another process would not get it either: the other backend goes on alone until it can be opened."""
    backend_of(side).error = StorageGone("it was replaced", can_open=False)
    assert asked(side)
    assert (side.is_out, side.trouble) == (True, "StorageGone: it was replaced")
    assert not asked(side)
    clock.now_s += FIRST_PAUSE_S
    backend_of(side).error = StorageGone("it was replaced")

    with pytest.raises(StorageGone, match="it was replaced"):
        asked(side)


def test_one_call_tries_and_the_others_do_not_wait(side: Side, clock: Clock) -> None:
    """A service that hangs costs one thread its limit, and not all of them."""
    storage = backend_of(side)
    storage.error = OSError("away")
    asked(side)
    clock.now_s += FIRST_PAUSE_S
    is_called, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        is_called.set()
        goes_on.wait(10)

    storage.on_call = hang
    trial = threading.Thread(target=asked, args=(side,))
    trial.start()
    assert is_called.wait(10)
    storage.on_call = lambda: None

    assert not asked(side)
    storage.error = None
    goes_on.set()
    trial.join()
    assert asked(side)


def test_calls_that_fail_together_are_one_failure(side: Side, clock: Clock) -> None:
    """Those that began before the first of them failed do not make the pause longer."""
    storage = backend_of(side)
    storage.error = OSError("away")
    nested = [3]

    def call_another() -> None:
        if nested[0]:
            nested[0] -= 1
            asked(side)

    storage.on_call = call_another
    asked(side)
    clock.now_s += FIRST_PAUSE_S
    assert asked(side)


def test_failures_and_their_end_are_in_the_log(side: Side, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each pause, with the reason; and when it works again."""
    backend_of(side).error = OSError("away")
    for _ in range(3):
        asked(side)
    assert side.trouble == "OSError: away"
    backend_of(side).error = None
    clock.now_s += FIRST_PAUSE_S
    asked(side)

    assert [each.getMessage() for each in caplog.records] == [
        "reads from it are left out for 0.5 s: OSError: away",
        "reads from it work again",
    ]


def test_call_that_takes_too_long_is_a_failure_with_an_answer(side: Side, clock: Clock) -> None:
    """Others shall not wait for a slow backend, and what it has said is as good as ever."""

    def take() -> None:
        clock.now_s += 3.0

    backend_of(side).on_call = take

    assert side.call(lambda storage: storage.exists([b"key"], timeout_s=1.0), slow_s=2.0) == [False]
    assert side.is_out
    assert side.trouble == "a call took 3.0 s"
