"""The eviction policies by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvcached.core.policy import EvictionPolicy, LeastRecentlyUsed
from kvcached.core.priorities import ByPriority
from kvcached.core.segmented import SegmentedLeastRecentlyUsed

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
