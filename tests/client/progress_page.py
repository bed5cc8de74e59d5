"""The worker's side of a progress page."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from kvcached_client.blocks.progress import ENTRY_SIZE_BYTES, PAGE_SIZE_BYTES, STATE_DONE, STATE_FAILED
from kvcached_client.types import PROGRESS_SLOTS

#: Nobody but the worker gets a mapping that can write. Python has no name for it before 3.13.
F_SEAL_FUTURE_WRITE = 0x0010
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memory(size_bytes: int, seals: int = SEALS, name: str = "pool") -> int:
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class ProgressPage:
    """Says how far loads are, in the order of writes that docs/protocol.md gives."""

    def __init__(self, page: int, events: list[int]) -> None:
        self.page = page
        self.events = events
        self._memory = mmap.mmap(self.page, PAGE_SIZE_BYTES)
        self._entries = np.ndarray((PROGRESS_SLOTS, ENTRY_SIZE_BYTES // 8), "<u8", self._memory)

    @classmethod
    def create(cls, seals: int = SEALS | F_SEAL_FUTURE_WRITE) -> ProgressPage:
        events = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(PROGRESS_SLOTS)]
        made = cls(sealed_memory(PAGE_SIZE_BYTES, 0, "progress"), events)
        fcntl.fcntl(made.page, fcntl.F_ADD_SEALS, seals)
        return made

    @property
    def descriptors(self) -> list[int]:
        return [self.page, *self.events]

    def start(self, entry: int, transfer: int) -> None:
        self._entries[entry, 1] = 0
        self._entries[entry, 0] = transfer

    def finish_layers(self, entry: int, layers: int = 1, *, tell: bool = True) -> None:
        for _ in range(layers):
            self._entries[entry, 1] += np.uint64(1)
            if tell:
                os.eventfd_write(self.events[entry], 1)

    def succeed(self, entry: int) -> None:
        self._end(entry, STATE_DONE)

    def fail(self, entry: int) -> None:
        self._end(entry, STATE_FAILED)

    def abandon(self, entry: int, transfer: int) -> None:
        self.start(entry, transfer)
        self.fail(entry)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        del self._entries
        self._memory.close()

    def _end(self, entry: int, state: int) -> None:
        self._entries[entry, 1] |= np.uint64(state << 32)
        os.eventfd_write(self.events[entry], 1)
