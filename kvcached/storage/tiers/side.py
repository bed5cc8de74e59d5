"""Calls of one kind to one of two backends: while they fail they are left out, and the other backend goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvcached.process.backoff import BackOff
from kvcached.storage.backend import Outcome, Result, Storage, StorageGone

T = TypeVar("T")

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0

_log: Final = logging.getLogger(__name__)


class Side:
    """Reads from a backend, or writes to it, and whether they are left out.

    After a failure there are none for a pause; then one call tries, and the others when that one has succeeded.

    Args:
        name: what is left out, for messages: "reads from …".
        backend: that gets the calls.
        clock_s: for pauses.

    Attributes:
        trouble: the last failure, in words.
    """

    def __init__(self, name: str, backend: Storage, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.trouble = ""
        self._name, self._backend = name, backend
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._pauses = BackOff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, healthy_after_s=LONGEST_PAUSE_S)
        self._until_s: float | None = None  #: the end of its pause; None = the last call has succeeded
        self._is_tried = False  #: the one call after a pause is under way
        self._is_full = False

    @property
    def is_out(self) -> bool:
        """Whether the last call has failed."""
        with self._lock:
            return self._until_s is not None

    def words(self) -> str:
        """That it is left out, and why."""
        return f"{self._name} are left out: {self.trouble or 'the other one left no time for them'}"

    def call(
        self, ask: Callable[[Storage], T], *, slow_s: float = math.inf, failure_in: Callable[[T], str] = lambda _: ""
    ) -> T | None:
        """The backend's answer; None if such calls are left out, or this one fails.

        Args:
            ask: makes the call.
            slow_s: a call that takes longer is a failure, and its answer is good all the same.
            failure_in: says what in an answer is a failure.
        """
        with self._lock:
            if self._until_s is not None and (self._is_tried or self._clock_s() < self._until_s):
                return None
            is_trial = self._is_tried = self._until_s is not None
        began_s = self._clock_s()
        answer: T | None
        try:
            answer = ask(self._backend)
            why = failure_in(answer)
        except Exception as error:
            if isinstance(error, StorageGone) and error.can_open:  # in another process: leaving it out does not mend it
                raise
            answer, why = None, f"{type(error).__name__}: {error}"
        if not why and (took_s := self._clock_s() - began_s) > slow_s:
            why = f"a call took {took_s:.1f} s"
        self._over(why, is_trial=is_trial)
        return answer

    def carry_out(self, ask: Callable[[Storage], list[Result]], *, slow_s: float = math.inf) -> list[Result] | None:
        """The same for a batch, of which a block that fails is a failure, too."""
        return self.call(ask, slow_s=slow_s, failure_in=_failure_in)

    def note_full(self, results: Sequence[Result]) -> None:
        """Say once that no blocks are accepted."""
        full = next((each for each in results if each.outcome is Outcome.FULL), None)
        if full is not None and not self._is_full:
            _log.warning("%s: it accepts no blocks: %s", self._name, full.detail)
        if results:
            self._is_full = full is not None

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
            _log.warning("%s are left out for %.1f s: %s", self._name, pause_s, why)
        elif is_trial:
            _log.warning("%s work again", self._name)


def _failure_in(results: Sequence[Result]) -> str:
    failed = (each.detail or "a block failed" for each in results if each.outcome is Outcome.FAILED)
    return next(failed, "")
