"""What storage is still to forget: asked for when it works, and again until that has succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from kvcached.process.in_flight import InFlight
from kvcached.storage.messages import Backup, Done, Request

#: What could not be forgotten is tried again so much later.
FORGET_PAUSE_S: Final = 1.0
#: Generations that wait to be forgotten: clears while storage is away. Each is in the record of generations.
FORGETS_DUE_MAX: Final = 1024

Tell = Callable[[Done], None]


class Forgets:
    """How the keys of blocks begin that are to be forgotten.

    Args:
        in_flight: the requests to the storage process.
        send: sends a `Forget` of such keys, and has its report told.
        is_ready: whether storage works.

    Attributes:
        due: what is to be forgotten, and is not yet; the oldest first.
    """

    def __init__(
        self, in_flight: InFlight[Request, Done], send: Callable[[bytes, Tell], None], is_ready: Callable[[], bool]
    ) -> None:
        self.due: dict[bytes, None] = {}
        self._in_flight = in_flight
        self._send = send
        self._is_ready = is_ready
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[bytes, set[int], Tell]] = []  #: not sent; the numbers of writes that come before

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prefix: bytes, tell: Tell) -> None:
        """Have all blocks forgotten whose keys begin so.

        After what is being written now: that may be one of them. Where too many wait already the oldest is given up:
        its blocks are found under no name, and go when storage needs their room.
        """
        while len(self.due) >= FORGETS_DUE_MAX:
            oldest = next(iter(self.due))
            del self.due[oldest]
            self._waiting = [each for each in self._waiting if each[0] != oldest]
        self.due[prefix] = None
        self._file(prefix, tell)

    def send_due(self) -> None:
        """Ask for what no write stands before any more, if storage works."""
        if not self._is_ready():
            return
        due = [each for each in self._waiting if not any(write in self._in_flight for write in each[1])]
        self._waiting = [each for each in self._waiting if each not in due]
        for prefix, _, tell in due:
            self._send(prefix, partial(self._forgot, prefix, tell))

    def _file(self, prefix: bytes, tell: Tell) -> None:
        if prefix in self.due:
            writes = {number for number, request in self._in_flight.requests() if isinstance(request, Backup)}
            self._waiting.append((prefix, writes, tell))
            self.send_due()

    def _forgot(self, prefix: bytes, tell: Tell, done: Done) -> None:
        if done.failed:
            self._loop.call_later(FORGET_PAUSE_S, self._file, prefix, tell)
            return
        self.due.pop(prefix, None)
        tell(done)
