"""Replies: what they are made of, and those that are owed, because their answer is not known yet.

Every pending reply ends in exactly one of these ways, and is sent then:

- done: its question has an answer, or whoever works on it hands one in;
- failed: its question raises an error;
- its deadline has passed, its session is over, or the daemon ends: the question is asked for the last time, and where
  even that brings no answer, the reply is an error.

A reply to a connection that is gone ends in the same ways; the server drops what it cannot send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from kvcached.core.refusals import Refusal
from kvcached.service.refusals import REFUSED, internal_error
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.engine import Header, error_reply
from kvcached_client.types import SessionId


class Answer(NamedTuple):
    """A reply: its header and the frames that follow it."""

    header: Header
    frames: tuple[bytes, ...] = ()


Respond = Callable[[Answer], None]
#: Serves one request: who asks, the request and its frames; the reply. An error that it raises is the reply, too.
Verb = Callable[[bytes, Any, list[bytes]], Answer]
#: The same where the reply may come later: None = `Respond` gets it then.
LateVerb = Callable[[bytes, Any, list[bytes], Respond], Answer | None]


class Wait(StrEnum):
    """What a reply waits for."""

    LOAD = "loads of a lease"
    SLOTS = "free slots"
    PREFETCH = "a prefetch"
    CLEAR = "the end of a clear"
    OPERATOR = "a pause or a drain"
    HEALTH = "a health check"
    STORAGE = "the storage process"
    POOL = "a device pool that falls asleep or wakes"
    STOP = "the daemon's last lease"


#: How many replies may wait for the same kind of thing at once; a further request is refused.
WAITING_MAX: Final[dict[Wait, int]] = {
    Wait.LOAD: 1024,  # of one session: a scheduler waits for a load per running request
    Wait.SLOTS: 1024,  # of one session, where a scheduler waits in one place
    Wait.PREFETCH: 4096,  # of all engines
    Wait.CLEAR: 256,  # they and the next come from people and tools; more of them are a mistake in some loop
    Wait.OPERATOR: 256,
    Wait.POOL: 256,
    Wait.STORAGE: 256,
    Wait.HEALTH: 16,  # a check takes slots and workers' time
    Wait.STOP: 2,
}
_LIMITED_PER_SESSION: Final = frozenset({Wait.LOAD, Wait.SLOTS})

log = logging.getLogger(__name__)


class Question(Protocol):
    """Asks whether the answer is known."""

    def __call__(self, *, is_last: bool) -> Answer | None:
        """The answer; None = not known yet. `is_last`: the reply ends now, whatever is returned."""


class Timer(Protocol):
    """A call that will be made."""

    def cancel(self) -> None:
        """Do not make it."""


#: Calls later: after so many seconds.
Later = Callable[[float, Callable[[], None]], Timer]


def later(delay_s: float, call: Callable[[], None]) -> Timer:
    """Call by the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, call)


def _unknown(*, is_last: bool) -> Answer | None:
    """The question of a reply whose answer is handed in with `PendingReplies.done`."""
    del is_last
    return None


@dataclass(slots=True, eq=False)
class PendingReply:
    """One reply that is owed.

    Attributes:
        wait: what for.
        respond: sends the reply.
        ask: whether the answer is known.
        session: whose end ends the reply; None = no session's.
        subject: which of the things that are waited for: a lease, a prefetch; None = any.
        timer: of its deadline.
    """

    wait: Wait
    request: Header
    respond: Respond
    ask: Question = _unknown
    session: SessionId | None = None
    subject: Hashable = None
    timer: Timer | None = None


#: Which replies: what they wait for, whose they are, and about what; None = any.
_Place = tuple[Wait, SessionId | None, Hashable]


