"""Storage without room gets less to write than storage with room."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import msgspec
import pytest

from kvcached.core.transfers.storage_copies import BACKUP_TRIES, RETRY_MS
from kvcached.storage.backend import DONE, Block, Outcome, Result
from kvcached.storage.executor import HostCopies
from kvcached.storage.messages import Delete, Forget
from kvcached.storage.tiers import full_pauses
from kvcached.storage.tiers.full_pauses import FIRST_PAUSE_S, LONGEST_PAUSE_S, FullPauses
from tests.storage.test_copies import KEYS, KIND, Rig
from tests.storage.tiers.away import Clock
from tests.storage.tiers.test_backend import Tiers
from tests.storage.values import TIMEOUT_S, key

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
    for pause_s in (1, 2, 2, 2):
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


def test_pause_is_shorter_than_the_tries_of_a_block(pauses: FullPauses, clock: Clock) -> None:
    """However long storage is full: a block that is refused three times has not been given up untried."""
    for _ in range(10):
        clock.now_s += LONGEST_PAUSE_S
        assert pauses.refusal(A) is None
        pauses.note(A, [FULL])
    retries_s = sum(RETRY_MS * 2**attempt for attempt in range(BACKUP_TRIES - 1)) / 1000
    clock.now_s += retries_s - 0.01

    assert pauses.refusal(A) is None


def test_pauses_end_when_blocks_are_deleted(clock: Clock) -> None:
    """By a clear, or by their keys: there may be room then. A deletion of nothing makes none."""
    rig, pauses = Rig(), FullPauses(clock)
    rig.copies = HostCopies(rig.memory, rig.shelf, 1.0, pauses=pauses)
    rig.fill(list(range(len(KEYS))))
    assert rig.back_up([0, 1]) == (2, 2)
    prefix = KIND.stored().prefix()
    pauses.note(prefix, [FULL])
    delete = Delete(sequence=1, prefix=prefix, keys=KEYS[0])
    rig.copies.carry_out(msgspec.structs.replace(delete, keys=KEYS[4]))
    assert pauses.refusal(prefix) == FULL
    for request in (delete, Forget(sequence=1, prefix=prefix)):
        rig.copies.carry_out(request)
        assert pauses.refusal(prefix) is None
        pauses.note(prefix, [FULL])


def test_pauses_of_a_service_end_when_blocks_are_deleted() -> None:
    """Behind a local disk, too."""
    with closing(Tiers()) as tiers:
        tiers.put(1)
        for is_clear in (False, True):
            tiers.far.full = True
            assert tiers.put(2) == [Outcome.FULL]
            tiers.far.full = False
            assert tiers.put(2) == [Outcome.FULL]
            if is_clear:
                tiers.both.clear(b"", timeout_s=TIMEOUT_S)
            else:
                tiers.both.delete([key(1)], timeout_s=TIMEOUT_S)
            assert tiers.put(2) == [Outcome.DONE]


def test_full_service_that_is_away_is_not_called_full() -> None:
    """What the disk takes while the service does not answer is stored, also in a pause for want of room."""
    with closing(Tiers()) as tiers:
        tiers.far.full = True
        assert tiers.put(1) == [Outcome.FULL]
        tiers.far.error = OSError("it is away")
        assert tiers.missing(2) == [True]

        assert tiers.put(2) == [Outcome.DONE]


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
