"""One of two backends that stand behind one another: while it fails it is left out, and the other one goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvcached.process.backoff import BackOff
from kvcached.storage.backend import Outcome, Result, Storage

T = TypeVar("T")

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0

_log: Final = logging.getLogger(__name__)


class Side:
    """A backend, and whether it is left out.

    After a failure nobody asks it for a pause; then one call tries, and the others when that one has succeeded.

    Attributes:
        name: for messages.
        backend: for calls that must not be left out.
        trouble: the last failure, in words.
    """

    def __init__(self, name: str, backend: Storage, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.name, self.backend = name, backend
        self.trouble = ""
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._pauses = BackOff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, healthy_after_s=LONGEST_PAUSE_S)
        self._until_s: float | None = None  #: the end of its pause; None = its last call has succeeded
        self._is_tried = False  #: the one call after a pause is under way
        self._is_full = False

    @property
    def is_out(self) -> bool:
        """Whether its last call has failed."""
        with self._lock:
            return self._until_s is not None

    def words(self) -> str:
        """That it is left out, and why."""
        return f"{self.name} is left out: {self.trouble}"

    def call(self, ask: Callable[[Storage], T], failure_in: Callable[[T], str] = lambda _: "") -> T | None:
        """The backend's answer; None if it is left out, or fails now. `failure_in` tells of failures in an answer."""
        with self._lock:
            if self._until_s is not None and (self._is_tried or self._clock_s() < self._until_s):
                return None
            is_trial = self._is_tried = self._until_s is not None
        answer: T | None
        try:
            answer = ask(self.backend)
            why = failure_in(answer)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            answer, why = None, f"{type(error).__name__}: {error}"
        self._over(why, is_trial=is_trial)
        return answer

    def carry_out(self, ask: Callable[[Storage], list[Result]]) -> list[Result] | None:
        """The same for a batch, of which a block that fails is a failure, too; and a full backend is told of once."""
        results = self.call(ask, _failure_in)
        full = next((each for each in results or () if each.outcome is Outcome.FULL), None)
        if full is not None and not self._is_full:
            _log.warning("%s accepts no blocks: %s", self.name, full.detail)
        if results:
            self._is_full = full is not None
        return results

    def _over(self, why: str, *, is_trial: bool) -> None:
        """A call has ended, and failed if `why` is not empty."""
        with self._lock:
            if is_trial:
                self._is_tried = False
            was_out = self._until_s is not None
            if why:
                if was_out and not is_trial:
                    return  # one of several that began before the first of them failed
                self.trouble = why
                pause_s = self._pauses.pause_s()
                self._until_s = self._clock_s() + pause_s
            elif is_trial:
                self._until_s = None
                self._pauses.reset()
        if why:
            _log.warning("%s is left out for %.1f s: %s", self.name, pause_s, why)
        elif is_trial:
            _log.warning("%s works again", self.name)


def _failure_in(results: Sequence[Result]) -> str:
    failed = (each.detail or "a block failed" for each in results if each.outcome is Outcome.FAILED)
    return next(failed, "")
