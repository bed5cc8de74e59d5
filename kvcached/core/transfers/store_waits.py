"""Waits for stores of other sessions: how much of a chain is there, and which store under way brings what follows.

Blocks that shards still write are in the index, and no request hits them. A prefetch waits for their store instead
(`prefetch`). It holds no slots, and it waits for one store at a time: for the one that writes the first block behind
the hit. When that store has ended, however it did, the chain is looked at again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple, TypeAlias

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.ranges import pairs
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached_client.types import TransferId

#: Stores under way by their tree and first host slot.
EngineStores: TypeAlias = Mapping[tuple[PrefixTree, int], EngineTransfer]
#: No transfer has this id.
NO_STORE = TransferId(0)


class Hit(NamedTuple):
    """How much of a chain the host pool holds.

    Attributes:
        run, depth: the path whose copies are complete.
        filling: how many blocks behind it are there, or will be when stores under way have ended.
    """

    run: Run
    depth: int
    filling: int


def longest_hit(tree: PrefixTree, keys: bytes, limit: int) -> Hit:
    """The longest prefix of a chain whose copies in the host pool are complete, up to `limit` blocks."""
    run, known = tree.match_host(tree.root, 0, keys, limit)
    depth, pool = known, tree.members[HOST]
    if pool.counts[SlotState.FILLING]:
        whole = 0
        for first, count in pairs(tree.path_slots(run, 0, known, HOST)):
            if not pool.holds(first, count, SlotState.CACHED):
                depth = whole + pool.leading(first, count, SlotState.CACHED)
                break
            whole += count
    return Hit(tree.resolve(run, depth), depth, known - depth)


def store_behind(
    hit: Hit, tree: PrefixTree, keys: bytes, stores: EngineStores, own: Container[TransferId]
) -> TransferId:
    """The store under way that writes the first block behind a hit; `NO_STORE` if there is none, or it is one of `own`.

    The block is the first of the store: what comes before it on its path is complete, and a store ends as a whole.
    A session does not wait for its own stores: the thread that waits may be the one that has to copy.
    """
    if not hit.filling:
        return NO_STORE
    end = hit.depth + 1
    run, _ = tree.match_host(tree.root, 0, keys, end)
    ((slot, _),) = pairs(tree.path_slots(run, hit.depth, end, HOST))
    store = stores.get((tree, slot))
    return NO_STORE if store is None or store.id in own else store.id
