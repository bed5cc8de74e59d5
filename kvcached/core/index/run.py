"""A node of the index: consecutive blocks with no divergence between them.

Depths are absolute: block 0 is the first of the chain. Run ``[start, end)`` holds its keys back to back; its first
blocks may be resident in any number of pools, each residency a `Segment` with one length::

    root ── run [0, 740) ──┬── run [740, 752)      keys of blocks 0..739, then two continuations
                           └── run [740, 1200)
             pool 0: ████████████░░░░              segment of length 12 of 16: a prefix, never with holes

A device pool's segment below a run exists only where the pool holds all of that run, so residency is a prefix of every
path. The host pool has segments of the same form, but with holes: ranges of blocks that it does not hold. A hole never
ends a segment, unless something below it is held.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvcached.core.index.part_uses import PartUse, higher, in_order
from kvcached.core.slots.ranges import Ranges, cut, section, solid_length

KEY_SIZE = 16
#: The deepest of fewer locks is found by looking at all.
_MANY_LOCKS = 16


class Segment:
    """The leading blocks of a run that one pool holds, of the host pool with holes.

    Attributes:
        run: the run.
        above: the parent run's segment in the same pool; None for the root's.
        ranges: slots in block order; `length` of them in all.
        length: resident blocks, counted from the run's first.
        solid: those before the first hole: all of them in a device pool.
        locks: leases and fences by the absolute depth that they reach; only those that end in this run.
        locked: the deepest of them, 0 without any.
        lock_order: the depths of many locks, negated, as a heap; those that `locks` does not have are outdated.
        protected: leading blocks that eviction cannot have, because of locks here or below.
        locked_children: child segments with something protected.
        resident_children: child segments of the same pool.
        last_used: logical time of the last use of its last block or, once they are gone, of its children.
        hit_end: depth up to which its blocks were found by a request after the one that brought them here.
        priority: the highest of the requests that used its last block, as far as is known; None stands for 0.
        part_uses: later or more important uses of less than all of its blocks, the longest first.
        moved_down: its place in the lower segment of `slru`, if it was moved there; outdated by a later use.
        queued: the eviction policy has an entry for it.
        filed_priority: the priority that this entry is filed under.
        backed: of the host pool: leading blocks that need not be written to storage any more.
    """

    __slots__ = (
        "above",
        "backed",
        "filed_priority",
        "hit_end",
        "last_used",
        "length",
        "lock_order",
        "locked",
        "locked_children",
        "locks",
        "moved_down",
        "part_uses",
        "priority",
        "protected",
        "queued",
        "ranges",
        "resident_children",
        "run",
        "solid",
    )

    def __init__(self, run: Run, above: Segment | None, ranges: Ranges[int], length: int, last_used: int) -> None:
        """`ranges` are holes, or have none."""
        self.run = run
        self.above = above
        self.ranges = ranges
        self.length = length
        self.solid = 0 if ranges and ranges[0] < 0 else length
        self.locks: dict[int, int] | None = None
        self.lock_order: list[int] | None = None
        self.locked = 0
        self.protected = 0
        self.locked_children = 0
        self.resident_children = 0
        self.last_used = last_used
        self.hit_end = 0
        self.priority: int | None = None
        self.part_uses: tuple[PartUse, ...] = ()
        self.moved_down: tuple[int, int] | None = None
        self.queued = False
        self.filed_priority = 0
        self.backed = 0

    def slots(self, start: int, end: int) -> Ranges[int]:
        """The slots of blocks ``[start, end)``, as far as there are any: a new list, found from the nearer end."""
        ranges, place, at = self.ranges, len(self.ranges), self.length
        if 2 * start <= at:
            return section(ranges, start, end)
        while at > start:
            place -= 2
            at -= ranges[place + 1]
        return section(ranges[place:], start - at, end - at)

    def solid_from(self, offset: int) -> int:
        """How many blocks from `offset` on have slots, up to the first hole."""
        return self.solid - offset if offset <= self.solid else solid_length(self.ranges, offset)

    def gaps(self, wanted: int) -> list[tuple[int, int]]:
        """Blocks ``[first, end)`` among the first `wanted` that are holes, or behind its end; the last ones first."""
        gaps = [(self.length, wanted)] if self.length < wanted else []
        ranges, place, end = self.ranges, len(self.ranges), self.length
        while end > self.solid:
            place -= 2
            first = end - ranges[place + 1]
            if ranges[place] < 0 and first < wanted:
                gaps.append((first, min(end, wanted)))
            end = first
        return gaps

    def lock(self, depth: int) -> bool:
        """A lock more reaches a depth; whether none has been as deep."""
        locks = self.locks
        if locks is None:
            self.locks = {depth: 1}
        elif depth in locks:
            locks[depth] += 1
        else:
            locks[depth] = 1
            if self.lock_order is not None:
                heappush(self.lock_order, -depth)
                if len(self.lock_order) > 2 * len(locks) + _MANY_LOCKS:
                    self.lock_order = None  # most are outdated: made anew when somebody asks
        if depth <= self.locked:
            return False
        self.locked = depth
        return True

    def unlock(self, depth: int) -> bool:
        """A lock less reaches a depth, which one does; whether none is as deep any more."""
        locks = self.locks or {}
        if locks[depth] > 1:
            locks[depth] -= 1
            return False
        del locks[depth]
        if not locks:
            self.locks = self.lock_order = None
        if depth < self.locked:
            return False
        self.locked = self._deepest(locks)
        return True

    def _deepest(self, locks: dict[int, int]) -> int:
        order = self.lock_order
        if order is None:
            if len(locks) < _MANY_LOCKS:
                return max(locks, default=0)
            order = self.lock_order = [-depth for depth in locks]
            heapify(order)
        while -order[0] not in locks:
            heappop(order)
        return -order[0]

    def back(self, blocks: int) -> None:
        """So many leading blocks need not be written to storage any more."""
        self.backed = blocks

    def use(self, end: int, stamp: int, priority: int | None) -> bool:
        """Its blocks up to the depth `end` were used; says whether that is all of them."""
        if end < self.run.start + self.length:
            self._use_part(end, stamp, priority)
            return False
        self.last_used = max(self.last_used, stamp)
        if priority is not None and (self.priority is None or priority > self.priority):
            self.priority = priority
        if self.part_uses:
            self.part_uses = in_order(self.part_uses, self.last_used, self.priority)
        return True

    def _use_part(self, end: int, stamp: int, priority: int | None) -> None:
        uses, known = self.part_uses, self.priority
        if uses and uses[-1].end == end:  # the same request most often, which is over now
            stamp, known, uses = max(stamp, uses[-1].last_used), uses[-1].priority, uses[:-1]
        use = PartUse(end, stamp, higher(known, priority))
        is_only = not uses and stamp > self.last_used
        self.part_uses = (use,) if is_only else in_order((*uses, use), self.last_used, self.priority)

    def grow(self, count: int, *, is_solid: bool = False) -> None:
        """Blocks join its end; if `is_solid`, all have slots. Their priority is that of their own requests.

        It is not worth remembering that what was there has priority 0: then what joins it has no lower one. Uses that
        were later than that of the last block may not be, now that the last block is a new one.
        """
        uses = self.part_uses
        if self.priority:
            uses = (*uses, PartUse(self.run.start + self.length, self.last_used, self.priority))
            self.priority = None
        if uses:
            self.part_uses = in_order(uses, self.last_used, self.priority)
        if is_solid and self.solid == self.length:
            self.solid += count
        self.length += count

    def end_part_uses(self) -> None:
        """It was cut: uses that reach its end now are uses of all of it."""
        if not self.part_uses:
            return
        end, uses = self.run.start + self.length, self.part_uses
        self.part_uses = tuple(use for use in uses if use.end < end)
        for use in uses[: len(uses) - len(self.part_uses)]:
            self.use(end, use.last_used, use.priority)

    def split(self, head: Run, offset: int) -> Segment:
        """The new segment of a split run's first `offset` blocks; this one keeps the rest and its deeper locks."""
        ranges, self.ranges = cut(self.ranges, offset)
        front = Segment(head, self.above, ranges, offset, self.last_used)
        front.resident_children = 1
        front.solid = min(self.solid, offset)
        self.solid = self.solid - offset if self.solid > offset else solid_length(self.ranges, 0)
        front.hit_end, front.priority = min(self.hit_end, head.end), self.priority
        front.moved_down = self.moved_down
        if self.part_uses:
            front.part_uses = self.part_uses
            front.end_part_uses()
            self.part_uses = tuple(use for use in self.part_uses if use.end > head.end)
        front.backed, self.backed = min(self.backed, offset), max(self.backed - offset, 0)
        self.length -= offset
        if self.locks:
            shallow = {depth: count for depth, count in self.locks.items() if depth <= head.end}
            deep = {depth: count for depth, count in self.locks.items() if depth > head.end}
            front.locks, self.locks, self.lock_order = shallow or None, deep or None, None
            front.locked, self.locked = max(shallow, default=0), max(deep, default=0)
        protected = self.protected
        self.protected = max(protected - offset, 0)
        front.protected = min(protected, offset)
        front.locked_children = 1 if self.protected else 0
        return front

    @property
    def evictable_tail(self) -> int:
        """Blocks that can be trimmed right now: none while a continuation is resident below."""
        return 0 if self.resident_children else self.length - self.protected

    @property
    def last_part(self) -> int:
        """Blocks of that tail with one last use and priority; what lies before them was used later, or matters more."""
        tail = self.evictable_tail
        return min(tail, self.run.start + self.length - self.part_uses[0].end) if self.part_uses else tail

    @property
    def latest_use(self) -> int:
        """The last use of its first block."""
        return max(self.last_used, self.part_uses[-1].last_used) if self.part_uses else self.last_used


