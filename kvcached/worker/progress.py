"""How far loads are, told to the shard process without a message: a page of shared memory, and an eventfd per entry.

The page is one array of 64-byte entries, little-endian::

     0  u64  transfer      the load that has the entry; grows from one to the next
     8  u32  layers_done   layers of every block of it that can be read
    12  u32  state         0 running, 1 done, 2 failed
    16       zero

A reader that waits for a layer of load T looks at the entry: with an earlier transfer T has not begun, with a later one
T is over. Otherwise the layer is there when `layers_done` is above it or the state is 1, and never comes when the state
is 2. Until then it waits for the eventfd. Writes become visible in program order (x86-64), and each event follows the
change that it tells of.

The seals keep others from resizing the page and from mapping it writable.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

#: Loads under way at once. The client calls it `PROGRESS_SLOTS`; a worker does not import the client.
PROGRESS_ENTRIES: Final = 32
ENTRY_BYTES: Final = 64

RUNNING: Final = 0
DONE: Final = 1
FAILED: Final = 2

_PAGE_BYTES: Final = PROGRESS_ENTRIES * ENTRY_BYTES
# Places inside an entry, in words of 8 and of 4 bytes.
_TRANSFER: Final = 0
_LAYERS_DONE: Final = 2
_STATE: Final = 3
#: Linux 5.1; Python has no name for it before 3.13.
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class ProgressPage:
    """The writing side. An entry is written by one thread at a time; different entries need no care.

    Attributes:
        descriptor: the page's memfd, close-on-exec.
        events: an eventfd per entry, close-on-exec and non-blocking.
    """

    def __init__(self, name: str) -> None:
        """Make the page, all zero.

        Args:
            name: shows in /proc/<pid>/maps.

        Raises:
            OSError: the kernel refused one of the steps.
        """
        with contextlib.ExitStack() as made:
            self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            made.callback(os.close, self.descriptor)
            os.ftruncate(self.descriptor, _PAGE_BYTES)
            self._page = made.enter_context(mmap.mmap(self.descriptor, _PAGE_BYTES))
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            whole = made.enter_context(memoryview(self._page))
            self._long = made.enter_context(whole.cast("Q"))
            self._short = made.enter_context(whole.cast("I"))
            events = []
            for _ in range(PROGRESS_ENTRIES):
                events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                made.callback(os.close, events[-1])
            self.events = tuple(events)
            self._made = made.pop_all()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a reader needs: the page, then the eventfd of each entry in order."""
        return (self.descriptor, *self.events)

    def begin(self, entry: int, transfer: int) -> None:
        """Give an entry to a load of which no layer is there yet."""
        # The transfer comes last: whoever sees it must not take the state of the load before for this one's.
        self._short[_short(entry) + _LAYERS_DONE] = 0
        self._short[_short(entry) + _STATE] = RUNNING
        self._long[_long(entry) + _TRANSFER] = transfer

    def advance(self, entry: int) -> None:
        """One more layer of every block is there."""
        self._short[_short(entry) + _LAYERS_DONE] += 1
        self._tell(entry)

    def succeed(self, entry: int) -> None:
        """All blocks are there."""
        self._short[_short(entry) + _STATE] = DONE
        self._tell(entry)

    def fail(self, entry: int, transfer: int) -> None:
        """A load is over, and not all of its blocks are there; it need not have begun."""
        if self._long[_long(entry) + _TRANSFER] != transfer:
            self.begin(entry, transfer)
        self._short[_short(entry) + _STATE] = FAILED
        self._tell(entry)

    def reset(self) -> None:
        """Forget every load, for the next ones are counted from the start. None may be under way.

        To whoever waits for an earlier load it has not come yet: they learn otherwise from their daemon's death.
        """
        for entry in range(PROGRESS_ENTRIES):
            self.begin(entry, 0)

    def close(self) -> None:
        """Unmap and close everything. Does nothing the second time."""
        self._made.close()

    def _tell(self, entry: int) -> None:
        # Only a reader that counts the event up itself can make it full, and then it is readable anyway.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.events[entry], 1)


def _long(entry: int) -> int:
    return entry * ENTRY_BYTES // 8


def _short(entry: int) -> int:
    return entry * ENTRY_BYTES // 4
