"""Writes that got no answer: the service may carry them out later, and bring back what was deleted meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

#: For so long services accept a signed request, so nothing that was sent before arrives later.
LATE_S: Final = 900.0
#: Keys that are remembered: some ten MiB. Of more it is only known that there are some.
LATE_MAX: Final = 1 << 16


class LateWrites:
    """Keys whose last write got no answer a short time ago. Used by several threads.

    Args:
        clock_s: of this process.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._until_s: dict[bytes, float] = {}  #: the oldest first
        self._others_until_s = 0.0  #: until when it may be any other key

    def add(self, keys: Iterable[bytes]) -> None:
        """Writes of these keys got no answer."""
        with self._lock:
            until_s = self._clock_s() + LATE_S
            for key in keys:
                self._until_s.pop(key, None)
                self._until_s[key] = until_s
            self._drop_old()

    def among(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that may still be written."""
        with self._lock:
            self._drop_old()
            return set(keys) if self._others_until_s > self._clock_s() else self._until_s.keys() & set(keys)

    def _drop_old(self) -> None:
        now_s = self._clock_s()
        while self._until_s:
            key, until_s = next(iter(self._until_s.items()))
            if until_s > now_s and len(self._until_s) <= LATE_MAX:
                return
            del self._until_s[key]
            self._others_until_s = max(self._others_until_s, until_s)
