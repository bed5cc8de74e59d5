"""A question of SGLang's scheduler, which serves no other request until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

#: How long the scheduler waits. A daemon that is there answers in less than a thousandth of it.
GLANCE_S: Final = 0.1


class Glance:
    """Asks in a thread of its own, and waits for the answer for a moment only. For one thread at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcached-glance")
        self._asked: Future[int] | None = None
        self._is_closed = False

    def found(self, ask: Callable[[], int]) -> int:
        """What `ask` finds; nothing if that takes too long, or if it is still busy with what it was asked before."""
        if self._is_closed or (self._asked is not None and not self._asked.done()):
            return 0
        self._asked = self._thread.submit(ask)
        try:
            return self._asked.result(timeout=GLANCE_S)
        except TimeoutError:
            return 0

    def close(self) -> None:
        """End the thread. Nothing is asked from now on."""
        self._is_closed = True
        self._thread.shutdown(wait=False)
