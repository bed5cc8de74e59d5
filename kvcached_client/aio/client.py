"""`AsyncClient`: the session of an engine's scheduler on one replica's pool, in an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, Self, TypedDict, TypeVar, Unpack

from kvcached_client.aio.lease import AsyncLease
from kvcached_client.aio.replies import Replies
from kvcached_client.blocks.layout import Layout
from kvcached_client.client import ClientSteps
from kvcached_client.errors import DaemonUnreachable, KvcachedError, Stale, TransportError
from kvcached_client.keys import KeyChain
from kvcached_client.lease import LeaseOptions
from kvcached_client.prefetch import PrefetchOptions, PrefetchResult, prefetching
from kvcached_client.protocol.engine import Welcome
from kvcached_client.protocol.grants import check_fence
from kvcached_client.transport.calls import PENDING_MAX
from kvcached_client.transport.misses import Failures
from kvcached_client.transport.patience import Patience
from kvcached_client.transport.session import FAREWELL_MS, SessionChannel
from kvcached_client.transport.steps import Steps
from kvcached_client.types import FenceSequence

#: Calls that are under way at the same time. The channel has room for a few requests more: a probe, a goodbye, releases
#: that nobody awaits.
CALLS_MAX: Final = PENDING_MAX - 8

C = TypeVar("C", bound=ClientSteps)
T = TypeVar("T")


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

    That is the loop of its first call: a call in another one raises `RuntimeError`, and changes nothing.

    Tasks may call it at the same time. Each call is sent at once, in the order of the calls, and while its task waits
    for the reply, others run: so the calls of a step, started together, take one round trip.

    Close it. If it is only dropped, the loop closes its connections, with a `ResourceWarning`, but the session is not
    closed: see `Client`.

    A task that is cancelled gives its call up, as after a missed deadline: a lease that comes too late is released.

    Behind 1016 calls under way, others wait for their turn, in their order; their deadlines begin with it.

    The loop does not wait for the daemon. What the daemon does not read is queued: the calls end at their deadlines,
    and the daemon reads what they have asked when it continues. Behind 64 MiB in the queue, a call fails at once, as
    `DaemonSilent`.
    """

    def __init__(self, channel: SessionChannel, welcome: Welcome, *, heartbeat: bool) -> None:
        """Use `connect`."""
        super().__init__(channel, welcome, heartbeat=heartbeat)
        self._loop: asyncio.AbstractEventLoop | None = None  #: whose tasks make the calls, from the first one on
        self._replies: Replies | None = None  #: of the present channel, from the first call on
        self._rejoining: asyncio.Future[None] | None = None  #: the attempt to rejoin that is under way
        self._places = asyncio.Semaphore(CALLS_MAX)

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
        return await self.carry_out(self.matching(chain, full=full))

    async def acquire(self, request: str, chain: KeyChain, **options: Unpack[LeaseOptions]) -> AsyncLease:
        """As `Client.acquire`. The prompt is what the chain holds when the call is sent."""
        return await self.carry_out(self.acquiring(partial(AsyncLease, self), request, chain, **options))

    async def prefetch(self, chain: KeyChain, **options: Unpack[PrefetchOptions]) -> PrefetchResult:
        """As `Client.prefetch`."""
        return await self.carry_out(self._prefetching(chain, **options))

    def signal_fence(self, sequence: FenceSequence) -> None:
        """As `Client.signal_fence`. During `rejoin`, whose thread uses the channel, it is sent when that is over."""
        if self._rejoining is None:
            super().signal_fence(sequence)
            return
        fence = check_fence(sequence)

        def signal(_: object) -> None:
            with suppress(DaemonUnreachable):  # it is noted for the next daemon
                self.signal_fence(fence)

        self._rejoining.add_done_callback(signal)

    async def rejoin(self) -> None:
        """As `Client.rejoin`, in a thread of its own. Calls that are under way are given up, as at their deadlines.

        While the session is alive and its daemon is there it does nothing, and calls that are under way go on.

        Calls that are made meanwhile wait until it is over. An attempt goes on although its task is cancelled; calling
        this again then waits for the same attempt.
        """
        self._check_loop()
        if self._rejoining is None and self._channel.is_connected() and self.is_alive:
            if self._replies is not None:
                self._replies.wake()  # replies may have been read
            return
        while self._rejoining is None and self._replies is not None:
            replies, self._replies = self._replies, None
            await replies.give_up()
        if self._rejoining is None:
            self._rejoining = asyncio.wrap_future(_in_thread(self.rejoin_next))
            self._rejoining.add_done_callback(self._note_rejoined)
        await asyncio.shield(self._rejoining)

    async def aclose(self) -> None:
        """As `Client.close`. Calls that are under way fail."""
        if self._channel.is_forked:  # the loop, and whoever waits in it, are the parent's
            self.close()
            return
        if self._loop is not None and self._loop.is_closed():
            self._loop = None  # the goodbye's reply is awaited in the loop that runs
            self._forget_replies()
        self._check_loop()
        try:
            await self._carry_out(self.leaving())
            if self._channel.is_waiting_in_vain:
                await self.replies().all_sent(FAREWELL_MS / 1000)
        finally:
            if self._rejoining is None:
                self._forget_replies()
                self._channel.close()
            else:  # this task was cancelled before that was over
                self._rejoining.add_done_callback(self._hang_up)

    async def carry_out(self, steps: Steps[T]) -> T:
        """The result of a call, which is sent now, or as soon as there is a place and no attempt to rejoin."""
        self._check_loop()
        async with self._places:
            try:
                return await self._carry_out(steps)
            except (TransportError, Stale) as error:
                if not self._is_closed:
                    raise
                # Its session and connection were ended by `aclose`, which says nothing about the daemon.
                raise DaemonUnreachable(
                    f"this client of {self._channel.endpoint} is closed", fix="connect again"
                ) from error

    async def _carry_out(self, steps: Steps[T]) -> T:
        while self._rejoining is not None:
            await asyncio.wait([self._rejoining])
        return await self.replies().carry_out(steps)

    def post(self, steps: Steps[None]) -> None:
        """As `carry_out`, for a call that nobody awaits. Raises nothing."""
        if self._rejoining is None:
            self.replies().post(steps)
        else:
            self._rejoining.add_done_callback(lambda _: self.post(steps))

    def replies(self) -> Replies:
        """What waits for replies in the running event loop."""
        if self._replies is None:
            self._replies = Replies(self._channel, asyncio.get_running_loop(), self)
        return self._replies

    def _check_loop(self) -> None:
        """Refuse a call in another event loop, before it is sent: the first loop reads the replies.

        Raises:
            RuntimeError: an earlier call was made in another loop.
        """
        running = asyncio.get_running_loop()
        self._loop = self._loop or running
        if self._loop is not running and not self._channel.is_forked:
            is_over = ", which is closed" if self._loop.is_closed() else ""
            raise RuntimeError(
                f"this client belongs to another event loop{is_over}: nothing was sent; connect a client in each loop, "
                "and await its calls there"
            )

    def _prefetching(self, chain: KeyChain, **options: Unpack[PrefetchOptions]) -> Steps[PrefetchResult]:
        # A function of its own, so that the channel is that of the first step.
        return (yield from prefetching(self._channel, self._chain_kind, chain, **options))

    def _forget_replies(self) -> None:
        replies, self._replies = self._replies, None
        if replies is not None:
            replies.close()

    def _note_rejoined(self, rejoining: asyncio.Future[None]) -> None:
        self._rejoining = None
        if not rejoining.cancelled():
            rejoining.exception()  # asyncio would log one that no task was left to be told of

    def _hang_up(self, _: object) -> None:
        """Close without waiting for anything."""
        self._is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._forget_replies()
        self._channel.hang_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _opened(attempt: Callable[[], C]) -> C:
    """What an attempt to connect returns, made in a thread. If its task is cancelled, the session is closed."""
    opening = _in_thread(attempt)
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)  # now, or in the thread when the attempt is over
        raise


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """The result of a call that is made in a thread of its own."""
    with_thread = ThreadPoolExecutor(max_workers=1)
    result = with_thread.submit(call)
    with_thread.shutdown(wait=False)
    return result


def _close_unwanted(opening: Future[C]) -> None:
    """Close the client that nobody takes, if there is one: its session would keep the pool."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
