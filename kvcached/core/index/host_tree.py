"""The host pool's part of an index: which blocks have a copy there, what goes when room is needed.

The host pool may have holes, wherever a copy was refused, failed or proved corrupt. What keeps it and the device pools
together: a block of the tree has a copy somewhere, unless a transfer is about to settle that. A block that loses its
last one takes everything below it along, for no match could reach it any more.
"""

from __future__ import annotations

from collections import Counter

from kvcached.core.eviction.by_tenant import ByTenant
from kvcached.core.eviction.eviction_log import EvictionLog
from kvcached.core.eviction.lru import EvictionPolicy
from kvcached.core.index.pieces import Piece, by_run
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.index.run_tree import RunTree, resident
from kvcached.core.slots.host_slots import HostPool, SlabAllocator
from kvcached.core.slots.ranges import (
    Ranges,
    append,
    chained,
    cut,
    hole,
    hole_tail,
    join,
    no_ranges,
    overlaid,
    pairs,
    pop_tail,
    slot_count,
    solid_length,
    solid_tail,
    without_holes,
)
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState
from kvcached_client.types import MissReason

#: Eviction may free this share of a pool more than it must where that leaves ranges of slots whole (decision 0008).
SLACK_DIVISOR = 256
#: The host pool's place in `RunTree.members` and in the segments of every run.
HOST = -1


