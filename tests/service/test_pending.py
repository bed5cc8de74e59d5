"""What becomes of a reply that waits: it is sent once, in whichever way it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvcached.service.pending import WAITING_MAX, Answer, PendingReplies, PendingReply, Wait
from kvcached.service.refusals import in_words
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId
from tests.service.office import FakeTimers

ONE, TWO = SessionId(1), SessionId(2)
REFUSAL = request_error(ErrorCode.DRAINING, "the daemon is stopping", "use another daemon")


@dataclass(eq=False)
class Subject:
    """What a reply waits for: its question is answered when `blocks` is set, and fails when `error` is."""

    blocks: int | None = None
    error: Exception | None = None
    answers: list[Answer] = field(default_factory=list)

    def reply(self, wait: Wait = Wait.LOAD, session: SessionId | None = ONE, subject: int = 7) -> PendingReply:
        return PendingReply(wait, wire.Load(id=5, epoch=1, lease=7), self.answers.append, self._ask, session, subject)

    def _ask(self, *, is_last: bool) -> Answer | None:
        if self.error is not None:
            raise self.error
        if self.blocks is None and not is_last:
            return None
        return None if self.blocks is None else Answer(wire.Loaded(id=5, hit=self.blocks))

    def code(self) -> ErrorCode:
        """The error that the one reply is."""
        (answer,) = self.answers
        assert isinstance(answer.header, wire.ErrorReply)
        return ErrorCode(answer.header.code)


@pytest.fixture
def timers() -> FakeTimers:
    return FakeTimers()


@pytest.fixture
def pending(timers: FakeTimers) -> PendingReplies:
    return PendingReplies(in_words, timers.later)


def test_known_answer_does_not_wait(pending: PendingReplies) -> None:
    """What is known at once is returned, not sent."""
    subject = Subject(blocks=3)

    assert pending.wait(subject.reply()) == Answer(wire.Loaded(id=5, hit=3))
    assert (subject.answers, pending.count(*Wait)) == ([], 0)


def test_reply_ends_once_whatever_happens_later(pending: PendingReplies, timers: FakeTimers) -> None:
    """After the first end none of the others sends anything."""
    subject = Subject()
    reply = subject.reply()
    assert pending.wait(reply, deadline_ms=100) is None
    subject.blocks = 4
    pending.look(Wait.LOAD, session=ONE, subject=7)
    pending.look(Wait.LOAD)
    timers[0].ring()
    pending.session_over(ONE)
    pending.fail(reply, REFUSAL)
    pending.close(REFUSAL)

    assert subject.answers == [Answer(wire.Loaded(id=5, hit=4))]
    assert timers[0].cancelled
    assert pending._replies == {}


@pytest.mark.parametrize("place", [(TWO, 7), (ONE, 8), (TWO, None), (None, 8)])
def test_only_what_has_happened_is_asked_about(pending: PendingReplies, place: tuple[SessionId | None, int]) -> None:
    """Another session's lease, and another lease of the session, are not asked for."""
    subject = Subject()
    pending.wait(subject.reply())
    subject.blocks = 1
    pending.look(Wait.SLOTS)
    pending.look(Wait.LOAD, session=place[0], subject=place[1])

    assert subject.answers == []


def test_question_that_fails_is_a_reply(pending: PendingReplies) -> None:
    """An error that a question raises later is sent; a bug is an internal error."""
    refused, broken = Subject(), Subject()
    for subject in (refused, broken):
        pending.wait(subject.reply())
    refused.error, broken.error = REFUSAL, ZeroDivisionError()
    pending.look(Wait.LOAD)

    assert (refused.code(), broken.code()) == (ErrorCode.DRAINING, ErrorCode.INTERNAL)


def test_end_without_an_answer_is_an_error(pending: PendingReplies) -> None:
    """A session that is over, and a daemon that ends, leave nobody without a reply."""
    of_session, of_daemon = Subject(), Subject()
    pending.wait(of_session.reply())
    pending.wait(of_daemon.reply(session=TWO))
    pending.session_over(ONE)
    assert (of_session.code(), of_daemon.answers) == (ErrorCode.NO_SESSION, [])
    pending.close(REFUSAL)

    assert of_daemon.code() is ErrorCode.DRAINING


@pytest.mark.parametrize("wait", list(Wait))
def test_every_queue_is_bounded(wait: Wait, pending: PendingReplies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever kind a reply is, only so many wait; engines' loads and free slots are counted for each session."""
    monkeypatch.setitem(WAITING_MAX, wait, 2)
    for number in range(2):
        assert pending.wait(Subject().reply(wait, subject=number)) is None

    with pytest.raises(RequestError) as refused:
        pending.wait(Subject().reply(wait, subject=3))
    assert refused.value.code is ErrorCode.LIMIT
    if wait in {Wait.LOAD, Wait.SLOTS}:
        assert pending.wait(Subject().reply(wait, session=TWO)) is None
