"""Host slots of one namespace, in slabs that the namespaces of a daemon share.

A slab is a piece of the host pool's memory that holds blocks of one namespace. It is handed out when a namespace needs
slots, and comes back when another namespace asks and its slots are all free, or have to be freed for it. Shares are
equal, within the floors and caps of a quota.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kvcached.core.messages import Effect, SlabAllocated
from kvcached.core.slots.ranges import Ranges, one_range, pairs, slot_count
from kvcached.core.slots.slots import SlotPool
from kvcached.core.slots.states import SlotState


@dataclass(frozen=True, slots=True)
class QuotaRule:
    """Bounds of the namespaces whose label, or one of whose replicas' names, matches a shell pattern; or of tenants.

    Attributes:
        floor_percent: of all slabs, or of a namespace's slots: what others never take from it.
        cap_percent: of the same: what it has at most.
    """

    label: str = "*"
    floor_percent: int = 0
    cap_percent: int = 100

    def matches(self, names: Iterable[str]) -> bool:
        """Whether it is about whoever has one of these names."""
        return self.label == "*" or any(fnmatchcase(name, self.label) for name in names)


@dataclass(frozen=True, slots=True)
class HostQuota:
    """Rules of namespaces, and of the tenants in each; the first one that matches holds."""

    rules: tuple[QuotaRule, ...] = ()
    tenants: tuple[QuotaRule, ...] = ()

    def bounds(self, labels: Iterable[str], slabs: int) -> tuple[int, int]:
        """Floor and cap of a namespace with these labels, in slabs out of `slabs`."""
        names = list(labels)
        for rule in self.rules:
            if rule.matches(names):
                floor = slabs * rule.floor_percent // 100
                return floor, max(slabs * rule.cap_percent // 100, floor, 1)
        return 0, slabs


#: A namespace that nobody has used for this long gives all that others need, but its floor. Engines start within it.
RESTING_MS = 120_000
#: Slabs that were freed for a namespace wait for its blocks for this long before they count as standing empty.
RESERVED_MS = 5_000
#: At least this part of all slabs is freed at once where it may be: a look through a namespace takes milliseconds.
BATCH_DIVISOR = 64
#: A namespace that no engine uses frees a slab at once for each so many runs that it has, if these are more: a look
#: through so many takes tens of milliseconds, and there would be one for each slab that others need.
RUNS_PER_SLAB = 4096
#: But no more than this part of its slabs: others may need none after the first.
GIVEN_DIVISOR = 8
#: Surpluses closer than this are equal: with one slab more for one, and less for the other, nothing would be gained.
_APART_MIN = 2


class SlabAllocator:
    """The slabs of one daemon, and which namespace gets them.

    A namespace that needs a slab gets, in this order: one that nobody has; one that stands empty elsewhere; one of a
    namespace that no engine uses; one of a namespace that has more above its share than it has itself. Shares are equal
    among the namespaces that were used lately, within their floors and caps. A slab changes hands only where the two
    are two slabs or more apart, so that none comes back until somebody's share changes.

    One slab for every namespace that has none is held back, so that the first one to fill the pool shuts nobody out.

    Args:
        count: how many there are.
        effects: told of each slab that a namespace gets.
        quota: floors and caps.

    Attributes:
        eviction_policy: of every namespace's host slots; see `kvcached.core.eviction.by_priority`.
        version: grows whenever a slab changes hands.
        now_ms: time of the last tick.
        make_room: asked for room where no slab is to be had: evicts in a namespace that no engine uses, and says
            whether there is one that has to give to this pool.
        evict_slabs: frees up to so many slabs of a pool for another one; returns how many stand empty now.
    """

    def __init__(
        self,
        count: int,
        effects: list[Effect] | None = None,
        eviction_policy: str = "lru",
        quota: HostQuota | None = None,
        counters: Counter[str] | None = None,
        make_room: Callable[[HostPool], bool] | None = None,
        evict_slabs: Callable[[HostPool, int], int] | None = None,
    ) -> None:
        self.count = count
        self.eviction_policy = eviction_policy
        self.quota = HostQuota() if quota is None else quota
        self.version = 0
        self._effects: list[Effect] = [] if effects is None else effects
        self._counters: Counter[str] = Counter() if counters is None else counters
        self.now_ms = 0
        self.pools: list[HostPool] = []
        self.make_room = make_room
        self.evict_slabs = evict_slabs
        self._free = list(range(count - 1, -1, -1))

    @property
    def unallocated(self) -> int:
        """Slabs that nobody has."""
        return len(self._free)

    @property
    def unused(self) -> int | None:
        """A slab that holds no block: one that nobody has, or that stands empty. None where there is none."""
        if self._free:
            return self._free[-1]
        return next((slab for pool in self.pools for slab in pool.empty), None)

    def claim(self, slab: int) -> None:
        """A slab that nobody has is somebody's again, with what is in it.

        Raises:
            ValueError: it is somebody's, or there is no such slab.
        """
        self._free.remove(slab)
        self.version += 1

    def tick(self, now_ms: int) -> None:
        """Time has passed: note which namespaces were used."""
        self.now_ms = now_ms
        for pool in self.pools:
            if pool.clock != pool.seen_clock:
                pool.seen_clock, pool.used_ms = pool.clock, now_ms
            pool.is_barren = False

    def allocate(self, pool: HostPool) -> list[int]:
        """Slabs for `pool`, which needs one; none where there are none for it. Several where others had to give."""
        if len(pool.slabs) >= pool.cap:
            return []
        pool.used_ms = self.now_ms
        slab = self._find(pool)
        while slab is None and self.make_room is not None and self.make_room(pool):
            slab = self._find(pool)
        slabs = self._reclaim(pool) if slab is None else [slab]
        for each in slabs:
            self.version += 1
            self._effects.append(SlabAllocated(pool.namespace, each))
        return slabs

    def take_back(self, pool: HostPool, *, keep: int = 0) -> bool:
        """Take the slabs of a pool that stand empty, until it has `keep`; whether there was one."""
        before = len(self._free)
        while len(pool.slabs) > keep and (slab := pool.give_back()) is not None:
            self._free.append(slab)
            self.version += 1
        return len(self._free) > before

    def retire(self, pool: HostPool) -> bool:
        """Take back what a pool needs no more that will not grow again; whether that was all of it."""
        if pool in self.pools:
            self.pools.remove(pool)
        self.take_back(pool)
        return not pool.slabs

    def look_again(self, pool: HostPool) -> None:
        """An engine of a pool has gone: what it held may be freed."""
        pool.is_barren = False

    # --- who gets whose ---------------------------------------------------------------------------------------------

    def surplus(self, pool: HostPool) -> int:
        """Slabs of a pool above its share; below 0 where it has less."""
        active = sum(not self.is_resting(other) for other in self.pools)
        share = 0 if self.is_resting(pool) else self.count // max(active, 1)
        return len(pool.slabs) - max(pool.floor, min(pool.cap, share))

    def is_resting(self, pool: HostPool) -> bool:
        """Whether nobody has used a namespace for so long that others may have its share."""
        return self.now_ms - pool.used_ms >= RESTING_MS

    def must_give(self, giver: HostPool, taker: HostPool, *, keep: int) -> int:
        """How many slabs a pool has to give to another one that needs some; it keeps its floor, and `keep` at least."""
        spare = len(giver.slabs) - max(giver.floor, keep)
        if spare <= 0 or giver is taker:
            return 0
        if self.is_resting(giver):
            return spare
        apart = self.surplus(giver) - self.surplus(taker)
        if len(taker.slabs) < max(taker.floor, 1):
            apart = max(apart, _APART_MIN)
        return min(apart // _APART_MIN, spare)

    def due(self, giver: HostPool, taker: HostPool, *, keep: int, runs: int = 0) -> int:
        """How many slabs of a pool are to be freed at once for another one: it must give them, and they fit.

        The more `runs` a look at it takes, the more they are.
        """
        batch = max(self.count // BATCH_DIVISOR, min(runs // RUNS_PER_SLAB, len(giver.slabs) // GIVEN_DIVISOR), 1)
        return min(self.must_give(giver, taker, keep=keep), batch, taker.cap - len(taker.slabs))

    def free_slabs(self, giver: HostPool, due: int) -> int:
        """Evict what lies in so many slabs of a pool; returns how many stand empty now."""
        freed = 0 if self.evict_slabs is None else self.evict_slabs(giver, due)
        giver.is_barren = freed < due  # all else is in use: the next tick is early enough to look again
        return freed

    def _reclaim(self, taker: HostPool) -> list[int]:
        """Slabs of namespaces that are in use, some at a time: each time, what they hold is looked through."""
        if self.evict_slabs is None or len(self.pools) < _APART_MIN:
            return []
        givers = sorted(self.pools, key=lambda pool: (not self.is_resting(pool), -self.surplus(pool), pool.used_ms))
        for giver in givers:
            due = 0 if giver.is_barren else self.due(giver, taker, keep=1)
            if due <= 0:
                continue
            freed = self.free_slabs(giver, due)
            if freed:
                taken = [slab for _ in range(min(freed, due)) if (slab := giver.give_back()) is not None]
                taker.reserved_until_ms = self.now_ms + RESERVED_MS
                self._counters["reclaimed_slabs"] += len(taken)
                return taken
        return []

    def _find(self, pool: HostPool) -> int | None:
        held_back = sum(1 for other in self.pools if other is not pool and not other.slabs)
        if len(self._free) > held_back:
            return self._free.pop()
        for other in self.pools:
            may_give = self.now_ms >= other.reserved_until_ms and len(other.slabs) > max(other.floor, 1)
            if other is not pool and may_give and (slab := other.give_back()) is not None:
                return slab
        return None


class HostPool(SlotPool):
    """The host slots of one namespace, the same ids on every shard: slot = slab * slots_per_slab + place in the slab.

    Attributes:
        slots_per_slab: blocks that a slab holds.
        namespace: whose they are: the root of its keys.
        slabs: those that it has now.
        empty: those of them whose slots are all free.
        floor, cap: slabs that others never take from it, and that it has at most.
        used_ms: time of the tick before which it was used last; `seen_clock` is its clock then.
        reserved_until_ms: until then its empty slabs are not given to others: they were freed for it.
        is_barren: no slab of it could be freed since the last tick.
    """

    __slots__ = (
        "_allocator",
        "_used",
        "cap",
        "empty",
        "floor",
        "is_barren",
        "namespace",
        "reserved_until_ms",
        "seen_clock",
        "slabs",
        "slots_per_slab",
        "used_ms",
    )

    def __init__(
        self, allocator: SlabAllocator, slots_per_slab: int, namespace: bytes = b"", labels: Iterable[str] = ()
    ) -> None:
        super().__init__("host", allocator.count * slots_per_slab, SlotState.ABSENT)
        self.slots_per_slab = slots_per_slab
        self.namespace = namespace
        self.slabs: set[int] = set()
        self.empty: set[int] = set()
        self._used = [0] * allocator.count  #: slots that are not free, by slab
        self._allocator = allocator
        self.floor, self.cap = allocator.quota.bounds(labels, allocator.count)
        self.used_ms, self.seen_clock = allocator.now_ms, 0
        self.reserved_until_ms = 0
        self.is_barren = False
        allocator.pools.append(self)

    @property
    def allocated(self) -> int:
        """Slots of the slabs that it has."""
        return len(self.slabs) * self.slots_per_slab

    @property
    def reachable(self) -> int:
        """Slots that it has, and those in slabs that nobody has."""
        return self.allocated + self._allocator.unallocated * self.slots_per_slab

    @property
    def room(self) -> int:
        """Slots that can be had without an eviction."""
        return self.free + self._allocator.unallocated * self.slots_per_slab

    def rename(self, namespace: bytes) -> None:
        """Its namespace has another root."""
        self.namespace = namespace

    def grow(self) -> bool:
        """Get a slab more, or some; False if there is none to have."""
        slabs = self._allocator.allocate(self) if self.slots_per_slab else []
        for slab in slabs:
            self.slabs.add(slab)
            self.empty.add(slab)
            place = one_range(slab * self.slots_per_slab, self.slots_per_slab)
            self.move(place, SlotState.ABSENT, SlotState.FREE, f"slab {slab} allocated")
        return bool(slabs)

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
            self._allocator.claim(slab)
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
