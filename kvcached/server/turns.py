"""Whose connection is served next, so that no user's connections keep the loop from everybody else's.

In one round of the loop, one connection of each user is served. What else has come in stays in its socket until a later
round: there is no queue here.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

C = TypeVar("C")


class Turns(Generic[C]):
    """The connections of one socket, in the running event loop.

    Args:
        serve: receives once from a connection that has something, or has ended.
    """

    def __init__(self, serve: Callable[[C], None]) -> None:
        self._serve = serve
        self._watched: dict[int, tuple[Hashable, C]] = {}
        self._rounds = 0  #: who is first of those that are ready
        self._ready = select.epoll()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ready.fileno(), self._on_ready)

    def watch(self, connection: C, descriptor: int, owner: Hashable) -> None:
        """Serve a connection from now on, in turn with the others of its owner."""
        self._watched[descriptor] = owner, connection
        self._ready.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Serve a connection no more. Call it before its descriptor is closed."""
        if self._watched.pop(descriptor, None) is not None:
            self._ready.unregister(descriptor)

    def close(self) -> None:
        """Serve nobody any more. Does nothing the second time."""
        if not self._ready.closed:
            self._loop.remove_reader(self._ready.fileno())
            self._ready.close()
            self._watched.clear()

    def _on_ready(self) -> None:
        ready = [descriptor for descriptor, _ in self._ready.poll(0)]
        self._rounds += 1
        first = self._rounds % max(len(ready), 1)
        served: set[Hashable] = set()
        for descriptor in [*ready[first:], *ready[:first]]:
            owner, connection = self._watched.get(descriptor, (None, None))
            if connection is not None and owner not in served:  # None: closed on behalf of another one
                served.add(owner)
                self._serve(connection)
