"""Pauses of writes to a backend that has no room: else it gets each block several times, and keeps none.

A local disk takes blocks while the service behind it has no room, so there the pauses are of the service alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvcached.process.backoff import BackOff
from kvcached.storage.backend import Outcome, Result

FIRST_PAUSE_S: Final = 1.0
#: Less than the time of a block's tries (`kvcached.core.transfers.storage_copies`): what is refused within one pause
#: was not tried, so no block is given up for a refusal of long ago.
LONGEST_PAUSE_S: Final = 2.0
#: Of which it is remembered that they are refused: there are fewer namespaces, unless engines come and go.
PREFIXES_MAX: Final = 256


class _Pause:
    """Of one prefix: until when nothing is written, and why."""

    def __init__(self) -> None:
        self.until_s = 0.0
        self.is_tried = False  #: a write after the pause is under way
        self.refusal = Result(Outcome.FULL)
        self.lengths = BackOff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, healthy_after_s=LONGEST_PAUSE_S)


class FullPauses:
    """Lets one batch of each prefix of keys through after each pause, until one of its blocks is taken.

    Prefixes are apart because a limit may concern blocks of one size only. Used by several threads.

    Args:
        clock_s: of this process.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._pauses: dict[bytes, _Pause] = {}

    def refusal(self, prefix: bytes) -> Result | None:
        """What a write gets without being tried; None if it is to be tried: then `note` is called with what it gets."""
        with self._lock:
            pause, now_s = self._pauses.get(prefix), self._clock_s()
            if pause is None:
                return None
            if now_s < pause.until_s:
                return pause.refusal
            # A try that never ends, as one that raises, does not keep out the others for ever.
            pause.until_s, pause.is_tried = now_s + LONGEST_PAUSE_S, True
            return None

    def note(self, prefix: bytes, results: Sequence[Result]) -> None:
        """A batch was tried; without results there was nothing to write, and the next one is tried instead."""
        full = next((each for each in results if each.outcome is Outcome.FULL), None)
        with self._lock:
            pause = self._pauses.get(prefix)
            if any(each.outcome is Outcome.DONE for each in results):
                self._pauses.pop(prefix, None)
            elif full is not None and (pause is None or pause.is_tried):  # else it began before the first refusal
                self._begin(pause or self._new(prefix), self._clock_s(), full)
            elif full is None and pause is not None and pause.is_tried:
                pause.until_s, pause.is_tried = self._clock_s(), False

    def forget(self) -> None:
        """There may be room now: blocks were deleted."""
        with self._lock:
            self._pauses.clear()

    def _begin(self, pause: _Pause, now_s: float, full: Result) -> None:
        pause.until_s, pause.is_tried, pause.refusal = now_s + pause.lengths.pause_s(), False, full

    def _new(self, prefix: bytes) -> _Pause:
        while len(self._pauses) >= PREFIXES_MAX:
            del self._pauses[next(iter(self._pauses))]
        return self._pauses.setdefault(prefix, _Pause())
