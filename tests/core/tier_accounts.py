"""Where every committed block has gone: the books of the tiers, checked after every step.

A block is *present* while an index of its namespace has it, that of a device pool or that of the host pool. What a
session wrote under a fence that never signalled was never good: its death, and what else was built on it, is counted as
*stripped*. These hold at any time:

=============  ====================================================================================================
device pools   committed + loaded = CACHED + evicted + demoted + stripped + lost with a worker + cut with a load
host pool      stored = CACHED + host evicted + host dropped + punched out because corrupt
last copies    blocks that only devices held vanish by ``dropped_blocks``, or stripped, lost or cut; those that the host
               pool held by host eviction, host drop, a store that failed, or because corrupt
=============  ====================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.slots.states import SlotState
from tests.core.tier_world import NAMESPACES, World

_HOST_LOSSES = ("host_evicted_blocks", "host_dropped_blocks", "store_failed_blocks", "corrupt_blocks")


class Accounts:
    """Books of one cache, kept from outside.

    Args:
        loaded_elsewhere: blocks that the step has loaded to no device pool.
    """

    def __init__(self, cache: Cache, world: World, loaded_elsewhere: Callable[[], int] = lambda: 0) -> None:
        self._loaded_elsewhere = loaded_elsewhere
        self.cache = cache
        self.world = world
        self.begin()

    def begin(self) -> None:
        """Look before a step."""
        self.counters = Counter(self.cache.counters)
        self.on_device, self.on_host = self._present()
        self.cached = self._cached_on_devices()
        self.excused: set[tuple[bytes, bytes]] = set()  #: what the step may take from devices without counting it
        self.excused_copies = 0  #: the same where a step may take several copies of one block

    # --- what a step is about to do ---------------------------------------------------------------------------------

    def stripping(self, name: str) -> None:
        """A session of a pool ends or expires."""
        slots, parents = self.world.index(name, self.cache.pools[name].index), self.world.parents
        for key in slots:
            at = key
            while at and slots[at] not in self.world.unwritten[name]:
                at = parents[at]
            if at:
                self.excused.add((NAMESPACES[name], key))

    def clearing(self, name: str) -> None:
        """A pool's namespace is being cleared."""
        self.excused.update((NAMESPACES[name], key) for key in self.world.index(name, self.cache.pools[name].index))
        self.excused_copies += len(self.world.index(name, self.cache.pools[name].index))

    def cutting(self, name: str, first: bytes) -> None:
        """A load may fail, whose first block this is: what continues it goes with it."""
        for key in self.world.index(name, self.cache.pools[name].index):
            at = key
            while at not in {b"", first}:
                at = self.world.parents[at]
            if at == first:
                self.excused.add((NAMESPACES[name], key))

    # --- afterwards -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Look after a step."""
        grown = self.grown()
        self._check_last_copies(grown)
        self._check_slots(grown)

    def grown(self) -> Counter[str]:
        """What the step has counted for the tiers."""
        grown = Counter({name: count - self.counters[name] for name, count in self.cache.counters.items()})
        grown["loaded_blocks"] -= self._loaded_elsewhere()
        return grown

    def _check_last_copies(self, grown: Counter[str]) -> None:
        on_device, on_host = self._present()
        gone = (self.on_device | self.on_host) - on_device - on_host
        device_only = gone - self.on_host
        assert len(device_only - self.excused) <= grown["dropped_blocks"] <= len(device_only)
        assert len(gone & self.on_host) <= sum(grown[name] for name in _HOST_LOSSES)

    def _check_slots(self, grown: Counter[str]) -> None:
        counters = self.cache.counters
        came = grown["committed_blocks"] + grown["loaded_blocks"]
        went = grown["evicted_blocks"] + grown["demoted_blocks"]
        uncounted = self.cached + came - went - self._cached_on_devices()
        assert 0 <= uncounted <= len(self.excused) + self.excused_copies
        cached = sum(tree.members[HOST].counts[SlotState.CACHED] for tree in self.cache.trees)
        punched = counters["stored_blocks"] - cached - counters["host_evicted_blocks"] - counters["host_dropped_blocks"]
        assert 0 <= punched <= counters["corrupt_blocks"]

    def _present(self) -> tuple[set[tuple[bytes, bytes]], set[tuple[bytes, bytes]]]:
        """What device pools hold, and what the host pool holds."""
        on_device = {
            (NAMESPACES[name], key)
            for name, pool in self.cache.pools.items()
            for key in self.world.index(name, pool.index)
        }
        return on_device, {(NAMESPACES[name], key) for name in ("a", "c") for key in self.world.index(name, HOST)}

    def _cached_on_devices(self) -> int:
        return sum(pool.counts[SlotState.CACHED] for pool in self.cache.pools.values())
