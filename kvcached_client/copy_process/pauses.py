"""Pauses between copy processes that come to nothing, each of which ends its session, for all ranks of the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

#: Before the third process in a row; the second comes at once, since one failure may be chance.
PAUSE_S_MIN: Final = 5.0
PAUSE_S_MAX: Final = 60.0

_ADVICE: Final = (
    "kvcached: two copy processes of this worker in a row have come to nothing, and the next ones begin more and more "
    "rarely: %s. Run `kvcached doctor --cuda`, and look for Xid errors in the kernel's log (dmesg). If neither names a "
    'cause, set "copies": "thread" in kv_connector_extra_config, and start vLLM again'
)


class Pauses:
    """How long to wait before the next copy process joins a session: each time twice as long, until one copies well.

    Args:
        log: the engine's.
        clock: returns seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._failures = 0  #: in a row
        self._pause_s = 0.0
        self._until_s = clock()

    def left_s(self) -> float:
        """How long no session is to be joined, from now on; at most 0 where one may be."""
        return self._until_s - self._clock()

    def add(self, why: str) -> None:
        """A process has come to nothing."""
        self._failures += 1
        if self._failures == 1:
            return
        if self._failures == 2:  # noqa: PLR2004 - the second one
            self._log.error(_ADVICE, why)
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S_MIN), PAUSE_S_MAX)
        self._until_s = self._clock() + self._pause_s

    def end(self) -> None:
        """A process has copied something well."""
        self._failures, self._pause_s = 0, 0.0
