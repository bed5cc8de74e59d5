"""Answers to requests: what they are made of, and those that are kept for retries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.engine import Header


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
    """The last answers of one session: a retry has one effect and gets the same answer.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[tuple[type[Header], int], Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, request: Header) -> Answer | None:
        """The answer to an earlier request with the same verb and id."""
        return self._answers.get((type(request), request.id))

    def keep(self, request: Header, answer: Answer) -> None:
        """Keep an answer, and drop the oldest one beyond the limit."""
        self._answers[type(request), request.id] = answer
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)


def internal_error() -> RequestError:
    """What a peer is told of a bug of ours."""
    return request_error(ErrorCode.INTERNAL, "the daemon failed while serving this request", "see the daemon's log")
