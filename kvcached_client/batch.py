"""A batch: many calls of a scheduler step in one round trip."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, Unpack

from kvcached_client.keys import KeyChain
from kvcached_client.lease import Lease, LeaseOptions
from kvcached_client.transport.steps import CALLS_UNDER_WAY_MAX, BatchedCall, Steps
from kvcached_client.types import NO_FENCE, FenceSequence


class CallBatch:
    """Calls that are sent at once and whose replies are awaited together: `Client.batch`. A context manager.

    Each method is the call of the same name without its wait, and returns a `BatchedCall`. The daemon carries the calls
    out in their order, so that slots that a `finish` gives back are there for an `acquire` behind it. A call of a lease
    first waits for the call of the same lease before it.

    The end of the ``with`` statement waits for all replies. Until then a lease is what it was before the call, and work
    that does not depend on the replies can be done. A call that cannot be sent raises at once. All other errors concern
    only the call that failed:

    * Those of `acquire` and `allocate` are raised by `BatchedCall.result`.
    * Of those of `commit`, `finish` and `release`, the first one is raised at the end, when all calls are over, unless
      the statement is left by another exception. `BatchedCall.result` raises each of them, too.

    With ``failures="miss"`` they are misses instead, and `Lease.reason` says why.
    """

    def __init__(self, acquiring: Callable[..., Steps[Lease]]) -> None:
        """Use `Client.batch`."""
        self._acquiring = acquiring
        self._calls: deque[tuple[BatchedCall[Lease] | BatchedCall[None], bool]] = deque()
        self._error: BaseException | None = None  #: the first that nobody is asked for
        self._is_ended = False

    def __repr__(self) -> str:
        state = "ended" if self._is_ended else "open"
        return f"CallBatch({len(self._calls)} calls under way, {state})"

    def acquire(
        self,
        request: str,
        chain: KeyChain,
        **options: Unpack[LeaseOptions],
    ) -> BatchedCall[Lease]:
        """Begin `Client.acquire`, with its options."""
        self._make_room()
        call = BatchedCall(self._acquiring(request, chain, **options))
        self._calls.append((call, True))
        return call

    def allocate(self, lease: Lease, tokens: int) -> BatchedCall[None]:
        """Begin `Lease.allocate`."""
        return self._begin(lease, lease.allocating(tokens), is_asked=True)

    def commit(self, lease: Lease, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> BatchedCall[None]:
        """Begin `Lease.commit`."""
        return self._begin(lease, lease.committing(computed_tokens, fence))

    def finish(self, lease: Lease, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> BatchedCall[None]:
        """Begin `Lease.finish`."""
        return self._begin(lease, lease.finishing(computed_tokens, fence))

    def release(self, lease: Lease, *, fence: FenceSequence = NO_FENCE) -> BatchedCall[None]:
        """Begin `Lease.release`."""
        return self._begin(lease, lease.releasing(fence))

    def wait(self) -> None:
        """Wait until all calls so far are over. Raises nothing of theirs."""
        while self._calls:
            self._wait_for_oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_ended = True
        self.wait()
        if error is None and self._error is not None:
            raise self._error

    def _begin(self, lease: Lease, steps: Steps[None], *, is_asked: bool = False) -> BatchedCall[None]:
        self._make_room()
        call = lease.begin(steps)
        self._calls.append((call, is_asked))
        return call

    def _make_room(self) -> None:
        if self._is_ended:
            raise RuntimeError("this batch has ended; begin another one with Client.batch")
        if len(self._calls) >= CALLS_UNDER_WAY_MAX:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        call, is_asked = self._calls.popleft()
        error = call.wait()
        if not is_asked:
            self._error = self._error or error
