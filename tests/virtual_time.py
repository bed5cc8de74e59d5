"""An event loop whose time is its own: it jumps to the next timer whenever there is nothing else to do."""

from __future__ import annotations

import asyncio
from typing import Any, Final

#: So many turns of a loop whose time stands still are calls without end.
_TURNS_MAX: Final = 100_000


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=VirtualTimeLoop)`, or driven by `pass_s`. Nothing is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._turns = 0  #: since the time has changed

    def time(self) -> float:
        return self._now_s

    def stand_still(self, seconds: float) -> None:
        """The process that runs this loop was stopped for so long."""
        self._now_s += seconds

    def pass_s(self, seconds: float) -> None:
        """Let time pass; what is due meanwhile happens.

        Raises:
            Exception: what a timer or a call has raised.
        """
        errors: list[Exception] = []

        def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            errors.append(context.get("exception") or RuntimeError(context["message"]))

        self.set_exception_handler(note)
        self.run_until_complete(asyncio.sleep(seconds))
        if errors:
            raise errors[0]

    def _run_once(self) -> None:
        before_s = self._now_s
        timers = [each.when() for each in self._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        if timers and not self._ready:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, min(timers))
        self._turns = self._turns + 1 if self._now_s == before_s else 0
        if self._turns > _TURNS_MAX:
            raise AssertionError("calls without end")
        super()._run_once()  # type: ignore[misc]
