"""Requests of people that are answered when something has come about, or at a deadline with how far it is.

What they wait for is looked at anew whenever anything has happened, so that nobody has to tell them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvcached.answers import Answer, Respond, internal_error
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import Header, error_reply

#: At once. They come from people and tools; more of them are a mistake in some loop.
AWAITED_MAX: Final = 256


class Question(Protocol):
    """Asks whether it has come about."""

    def __call__(self, *, is_last: bool) -> Answer | None:
        """The answer; None = not yet, which is none the last time."""


log = logging.getLogger(__name__)


class Timer(Protocol):
    """Something that will happen."""

    def cancel(self) -> None:
        """It will not."""


#: Calls later: after so many seconds.
Later = Callable[[float, Callable[[], None]], Timer]


def later(delay_s: float, call: Callable[[], None]) -> Timer:
    """Call by the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, call)


@dataclass(slots=True, eq=False)
class _Awaited:
    request: Header
    ask: Question
    respond: Respond
    timer: Timer | None = None


class Awaiting:
    """Questions that wait.

    Args:
        refused: takes note of an error reply.
        later: sets timers.
    """

    def __init__(self, refused: Callable[[RequestError], RequestError], later: Later = later) -> None:
        self._refused = refused
        self._later = later
        self._waiting: list[_Awaited] = []

    def answer(self, request: Header, ask: Question, respond: Respond, deadline_ms: int | None = None) -> None:
        """Answer now, or when there is an answer; past the deadline the question is asked for the last time.

        Raises:
            RequestError: too many wait.
        """
        awaited = _Awaited(request, ask, respond)
        if self._is_answered(awaited, is_last=deadline_ms == 0):
            return
        if len(self._waiting) >= AWAITED_MAX:
            raise request_error(ErrorCode.LIMIT, f"{len(self._waiting)} requests wait already", "wait for some of them")
        self._waiting.append(awaited)
        if deadline_ms is not None:
            awaited.timer = self._later(deadline_ms / 1000, lambda: self._end(awaited))

    def look(self) -> None:
        """Something may have come about."""
        if self._waiting:
            self._waiting = [each for each in self._waiting if not self._is_answered(each, is_last=False)]

    def close(self) -> None:
        """Ask everything for the last time."""
        for awaited in self._waiting[:]:
            self._end(awaited)

    def _end(self, awaited: _Awaited) -> None:
        if awaited in self._waiting:
            self._waiting.remove(awaited)
            self._is_answered(awaited, is_last=True)

    def _is_answered(self, awaited: _Awaited, *, is_last: bool) -> bool:
        answer = self._outcome(awaited, is_last=is_last)
        if answer is None:
            return False
        if awaited.timer is not None:
            awaited.timer.cancel()
        awaited.respond(answer)
        return True

    def _outcome(self, awaited: _Awaited, *, is_last: bool) -> Answer | None:
        try:
            return awaited.ask(is_last=is_last)
        except RequestError as error:
            return Answer(error_reply(awaited.request.id, self._refused(error)))
        except Exception:
            log.exception("internal error while answering %s late", type(awaited.request).__name__)
            return Answer(error_reply(awaited.request.id, self._refused(internal_error())))
