"""Requests to a child process that it has not reported as done, and which of them are late.

Workers and the storage process are asked in the same way: each request has a number, and is over when the process has
reported that number, or is dead. Until then the process may touch whatever the request names.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Q = TypeVar("Q")
D = TypeVar("D")


@dataclass(slots=True)
class OpenRequest(Generic[Q, D]):
    """A request that is not over.

    Attributes:
        tell: takes the report.
        deadline_s: how long it may take from when it was begun, or last progressed.
        is_aside: it is carried out when it is read, not in its turn: its report does not show that others get on.
        began_s: when the process began it, or last reported progress; None while it waits for its turn.
    """

    request: Q
    tell: Callable[[D], None]
    deadline_s: float
    is_aside: bool = False
    began_s: float | None = None


class InFlight(Generic[Q, D]):
    """The requests to one process. Used in one event loop's thread.

    Args:
        on_late: called with the numbers of late requests. Lateness is not watched any further until `watch` is called.
        turns: how many requests the process works on at a time, in the order in which they were sent: one that waits
            for its turn is not late. None: it chooses the order, so that each report shows that it gets on.
    """

    def __init__(self, on_late: Callable[[list[int]], None], turns: int | None = None) -> None:
        self.turns = turns
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, OpenRequest[Q, D]] = {}
        self._last = 0
        self._reported_s = -math.inf
        self._least_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    @property
    def next_number(self) -> int:
        """Number of the next request."""
        return self._last + 1

    def count(self, *, aside: bool) -> int:
        """How many there are that are carried out aside, or in their turn."""
        return sum(each.is_aside is aside for each in self._open.values())

    def deadline_s(self, number: int) -> float:
        """How long an open request may take."""
        return self._open[number].deadline_s

    def requests(self) -> Iterator[tuple[int, Q]]:
        """What is open, by number."""
        return ((number, each.request) for number, each in self._open.items())

    def add(self, request: Q, tell: Callable[[D], None], deadline_s: float, *, aside: bool = False) -> None:
        """The request with the next number is sent now."""
        self._last += 1
        self._open[self._last] = OpenRequest(request, tell, deadline_s, aside)
        self._begin()

    def done(self, number: int) -> OpenRequest[Q, D] | None:
        """The process reports a request as done; None for one that is not open."""
        found = self._open.pop(number, None)
        if found is not None and not found.is_aside and self.turns is None:
            self._reported_s = self._loop.time()
        self._begin()
        return found

    def progressed(self, number: int) -> None:
        """The process reports that a request gets on: it is late so long after this report, not after its begin."""
        found = self._open.get(number)
        if found is not None and found.began_s is not None:
            found.began_s = self._loop.time()

    def clear(self) -> list[OpenRequest[Q, D]]:
        """The process is dead: what was open, and is not any more."""
        left = list(self._open.values())
        self._open.clear()
        self.watch(self._least_s)
        return left

    def late(self, least_s: float = 0.0) -> list[int]:
        """Numbers of requests that have been under way for longer than they may, and for `least_s` at least."""
        now_s = self._loop.time()
        return [number for number, at_s in self._due(least_s) if at_s <= now_s]

    def watch(self, least_s: float) -> None:
        """Call `on_late` once a request is late and has been under way for `least_s` at least."""
        self._least_s = least_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._arm()

    def _under_way(self) -> Iterator[tuple[int, OpenRequest[Q, D]]]:
        return islice(self._open.items(), self.turns)

    def _begin(self) -> None:
        begun = [each for _, each in self._under_way() if each.began_s is None]
        for each in begun:
            each.began_s = self._loop.time()
        if begun:
            self._arm()

    def _due(self, least_s: float) -> Iterator[tuple[int, float]]:
        for number, each in self._under_way():
            if each.began_s is not None:
                yield number, max(each.began_s, self._reported_s) + max(each.deadline_s, least_s)

    def _arm(self) -> None:
        """Have a look when the first request will be late, or sooner: reports only put that off."""
        at_s = min((at_s for _, at_s in self._due(self._least_s)), default=math.inf)
        if self._timer is not None and self._timer_s <= at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s < math.inf:
            self._timer, self._timer_s = self._loop.call_at(at_s, self._look), at_s

    def _look(self) -> None:
        self._timer = None
        late = self.late(self._least_s)
        if late:
            self._on_late(late)
        else:
            self._arm()
