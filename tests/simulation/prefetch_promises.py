"""What was known of a prompt when its prefetch began is there as long as that is under way."""

from __future__ import annotations

from typing import NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.slots.host_slots import HostPool
from kvcached.core.transfers.prefix_locks import LOCKED_PERCENT_MAX
from kvcached.core.transfers.storage_state import Prefetch
from tests.simulation.scheduler import Broken

#: Blocks leave a prefix by these, whoever holds it.
_LOSSES = ("corrupt_blocks", "store_failed_blocks", "load_failed_blocks", "host_dropped_blocks", "cleared_blocks")


class _Known(NamedTuple):
    """How much of a prompt the host pool had, after how many losses."""

    depth: int
    losses: tuple[int, ...]


class PrefetchPromises:
    """Of one daemon."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._known: dict[int, _Known] = {}

    def look(self) -> None:
        """Raises `Broken` where a prefix was evicted while storage was asked for what follows it."""
        under_way = self._cache.storage.prefetches.under_way
        if not under_way:
            self._known.clear()
            return
        losses = tuple(self._cache.counters[name] for name in _LOSSES)
        for number in self._known.keys() - under_way.keys():
            del self._known[number]
        for number, prefetch in under_way.items():
            known = self._known.get(number)
            if known is None:
                self._known[number] = _Known(_lockable(prefetch), losses)
            elif known.losses != losses:
                self._known[number] = _Known(0, losses)
            elif (depth := _depth(prefetch)) < known.depth:
                raise Broken(f"prefetch {number} began with {known.depth} blocks in the host pool; {depth} are left")


def _depth(prefetch: Prefetch) -> int:
    tree, keys, limit = prefetch.chain.tree, prefetch.chain.keys, prefetch.chain.limit
    return tree.match_host(tree.root, 0, keys, limit)[1]


def _lockable(prefetch: Prefetch) -> int:
    """How much of the prompt is there, if so little is protected that this may be, too."""
    host, depth = prefetch.chain.tree.host, _depth(prefetch)
    is_little = isinstance(host, HostPool) and (host.protected + depth) * 100 <= host.reachable * LOCKED_PERCENT_MAX
    return depth if is_little else 0
