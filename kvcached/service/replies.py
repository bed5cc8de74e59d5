"""Answers to requests: what they are made of, and those that are kept for retries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.engine import Header
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


class KeptAnswers:
    """The last answers of each session, so that a retry has one effect and one answer.

    Args:
        per_session: how many are kept of each.
    """

    def __init__(self, per_session: int) -> None:
        self._per_session = per_session
        self._of_session: dict[SessionId, OrderedDict[tuple[type[Header], int], Answer]] = {}

    def open(self, session: SessionId) -> None:
        """Keep answers for a new session."""
        self._of_session[session] = OrderedDict()

    def close(self, session: SessionId) -> None:
        """Forget a session's answers. Does nothing where there are none."""
        self._of_session.pop(session, None)

    def find(self, session: SessionId, request: Header) -> Answer | None:
        """The answer that a request with the same verb and id has got."""
        return self._of_session[session].get((type(request), request.id))

    def keep(self, session: SessionId, request: Header, answer: Answer) -> None:
        """Keep an answer, and forget the oldest beyond the limit."""
        kept = self._of_session[session]
        kept[type(request), request.id] = answer
        if len(kept) > self._per_session:
            kept.popitem(last=False)


def internal_error() -> RequestError:
    """What a peer is told of a bug of ours."""
    return request_error(ErrorCode.INTERNAL, "the daemon failed while serving this request", "see the daemon's log")
