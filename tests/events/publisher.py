"""A publisher without a daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from kvcached.core.messages import IndexChange, Tier
from kvcached.core.slots.announced import Announced
from kvcached.core.slots.ranges import one_range
from kvcached.events.server import Endpoints, EventServer
from kvcached.events.stream import EventStream

TIER = Tier(b"root", 3, "model", "", None, 16)
SLOTS = 4096
TIMEOUT_MS = 10_000
T = TypeVar("T")


class Publisher:
    """A server in a thread with a loop of its own, and a pool whose blocks it tells of."""

    def __init__(self, directory: Path, endpoints: Endpoints | None = None) -> None:
        self.endpoints = endpoints or Endpoints(f"ipc://{directory}/events.sock", f"ipc://{directory}/replay.sock")
        self.changes: list[IndexChange] = []
        self.announced = Announced(self.changes, TIER, SLOTS)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.stored = 0
        try:
            self.server: EventServer = self.do(self._start)
        except OSError:
            self._end()
            raise

    async def _start(self) -> EventServer:
        stream = EventStream(
            self.changes, lambda: [self.announced], topic="", epoch=1, buffer_bytes=1 << 16, now_s=lambda: 0.0
        )
        events = EventServer(stream, self.endpoints)
        try:
            await events.start()
        except OSError:
            events.close()
            raise
        return events

    def do(self, what: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run it in the loop."""
        return asyncio.run_coroutine_threadsafe(what(), self._loop).result(TIMEOUT_MS / 1000)

    def store(self, count: int = 1) -> None:
        """So many blocks more, each of a prompt of its own."""

        async def store() -> None:
            for _ in range(count):
                key = self.stored.to_bytes(16, "big")
                self.announced.add(b"", key, one_range(self.stored % SLOTS, 1))
                self.stored += 1
            self.server.poke()
            self.server._publish()

        self.do(store)

    def close(self) -> None:
        async def close() -> None:
            self.server.close()

        self.do(close)
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def last(self) -> int:
        """Number of the last batch."""
        return self.server._stream.last.number

    def remove(self, count: int) -> None:
        """The oldest blocks leave."""

        async def remove() -> None:
            self.announced.remove(one_range(self.announced.next_known(0), count))
            self.server._publish()

        self.do(remove)

    def clear(self) -> None:
        """All blocks leave."""

        async def clear() -> None:
            self.announced.remove_all()
            self.server._publish()

        self.do(clear)

    def right(self) -> dict[tuple[str, int | None], set[bytes]]:
        """What a router has to know."""
        return {(TIER.namespace.hex(), None): {key for slot in range(SLOTS) if (key := self.announced.key(slot))}}
