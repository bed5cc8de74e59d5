"""`AsyncLease`: the lease of one request, whose calls are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from kvcached_client.aio.replies import Replies
from kvcached_client.lease_steps import LeaseSteps
from kvcached_client.transport.steps import Steps
from kvcached_client.types import NO_FENCE, FenceSequence


class AsyncLease(LeaseSteps):
    """As `kvcached_client.Lease`, from `AsyncClient.acquire` on. A context manager for ``async with`` that releases.

    Calls of one lease wait for each other; those of different leases do not. A call whose task is cancelled may have
    taken effect: the lease's next call finds out, as after a missed deadline.
    """

    def __init__(self, replies: Callable[[], Replies], *granted: Any) -> None:  # noqa: ANN401 - those of `LeaseSteps`
        """Use `AsyncClient.acquire`."""
        super().__init__(*granted)
        self._replies = replies
        self._turn = asyncio.Lock()

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
        """As `Lease.release`."""
        await self._carry_out(self.releasing(fence))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def _carry_out(self, steps: Steps[None]) -> None:
        async with self._turn:
            await self._replies().carry_out(steps)
