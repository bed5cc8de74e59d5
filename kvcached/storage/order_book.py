"""Orders to the storage process that have no answer yet, and since when each of them has been under way.

The process begins orders in the order in which they were sent, as many at a time as the backend bears. One that waits
there for its turn is not late: many prefetches at a time are no failure of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvcached.storage.messages import Backup, Forget, Order, Over

#: No request waits until something is forgotten, and that may be millions of blocks.
FORGET_S_MAX: Final = 600.0


@dataclass(slots=True)
class OpenOrder:
    """An order without an answer.

    Attributes:
        tell: takes the answer.
        began_s: when the process began it; None while it waits for its turn.
    """

    order: Order
    tell: Callable[[Over], None]
    began_s: float | None = None


class OrderBook:
    """Those of one process.

    Attributes:
        threads: how many it carries out at a time.
    """

    def __init__(self) -> None:
        self.threads = 1
        self._open: dict[int, OpenOrder] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._open

    def add(self, order: Order, tell: Callable[[Over], None], now_s: float) -> None:
        """It was sent just now."""
        self._open[order.sequence] = OpenOrder(order, tell)
        self._begin(now_s)

    def answered(self, sequence: int, now_s: float) -> OpenOrder | None:
        """It is over: another one begins. None for one that is not open."""
        found = self._open.pop(sequence, None)
        self._begin(now_s)
        return found

    def clear(self) -> list[OpenOrder]:
        """The process is dead: all that are open, which are so no more."""
        left = list(self._open.values())
        self._open.clear()
        return left

    def writes(self) -> set[int]:
        """Numbers of those that write to storage."""
        return {sequence for sequence, each in self._open.items() if isinstance(each.order, Backup)}

    def late_at(self, limit_s: float) -> float | None:
        """When the first of those under way will have taken so long, or has; None where nothing is under way."""
        return min(
            (
                each.began_s + (max(limit_s, FORGET_S_MAX) if isinstance(each.order, Forget) else limit_s)
                for each in self._under_way()
                if each.began_s is not None
            ),
            default=None,
        )

    def _under_way(self) -> Iterator[OpenOrder]:
        return islice(self._open.values(), self.threads)

    def _begin(self, now_s: float) -> None:
        for each in self._under_way():
            if each.began_s is None:
                each.began_s = now_s