class HostTree(RunTree):
    """Runs over device pools and a host pool, and what concerns the host pool.

    Attributes:
        host: the host pool, at index `HOST`; None without a host tier.
        counters: where evictions are counted.
        tenants: who has how much of the host pool; None without quotas of tenants.
    """

    def __init__(
        self,
        pools: list[DevicePool],
        policies: list[EvictionPolicy],
        host: HostPool | None,
        counters: Counter[str] | None,
        *,
        namespace: bytes,
        eviction_log: EvictionLog | None,
    ) -> None:
        self._host = host or HostPool(SlabAllocator(0), 0)
        super().__init__([*pools, self._host], policies, namespace=namespace, eviction_log=eviction_log)
        self.host = host
        self.counters: Counter[str] = Counter() if counters is None else counters
        policy = policies[HOST]
        self.tenants = policy if isinstance(policy, ByTenant) else None

    def rename(self, namespace: bytes) -> None:
        """Its namespace has another root: who asks for what was there is told why it left."""
        self.namespace = namespace
        self._host.rename(namespace)

    # --- reading ------------------------------------------------------------------------------------------------------

    def match_host(self, run: Run, depth: int, keys: bytes, limit: int) -> tuple[Run, int]:
        """Go on from a match of a device pool through blocks that the host pool holds or is being given.

        Returns:
            The run of the last block, and the depth behind it. Changes nothing.
        """
        if depth < run.end:
            depth += self._common_in_host(run, depth, keys, limit)
            if depth < run.end:
                return self.resolve(run, depth), depth
        position, end = depth * KEY_SIZE, min(limit * KEY_SIZE, len(keys))
        while position < end and run.children:
            child = run.children.get(keys[position : position + KEY_SIZE])
            if child is None:
                break
            segment = child.segments[HOST]
            if segment is None:
                break
            own = child.keys
            after = position + len(own)
            if (
                after <= end and segment.solid * KEY_SIZE == len(own) and own.endswith(keys[after - KEY_SIZE : after])
            ):  # all of the run
                run, position = child, after
                continue
            depth = position // KEY_SIZE + self._common_in_host(child, position // KEY_SIZE, keys, limit)
            run, position = self.resolve(child, depth), depth * KEY_SIZE
            if depth < child.end:
                break
        return run, position // KEY_SIZE

    def _common_in_host(self, run: Run, depth: int, keys: bytes, limit: int) -> int:
        """How many blocks of a run from `depth` on the host pool holds, and `keys` go on with; at most to `limit`."""
        segment, offset = run.segments[HOST], depth - run.start
        if segment is None:
            return 0
        most = min(limit, len(keys) // KEY_SIZE) - depth
        return run.common(offset, keys, depth, min(segment.solid_from(offset), most))

    def missing_in_host(self, run: Run, depth: int) -> list[Piece]:
        """Blocks of the path ``[0, depth)`` that the host pool does not hold.

        Ancestors come first, so that copies in this order leave no hole.
        """
        found: list[Piece] = []
        while run.parent is not None:
            segment = run.segments[HOST]
            wanted = depth - run.start
            if segment is None:
                found.append(Piece(run.start, depth))
            elif segment.solid < wanted:
                found.extend(Piece(run.start + first, run.start + end) for first, end in segment.gaps(wanted))
            run, depth = run.parent, run.start
        merged: list[Piece] = []
        for piece in reversed(found):
            if merged and merged[-1].end == piece.start:
                merged[-1] = Piece(merged[-1].start, piece.end)
            else:
                merged.append(piece)
        return merged

    def host_end(self, run: Run, depth: int) -> tuple[Run, int]:
        """The end of what the host pool covers of the path ``[0, depth)``, and its run; depth 0 if nothing."""
        run = self.resolve(run, depth)
        while run.parent is not None:
            segment = run.segments[HOST]
            if segment is not None and segment.length:
                return run, min(depth, run.start + segment.length)
            run, depth = run.parent, run.start
        return run, 0

    def stored_tail(self, segment: Segment) -> int:
        """How many of a segment's evictable blocks, from its end back, the host pool has.

        None while another pool's store still writes some of them: it may fail.
        """
        host = segment.run.segments[HOST]
        if host is None or host.length < segment.length:
            return 0
        count = segment.evictable_tail
        if host.solid < segment.length:
            count = min(solid_tail(host.slots(0, segment.length)), count)
        if not self._host.counts[SlotState.FILLING]:
            return count
        slots = host.slots(segment.length - count, segment.length)
        return count if all(self._host.holds(*each, SlotState.CACHED) for each in pairs(slots)) else 0

    def touch_host(self, run: Run, depth: int, *, is_hit: bool = False, priority: int | None = None) -> None:
        """The path was used now: as `touch`, for the deepest part of it that the host pool covers."""
        while run.parent is not None and (depth <= run.start or run.segments[HOST] is None):
            run = run.parent
        self.touch(run, depth, HOST, is_hit=is_hit, priority=priority)

    def unlock_host(self, run: Run, depth: int, reason: MissReason = MissReason.CORRUPT_OR_FAILED) -> None:
        """Take back a lock of the host's part of the path ``[0, depth)``; holes at its end go, for `reason`."""
        run = self.resolve(run, depth)
        self.unlock(run, depth, HOST)
        self._prune(run)
        self._note_gone(reason)

    # --- growing and shrinking ----------------------------------------------------------------------------------------

    def extend_host(self, run: Run, depth: int, keys: bytes) -> Run:
        """Blocks from `depth` on have `keys`: the host pool covers them, by holes where it holds nothing of them.

        ``(run, depth)`` is locked in the host pool, which is the tree's only one. Returns the run where the chain ends,
        which the caller locks at once.
        """
        count = len(keys) // KEY_SIZE
        return self.commit(run, depth, keys, hole(count), HOST).run if count else run

    def cover_host(self, run: Run, depth: int) -> None:
        """The host pool covers the path ``[0, depth)``, by holes where it holds nothing of it; the caller locks it."""
        if depth:
            owner = self.resolve(run, depth)
            self._cover(owner, depth - owner.start)

    def put_host(self, run: Run, pieces: list[Piece], slots: Ranges[int]) -> None:
        """Blocks of the path to `run`, which are holes now, lie in `slots`. The caller locks them at once."""
        self._place(run, pieces, slots)

    def punch_host(self, run: Run, pieces: list[Piece]) -> None:
        """The host copies of these blocks of the path are no good: holes again. Their slots are the caller's to free.

        What is lost by that leaves the tree, as far as no transfer holds it.
        """
        self._place(run, pieces, hole(sum(end - start for start, end in pieces)))
        self._prune(self.resolve(run, pieces[-1].end))
        self.drop_lost(run)

    def reserve_host(
        self, count: int, cause: str, *, tenant: str, keep: tuple[Run, int] | None = None, coming: int = 0
    ) -> Ranges[int]:
        """Up to `count` host slots, FILLING, for which slabs are taken and least valuable tails evicted.

        They are for a tenant: it gets no more than its cap, `coming` blocks included that the index does not have yet,
        and others keep their floors. What the host pool has of the path `keep`, which these slots will continue, is not
        evicted for them.
        """
        host, tenants = self._host, self.tenants
        if tenants is not None and tenant and (over := count + coming - tenants.room(tenant)) > 0:
            self._evict_for(tenant, over, f"{cause}: cap of {tenant!r}", keep, only=True)
            count = max(min(count, tenants.room(tenant) - coming), 0)
        while host.free < count and host.grow():
            pass
        if host.free < count:
            self._evict_for(tenant, count - host.free, cause, keep)
        return host.take(min(count, host.free), SlotState.FILLING, cause)

    def _evict_for(
        self, tenant: str, count: int, cause: str, keep: tuple[Run, int] | None, *, only: bool = False
    ) -> None:
        """Evict host slots for a tenant, of any or `only` of its own; what continues the path `keep` stays."""
        run, depth = self.host_end(*keep) if keep else (self.root, 0)
        self.lock(run, depth, HOST)
        if self.tenants is not None:
            self.tenants.make_room_for(tenant, only=only)
        try:
            self._evict_host(count, cause)
        finally:
            if self.tenants is not None:
                self.tenants.make_room_for(None)
            self.unlock_host(run, depth)

    def belong(self, run: Run, tenant: str) -> None:
        """A tenant uses the path to `run`: the path's blocks, and all that continue them, are its own if nobody's."""
        if self.tenants is not None and tenant:
            top = self.resolve(run, 1)
            if top.parent is not None and not top.tenant and self.tenants.is_bounded(tenant):
                self.tenants.take(top, tenant, HOST)

    def trim(self, segment: Segment, count: int, pool: int) -> Ranges[int]:
        """As `RunTree.trim`; a tenant has less."""
        freed = super().trim(segment, count, pool)
        if self.tenants is not None and pool == HOST and segment.run.tenant:
            self.tenants.count(segment.run.tenant, -slot_count(without_holes(freed)))
        return freed

    def shed_host(self, cause: str, count: int | None = None, reason: MissReason = MissReason.EVICTED) -> None:
        """Evict `count` host slots, least valuable tails first, or all that nothing holds."""
        self._evict_host(self._host.slots if count is None else count, cause, reason)

    def drop_lost(self, run: Run, reason: MissReason = MissReason.CORRUPT_OR_FAILED) -> None:
        """Drop what hangs on the first block of the path to `run` that has no copy, as far as no transfer holds it."""
        self._drop_lost(run)
        self._note_gone(reason)

    def _drop_lost(self, run: Run) -> None:
        lost: tuple[Run, int] | None = None
        while run.parent is not None:
            segment = run.segments[HOST]
            if segment is not None and segment.solid < segment.length:
                held = max((each.length for each in run.segments[:HOST] if each is not None), default=0)
                offset = held + segment.solid_from(held)
                if offset < segment.length:
                    lost = run, offset
            run = run.parent
        if lost is not None:
            self._drop_host(*lost)

    def cut_host(self, run: Run, depth: int, cause: str) -> None:
        """Evict what the host pool has of a run from `depth` on, and of everything below it. None of it is locked."""
        slots = self._take(run, depth - run.start, HOST)
        self.counters["host_evicted_blocks"] += slot_count(slots)
        self._host.move(slots, SlotState.CACHED, SlotState.FREE, cause)
        self._prune(run)
        self._note_gone(MissReason.EVICTED)

    def _drop_host(self, run: Run, offset: int) -> None:
        slots = self._take(run, offset, HOST)
        self.counters["host_dropped_blocks"] += slot_count(slots)
        self._host.move(slots, SlotState.CACHED, SlotState.FREE, f"path lost at block {run.start + offset}")
        self._prune(run)

    def _take(self, run: Run, offset: int, pool: int) -> Ranges[int]:
        """Take what a pool has of a run from `offset` on, and below, out of the index, as far as it may go."""
        dropped: list[Ranges[int]] = []
        for each in (*reversed(self._resident_below(run, pool)), run):
            segment = resident(each, pool)
            keep = max(segment.protected, offset if each is run else 0)
            if not segment.resident_children and keep < segment.length:
                dropped.append(without_holes(self.trim(segment, segment.length - keep, pool)))
        return join(dropped)

    def _evict_host(self, wanted: int, cause: str, reason: MissReason = MissReason.EVICTED) -> None:
        """Free so many host slots, least valuable tails first, or as many as there are; some more for whole ranges."""
        policy, slack = self.policies[HOST], self._host.allocated // SLACK_DIVISOR
        freed: list[Ranges[int]] = []
        try:
            while wanted > 0 and (segment := policy.pop()) is not None:
                freed.append(without_holes(self.trim_tail(segment, policy.most(segment), wanted, HOST, slack=slack)))
                wanted -= slot_count(freed[-1])
                self._prune(segment.run)
        finally:  # what has left the tree is free, whatever a policy did
            slots = join(freed)
            self._host.move(slots, SlotState.CACHED, SlotState.FREE, cause)
            self._note_gone(reason)
        self.counters["host_evicted_blocks"] += slot_count(slots)

    def _prune(self, run: Run) -> None:
        """Take holes off the end of what the host pool holds of a run, and of those above that this lays bare."""
        at: Run | None = run
        while at is not None and at.parent is not None:
            segment = at.segments[HOST]
            if segment is not None:
                if segment.resident_children:
                    return
                if segment.solid < segment.length:
                    holes = min(hole_tail(segment.ranges), segment.length - segment.protected)
                    if holes:
                        self.trim(segment, holes, HOST)
                if segment.length:
                    return
            at = at.parent

    def _place(self, run: Run, pieces: list[Piece], slots: Ranges[int]) -> None:
        """Write slots, or holes, over blocks of a path: over all that lie in one run at once."""
        for owner, own in by_run(run, pieces):
            mine, slots = cut(slots, sum(end - start for start, end in own))
            self._write(owner, own, mine)

    def _write(self, run: Run, pieces: list[Piece], slots: Ranges[int]) -> None:
        """Write slots, or holes, over blocks of a run, counted from its first."""
        first, last = pieces[0].start, pieces[-1].end
        segment = self._cover(run, first)
        before, behind = cut(pop_tail(segment.ranges, segment.length - first), last - first)
        if len(pieces) > 1:
            slots = overlaid(before, pieces, slots)
        if self.tenants is not None and run.tenant:
            change = slot_count(without_holes(slots)) - slot_count(without_holes(before))
            self.tenants.count(run.tenant, change)
        rest = chained(slots, behind)
        append(segment.ranges, rest)
        if last > segment.length:
            segment.grow(last - segment.length)
        if segment.solid >= first:  # no hole lies before them
            segment.solid = first + solid_length(rest, 0)
        segment.backed = min(segment.backed, first)

    def _cover(self, run: Run, length: int) -> Segment:
        """The host segment of a run, made or lengthened by holes until it has `length` blocks, those above included."""
        path = [run]
        while path[-1].parent is not None and path[-1].segments[HOST] is None:
            path.append(path[-1].parent)
        host = self._host
        for each in reversed(path):
            segment = each.segments[HOST]
            if segment is None:
                above = resident(each.parent, HOST) if each.parent is not None else None
                if above is None:
                    raise RuntimeError("the root has its host segment from the start")
                above.resident_children += 1
                host.clock += 1
                segment = each.segments[HOST] = Segment(each, above, no_ranges(), 0, host.clock)
            wanted = length if each is run else each.length
            if segment.length < wanted:
                append(segment.ranges, hole(wanted - segment.length))
                segment.grow(wanted - segment.length)
        return resident(run, HOST)

    def _resident_below(self, run: Run, pool: int) -> list[Run]:
        """Runs below that the pool holds something of, parents before children."""
        order: list[Run] = []
        waiting = [run]
        while waiting:
            for child in (waiting.pop().children or {}).values():
                if child.segments[pool] is not None:
                    order.append(child)
                    waiting.append(child)
        return order
