"""Runs and their residency in pools: match, locks, growth, splits, and the trimming of tails.

Only two token chains that diverge split a run. Match reads; locks and eviction change lengths and counts.

Who may point at what: a lease or fence names ``(run, depth)``. When a run is split, its deep part keeps the object and
the shallow part becomes a new parent, so a pointer with a depth above the cut finds its run by walking up
(`RunTree.resolve`), and no split has to know who points at it. Locks move with their depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcached.core.eviction.eviction_log import EvictionLog
from kvcached.core.eviction.lru import EvictionPolicy
from kvcached.core.index.part_uses import PartUse
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.slots.ranges import Ranges, append, cut, no_ranges, places_of, pop_tail, whole_tail
from kvcached.core.slots.slots import SlotPool
from kvcached_client.types import MissReason


class Adoption(NamedTuple):
    """What a commit did. Residency is a prefix, so what was there already comes before what is new."""

    run: Run  #: where the chain ends now
    duplicates: int  #: that many of the first blocks were there already; their slots stay the lease's scratch


class RunTree:
    """Runs and their residency in `members`. Methods take a pool's index there.

    Attributes:
        members: the pools; the same key has at most one slot in each.
        policies: order of eviction, one for each member.
        namespace: root of its keys.
        root: the empty run.
        run_count: runs below it.
    """

    def __init__(
        self,
        members: list[SlotPool],
        policies: list[EvictionPolicy],
        *,
        namespace: bytes = b"",
        eviction_log: EvictionLog | None = None,
    ) -> None:
        self.members = members
        self.policies = policies
        self.namespace = namespace
        self._eviction_log = EvictionLog() if eviction_log is None else eviction_log
        self._gone: list[bytearray] = []  #: keys that left, until it is said why
        self.root = Run(b"", 0, None, len(self.members))
        self.root.segments = [Segment(self.root, None, no_ranges(), 0, 0) for _ in self.members]
        self.run_count = 0

    # --- reading ----------------------------------------------------------------------------------------------------

    def match(self, keys: bytes, limit: int, pool: int) -> tuple[Run, int]:
        """The deepest resident run on the path of `keys`, and the depth reached in it (at most `limit` blocks).

        Changes nothing. A run that is wholly there costs one look-up and the comparison of its last key.
        """
        run = self.root
        position, end = 0, min(limit * KEY_SIZE, len(keys))
        while position < end and run.children:
            child = run.children.get(keys[position : position + KEY_SIZE])
            if child is None:
                break
            segment = child.segments[pool]
            if segment is None:
                break
            own = child.keys
            after = position + len(own)
            if after <= end and segment.length * KEY_SIZE == len(own) and own.endswith(keys[after - KEY_SIZE : after]):
                run, position = child, after
                continue
            index = position // KEY_SIZE
            return child, child.start + child.common(0, keys, index, min(segment.length, end // KEY_SIZE - index))
        return run, position // KEY_SIZE

    def follow(self, run: Run, depth: int, keys: bytes, pool: int) -> tuple[Run, int]:
        """How far a pool holds `keys`, which go on from ``(run, depth)``: the run where that ends, and the depth."""
        index, count = 0, len(keys) // KEY_SIZE
        while index < count:
            offset = depth + index - run.start
            if offset == run.length:
                child = run.children.get(keys[index * KEY_SIZE : (index + 1) * KEY_SIZE]) if run.children else None
                if child is None or child.segments[pool] is None:
                    break
                run, offset = child, 0
            same = run.common(offset, keys, index, min(resident(run, pool).length - offset, count - index))
            index += same
            if depth + index < run.end:
                break
        return self.resolve(run, depth + index), depth + index

    def resolve(self, run: Run, depth: int) -> Run:
        """The run that holds block ``depth - 1`` on the way from `run` to the root (the root for depth 0)."""
        while run.parent is not None and depth <= run.start:
            run = run.parent
        return run

    def passes(self, run: Run, depth: int, other: Run, at: int) -> bool:
        """Whether the path ``[0, depth)`` to `run` has the block at depth `at` of the path to `other`."""
        return depth > at and self.resolve(run, at + 1) is self.resolve(other, at + 1)

    def path_ranges(self, run: Run, depth: int, pool: int) -> bytes:
        """The slots of blocks ``[0, depth)``, packed, in block order. All of them are resident."""
        segment = resident(run, pool)
        reach, above = depth - run.start, segment.above
        parts = [segment.ranges if reach >= segment.length else cut(segment.ranges, reach)[0]]
        while above is not None:  # what has a segment below it holds all of its run
            parts.append(above.ranges)
            above = above.above
        parts.reverse()
        return b"".join(parts)

    def path_slots(self, run: Run, start: int, depth: int, pool: int) -> Ranges[int]:
        """The slots of blocks ``[start, depth)`` on the path to `run`, in block order, neighbours merged."""
        run = self.resolve(run, depth)
        parts: list[Ranges[int]] = []
        while run.parent is not None and depth > start:
            parts.append(resident(run, pool).slots(start - run.start, depth - run.start))
            run, depth = run.parent, run.start
        slots = no_ranges()
        for part in reversed(parts):
            append(slots, part)
        return slots

    def path_keys(self, run: Run, start: int, depth: int) -> bytes:
        """The keys of blocks ``[start, depth)`` on the path to `run`."""
        run = self.resolve(run, depth)
        parts: list[bytes] = []
        while run.parent is not None and depth > start:
            parts.append(bytes(run.keys[max(start - run.start, 0) * KEY_SIZE : (depth - run.start) * KEY_SIZE]))
            run, depth = run.parent, run.start
        return b"".join(reversed(parts))

    def find(self, slots: list[int], pool: int) -> dict[int, tuple[Run, int]]:
        """Run and depth of the blocks in slots of a pool, which are sorted. Looks at every run: for what is rare."""
        found: dict[int, tuple[Run, int]] = {}
        for run in self.runs():
            segment = run.segments[pool]
            if segment is not None:
                found.update((slot, (run, run.start + place)) for place, slot in places_of(segment.ranges, slots))
        return found

    def runs(self) -> Iterator[Run]:
        """Every run below the root, parents before children."""
        stack = [self.root]
        while stack:
            run = stack.pop()
            if run.parent is not None:
                yield run
            if run.children:
                stack.extend(run.children.values())

    # --- locks ------------------------------------------------------------------------------------------------------

    def lock(self, run: Run, depth: int, pool: int) -> None:
        """Keep blocks ``[0, depth)`` of the path resident. Depth 0 locks nothing."""
        if not depth:
            return
        segment = resident(run, pool)
        if segment.lock(depth):
            self._reprotect(segment, pool)

    def unlock(self, run: Run, depth: int, pool: int) -> None:
        """Take one lock back.

        Raises:
            RuntimeError: there is none at this depth: a bug of ours.
        """
        if not depth:
            return
        segment = resident(run, pool)
        if segment.locks is None or depth not in segment.locks:
            raise RuntimeError(f"no lock at depth {depth} of run [{run.start}, {run.end}) in pool {pool}")
        if segment.unlock(depth):
            self._reprotect(segment, pool)

    def touch(self, run: Run, depth: int, pool: int, *, is_hit: bool = False, priority: int | None = None) -> None:
        """The path ``[0, depth)`` to `run` was used now. The runs above learn of it when they become tails themselves.

        `is_hit` says that a request has found it; `priority` is the request's.
        """
        owner, segment = self.members[pool], resident(run, pool)
        owner.clock += 1
        if is_hit and depth > segment.hit_end:
            segment.hit_end = min(depth, run.start + segment.length)
        if segment.use(depth, owner.clock, priority) and segment.queued:
            self.policies[pool].touch(segment)

    def share_priority(self, run: Run, source: int, target: int) -> None:
        """A run is in two pools: in `target`, where it is locked or about to be, it gets no less priority."""
        known, segment = resident(run, source), resident(run, target)
        for use in (PartUse(run.start + known.length, 0, known.priority), *known.part_uses):
            segment.use(use.end, segment.last_used, use.priority)

    def _reprotect(self, segment: Segment, pool: int) -> None:
        """Carry a change of locks up, as far as it changes anything."""
        above, changed = segment.above, 0
        while above is not None:
            before = segment.protected
            if segment.locked_children:
                after = segment.length
            else:
                after = max(segment.locked - segment.run.start, 0) if segment.locked else 0
            if after == before:
                break
            segment.protected = after
            changed += after - before
            if segment.queued or (after < before and not segment.resident_children):
                self.policies[pool].add(segment)
            if after and before:
                break
            segment, above = above, above.above
            segment.locked_children += 1 if after else -1
        self.members[pool].protected += changed

    # --- growing ----------------------------------------------------------------------------------------------------

    def commit(self, run: Run, depth: int, keys: bytes, slots: Ranges[int], pool: int) -> Adoption:
        """Blocks from `depth` on have `keys` and lie in `slots`, one each: take in what this pool does not hold.

        ``(run, depth)`` is resident and locked by the caller. The slots' states are the caller's to move.
        """
        count, index, duplicates = len(keys) // KEY_SIZE, 0, 0
        offset = depth - run.start
        while index < count:
            length = len(run.keys) // KEY_SIZE
            if offset == length:
                child = run.children.get(keys[index * KEY_SIZE : (index + 1) * KEY_SIZE]) if run.children else None
                if child is None:
                    return Adoption(self._extend(run, keys[index * KEY_SIZE :], slots, pool), duplicates)
                run, offset, length = child, 0, len(child.keys) // KEY_SIZE
            same = run.common(offset, keys, index, min(length - offset, count - index))
            segment = run.segments[pool]
            known = min(max((segment.length if segment else 0) - offset, 0), same)
            duplicates += known
            if same:
                fresh, slots = cut(cut(slots, known)[1], same - known)
                if fresh:
                    self._fill(run, fresh, same - known, pool)
            index, offset = index + same, offset + same
            if index < count and offset < length:
                run = self._split(run, offset)
        return Adoption(run, duplicates)

    def _extend(self, run: Run, keys: bytes, slots: Ranges[int], pool: int) -> Run:
        """Put new blocks behind a run's last: into the run where nothing else follows it, else into a new one."""
        if run.parent is not None and not run.children:
            run.keys += keys
            self._fill(run, slots, len(keys) // KEY_SIZE, pool)
            return run
        child = Run(keys, run.end, run, len(self.members))
        if run.children is None:
            run.children = {}
        run.children[child.first_key] = child
        self.run_count += 1
        self._fill(child, slots, len(keys) // KEY_SIZE, pool)
        return child

    def _fill(self, run: Run, slots: Ranges[int], count: int, pool: int) -> None:
        """The next `count` blocks of the run become resident. The caller locks them: until then nobody may evict."""
        owner = self.members[pool]
        owner.clock += 1
        segment = run.segments[pool]
        if segment is not None:
            append(segment.ranges, slots)
            segment.last_used = owner.clock
            segment.grow(count, is_solid=slots[0] >= 0)
            return
        above = run.parent.segments[pool] if run.parent is not None else None
        if above is None:
            raise RuntimeError(f"run [{run.start}, {run.end}) cannot be resident where its parent is not")
        above.resident_children += 1
        run.segments[pool] = Segment(run, above, slots[:], count, owner.clock)

    def _split(self, run: Run, offset: int) -> Run:
        """Cut a run where chains diverge; return the new run of its first `offset` blocks.

        `run` itself keeps the rest, and with it every lock deeper than the cut.
        """
        parent = run.parent
        if parent is None or parent.children is None:
            raise RuntimeError("the root has no blocks to split")
        head = Run(run.keys[: offset * KEY_SIZE], run.start, parent, len(self.members))
        head.belong_to(run.tenant)
        parent.children[head.first_key] = head
        del run.keys[: offset * KEY_SIZE]
        run.start += offset
        run.parent = head
        head.children = {run.first_key: run}
        self.run_count += 1
        for pool, segment in enumerate(run.segments):
            if segment is None:
                continue
            if segment.length <= offset:
                segment.run = head
                head.segments[pool], run.segments[pool] = segment, None
            else:
                segment.above = head.segments[pool] = segment.split(head, offset)
                if segment.queued:
                    self.policies[pool].add(segment)
        return head

    # --- shrinking --------------------------------------------------------------------------------------------------

    def trim_tail(self, segment: Segment, most: int, wanted: int, pool: int, *, slack: int) -> Ranges[int]:
        """Take up to `wanted` of a victim's last `most` blocks out of the pool."""
        count = most
        if count > wanted:
            count = min(count, whole_tail(segment.ranges, wanted, most=wanted + slack))
        return self.trim(segment, count, pool)

    def trim(self, segment: Segment, count: int, pool: int) -> Ranges[int]:
        """Take the last `count` blocks of a childless segment out of the pool; forget keys that nobody holds now.

        What is left of it is filed again.
        """
        run, above = segment.run, segment.above
        if above is None or segment.resident_children or count > segment.length - segment.protected:
            raise RuntimeError(f"{count} blocks of run [{run.start}, {run.end}) are not a free tail")
        if count < segment.length:
            freed = pop_tail(segment.ranges, count)
            segment.length -= count
            segment.solid = min(segment.solid, segment.length)
            segment.backed = min(segment.backed, segment.length)
            segment.end_part_uses()
            if segment.length > segment.protected or segment.queued:
                self.policies[pool].add(segment)
        else:
            freed = segment.ranges
            segment.length = 0
            segment.end_part_uses()
            run.segments[pool] = None
            if segment.queued:
                self.policies[pool].remove(segment)
            above.resident_children -= 1
            above.use(run.start, segment.last_used, segment.priority)
            if segment.hit_end > run.start:
                above.hit_end = run.start
            if not above.resident_children and above.length > above.protected:
                self.policies[pool].add(above)
        self._forget_keys(run)
        return freed

    def _forget_keys(self, run: Run) -> None:
        """Cut a run to what some pool holds of it; without any it leaves the tree."""
        if any(run.segments):
            longest = max(segment.length for segment in run.segments if segment is not None)
            if longest * KEY_SIZE < len(run.keys):
                self._gone.append(run.keys[longest * KEY_SIZE :])
                del run.keys[longest * KEY_SIZE :]
            return
        siblings = run.parent.children if run.parent is not None else None
        if siblings is None or run.children:
            raise RuntimeError(f"run [{run.start}, {run.end}) leaves the tree with children below it")
        del siblings[bytes(run.keys[:KEY_SIZE])]
        if not siblings and run.parent is not None:
            run.parent.children = None
        self.run_count -= 1  # `run.parent` stays: a lease of a shallower depth may still walk up from here
        self._gone.append(run.keys)

    def _note_gone(self, reason: MissReason) -> None:
        """Say why what has left the tree since the last time has left."""
        if self._gone:
            self._eviction_log.add(self.namespace, reason, self._gone)
            self._gone = []


def resident(run: Run, pool: int) -> Segment:
    """The segment of a run that the pool holds something of.

    Raises:
        RuntimeError: it holds nothing: a bug of ours.
    """
    segment = run.segments[pool]
    if segment is None:
        raise RuntimeError(f"run [{run.start}, {run.end}) is not resident in pool {pool}")
    return segment
