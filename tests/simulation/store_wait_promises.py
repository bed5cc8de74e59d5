"""Who waits for a store of another session waits for one that brings the next block, and is told the truth."""

from __future__ import annotations

from itertools import takewhile

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.slots.ranges import every_slot, pairs
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.storage_state import Prefetch, PrefetchEnd
from tests.simulation.scheduler import Broken


class StoreWaitPromises:
    """Of one daemon."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._waited: dict[int, Prefetch] = {}

    def look(self) -> None:
        """Raises `Broken` where somebody waits in vain, or is told of other blocks than there are."""
        waiting = self._cache.storage.prefetches.waiting
        for number, prefetch in self._waited.items():
            if number not in waiting and not prefetch.asked:
                _check_told(prefetch)
        stores = {store.id: store for store in self._cache.offload.transfers}
        for number, prefetch in waiting.items():
            if self._cache.offload.namespaces.generation_of(prefetch.chain.tree) is None:
                raise Broken(f"prefetch {number} waits for a store in a namespace that was cleared")
            if _stored(prefetch) < prefetch.next and prefetch.store in stores:
                continue  # a block before was found bad meanwhile: the wait ends with the store all the same
            slot, store = _next_slot(prefetch), stores.get(prefetch.store)
            if slot is None or store is None or slot not in every_slot(store.host):
                raise Broken(f"prefetch {number} waits for store {prefetch.store}, which does not bring its next block")
        self._waited = dict(waiting)


def _check_told(prefetch: Prefetch) -> None:
    """A wait that is over, and after which storage was not asked."""
    stored = _stored(prefetch)
    if prefetch.end in {PrefetchEnd.STORED, PrefetchEnd.FAILED} and prefetch.inserted != stored:
        raise Broken(f"prefetch {prefetch.id} is told of {prefetch.inserted} blocks, {stored} are stored")


def _slots(prefetch: Prefetch) -> list[int]:
    """Of the blocks of its chain that are in the index."""
    tree, keys, limit = prefetch.chain.tree, prefetch.chain.keys, prefetch.chain.limit
    run, depth = tree.match_host(tree.root, 0, keys, limit)
    ranges = pairs(tree.path_slots(run, 0, depth, HOST))
    return [slot for first, count in ranges for slot in range(first, first + count)]


def _stored(prefetch: Prefetch) -> int:
    pool = prefetch.chain.tree.members[HOST]
    return sum(1 for _ in takewhile(lambda slot: pool.state_of(slot) is SlotState.CACHED, _slots(prefetch)))


def _next_slot(prefetch: Prefetch) -> int | None:
    """The slot of the block behind those that are stored, if it is in the index."""
    return next(iter(_slots(prefetch)[_stored(prefetch) :]), None)
