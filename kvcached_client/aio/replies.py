"""Waits in an event loop for replies, so that other tasks run meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
import weakref
from contextlib import suppress
from typing import Final, TypeVar

from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.engine import Request
from kvcached_client.transport.session import SessionChannel
from kvcached_client.transport.steps import Steps

T = TypeVar("T")

_log: Final = logging.getLogger("kvcached_client")


class Replies:
    """The replies of one channel, awaited by tasks of one event loop. From now on the channel never waits to send.

    The loop watches the channel's descriptors. Any message that arrives, and any call that reads the channel while it
    sends, may bring the replies of several tasks: each of these is woken.

    In a forked child it does nothing: there the messages are the parent's, and so may be what the loop waits with.

    Args:
        channel: which brings the replies.
        loop: that runs.
        owner: whose channel it is. If it is dropped and nothing was closed, the loop lets go of the channel.
    """

    def __init__(self, channel: SessionChannel, loop: asyncio.AbstractEventLoop, owner: object) -> None:
        channel.never_wait()
        self._channel = channel
        self._loop = loop
        self._awaited: dict[int, tuple[Request, asyncio.Future[None]]] = {}
        self._call_count = 0  #: of calls that are under way
        self._no_call: asyncio.Future[None] | None = None  #: that `give_up` waits for
        self._all_sent: asyncio.Future[None] | None = None  #: that `all_sent` waits for
        self._descriptors = () if channel.is_ended or channel.is_forked else channel.descriptors()
        self._is_writing = False
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self.wake)
        self._drop = weakref.finalize(owner, self._owner_was_dropped)
        self._drop.atexit = False

    async def carry_out(self, steps: Steps[T]) -> T:
        """A call's result. If the task is cancelled, the call is given up as after a missed deadline.

        Raises:
            KvcachedError: what the blocking form of the call raises.
        """
        self._call_count += 1
        try:
            while True:
                try:
                    request = next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                try:
                    await self.arrival(request)
                except BaseException:
                    self._channel.abandon(request)
                    steps.close()
                    raise
        finally:
            self.wake()  # the last step may have read replies or left something unsent, and given up a lease
            self._call_count -= 1
            if not self._call_count and self._no_call is not None:
                _end(self._no_call)

    def post(self, steps: Steps[None]) -> None:
        """Send the request of a call, and give the call up as if its task were cancelled now. Raises nothing."""
        try:
            request = next(steps)
        except StopIteration:
            pass
        except KvcachedError as error:
            _log.warning("a call that nobody waits for was not sent: %s", error)
        else:
            self._channel.abandon(request)
            steps.close()
        self.wake()  # sending may have read replies, also where nothing was sent

    async def arrival(self, request: Request) -> None:
        """Wait until the channel's `receive` returns at once: for the reply, its deadline, or the daemon's end."""
        self.wake()  # sending has read what had arrived, and may have left something unsent
        if self._descriptors and not self._channel.has_come(request):
            left_s = (self._channel.reply_deadline_ns(request) - time.monotonic_ns()) / 1e9
            over = self._loop.create_future()
            self._awaited[request.id] = (request, over)
            try:
                await self._end_of(over, left_s)
            finally:
                del self._awaited[request.id]
        if not self._descriptors and not self._channel.has_come(request):
            self._channel.abandon(request)  # closed before the reply was there, which nobody will read now

    async def all_sent(self, within_s: float) -> None:
        """Wait until nothing is unsent, but no longer than this."""
        self.wake()
        if self._is_writing:
            self._all_sent = self._loop.create_future()
            await self._end_of(self._all_sent, within_s)

    async def give_up(self) -> None:
        """Take what has arrived, and close; wait until the calls that were under way have ended."""
        self.wake()
        self.close()
        if self._call_count:
            self._no_call = self._loop.create_future()
            await self._no_call

    def close(self) -> None:
        """Watch the channel no longer; who still waits gives its call up. Does nothing the second time.

        A loop that is closed watches nothing, and nobody waits in it.
        """
        descriptors, self._descriptors = self._descriptors, ()
        self._drop.detach()
        if self._channel.is_forked or self._loop.is_closed():
            return
        for descriptor in descriptors:
            self._loop.remove_reader(descriptor)
        self._write(descriptors, is_writing=False)
        for _, over in self._awaited.values():
            _end(over)

    def _owner_was_dropped(self) -> None:
        """Close, in the thread of the loop: this may be another one, because the garbage collector runs in any."""
        if not self._descriptors:  # it was closed before
            return
        if self._channel.is_forked:  # the session goes on in the parent
            self._channel.close()
            return
        if self._loop.is_closed():
            self._channel.close()
        else:
            with suppress(RuntimeError):  # the loop was closed just now, and watches nothing
                self._loop.call_soon_threadsafe(self._close_all)
        warnings.warn(
            f"a client of {self._channel.endpoint} was dropped without aclose, and its session keeps the pool until it "
            "has expired; await client.aclose(), or use `async with`",
            ResourceWarning,
            stacklevel=3,
        )

    def _close_all(self) -> None:
        self.close()
        self._channel.close()

    def wake(self) -> None:
        """Send and read what is possible, and wake the tasks whose wait is over."""
        if self._descriptors and not self._channel.is_forked:
            for request in self._channel.over(request for request, _ in self._awaited.values()):
                _end(self._awaited[request.id][1])
            self._tidy()

    def _tidy(self) -> None:
        """Give back the leases that were granted too late, and have the loop send what is unsent."""
        if self._channel.is_ended:  # its descriptors stay readable from now on
            self.close()
            return
        self._channel.give_back_late()
        self._write(self._descriptors, is_writing=self._channel.has_unsent)

    def _write(self, descriptors: tuple[int, ...], *, is_writing: bool) -> None:
        if is_writing == self._is_writing:
            return
        self._is_writing = is_writing
        if is_writing:
            self._loop.add_writer(descriptors[0], self.wake)
        else:
            self._loop.remove_writer(descriptors[0])
            if self._all_sent is not None:
                _end(self._all_sent)

    async def _end_of(self, wait: asyncio.Future[None], within_s: float) -> None:
        """Wait for the end of a wait, and end it after this time."""
        deadline = self._loop.call_later(max(within_s, 0.0), _end, wait)
        try:
            await wait
        finally:
            deadline.cancel()


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)
