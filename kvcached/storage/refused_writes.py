"""Whether storage, which works, accepts blocks: it may have no room, or have reached a limit."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Final

from kvcached.storage.messages import Done

#: The shortest interval between two log lines that storage accepts no blocks.
REFUSAL_LOG_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


class RefusedWrites:
    """Why the last blocks were not accepted; logged once in a while, and not for each block.

    Args:
        backend: its name.
        counters: where they are counted.

    Attributes:
        why: empty if the last ones were accepted.
    """

    def __init__(self, backend: str, counters: Counter[str]) -> None:
        self.why = ""
        self._backend = backend
        self._counters = counters
        self._told_s = -math.inf

    def note(self, done: Done, now_s: float) -> None:
        """A backup has ended."""
        if done.failed or (not done.error and not done.written):
            return
        if done.error:
            self._counters["refused_writes"] += 1
            if now_s - self._told_s >= REFUSAL_LOG_S:
                self._told_s = now_s
                _log.warning("storage %s accepts no blocks: %s", self._backend, done.error)
        elif self.why:
            _log.info("storage %s accepts blocks again", self._backend)
        self.why = done.error
