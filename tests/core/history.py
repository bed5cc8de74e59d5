"""What the models of the core share: random operations, what is done after each, and how histories are played."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from hypothesis import strategies as st

from kvcached.core.cache import Cache

#: A number below another one.
Choose = Callable[[int], int]
Operation = Callable[[], None]
T = TypeVar("T")


class History(ABC):
    """Random operations on a cache, with everything checked after each of them.

    It takes its choices from outside, so that a seeded generator can run it for long and hypothesis can shrink what
    fails.

    Attributes:
        weighted: what may happen, with how often it does.
        done: what has happened, by name.
    """

    cache: Cache
    weighted: list[tuple[Operation, int]]

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        """Do one random operation."""
        self.do(self.chosen())

    def chosen(self) -> Operation:
        """An operation, each as often as its weight says."""
        index = self.choose(sum(weight for _, weight in self.weighted))
        for operation, weight in self.weighted:
            if index < weight:
                return operation
            index -= weight
        raise AssertionError("no weight is left")

    def pick(self, things: list[T]) -> T | None:
        """One of some things, if there are any."""
        return things[self.choose(len(things))] if things else None

    @abstractmethod
    def do(self, operation: Operation) -> None:
        """Do it, and check everything."""

    @abstractmethod
    def end(self) -> None:
        """Everybody leaves, and nothing is held."""

    def seen(self) -> Counter[str]:
        """What was counted: by the cache, and here."""
        return self.cache.counters + self.done


def play(kind: Callable[[Choose], History], seeds: Iterable[int], steps: int) -> Counter[str]:
    """Play a history per seed to its end; what was seen in all of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = kind(random.Random(seed).randrange)
        for _ in range(steps):
            history.step()
        history.end()
        seen += history.seen()
    return seen


def play_drawn(kind: Callable[[Choose], History], data: st.DataObject, steps: int) -> None:
    """Play a short history whose choices hypothesis makes."""
    history = kind(lambda count: data.draw(st.integers(0, count - 1)))
    for _ in range(steps):
        history.step()
    history.end()
