"""Calls in steps: each stops where it has sent a request, so that the replies of many calls are awaited together."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.engine import Request

T = TypeVar("T")

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
