"""Pauses between the lives of a child process: workers and storage are started again after them."""

from __future__ import annotations


class BackOff:
    """How long to wait before the next try: each time twice as long, and anew after a long life.

    Args:
        first_s: the first pause.
        longest_s: the longest one.
        healthy_after_s: what lived so long was healthy: its end has a cause of its own.
        spares_first: there is no pause before the first try after a healthy life; the next pause is `first_s`.
    """

    def __init__(self, *, first_s: float, longest_s: float, healthy_after_s: float, spares_first: bool = False) -> None:
        self.longest_s = longest_s
        self.healthy_after_s = healthy_after_s
        self._first_s = first_s
        self._spares_first = spares_first
        self.reset()

    def reset(self) -> None:
        """All is well: the next pause is the shortest."""
        self._next_s = self._first_s
        self._is_spared = self._spares_first

    def pause_s(self) -> float:
        """The next pause. The one after it is twice as long, up to the longest."""
        if self._is_spared:
            self._is_spared = False
            return 0.0
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self.longest_s)
        return pause_s

    def lived(self, seconds: float) -> None:
        """What was started lived for so long: long enough, and pauses begin anew."""
        if seconds >= self.healthy_after_s:
            self.reset()


class Breaker:
    """Opens after many short lives in a row, failed starts among them, and closes after a long one."""

    def __init__(self, *, healthy_after_s: float, losses_max: int) -> None:
        self._healthy_after_s = healthy_after_s
        self._losses_max = losses_max
        self._losses = 0

    @property
    def is_open(self) -> bool:
        """Whether to try as rarely as possible."""
        return self._losses >= self._losses_max

    def ended(self, lived_s: float) -> None:
        """A life ended after so long, 0 where the start failed."""
        self._losses = 1 if lived_s >= self._healthy_after_s else self._losses + 1

    def close(self) -> None:
        """A life has been long enough by now."""
        self._losses = 0
