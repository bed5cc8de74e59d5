"""The record of generations of a shared backend as the daemon reaches it: through the storage process, by its version.

The record lies in memory that the daemon and the storage process share, so there is one request at a time.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from kvcached.memory.sealed import sealed_memfd
from kvcached.storage.backend import SHARED_RECORD_BYTES_MAX
from kvcached.storage.messages import Done, ReadRecord, WriteRecord

#: Takes the end of a request, and the bytes of the record if that has any.
Tell = Callable[[Done, bytes], None]

_NOT_OPEN: Final = Done(sequence=0, failed=True, error="storage is not open")


class Link(Protocol):
    """What the exchange needs of the storage process."""

    def ask(self, request: Callable[[int], ReadRecord | WriteRecord], tell: Callable[[Done], None]) -> bool:
        """Send a request; False if there is no process."""


class RecordExchange:
    """Sends requests about the record, one after the other.

    Attributes:
        memory: the descriptor of the shared memory, for the storage process.
    """

    def __init__(self) -> None:
        """Make the memory.

        Raises:
            OSError: the kernel refuses.
        """
        self.memory = sealed_memfd("kvcached-record", SHARED_RECORD_BYTES_MAX)
        self._mapped = mmap.mmap(self.memory, SHARED_RECORD_BYTES_MAX)
        self._waiting: deque[Callable[[], None]] = deque()  # at most one of each kind: who asks waits for the answer
        self._is_busy = False
        self._link: Link | None = None

    def use(self, link: Link) -> None:
        """Send requests here from now on."""
        self._link = link

    def read(self, known: bytes, tell: Tell) -> None:
        """Read the record, if it is of another version than `known`; `tell` is called later."""
        self._add(lambda: self._ask(partial(_read, known), tell))

    def write(self, data: bytes, after: bytes, tell: Tell) -> None:
        """Replace the record, if it is of the version `after`, and read it if it is not; `tell` is called later."""

        def send() -> None:
            self._mapped[: len(data)] = data
            self._ask(partial(_write, len(data), after), tell)

        self._add(send)

    def close(self) -> None:
        """Give the memory back; no request is made any more."""
        self._mapped.close()
        os.close(self.memory)

    def _add(self, send: Callable[[], None]) -> None:
        self._waiting.append(send)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        while self._waiting and not self._is_busy:
            self._is_busy = True
            self._waiting.popleft()()

    def _ask(self, request: Callable[[int], ReadRecord | WriteRecord], tell: Tell) -> None:
        if self._link is None or not self._link.ask(request, partial(self._over, tell)):
            self._over(tell, _NOT_OPEN)

    def _over(self, tell: Tell, done: Done) -> None:
        data = b"" if done.failed else bytes(self._mapped[: done.count])
        self._is_busy = False
        tell(done, data)
        self._next()


def _read(known: bytes, sequence: int) -> ReadRecord:
    return ReadRecord(sequence=sequence, known=known)


def _write(size_bytes: int, after: bytes, sequence: int) -> WriteRecord:
    return WriteRecord(sequence=sequence, size_bytes=size_bytes, after=after)
