"""What an engine's process tells: counts and findings to the run, and its story to a file that outlives it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

_COUNTS_PAUSE_S = 0.25


class Report:
    """A line of JSON for each message, in a pipe that all engines share. A story of one line for each event.

    Args:
        pipe: descriptor; lines are shorter than what a pipe takes at once.
        story: the file, the same for all incarnations of an engine.
        name: of the engine, with its incarnation.
    """

    def __init__(self, pipe: int, story: Path, name: str) -> None:
        self._pipe = pipe
        self._story = os.open(story, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.name = name
        self.counts: Counter[str] = Counter()
        self._told_s = 0.0

    def note(self, event: str) -> None:
        """An event of the story."""
        os.write(self._story, f"{time.monotonic():.4f} {self.name} {event}\n".encode())

    def tell(self, kind: str, **what: Any) -> None:
        """A finding."""
        self.note(f"{kind} {what}")
        self._send({"kind": kind, "engine": self.name, "time_s": time.monotonic(), **what})

    def tell_counts(self, *, now: bool = False) -> None:
        """What was counted since the last time, some times a second."""
        if self.counts and (now or time.monotonic() - self._told_s > _COUNTS_PAUSE_S):
            self._told_s = time.monotonic()
            self._send({"kind": "counts", "engine": self.name, "counts": self.counts})
            self.counts.clear()

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, default=str)[:4000] + "\n"
        os.write(self._pipe, line.encode())
