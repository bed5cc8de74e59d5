"""How far loads are, told to the shard process: the writing side of a progress page (`blocks.progress`).

The daemon makes the page. Workers get a descriptor through which it can be written, engines one through which it can be
read only. The seals keep both from resizing it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Final, Self

from kvcached.memory.sealed import sealed_memfd
from kvcached_client.blocks.progress import (
    ENTRY_SIZE_BYTES,
    PAGE_SIZE_BYTES,
    STATE_DONE,
    STATE_FAILED,
    STATE_RUNNING,
)
from kvcached_client.types import PROGRESS_SLOTS

# Places inside an entry, in words of 8 and of 4 bytes.
_TRANSFER: Final = 0
_LAYERS_DONE: Final = 2
_STATE: Final = 3


class ProgressPage:
    """The writing side. An entry is written by one thread of one process at a time; different entries need no care.

    Attributes:
        descriptor: a memfd of the page that can only be read, close-on-exec; -1 where the page came from the daemon.
        events: an eventfd per entry, close-on-exec and non-blocking.
    """

    def __init__(self, readable: int, writable: int, events: tuple[int, ...]) -> None:
        """Take over these descriptors, of a page's memory and of the eventfds of its entries; see `make` and `of`.

        Raises:
            OSError: the memory cannot be mapped; they are still the caller's.
        """
        self.descriptor = readable
        self.events = events
        self.writable = (writable, *events)  #: what a worker needs
        with contextlib.ExitStack() as made:
            page = made.enter_context(mmap.mmap(writable, PAGE_SIZE_BYTES))
            whole = made.enter_context(memoryview(page))
            self._long = made.enter_context(whole.cast("Q"))
            self._short = made.enter_context(whole.cast("I"))
            self._mapped = made.pop_all()

    @classmethod
    def make(cls, name: str) -> Self:
        """A new page, all zero.

        Args:
            name: shows in /proc/<pid>/maps.

        Raises:
            OSError: the kernel refused one of the steps.
        """
        with contextlib.ExitStack() as made:
            writable = sealed_memfd(name, PAGE_SIZE_BYTES)
            made.callback(os.close, writable)
            os.fchmod(writable, 0o600)  # or any user's process could open the readable one again, to write
            readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
            made.callback(os.close, readable)
            events = []
            for _ in range(PROGRESS_SLOTS):
                events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                made.callback(os.close, events[-1])
            page = cls(readable, writable, tuple(events))
            made.pop_all()
        return page

    @classmethod
    def of(cls, descriptors: Sequence[int]) -> Self:
        """The page behind `writable` descriptors, which become this object's to close.

        Raises:
            ValueError: they are not as many as belong to a page; they are still the caller's.
            OSError: the first is no page; the same.
        """
        if len(descriptors) != 1 + PROGRESS_SLOTS:
            raise ValueError(f"{len(descriptors)} descriptors for a progress page of {PROGRESS_SLOTS} entries")
        return cls(-1, descriptors[0], tuple(descriptors[1:]))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a reader needs: the page, then the eventfd of each entry in order."""
        return (self.descriptor, *self.events)

    def begin(self, entry: int, transfer: int) -> None:
        """Give an entry to a load of which no layer is there yet."""
        before = self._long[_long(entry) + _TRANSFER]
        self._give(entry, transfer)
        if before:
            self._tell(entry)  # whoever looked in between, and waits for the load before, sees that it is over

    def advance(self, entry: int) -> None:
        """One more layer of every block is there."""
        self._short[_short(entry) + _LAYERS_DONE] += 1
        self._tell(entry)

    def succeed(self, entry: int) -> None:
        """All blocks are there."""
        self._short[_short(entry) + _STATE] = STATE_DONE
        self._tell(entry)

    def fail(self, entry: int, transfer: int) -> None:
        """A load is over, and not all of its blocks are there; it need not have begun."""
        if self._long[_long(entry) + _TRANSFER] != transfer:
            self._give(entry, transfer)
        self._short[_short(entry) + _STATE] = STATE_FAILED
        self._tell(entry)

    def close(self) -> None:
        """Unmap and close everything. Does nothing the second time."""
        self._mapped.close()
        for descriptor in (self.descriptor, *self.writable):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self.writable = -1, ()

    def _give(self, entry: int, transfer: int) -> None:
        # The transfer comes last: whoever sees it must not take the state of the load before for this one's.
        self._short[_short(entry) + _LAYERS_DONE] = 0
        self._short[_short(entry) + _STATE] = STATE_RUNNING
        self._long[_long(entry) + _TRANSFER] = transfer

    def _tell(self, entry: int) -> None:
        # Only a reader that counts the event up itself can make it full, and then it is readable anyway.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.events[entry], 1)


def _long(entry: int) -> int:
    return entry * ENTRY_SIZE_BYTES // 8


def _short(entry: int) -> int:
    return entry * ENTRY_SIZE_BYTES // 4
