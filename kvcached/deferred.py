"""Requests whose answer is not known yet: asked again when something has happened that may have brought it.

The question itself stays with the core. It is asked anew each time, and answers with None while it does not know; that
its session or lease is over is an answer, too. So each of them gets exactly one reply, however its subject ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kvcached.answers import Answer, Respond, internal_error
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import Header, error_reply
from kvcached_client.types import LeaseId, SessionId

log = logging.getLogger(__name__)

#: Of one session. A scheduler waits for a load per running request, and for vacancy in one place.
DEFERRED_PER_SESSION_MAX: Final = 1024

#: Asks the core; None = it does not know yet.
Question = Callable[[], Answer | None]


class _Deferred(NamedTuple):
    lease: LeaseId | None
    request: Header
    ask: Question
    respond: Respond


_Waiting = dict[SessionId, list[_Deferred]]


class DeferredAnswers:
    """Questions that wait.

    Args:
        refused: takes note of an error reply.
    """

    def __init__(self, refused: Callable[[RequestError], RequestError]) -> None:
        self._refused = refused
        self._loads: dict[SessionId, list[_Deferred]] = {}
        self._vacancies: dict[SessionId, list[_Deferred]] = {}

    def load(
        self, session: SessionId, lease: LeaseId, request: Header, ask: Question, respond: Respond
    ) -> Answer | None:
        """The answer about a lease's loads if it is known; else None, and it goes to `respond` later.

        Raises:
            RequestError: what the question raised, or `LIMIT`: too many of the session wait already.
        """
        return self._answer(self._loads, session, _Deferred(lease, request, ask, respond))

    def vacancy(self, session: SessionId, request: Header, ask: Question, respond: Respond) -> Answer | None:
        """As `load`, about room in the session's pool."""
        return self._answer(self._vacancies, session, _Deferred(None, request, ask, respond))

    def lease_changed(self, session: SessionId, lease: LeaseId) -> None:
        """The loads of a lease have ended, or the lease has."""
        self._ask_again(self._loads, session, lease)

    def session_changed(self, session: SessionId) -> None:
        """A session has expired or ended: everything that it waits for is answered, with an error."""
        self._ask_again(self._loads, session)
        self._ask_again(self._vacancies, session)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(each) for place in (self._loads, self._vacancies) for each in place.values())

    def close(self, error: RequestError) -> None:
        """The daemon ends: everything that waits is answered with an error."""
        for place in (self._loads, self._vacancies):
            waiting = [deferred for each in place.values() for deferred in each]
            place.clear()
            for deferred in waiting:
                deferred.respond(Answer(error_reply(deferred.request.id, self._refused(error))))

    def vacancy_changed(self) -> None:
        """Slots may have become free, or a copy may have ended."""
        for session in list(self._vacancies):
            self._ask_again(self._vacancies, session)

    def _answer(self, place: _Waiting, session: SessionId, deferred: _Deferred) -> Answer | None:
        answer = deferred.ask()
        if answer is None:
            waiting = place.setdefault(session, [])
            if len(waiting) >= DEFERRED_PER_SESSION_MAX:
                raise request_error(
                    ErrorCode.LIMIT, f"{len(waiting)} requests of session {session} wait", "wait for some of them"
                )
            waiting.append(deferred)
        return answer

    def _ask_again(self, place: _Waiting, session: SessionId, lease: LeaseId | None = None) -> None:
        """Ask what a session waits for; with a `lease`, only what is about that."""
        answered: list[tuple[Respond, Answer]] = []
        still: list[_Deferred] = []
        for deferred in place.pop(session, ()):
            answer = self._outcome(deferred) if lease in {None, deferred.lease} else None
            if answer is None:
                still.append(deferred)
            else:
                answered.append((deferred.respond, answer))
        if still:
            place[session] = still
        for respond, answer in answered:
            respond(answer)

    def _outcome(self, deferred: _Deferred) -> Answer | None:
        try:
            return deferred.ask()
        except RequestError as error:
            return Answer(error_reply(deferred.request.id, self._refused(error)))
        except Exception:
            log.exception("internal error while answering %s late", type(deferred.request).__name__)
            return Answer(error_reply(deferred.request.id, self._refused(internal_error())))
