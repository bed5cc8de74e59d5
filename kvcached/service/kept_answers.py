"""Answers that are kept, so that a request that comes again has one effect and gets the same answer."""

from __future__ import annotations

from collections import OrderedDict

from kvcached.service.pending import Answer
from kvcached_client.protocol.engine import (
    Allocate,
    Commit,
    ErrorReply,
    Header,
    PrepareLoad,
    PrepareStore,
    PrepareStores,
    Release,
)

#: What tells a session's requests apart: verb and id.
_RequestKey = tuple[type[Header], int]


class KeptAnswers:
    """The last answers of one session: a retry has one effect and gets the same answer.

    Also the last one by which each lease got slots or committed blocks, for as long as the lease lives: an engine that
    has no reply repeats that request before the lease's next one, which may be after any number of other requests.

    And as many answers to preparations of copies in offload mode: an engine that has no reply repeats the preparation
    before its next one, also behind the lease's release, and calls off what it was granted.

    Args:
        most: how many are kept, without those of leases; of preparations as many again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[_RequestKey, Answer] = OrderedDict()
        self._preparations: OrderedDict[_RequestKey, Answer] = OrderedDict()
        self._of_leases: dict[int, tuple[_RequestKey, Answer]] = {}

    def __len__(self) -> int:
        return len(self._answers) + len(self._preparations)

    def find(self, request: Header) -> Answer | None:
        """The answer to an earlier request with the same verb and id."""
        key = type(request), request.id
        answer = self._window(request).get(key)
        if answer is None and isinstance(request, (Allocate, Commit)):
            last = self._of_leases.get(request.lease)
            if last is not None and last[0] == key:
                return last[1]
        return answer

    def keep(self, request: Header, answer: Answer) -> None:
        """Keep an answer, and drop the oldest one beyond the limit."""
        key, window = (type(request), request.id), self._window(request)
        window[key] = answer
        if len(window) > self._most:
            window.popitem(last=False)
        if isinstance(answer.header, ErrorReply):
            return  # the request had no effect, and has none twice
        if isinstance(request, (Allocate, Commit)):
            self._of_leases[request.lease] = key, answer
        elif isinstance(request, Release):
            self._of_leases.pop(request.lease, None)

    def _window(self, request: Header) -> OrderedDict[_RequestKey, Answer]:
        is_preparation = isinstance(request, (PrepareLoad, PrepareStore, PrepareStores))
        return self._preparations if is_preparation else self._answers
