"""`AsyncLease`: the lease of one request, whose calls are awaited."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from kvcached_client.lease_steps import LeaseSteps
from kvcached_client.transport.steps import Steps
from kvcached_client.types import NO_FENCE, FenceSequence

T = TypeVar("T")


class Caller(Protocol):
    """Who makes the calls of a lease: its client."""

    async def carry_out(self, steps: Steps[T]) -> T:
        """A call's result."""

    def post(self, steps: Steps[None]) -> None:
        """Make a call that nobody awaits. Raises nothing."""


class AsyncLease(LeaseSteps):
    """As `kvcached_client.Lease`, from `AsyncClient.acquire` on. A context manager for ``async with`` that releases.

    Calls of one lease wait for each other; those of different leases do not. A call whose task is cancelled may have
    taken effect: the lease's next call finds out, as after a missed deadline.
    """

    def __init__(self, caller: Caller, *granted: Any) -> None:  # noqa: ANN401 - those of `LeaseSteps`
        """Use `AsyncClient.acquire`."""
        super().__init__(*granted)
        self._caller = caller
        self._turn = asyncio.Lock()
        self._call_count = 0  #: of calls that are under way, or wait for their turn
        self._owed: deque[Steps[None]] = deque()  #: releases whose task was cancelled

    async def wait_loaded(self) -> int:
        """As `Lease.wait_loaded`: how many tokens need no computing, once all loads have ended."""
        await self._carry_out(self.loading())
        return self.ready_blocks * self._chain.block_size

    async def allocate(self, tokens: int) -> None:
        """As `Lease.allocate`."""
        await self._carry_out(self.allocating(tokens))

    async def commit(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> None:
        """As `Lease.commit`."""
        await self._carry_out(self.committing(computed_tokens, fence))

    async def finish(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> None:
        """As `Lease.finish`."""
        await self._carry_out(self.finishing(computed_tokens, fence))

    async def release(self, *, fence: FenceSequence = NO_FENCE) -> None:
        """As `Lease.release`. If its task is cancelled while it waits for its turn, it is sent all the same, later."""
        await self._carry_out(self.releasing(fence), is_owed=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self.parting(error):
            await self.release()

    async def _carry_out(self, steps: Steps[None], *, is_owed: bool = False) -> None:
        self._call_count += 1
        try:
            async with self._turn:
                await self._caller.carry_out(steps)
        except asyncio.CancelledError:
            if is_owed:
                self._owed.append(steps)
            raise
        finally:
            self._call_count -= 1
            while self._owed and not self._call_count:
                self._caller.post(self._owed.popleft())  # nothing, if it was sent: then its steps have ended
