"""The eviction policies by name. Lower priorities go first, whatever the policy says of tails of one priority."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvcached.core.eviction.lru import EvictionPolicy, LeastRecentlyUsed
from kvcached.core.eviction.slru import SegmentedLeastRecentlyUsed
from kvcached.core.index.run import Segment


class ByPriority:
    """One policy for each priority that is used: O(log n) as theirs, and a look at each lower priority that is empty.

    Args:
        make: the policy for the tails of one priority.
    """

    __slots__ = ("_make", "_order", "_policies", "most")

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self._make = make
        self._policies: dict[int, EvictionPolicy] = {0: make()}
        self._order = [0]
        self.most = self._policies[0].most  #: as its policy says

    def add(self, segment: Segment) -> None:
        """File a tail under its priority, or move it there."""
        priority = segment.priority or 0
        if segment.queued and segment.filed_priority != priority:
            self._policies[segment.filed_priority].remove(segment)
        policy = self._policies.get(priority)
        if policy is None:
            policy = self._policies[priority] = self._make()
            insort(self._order, priority)
        segment.filed_priority = priority
        policy.add(segment)

    def pop(self) -> Segment | None:
        """The next victim: of the lowest priority that has one."""
        for priority in self._order:
            policy = self._policies[priority]
            while (segment := policy.pop()) is not None:
                if (segment.priority or 0) == priority:
                    return segment
                self.add(segment)  # its priority has risen since
        return None

    def touch(self, segment: Segment) -> None:
        """Tell its policy, or move it to that of its new priority."""
        if not segment.queued:
            return
        if segment.filed_priority == (segment.priority or 0):
            self._policies[segment.filed_priority].touch(segment)
        else:
            self.add(segment)

    def remove(self, segment: Segment) -> None:
        """Forget its place, if it has one."""
        if segment.queued:
            self._policies[segment.filed_priority].remove(segment)

    def clear(self) -> None:
        """Forget every place."""
        for policy in self._policies.values():
            policy.clear()


#: What orders tails of one priority, by the number of the pool's slots.
POLICIES: Final[Mapping[str, Callable[[int], EvictionPolicy]]] = {
    "lru": lambda _: LeastRecentlyUsed(),
    "slru": SegmentedLeastRecentlyUsed,
}


def make_policy(name: str, slots: int) -> EvictionPolicy:
    """The policy of a pool of so many slots: by priority first.

    Raises:
        KeyError: there is none of that name.
    """
    return ByPriority(partial(POLICIES[name], slots))
