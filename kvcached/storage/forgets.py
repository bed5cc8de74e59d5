"""The blocks that storage has still to forget: requested when storage works, and repeated until that succeeds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Final

from kvcached.process.backoff import BackOff
from kvcached.process.in_flight import InFlight
from kvcached.storage.messages import Backup, Done, Request

#: The pause before a failed request is repeated; each is twice the one before it, until one succeeds.
FORGET_PAUSE_S: Final = 1.0
FORGET_PAUSE_S_MAX: Final = 60.0
#: How many generations may wait to be forgotten: clears while storage is away. The record of generations has each.
FORGETS_DUE_MAX: Final = 1024

Tell = Callable[[Done], None]


class Forgets:
    """The prefixes of the keys that storage has to forget.

    Args:
        in_flight: the requests to the storage process.
        send: sends a `Forget` of a prefix, and delivers its report.
        is_ready: whether storage works.

    Attributes:
        due: the prefixes that are not forgotten yet, oldest first.
    """

    def __init__(
        self, in_flight: InFlight[Request, Done], send: Callable[[bytes, Tell], None], is_ready: Callable[[], bool]
    ) -> None:
        self.due: dict[bytes, None] = {}
        self._in_flight = in_flight
        self._send = send
        self._is_ready = is_ready
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[bytes, set[int], Tell]] = []  #: not sent: writes must end first, by number
        self._is_under_way = False
        self._pauses = BackOff(first_s=FORGET_PAUSE_S, longest_s=FORGET_PAUSE_S_MAX, healthy_after_s=math.inf)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prefix: bytes, tell: Tell) -> None:
        """Let storage forget all blocks whose keys have a prefix.

        The request is sent after the writes that are under way, which may be of such blocks. If too many prefixes wait
        already, the oldest is dropped: no request finds its blocks, and storage evicts them when it needs room. For a
        prefix that is due already, the request that waits or was sent is enough: nobody writes such blocks any more.
        """
        if prefix in self.due:
            return
        while len(self.due) >= FORGETS_DUE_MAX:
            oldest = next(iter(self.due))
            del self.due[oldest]
            self._waiting = [each for each in self._waiting if each[0] != oldest]
        self.due[prefix] = None
        self._file(prefix, tell)

    def send_due(self) -> None:
        """If storage works, send a request that no longer waits for a write, unless one is under way.

        Each may take minutes, and a thread of the storage process that others need.
        """
        if not self._is_ready() or self._is_under_way:
            return
        for each in self._waiting:
            if not any(write in self._in_flight for write in each[1]):
                self._waiting.remove(each)
                self._is_under_way = True
                prefix, _, tell = each
                self._send(prefix, partial(self._forgot, prefix, tell))
                return

    def _file(self, prefix: bytes, tell: Tell) -> None:
        if prefix in self.due:
            writes = {number for number, request in self._in_flight.requests() if isinstance(request, Backup)}
            self._waiting.append((prefix, writes, tell))
            self.send_due()

    def _forgot(self, prefix: bytes, tell: Tell, done: Done) -> None:
        self._is_under_way = False
        if done.failed and self._is_ready():
            self._loop.call_later(self._pauses.pause_s(), self._file, prefix, tell)
            return
        if done.failed:
            self._file(prefix, tell)  # it is sent when storage works again
            return
        self._pauses.reset()
        self.due.pop(prefix, None)
        tell(done)
        self.send_due()
