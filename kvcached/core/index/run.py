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

from kvcached.core.index.part_uses import PartUse, higher, in_order
from kvcached.core.slots.ranges import Ranges, cut

KEY_SIZE = 16


class Segment:
    """The leading blocks of a run that one pool holds, of the host pool with holes.

    Attributes:
        run: the run.
        above: the parent run's segment in the same pool; None for the root's.
        ranges: slots in block order; `length` of them in all.
        length: resident blocks, counted from the run's first.
        locks: leases and fences by the absolute depth that they reach; only those that end in this run.
        locked: the deepest of them, 0 without any.
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
        holed: of the host pool: its ranges may have holes.
        backed: of the host pool: leading blocks that need not be written to storage any more.
    """

    __slots__ = (
        "above",
        "backed",
        "filed_priority",
        "hit_end",
        "holed",
        "last_used",
        "length",
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
    )

    def __init__(self, run: Run, above: Segment | None, ranges: Ranges[int], length: int, last_used: int) -> None:
        self.run = run
        self.above = above
        self.ranges = ranges
        self.length = length
        self.locks: dict[int, int] | None = None
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
        self.holed = False
        self.backed = 0

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

    def grow(self, count: int, *, is_holed: bool = False) -> None:
        """Blocks join its end, some of them holes if `is_holed`. Their priority is that of their own requests.

        It is not worth remembering that what was there has priority 0: then what joins it has no lower one. Uses that
        were later than that of the last block may not be, now that the last block is a new one.
        """
        uses = self.part_uses
        if self.priority:
            uses = (*uses, PartUse(self.run.start + self.length, self.last_used, self.priority))
            self.priority = None
        if uses:
            self.part_uses = in_order(uses, self.last_used, self.priority)
        self.length += count
        self.holed = self.holed or is_holed

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
        front.holed = self.holed
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
            front.locks, self.locks = shallow or None, deep or None
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