class Run:
    """Keys ``[start, end)`` of a chain. The root is the empty run at depth 0.

    Attributes:
        keys: 16 bytes per block.
        start: depth of the first block.
        parent: None for the root only; a run that has left the tree keeps its last one.
        children: continuations by their first key; None without any.
        segments: residency by pool index, that in the host pool last; None where the pool holds nothing of it.
        tenant: whose blocks they are; "" for nobody's that has a quota.
    """

    __slots__ = ("children", "keys", "parent", "segments", "start", "tenant")

    def __init__(self, keys: bytes | bytearray, start: int, parent: Run | None, pools: int) -> None:
        self.keys = bytearray(keys)
        self.start = start
        self.parent = parent
        self.children: dict[bytes, Run] | None = None
        self.segments: list[Segment | None] = [None] * pools
        self.tenant: str = "" if parent is None else parent.tenant

    def belong_to(self, tenant: str) -> None:
        """Its blocks are a tenant's from now on."""
        self.tenant = tenant

    @property
    def length(self) -> int:
        """Number of blocks."""
        return len(self.keys) // KEY_SIZE

    @property
    def end(self) -> int:
        """Depth past the last block."""
        return self.start + len(self.keys) // KEY_SIZE

    @property
    def first_key(self) -> bytes:
        """The key its parent files it under."""
        return bytes(self.keys[:KEY_SIZE])

    def common(self, offset: int, keys: bytes, index: int, limit: int) -> int:
        """How many blocks from `offset` on have the keys that follow `index` in `keys`; at most `limit`.

        Equal keys mean equal prefixes, so the last equal one is found by bisection.
        """
        own, base, other = self.keys, offset * KEY_SIZE, index * KEY_SIZE
        low, high = 0, limit
        probe = limit  # all of them, most of the time
        while low < high:
            at = (probe - 1) * KEY_SIZE
            if own[base + at : base + at + KEY_SIZE] == keys[other + at : other + at + KEY_SIZE]:
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low
