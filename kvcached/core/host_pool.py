"""Host slots of one namespace, in slabs that the namespaces of a daemon share.

A slab is a piece of the host pool's memory that holds blocks of one namespace. It is handed out when a namespace needs
slots, and comes back when all its slots are free and another namespace asks.
"""

from __future__ import annotations

from kvcached.core.pool import SlotPool
from kvcached.core.ranges import one_range
from kvcached.core.states import SlotState


class SlabStock:
    """The slabs of one daemon.

    One slab for every namespace that has none is held back, so that the first one to fill the pool shuts nobody out.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.pools: list[HostPool] = []
        self._free = list(range(count - 1, -1, -1))

    def lend(self, pool: HostPool) -> int | None:
        """A slab for `pool`: one that nobody has, else one that stands empty elsewhere; None if there is neither."""
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
        slabs: those that it has now.
    """

    __slots__ = ("_stock", "slabs", "slots_per_slab")

    def __init__(self, stock: SlabStock, slots_per_slab: int) -> None:
        super().__init__("host", stock.count * slots_per_slab, SlotState.ABSENT)
        self.slots_per_slab = slots_per_slab
        self.slabs: set[int] = set()
        self._stock = stock
        stock.pools.append(self)

    def grow(self) -> bool:
        """Get one slab more; False if there is none to have."""
        slab = self._stock.lend(self) if self.slots_per_slab else None
        if slab is None:
            return False
        self.slabs.add(slab)
        place = one_range(slab * self.slots_per_slab, self.slots_per_slab)
        self.move(place, SlotState.ABSENT, SlotState.FREE, f"slab {slab} lent")
        return True

    def give_back(self) -> int | None:
        """Part with a slab whose slots are all free; None if there is none."""
        count = self.slots_per_slab
        for slab in self.slabs:
            if self.holds(slab * count, count, SlotState.FREE):
                self.slabs.remove(slab)
                self._free.remove(slab * count, count)
                self.move(one_range(slab * count, count), SlotState.FREE, SlotState.ABSENT, f"slab {slab} given back")
                return slab
        return None
