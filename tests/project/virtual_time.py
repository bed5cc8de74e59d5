"""An event loop whose time is its own: it jumps to the next timer whenever there is nothing else to do."""

from __future__ import annotations

import asyncio


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=VirtualTimeLoop)`. Nothing is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def stand_still(self, seconds: float) -> None:
        """The process that runs this loop was stopped for so long."""
        self._now_s += seconds

    def _run_once(self) -> None:
        timers = [each.when() for each in self._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        if timers and not self._ready:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, min(timers))
        super()._run_once()  # type: ignore[misc]
