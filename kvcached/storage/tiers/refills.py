"""Blocks that came from the far backend, on their way to the local disk: written behind the answer, as copies.

What waits is bounded; beyond that blocks are left out, and come from the far backend again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvcached.storage.backend import Block, memory_for

T = TypeVar("T")

#: Of copies that wait or are being written.
REFILL_BYTES_MAX: Final = 64 << 20


class Refills:
    """A thread that writes copies of blocks.

    Args:
        write: writes some blocks; never raises.
    """

    def __init__(self, write: Callable[[Sequence[Block]], object]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._writing = threading.Lock()  #: held while blocks are written, or deleted; taken before `_changed`
        self._waiting: deque[Block] = deque()
        self._size_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._epoch = 0

    def epoch(self) -> int:
        """A number for a read that begins now: if something is deleted before its blocks are added, they are not."""
        with self._changed:
            return self._epoch

    def add(self, blocks: Sequence[Block], epoch: int) -> None:
        """Copy blocks and have them written, as far as there is room."""
        for block in blocks:
            size_bytes = block.size_bytes
            with self._changed:
                if epoch != self._epoch or self._size_bytes + size_bytes > REFILL_BYTES_MAX:
                    return
                self._size_bytes += size_bytes
            copy = _copy(block)
            with self._changed:
                if copy is None or epoch != self._epoch:
                    self._size_bytes -= size_bytes
                    return
                self._waiting.append(copy)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="refills", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def without(self, delete: Callable[[], T]) -> T:
        """Drop all blocks that wait, and call `delete` while none is being written."""
        with self._writing:
            self._drop()
            return delete()

    def wait(self) -> None:
        """Until everything that was added is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size_bytes)

    def close(self) -> None:
        """Write no more."""
        with self._changed:
            self._is_closed = True
        self._drop()
        if self._thread is not None:
            self._thread.join()

    def _drop(self) -> None:
        with self._changed:
            self._epoch += 1
            self._size_bytes -= sum(block.size_bytes for block in self._waiting)
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
            with self._writing:
                self._write_waiting()

    def _write_waiting(self) -> None:
        with self._changed:
            blocks = list(self._waiting)
            self._waiting.clear()
        if blocks:
            self._write(blocks)
        with self._changed:
            self._size_bytes -= sum(block.size_bytes for block in blocks)
            self._changed.notify_all()


def _copy(block: Block) -> Block | None:
    """A copy of a block; None where there is no memory for it."""
    try:
        copy = Block(block.key, memory_for([part.nbytes for part in block.parts]))
    except OSError:
        return None
    for ours, theirs in zip(copy.parts, block.parts, strict=True):
        ours[:] = theirs
    return copy
