"""Whether and how routers are told which blocks are where: begins with a tree, and ends when nothing of it is found."""

from __future__ import annotations

from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import IndexChange, Tier
from kvcached.core.slots.announced import Announced
from kvcached.core.slots.ranges import one_range, pairs
from kvcached.core.slots.slots import SlotPool


class Announcements:
    """What routers are told of all trees.

    Args:
        is_wanted: whether anybody wants to know; if not, nothing is recorded, and `changes` stays empty.

    Attributes:
        changes: what they have not been told yet, in order.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.changes: list[IndexChange] = []
        self._is_wanted = is_wanted

    def begin(self, tree: PrefixTree, label: str, generation: int, block_size: int) -> None:
        """Tell of a new tree, which is empty."""
        if not self._is_wanted:
            return
        for pool in tree.pools:
            self._begin(pool, Tier(tree.namespace, generation, label, pool.name, pool.index, block_size))
        if tree.host is not None:
            self._begin(tree.host, Tier(tree.namespace, generation, label, "", None, block_size))

    def _begin(self, pool: SlotPool, tier: Tier) -> None:
        pool.announce(Announced(self.changes, tier, pool.slots))


def tiers(tree: PrefixTree) -> list[Announced]:
    """What routers know of a tree, pool by pool."""
    return [pool.announced for pool in tree.members if pool.announced is not None]


def inherit(tree: PrefixTree, pool: SlotPool) -> None:
    """A pool has blocks from before a restart: routers get them with their first snapshot."""
    announced, index = pool.announced, tree.members.index(pool)
    if announced is None:
        return
    for run in tree.runs():
        segment = run.segments[index]
        before = tree.path_keys(run, run.start - 1, run.start) if run.start else b""
        at = 0
        for first, count in pairs(segment.ranges) if segment is not None else ():
            end = at + count * KEY_SIZE
            if first >= 0:
                parent = bytes(run.keys[at - KEY_SIZE : at]) if at else before
                announced.inherit(parent, bytes(run.keys[at:end]), one_range(first, count))
            at = end


def end(tree: PrefixTree) -> None:
    """Nothing of a tree is found any more, though something may still be held."""
    for announced in tiers(tree):
        announced.end()
    for pool in tree.members:
        pool.announce(None)


def renew(tree: PrefixTree, namespace: bytes, generation: int) -> None:
    """All that a tree holds is about to go, and what comes then belongs to another generation."""
    for announced in tiers(tree):
        announced.end()
        announced.rename(namespace, generation)
