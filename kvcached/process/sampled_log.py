"""Log lines that peers can cause as often as they like: one a minute of each kind, with the number of the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 60.0


class SampledLog:
    """Writes the first line of a kind at once, and then one each `INTERVAL_S`. Kinds are few: they are the caller's."""

    def __init__(self, log: logging.Logger, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now_s = now_s
        self._last_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def note(self, kind: str, message: str, *values: object) -> None:
        """Log a warning, or count that it was left out."""
        now_s = self._now_s()
        if now_s - self._last_s.get(kind, -INTERVAL_S) < INTERVAL_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last_s[kind] = now_s
        left_out = self._left_out.pop(kind, 0)
        if left_out:
            message += "; %d more like it in the last %d s or more were left out"
            values = (*values, left_out, int(INTERVAL_S))
        self._log.warning(message, *values)
