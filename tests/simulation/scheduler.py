"""Virtual time: everything that happens is an event of one scheduler, and its order and times come from one seed."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

T = TypeVar("T")
#: Lines of history that are kept for `--trace`.
HISTORY_MAX = 100_000
MS = 1000  #: microseconds


class Broken(AssertionError):
    """Something happened that must not, however the parts fail."""


class Chance:
    """Draws from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return self._random.randint(low, high)

    def among(self, choices: Sequence[T]) -> T:
        return choices[self._random.randrange(len(choices))]

    def weighted(self, choices: dict[T, float]) -> T:
        return self._random.choices(list(choices), list(choices.values()))[0]

    def spread(self, low: int, high: int) -> int:
        """Between two durations; short ones are as likely as long ones."""
        return int(low * (high / low) ** self._random.random())


class Event:
    """Something that is to happen, unless it is called off."""

    __slots__ = ("action", "what")

    def __init__(self, what: str, action: Callable[[], None]) -> None:
        self.what = what
        self.action: Callable[[], None] | None = action

    def call_off(self) -> None:
        self.action = None


class Scheduler:
    """What happens next, and when.

    Attributes:
        now_us: virtual microseconds since the beginning.
        count: events that have happened.
        history: the last of them, in words.
    """

    def __init__(self, seed: int) -> None:
        self.chance = Chance(seed)
        self.now_us = 0
        self.count = 0
        self.history: deque[str] = deque(maxlen=HISTORY_MAX)
        self._hash = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[int, int, int, Event]] = []
        self._added = 0

    def after(self, delay_us: int, what: str, action: Callable[[], None]) -> Event:
        """Plan an event. Of two for the same time, chance says which comes first."""
        event = Event(what, action)
        self._added += 1
        heappush(self._queue, (self.now_us + delay_us, self.chance.number(0, 1 << 30), self._added, event))
        return event

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        while self._queue:
            at_us, _, _, event = heappop(self._queue)
            if event.action is not None:
                self.now_us = max(self.now_us, at_us)
                self.count += 1
                self.note(event.what)
                event.action()
                return True
        return False

    def jump(self, duration_us: int) -> None:
        """The machine is suspended for so long: what was due meanwhile happens at once when it wakes."""
        self.now_us += duration_us

    def note(self, what: str) -> None:
        """Write something into the history."""
        line = f"#{self.count} {self.now_us / MS:.3f} ms  {what}"
        self._hash.update(line.encode())
        self.history.append(line)

    @property
    def digest(self) -> str:
        """The same for two runs only if the same has happened in both."""
        return self._hash.hexdigest()
