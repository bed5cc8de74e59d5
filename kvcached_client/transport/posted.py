"""Calls that nobody waits for: their replies are taken when they have come, by the session's later calls."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from kvcached_client.protocol.engine import Request
from kvcached_client.transport.steps import BatchedCall

#: Calls of a session whose replies are awaited at the same time; one more first waits for the oldest reply. The daemon
#: keeps at least as many replies of a session, so that each of these calls can be repeated.
CALLS_UNDER_WAY_MAX: Final = 64

_log: Final = logging.getLogger("kvcached_client")


class PostedCalls:
    """The calls of a session that were sent with ``wait=False``, oldest first."""

    def __init__(self) -> None:
        self._calls: deque[BatchedCall[None]] = deque()
        self._error: BaseException | None = None  #: the first that nobody was told of
        self._is_collecting = False

    def add(self, call: BatchedCall[None]) -> None:
        """Take over a call whose request was sent."""
        if call.is_over:
            self._note(call)
            return
        self._calls.append(call)
        if len(self._calls) > CALLS_UNDER_WAY_MAX:
            self._take_oldest()

    def collect(self, has_come: Callable[[Request], bool]) -> None:
        """Take the replies that have come, in the order of their calls.

        Args:
            has_come: whether the reply to a request has come, or will not come.
        """
        if self._is_collecting:
            return  # a call that is taken may send a request of its own
        self._is_collecting = True
        try:
            while self._calls and has_come(self._calls[0].request):
                self._take_oldest()
        finally:
            self._is_collecting = False

    def wait(self) -> None:
        """Wait until all calls are over. Raises nothing of theirs."""
        while self._calls:
            self._take_oldest()

    def settle(self) -> None:
        """Wait until all calls are over, and raise the first error since the last time."""
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _take_oldest(self) -> None:
        call = self._calls.popleft()
        call.wait()
        self._note(call)

    def _note(self, call: BatchedCall[None]) -> None:
        if (error := call.wait()) is not None:
            _log.warning("a call that nobody waits for failed: %s", error)
            self._error = self._error or error
