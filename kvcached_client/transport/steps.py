"""Calls in steps: each stops where it has sent a request, so that the replies of many calls are awaited together.

The replies to *posted* calls are awaited by nobody: the session's later calls take them when they have come.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from functools import wraps
from typing import Final, Generic, ParamSpec, Protocol, TypeVar

from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.engine import Request

#: Calls of a session whose replies are awaited at the same time; one more first waits for the oldest reply. The daemon
#: keeps at least as many replies of a session, so that each of these calls can be repeated.
CALLS_UNDER_WAY_MAX: Final = 64


_log: Final = logging.getLogger("kvcached_client")

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: A call as a generator: it yields each request that it has sent and, when resumed, waits for the reply.
Steps = Generator[Request, None, T]


def complete(steps: Steps[T]) -> T:
    """Carry out a call to its end: its blocking form."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class BatchedCall(Generic[T]):
    """A call whose request was sent, and whose reply may not have been taken yet. Belongs to the client's thread.

    Attributes:
        request: that was sent; there is none if the call had nothing to ask, and is over.
    """

    request: Request

    def __init__(self, steps: Steps[T]) -> None:
        """Send the request.

        Raises:
            KvcachedError: the request was not sent.
        """
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._steps: Steps[T] | None = None  #: those that are left, except while they are carried out
        try:
            self.request = next(steps)
        except StopIteration as end:
            self._results.append(end.value)
        else:
            self._steps = steps

    def __repr__(self) -> str:
        return f"BatchedCall({'over' if self.is_over else 'under way'})"

    @property
    def is_over(self) -> bool:
        """Whether the reply has been taken, or will not come: then `result` does not wait."""
        return self._steps is None

    def wait(self) -> BaseException | None:
        """Wait until the call is over; returns its error, if it failed."""
        steps, self._steps = self._steps, None
        if steps is not None:
            try:
                self._results.append(complete(steps))
            except KvcachedError as error:
                self._error = error
            except BaseException as error:
                self._error = error
                raise
        return self._error

    def result(self) -> T:
        """Wait until the call is over; returns what its blocking form returns, or raises what that raises."""
        error = self.wait()
        if error is not None:
            raise error
        return self._results[0]


class PostedCalls:
    """The calls of a session that were sent with ``wait=False``, oldest first."""

    def __init__(self) -> None:
        self._calls: deque[BatchedCall[None]] = deque()
        self._error: BaseException | None = None  #: the first that nobody was told of
        self._why = ""  #: the last one failed for; told once of many in a row, as while the daemon hangs
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
        error = call.wait()
        why = "" if error is None else str(error)
        if why not in {"", self._why}:
            _log.warning("a call that nobody waits for failed: %s", why)
        self._why = why
        self._error = self._error or error


class Pending(Protocol[T_co]):
    """A request that was sent to the daemon."""

    def result(self) -> T_co:
        """Wait for the reply."""


class PendingReply(Generic[T]):
    """A request that was sent; its reply may be fetched later, before its deadline, by the client's thread.

    If the reply is not fetched, what the daemon granted stays granted until the session ends.
    """

    def __init__(self, receive: Callable[[], T]) -> None:
        self._receive = receive

    def result(self) -> T:
        """Wait for the reply. Call it once; it raises what the blocking form of the call raises."""
        return self._receive()


def waiting(begin: Callable[P, Pending[T]]) -> Callable[P, T]:
    """The blocking form of a call that sends a request and returns before the reply."""

    @wraps(begin)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return begin(*args, **kwargs).result()

    return call