class PendingReplies:
    """All replies that one daemon owes.

    Args:
        refused: takes note of an error reply.
        later: sets timers.
        before_reply: writes down what the core has changed, before a reply tells of it.
    """

    def __init__(
        self,
        refused: Callable[[RequestError | Refusal], RequestError],
        later: Later = later,
        *,
        before_reply: Callable[[], None] = lambda: None,
    ) -> None:
        self._refused = refused
        self._later = later
        self._before_reply = before_reply
        self._replies: dict[_Place, dict[PendingReply, None]] = {}

    @property
    def is_owing(self) -> bool:
        """Whether any reply is owed."""
        return bool(self._replies)

    def wait(self, reply: PendingReply, deadline_ms: int | None = None) -> Answer | None:
        """The answer if it is known; else None, and the reply is sent later.

        Raises:
            RequestError: what the question raised, or `LIMIT`: too many wait already.
        """
        answer = reply.ask(is_last=deadline_ms == 0)
        if answer is not None:
            return answer
        self._check_limit(reply)
        for place in _places(reply):
            self._replies.setdefault(place, {})[reply] = None
        if deadline_ms is not None:
            reply.timer = self._later(deadline_ms / 1000, lambda: self._end(reply, internal_error()))
        return None

    def look(self, *waits: Wait, session: SessionId | None = None, subject: Hashable = None) -> None:
        """Something has happened that may have brought answers: ask for them again."""
        for wait in waits:
            for reply in list(self._replies.get((wait, session, subject), ())):
                answer = self._outcome(reply, is_last=False)
                if answer is not None:
                    self.done(reply, answer)

    def done(self, reply: PendingReply, answer: Answer) -> None:
        """Send a reply. Does nothing where it was sent before."""
        if reply not in self._replies.get((reply.wait, None, None), ()):
            return
        for place in _places(reply):
            replies = self._replies[place]
            del replies[reply]
            if not replies:
                del self._replies[place]
        if reply.timer is not None:
            reply.timer.cancel()
        self._before_reply()
        reply.respond(answer)

    def fail(self, reply: PendingReply, error: RequestError) -> None:
        """Send an error as the reply. Does nothing where it was sent before."""
        self.done(reply, Answer(error_reply(reply.request.id, self._refused(error))))

    def session_over(self, session: SessionId) -> None:
        """A session has expired or ended: everything that waits in it ends."""
        if self._replies:
            over = request_error(
                ErrorCode.NO_SESSION, f"session {session} is over", "close the client and connect again"
            )
            for wait in Wait:
                self._end_all(self._replies.get((wait, session, None), ()), over)

    def close(self, refusal: RequestError) -> None:
        """The daemon ends: everything that waits ends."""
        for wait in Wait:
            self._end_all(self._replies.get((wait, None, None), ()), refusal)

    def count(self, *waits: Wait, subject: Hashable = None) -> int:
        """How many wait."""
        return sum(len(self._replies.get((wait, None, subject), ())) for wait in waits)

    def by_wait(self) -> dict[str, int]:
        """How many wait for each kind of thing."""
        return {wait.name.lower(): self.count(wait) for wait in Wait}

    def _check_limit(self, reply: PendingReply) -> None:
        session = reply.session if reply.wait in _LIMITED_PER_SESSION else None
        waiting = len(self._replies.get((reply.wait, session, None), ()))
        if waiting >= WAITING_MAX[reply.wait]:
            raise request_error(
                ErrorCode.LIMIT, f"{waiting} requests wait for {reply.wait} already", "wait for some of them"
            )

    def _end_all(self, replies: Iterable[PendingReply], error: RequestError) -> None:
        for reply in list(replies):
            self._end(reply, error)

    def _end(self, reply: PendingReply, error: RequestError) -> None:
        """Ask for the last time; `error` is the reply where there is no answer."""
        answer = self._outcome(reply, is_last=True)
        if answer is None:
            self.fail(reply, error)
        else:
            self.done(reply, answer)

    def _outcome(self, reply: PendingReply, *, is_last: bool) -> Answer | None:
        try:
            return reply.ask(is_last=is_last)
        except REFUSED as error:
            return Answer(error_reply(reply.request.id, self._refused(error)))
        except Exception:
            log.exception("internal error while answering %s late", type(reply.request).__name__)
            return Answer(error_reply(reply.request.id, self._refused(internal_error())))


def _places(reply: PendingReply) -> set[_Place]:
    """Where a reply is looked for: among all of its kind, those of its session, those about its subject, and both."""
    wait, session, subject = reply.wait, reply.session, reply.subject
    return {(wait, None, None), (wait, session, None), (wait, None, subject), (wait, session, subject)}
