"""Host slots of one namespace, in slabs that the namespaces of a daemon share.

A slab is a piece of the host pool's memory that holds blocks of one namespace. It is handed out when a namespace needs
slots, and comes back when all its slots are free and another namespace asks.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcached.core.effects import Effect, SlabLent
from kvcached.core.pool import SlotPool
from kvcached.core.ranges import Ranges, one_range, pairs, slot_count
from kvcached.core.states import SlotState


class SlabStock:
    """The slabs of one daemon.

    One slab for every namespace that has none is held back, so that the first one to fill the pool shuts nobody out.

    Args:
        count: how many there are.
        effects: told of each slab that a namespace gets.

    Attributes:
        eviction_policy: of every namespace's host slots; see `kvcached.core.eviction`.
        version: grows whenever a slab changes hands.
    """

    def __init__(self, count: int, effects: list[Effect] | None = None, eviction_policy: str = "lru") -> None:
        self.count = count
        self.eviction_policy = eviction_policy
        self.version = 0
        self._effects: list[Effect] = [] if effects is None else effects
        self.pools: list[HostPool] = []
        #: Asked for room when no slab is to be had: evicts where nobody minds; False where there is no such place.
        self.make_room: Callable[[], bool] | None = None
        self._free = list(range(count - 1, -1, -1))

    @property
    def unlent(self) -> int:
        """Slabs that nobody has."""
        return len(self._free)

    def claim(self, slab: int) -> None:
        """A slab that nobody has is somebody's again, with what is in it.

        Raises:
            ValueError: it is somebody's, or there is no such slab.
        """
        self._free.remove(slab)
        self.version += 1

    def lend(self, pool: HostPool) -> int | None:
        """A slab for `pool`: one that nobody has, else one that stands empty elsewhere; None if there is neither."""
        slab = self._find(pool)
        while slab is None and self.make_room is not None and self.make_room():
            slab = self._find(pool)
        if slab is not None:
            self.version += 1
            self._effects.append(SlabLent(pool.namespace, slab))
        return slab

    def take_back(self, pool: HostPool) -> bool:
        """Take the slabs of a pool that stand empty; whether there was one."""
        before = len(self._free)
        while (slab := pool.give_back()) is not None:
            self._free.append(slab)
            self.version += 1
        return len(self._free) > before

    def retire(self, pool: HostPool) -> bool:
        """Take back what a pool needs no more that will not grow again; whether that was all of it."""
        if pool in self.pools:
            self.pools.remove(pool)
        self.take_back(pool)
        return not pool.slabs

    def _find(self, pool: HostPool) -> int | None:
        held_back = sum(1 for other in self.pools if other is not pool and not other.slabs)
        if len(self._free) > held_back:
            return self._free.pop()
        for other in self.pools:
            if other is not pool and len(other.slabs) > 1 and (slab := other.give_back()) is not None:
                return slab
        return None


class HostPool(SlotPool):
    """The host slots of one namespace, the same ids on every shard: slot = slab * slots_per_slab + place in the slab.

    Attributes:
        slots_per_slab: blocks that a slab holds.
        namespace: whose they are: the root of its keys.
        slabs: those that it has now.
        empty: those of them whose slots are all free.
    """

    __slots__ = ("_stock", "_used", "empty", "namespace", "slabs", "slots_per_slab")

    def __init__(self, stock: SlabStock, slots_per_slab: int, namespace: bytes = b"") -> None:
        super().__init__("host", stock.count * slots_per_slab, SlotState.ABSENT)
        self.slots_per_slab = slots_per_slab
        self.namespace = namespace
        self.slabs: set[int] = set()
        self.empty: set[int] = set()
        self._used = [0] * stock.count  #: slots that are not free, by slab
        self._stock = stock
        stock.pools.append(self)

    @property
    def lent(self) -> int:
        """Slots of the slabs that it has."""
        return len(self.slabs) * self.slots_per_slab

    @property
    def room(self) -> int:
        """Slots that can be had without an eviction."""
        return self.free + self._stock.unlent * self.slots_per_slab

    def grow(self) -> bool:
        """Get one slab more; False if there is none to have."""
        slab = self._stock.lend(self) if self.slots_per_slab else None
        if slab is None:
            return False
        self.slabs.add(slab)
        self.empty.add(slab)
        place = one_range(slab * self.slots_per_slab, self.slots_per_slab)
        self.move(place, SlotState.ABSENT, SlotState.FREE, f"slab {slab} lent")
        return True

    def restore(
        self, slabs: list[int], free: Ranges[int], cached: Ranges[int], set_aside: Ranges[int], cause: str
    ) -> None:
        """Have slabs again, each of whose slots is in one of the three lists.

        Raises:
            ValueError: somebody has one of the slabs, or the lists hold other slots than the slabs.
        """
        uses = ((free, SlotState.FREE), (cached, SlotState.CACHED), (set_aside, SlotState.QUARANTINED))
        slots = sum(slot_count(ranges) for ranges, _ in uses)
        if slots != len(slabs) * self.slots_per_slab:
            raise ValueError(f"{slots} slots in {len(slabs)} slabs of {self.slots_per_slab}")
        for slab in slabs:
            self._stock.claim(slab)
        self.slabs.update(slabs)
        self.empty.update(slabs)
        for ranges, state in uses:
            self.move(ranges, SlotState.ABSENT, state, cause)
            if state is not SlotState.FREE:
                for first, count in pairs(ranges):
                    self._count(first, first + count, 1)

    def give_back(self) -> int | None:
        """Part with a slab whose slots are all free; None if there is none."""
        if not self.empty:
            return None
        slab, count = self.empty.pop(), self.slots_per_slab
        self.slabs.remove(slab)
        self._free.remove(slab * count, count)
        self.move(one_range(slab * count, count), SlotState.FREE, SlotState.ABSENT, f"slab {slab} given back")
        return slab

    def move(self, ranges: Ranges[int], source: SlotState, target: SlotState, cause: str) -> None:
        """As `SlotPool.move`; keeps count of which slabs stand empty."""
        super().move(ranges, source, target, cause)
        if source is SlotState.FREE and target is not SlotState.ABSENT:
            change = 1
        elif target is SlotState.FREE and source is not SlotState.ABSENT:
            change = -1
        else:
            return
        for first, count in pairs(ranges):
            self._count(first, first + count, change)

    def _count(self, first: int, end: int, change: int) -> None:
        size, used = self.slots_per_slab, self._used
        slab = first // size
        while first < end:
            stop = min((slab + 1) * size, end)
            before = used[slab]
            used[slab] = after = before + change * (stop - first)
            if not after:
                self.empty.add(slab)
            elif not before:
                self.empty.discard(slab)
            first, slab = stop, slab + 1
