"""`AsyncClient`: the session of an engine's scheduler on one replica's pool, in an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self, TypedDict, TypeVar, Unpack

from kvcached_client.aio.lease import AsyncLease
from kvcached_client.aio.replies import Replies
from kvcached_client.blocks.layout import Layout
from kvcached_client.client import ClientSteps
from kvcached_client.errors import KvcachedError
from kvcached_client.keys import KeyChain
from kvcached_client.lease import LeaseOptions
from kvcached_client.prefetch import PrefetchOptions, PrefetchResult, prefetching
from kvcached_client.protocol.engine import Welcome
from kvcached_client.transport.misses import Failures
from kvcached_client.transport.patience import Patience
from kvcached_client.transport.session import SessionChannel

C = TypeVar("C", bound=ClientSteps)


class ConnectOptions(TypedDict, total=False):
    """The options of `Client.connect`, without `wait_s`."""

    replica: str
    deadline_ms: int
    failures: Failures
    layout: Layout | None
    heartbeat: bool
    reserve_blocks: int


class AsyncClient(ClientSteps):
    """As `kvcached_client.Client`, with calls that are awaited. For ``async with``; belongs to one event loop.

    Tasks may call it at the same time. Each call is sent at once, in the order of the calls, and while its task waits
    for the reply, others run: so the calls of a step, started together, take one round trip.

    A task that is cancelled gives its call up, as after a missed deadline: a lease that comes too late is released.

    The loop does not wait for the daemon, but for the rare moments in which the kernel takes no more bytes for it, at
    most for the deadline of a call.
    """

    def __init__(self, channel: SessionChannel, welcome: Welcome, *, heartbeat: bool) -> None:
        """Use `connect`."""
        super().__init__(channel, welcome, heartbeat=heartbeat)
        self._replies: Replies | None = None  #: of the present channel, from the first call on

    @classmethod
    async def connect(
        cls, run_dir: str | os.PathLike[str] | None = None, *, wait_s: float = 0.0, **options: Unpack[ConnectOptions]
    ) -> Self:
        """As `Client.connect`; each attempt is made in a thread of its own."""
        patience = Patience(wait_s)
        while True:
            try:
                return await _opened(partial(cls.open, run_dir, **options))
            except KvcachedError as error:
                pause_s = patience.pause_s(error)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def match(self, chain: KeyChain, *, full: bool = False) -> int:
        """As `Client.match`."""
        return await self.replies().carry_out(self.matching(chain, full=full))

    async def acquire(self, request: str, chain: KeyChain, **options: Unpack[LeaseOptions]) -> AsyncLease:
        """As `Client.acquire`. The prompt is what the chain holds at the call."""
        make = partial(AsyncLease, self.replies)
        return await self.replies().carry_out(self.acquiring(make, request, chain, **options))

    async def prefetch(self, chain: KeyChain, **options: Unpack[PrefetchOptions]) -> PrefetchResult:
        """As `Client.prefetch`."""
        return await self.replies().carry_out(prefetching(self._channel, self.epoch, chain, **options))

    async def rejoin(self) -> None:
        """As `Client.rejoin`, in a thread of its own. No other call may be under way."""
        await asyncio.to_thread(self.rejoin_next)
        self._forget_replies()

    async def aclose(self) -> None:
        """As `Client.close`. Calls that are under way fail."""
        try:
            await self.replies().carry_out(self.leaving())
        finally:
            self._forget_replies()
            self._close_channel()

    def replies(self) -> Replies:
        """What waits for replies in the running event loop."""
        if self._replies is None:
            self._replies = Replies(self._channel, asyncio.get_running_loop())
        return self._replies

    def _forget_replies(self) -> None:
        replies, self._replies = self._replies, None
        if replies is not None:
            replies.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _opened(attempt: Callable[[], C]) -> C:
    """What an attempt to connect returns, made in a thread. If its task is cancelled, the session is closed."""
    with_thread = ThreadPoolExecutor(max_workers=1)
    opening = with_thread.submit(attempt)
    with_thread.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)  # now, or in the thread when the attempt is over
        raise


def _close_unwanted(opening: Future[C]) -> None:
    """Close the client that nobody takes, if there is one: its session would keep the pool."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
