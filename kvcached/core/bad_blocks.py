"""Host slots whose blocks have left the index because they are bad: free, unless somebody reads them yet."""

from __future__ import annotations

from collections.abc import Callable

from kvcached.core.ranges import one_range
from kvcached.core.states import SlotState
from kvcached.core.tree import HOST, PrefixTree

#: Told of each such slot, which is CACHED until then, and why.
LetGo = Callable[[PrefixTree, int, str], None]


def free_now(tree: PrefixTree, slot: int, cause: str) -> None:
    """Nobody reads it."""
    tree.members[HOST].move(one_range(slot, 1), SlotState.CACHED, SlotState.FREE, cause)
