"""Storage without room gets less to write than storage with room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcached.storage.backend import DONE, Block, Outcome, Result
from kvcached.storage.executor import HostCopies
from kvcached.storage.tiers import full_pauses
from kvcached.storage.tiers.full_pauses import FIRST_PAUSE_S, LONGEST_PAUSE_S, FullPauses
from tests.storage.test_copies import KEYS, Rig
from tests.storage.tiers.away import Clock

A, B = b"a" * 16, b"b" * 16
FULL = Result(Outcome.FULL, "no room")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> FullPauses:
    """Of a backend that has just refused a block of `A`."""
    made = FullPauses(clock)
    made.note(A, [FULL])
    return made


def test_one_is_tried_after_each_pause(pauses: FullPauses, clock: Clock) -> None:
    """Pauses become longer until a block is taken; what is refused meanwhile is refused for the same reason."""
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        assert pauses.refusal(A) == FULL
        clock.now_s += pause_s * 0.99
        assert pauses.refusal(A) == FULL
        clock.now_s += pause_s * 0.02
        assert [pauses.refusal(A), pauses.refusal(A)] == [None, FULL]
        pauses.note(A, [FULL, FULL])
    clock.now_s += LONGEST_PAUSE_S
    assert pauses.refusal(A) is None
    pauses.note(A, [FULL, DONE])
    assert [pauses.refusal(A), pauses.refusal(A)] == [None, None]


def test_several_that_are_refused_together_are_one_refusal(pauses: FullPauses, clock: Clock) -> None:
    """They began before the first answer, and do not make the pause longer."""
    for _ in range(7):
        pauses.note(A, [FULL])
    clock.now_s += FIRST_PAUSE_S

    assert pauses.refusal(A) is None


def test_limit_of_one_namespace_holds_up_no_other(pauses: FullPauses) -> None:
    """Its blocks may be too large, and others small enough."""
    assert pauses.refusal(B) is None
    pauses.note(B, [DONE])

    assert pauses.refusal(A) == FULL


@pytest.mark.parametrize("ends", [True, False])
def test_try_that_writes_nothing_keeps_nobody_out(pauses: FullPauses, clock: Clock, *, ends: bool) -> None:
    """Storage had its blocks already, or the call failed: another one is tried, soon."""
    clock.now_s += FIRST_PAUSE_S
    assert pauses.refusal(A) is None
    if ends:
        pauses.note(A, [])
    else:
        clock.now_s += LONGEST_PAUSE_S

    assert pauses.refusal(A) is None


def test_namespaces_are_bounded(pauses: FullPauses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten, which costs one try."""
    monkeypatch.setattr(full_pauses, "PREFIXES_MAX", 1)
    pauses.note(B, [FULL])

    assert [pauses.refusal(A), pauses.refusal(B)] == [None, FULL]


def test_full_backend_gets_no_backups_during_a_pause(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor questions; the answer is that of the last try. When it has room again, the next try finds out."""
    rig = Rig()
    rig.copies = HostCopies(rig.memory, rig.shelf, 1.0, pauses=FullPauses(clock))
    asked: list[int] = []
    put, is_full = rig.shelf.put, True

    def limited(blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        asked.append(len(blocks))
        return [FULL] * len(blocks) if is_full else put(blocks, timeout_s=timeout_s)

    monkeypatch.setattr(rig.shelf, "put", limited)
    rig.fill(list(range(len(KEYS))))
    answers = []
    for _ in range(8):
        answers.append(rig.back_up([0, 1]))
        clock.now_s += 0.4

    assert answers == [(0, 0)] * 8
    assert len(asked) == 2
    is_full = False
    clock.now_s += LONGEST_PAUSE_S
    assert [rig.back_up([0, 1]), rig.back_up([0, 1, 2])] == [(2, 2), (3, 1)]
