"""Waits for stores of other sessions: how much of a chain is there, and which store under way brings what follows.

Blocks that shards still write are in the index, and no request hits them. A prefetch waits for their store instead
(`prefetch`). It holds no slots, and it waits for one store at a time: for the one that writes the first block behind
the hit. When that store has ended, however it did, the chain is looked at again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import TransferKind
from kvcached.core.slots.ranges import pairs, place_of
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached_client.types import TransferId

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
            whole += count
            if not pool.holds(first, count, SlotState.CACHED):
                states = (pool.state_of(slot) is SlotState.CACHED for slot in range(first, first + count))
                depth = whole - count + list(states).index(False)
                break
    return Hit(tree.resolve(run, depth), depth, known - depth)


def store_behind(
    hit: Hit, tree: PrefixTree, keys: bytes, stores: Iterable[EngineTransfer], own: Container[TransferId]
) -> TransferId:
    """The store under way that writes the first block behind a hit; `NO_STORE` if there is none, or it is one of `own`.

    A session does not wait for its own stores: the thread that waits may be the one that has to copy.
    """
    if not hit.filling:
        return NO_STORE
    end = hit.depth + 1
    run, _ = tree.match_host(tree.root, 0, keys, end)
    ((slot, _),) = pairs(tree.path_slots(run, hit.depth, end, HOST))
    for store in stores:
        if store.kind is TransferKind.STORE and store.tree is tree and place_of(store.host, slot) is not None:
            return NO_STORE if store.id in own else store.id
    return NO_STORE
