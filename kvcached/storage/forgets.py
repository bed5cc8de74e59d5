"""What storage is to forget.

Generations that are over are requested when storage works, and repeated until that succeeds. Blocks by their keys are
requested once: whoever wants them deleted is told what came of it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from kvcached.process.backoff import BackOff
from kvcached.process.in_flight import InFlight
from kvcached.storage.messages import AskedRequest, Backup, Delete, Done, Request
from kvcached_client.types import KEY_SIZE_BYTES

#: The pause before a failed request is repeated; each is twice the one before it, until one succeeds.
FORGET_PAUSE_S: Final = 1.0
FORGET_PAUSE_S_MAX: Final = 60.0
#: How many generations may wait to be forgotten: clears while storage is away. The record of generations has each.
FORGETS_DUE_MAX: Final = 1024

#: Of one request: each takes a thread of the storage process, which others need, for so long.
DELETE_BLOCKS_MAX: Final = 1024

Tell = Callable[[Done], None]
#: Sends a request to the storage process; False if there is none.
Ask = Callable[[Callable[[int], AskedRequest], Tell], bool]


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


def delete_blocks(ask: Ask, prefix: bytes, keys: bytes, tell: Tell) -> None:
    """Have storage delete the blocks of some keys, a part of them after the other.

    Args:
        ask: see there.
        prefix: with which all keys begin in storage.
        keys: what follows it, 16 bytes a block.
        tell: gets the report of all together, or of what went well until one of the requests failed.
    """
    _Deletion(ask, prefix, keys, tell).go_on(Done(sequence=0))


class _Deletion:
    def __init__(self, ask: Ask, prefix: bytes, keys: bytes, tell: Tell) -> None:
        self._ask, self._prefix, self._tell = ask, prefix, tell
        size = DELETE_BLOCKS_MAX * KEY_SIZE_BYTES
        self._parts = [keys[at : at + size] for at in range(0, len(keys), size)]

    def go_on(self, before: Done) -> None:
        """Request the next part; this has come of those before."""
        if not self._parts:
            self._tell(before)
            return
        keys = self._parts.pop(0)
        if not self._ask(lambda number: Delete(sequence=number, prefix=self._prefix, keys=keys), self._over(before)):
            self._tell(msgspec.structs.replace(before, failed=True, error="its process has ended"))

    def _over(self, before: Done) -> Tell:
        def over(done: Done) -> None:
            if done.failed:
                self._tell(msgspec.structs.replace(done, count=before.count))
            elif done.count < 0:
                self._tell(done)
            else:
                count, error = before.count + done.count, done.error or before.error
                self.go_on(msgspec.structs.replace(before, count=count, error=error))

        return over
