"""Waits in an event loop for replies, so that other tasks run meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from kvcached_client.protocol.engine import Request
from kvcached_client.transport.channel import Channel
from kvcached_client.transport.steps import Steps

T = TypeVar("T")


class Replies:
    """The replies of one channel, awaited by tasks of one event loop.

    The loop watches the channel's descriptors. Any message that arrives, and any call that reads the channel while it
    sends, may bring the replies of several tasks: each of these is woken.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._awaited: dict[int, tuple[Request, asyncio.Future[None]]] = {}
        self._descriptors = () if channel.is_ended else channel.descriptors()
        self._is_writing = False
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self._wake)

    async def carry_out(self, steps: Steps[T]) -> T:
        """A call's result. If the task is cancelled, the call is given up as after a missed deadline.

        Raises:
            KvcachedError: what the blocking form of the call raises.
        """
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

    async def arrival(self, request: Request) -> None:
        """Wait until the channel's `receive` returns at once: for the reply, its deadline, or the daemon's end."""
        self._wake()  # sending has read what had arrived, and may have left something unsent
        if not self._channel.is_pending(request) or self._channel.over([request]):
            return
        over = self._loop.create_future()
        left_s = (self._channel.reply_deadline_ns(request) - time.monotonic_ns()) / 1e9
        deadline = self._loop.call_later(max(left_s, 0.0), _end, over)
        self._awaited[request.id] = (request, over)
        try:
            await over
        finally:
            deadline.cancel()
            del self._awaited[request.id]

    def close(self) -> None:
        """Watch the channel no longer; who still waits is woken. Does nothing the second time."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        if self._is_writing:
            self._loop.remove_writer(self._descriptors[0])
        self._descriptors, self._is_writing = (), False
        for _, over in self._awaited.values():
            _end(over)

    def _wake(self) -> None:
        """Send and read what is possible, and wake the tasks whose wait is over."""
        for request in self._channel.over([request for request, _ in self._awaited.values()]):
            _end(self._awaited[request.id][1])
        if self._channel.is_ended:  # its descriptors stay readable from now on
            self.close()
        elif self._channel.has_unsent != self._is_writing:
            self._is_writing = self._channel.has_unsent
            if self._is_writing:
                self._loop.add_writer(self._descriptors[0], self._wake)
            else:
                self._loop.remove_writer(self._descriptors[0])


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)
