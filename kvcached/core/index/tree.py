"""The prefix index of one namespace: runs, resident in the device pools of all its replicas and in the host pool.

A device pool holds a prefix of every path, the host pool also what lies behind holes (`host_tree`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvcached.core.eviction.eviction_log import EvictionLog
from kvcached.core.eviction.lru import EvictionPolicy
from kvcached.core.eviction.reuse import TreeReuse
from kvcached.core.index.host_tree import HOST, HostTree
from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.index.run_tree import resident
from kvcached.core.messages import BlocksCached
from kvcached.core.slots.host_slots import HostPool
from kvcached.core.slots.ranges import (
    Ranges,
    join,
    no_ranges,
    pairs,
    slot_count,
    whole_tail,
    without_holes,
)
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState
from kvcached_client.types import MissReason, WritePolicy

#: An eviction frees at least this share of a pool: what goes together leaves ranges that stay together (decision 0008).
BATCH_DIVISOR = 64
#: Slots in these states may be freed. All others belong to copies, or to processes that may write them.
_AT_REST = (SlotState.FREE, SlotState.CACHED)


class Removed(NamedTuple):
    """What was taken out of an index on request."""

    device: int  #: copies in device pools
    host: int  #: copies in the host pool
    keys: bytes  #: of the blocks that no pool has any more


class Listener(Protocol):
    """Wants to know which paths may be worth a copy below the host pool, and which copies there are worth nothing."""

    def stored(self, tree: PrefixTree, run: Run, depth: int) -> None:
        """The host copies of a path are complete up to a depth."""

    def sighted(self, tree: PrefixTree, run: Run, depth: int) -> None:
        """A request has hit a path."""

    def cleared(self, namespace: bytes, generation: int) -> None:
        """Nothing of this generation of a namespace will be asked for again."""


class PrefixTree(HostTree):
    """The index over device pools and a host pool.

    Attributes:
        pools: the device pools; a pool's `index` is its place here.
        write_policy: when blocks are copied to the host pool.
        listener: told of host copies that have come, and of hits; None if nobody asks.
        reuse: told of blocks that requests ask for and engines store; None without a host pool.
    """

    def __init__(
        self,
        pools: list[DevicePool],
        policies: list[EvictionPolicy],
        host: HostPool | None = None,
        counters: Counter[str] | None = None,
        *,
        namespace: bytes = b"",
        eviction_log: EvictionLog | None = None,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        listener: Listener | None = None,
        reuse: TreeReuse | None = None,
    ) -> None:
        super().__init__(pools, policies, host, counters, namespace=namespace, eviction_log=eviction_log)
        self.pools = pools
        self.listener = listener
        self.reuse = reuse
        self.write_policy = write_policy

    def set_write_policy(self, policy: WritePolicy) -> None:
        """Copy blocks by another policy from now on."""
        self.write_policy = policy

    # --- whole paths, in all pools ------------------------------------------------------------------------------------

    def known(self, keys: bytes, blocks: int) -> tuple[Run, int]:
        """How far the index knows a chain, whoever holds its blocks: the run where that ends, and the depth."""
        run, depth = self.root, 0
        while depth < blocks and run.children:
            child = run.children.get(keys[depth * KEY_SIZE : (depth + 1) * KEY_SIZE])
            if child is None:
                break
            run = child
            depth += run.common(0, keys, depth, min(run.length, blocks - depth))
            if depth < run.end:
                break
        return run, depth

    def behind(self, keys: bytes, depth: int) -> Iterator[tuple[Run, int]]:
        """The runs with the block of a chain at `depth`, or behind it, each with the place of the first such block."""
        run, reach = self.known(keys, depth + 1)
        if reach <= depth:
            return
        yield run, depth - run.start
        waiting = list((run.children or {}).values())
        while waiting:
            each = waiting.pop()
            yield each, 0
            waiting.extend((each.children or {}).values())

    def remove(self, keys: bytes, depth: int, cause: str) -> Removed:
        """Take the block of a chain at `depth`, and all that is behind it, out of all pools, as far as they are free.

        That is what eviction could take; it could take nothing of a pool that is frozen.
        """
        run, reach = self.known(keys, depth + 1)
        if reach <= depth:
            return Removed(0, 0, b"")
        device = host = 0
        for pool in self.pools:
            if not pool.frozen and run.segments[pool.index] is not None:
                slots = self._take(run, depth - run.start, pool.index)
                pool.move(slots, SlotState.CACHED, SlotState.FREE, cause)
                device += slot_count(slots)
        if run.segments[HOST] is not None:
            slots = self._take(run, depth - run.start, HOST)
            self._host.move(slots, SlotState.CACHED, SlotState.FREE, cause)
            host = slot_count(slots)
            self._prune(run)
        gone = b"".join(self._gone)
        self._note_gone(MissReason.FORGOTTEN)
        return Removed(device, host, gone)

    # --- device pools -----------------------------------------------------------------------------------------------

    def evict(self, count: int, pool: int, cause: str, *, slack: int = 0) -> int:
        """Free `count` device slots, least valuable tails first; returns how many it were.

        The caller has checked `DevicePool.evictable`. Up to `slack` more are freed where that leaves ranges whole: each
        range that is cut in two stays so until both parts are free together. Blocks that have no other copy are lost.
        """
        owner, policy = self.pools[pool], self.policies[pool]
        freed = no_ranges()
        done = 0
        try:
            while done < count:
                segment = policy.pop()
                if segment is None:
                    raise RuntimeError(f"{owner.evictable} slots of pool {owner.name} are evictable, but no tail is")
                left, size = count - done, policy.most(segment)
                if size > left:
                    size = min(size, whole_tail(segment.ranges, left, most=left + slack))
                freed.extend(self.trim(segment, size, pool))
                done += size
                if self.host is not None:
                    self._count_dropped(segment, size)
        finally:  # what has left the tree is free, whatever a policy did
            owner.move(join([freed]), SlotState.CACHED, SlotState.FREE, cause)
            self._note_gone(MissReason.EVICTED)
        self.counters["evicted_blocks"] += done
        return done

    def _count_dropped(self, segment: Segment, size: int) -> None:
        """A segment lost its last `size` blocks: count those that are nowhere now, and drop what hung on them."""
        run = segment.run
        host = run.segments[HOST]
        held = max((each.length for each in run.segments[:HOST] if each is not None), default=0)
        first, end = max(segment.length, held), segment.length + size
        if host is None:
            self.counters["dropped_blocks"] += max(end - first, 0)
            return
        kept = slot_count(without_holes(host.slots(first, end)))
        self.counters["dropped_blocks"] += max(end - first, 0) - kept
        if host.solid < host.length:
            self._drop_lost(run)

    def drop(self, run: Run, depth: int, pool: int, reason: MissReason = MissReason.CORRUPT_OR_FAILED) -> Ranges[int]:
        """Take residency in a device pool from `depth` on, in this run and everything below it, out of the tree.

        Nothing there is locked. The slots are returned in the state they had: the caller says what becomes of them.
        """
        dropped = no_ranges()
        below = self._resident_below(run, pool)
        for child in reversed(below):
            segment = resident(child, pool)
            dropped.extend(self.trim(segment, segment.length, pool))
        segment = resident(run, pool)
        if segment.length > depth - run.start:
            dropped.extend(self.trim(segment, segment.length - (depth - run.start), pool))
        for each in (run, *below):
            host = each.segments[HOST]
            if host is not None and host.solid < host.length:
                self._drop_lost(each)
        self._note_gone(reason)
        return dropped

    def cached_blocks(self, run: Run, start: int, depth: int, pool: DevicePool) -> BlocksCached:
        """Blocks ``[start, depth)`` of the path to `run`, whose bytes are all there."""
        keys = self.path_keys(run, max(start - 1, 0), depth)
        slots = self.path_slots(run, start, depth, pool.index)
        first = KEY_SIZE if start else 0
        return BlocksCached(pool.name, start, keys[:first], keys[first:], slots)

    def announce_host(self, run: Run, pieces: list[Piece]) -> None:
        """The host copies of these blocks of the path to `run` are complete: routers are told."""
        announced = self._host.announced
        if announced is None:
            return
        for start, end in pieces:
            keys = self.path_keys(run, max(start - 1, 0), end)
            slots = self.path_slots(run, start, end, HOST)
            parent = keys[:KEY_SIZE] if start else b""
            announced.add(parent, keys[len(parent) :], slots)

    # --- slabs of the host pool -------------------------------------------------------------------------------------

    def evict_slabs(self, count: int, cause: str) -> int:
        """Evict what lies in up to `count` slabs of the host pool, which stand empty then; returns how many.

        Which slabs: those whose blocks, with all that continues them, are the fewest and were used longest ago. A slab
        with a slot that somebody holds, writes or may write is left alone. The index does not know which blocks lie in
        a slab, so this walks all runs: callers free some slabs at a time.
        """
        host = self._host
        runs = [run for run in self.runs() if run.segments[HOST] is not None]
        size = host.slots_per_slab
        losses, held = _losses(runs, size)
        movable = (
            slab
            for slab in sorted(host.slabs, key=lambda slab: (losses.get(slab, 0), slab))
            if slab not in held and sum(host.count_in(slab * size, size, state) for state in _AT_REST) == size
        )
        chosen = {slab for slab, _ in zip(movable, range(count), strict=False)}
        for run in runs:  # parents first: what hangs on a block goes with it
            segment = run.segments[HOST]
            if segment is not None:
                places = _first_positions(segment.ranges, size)
                cut = min((place for slab, place in places.items() if slab in chosen), default=None)
                if cut is not None:
                    self.cut_host(run, run.start + cut, cause)
        return len(chosen & host.empty)


def _losses(runs: list[Run], size: int) -> tuple[dict[int, int], set[int]]:
    """What would be lost with each slab, as a sum over blocks of how recently they were used; and which are held.

    With a block goes what continues it, wherever that lies; so it counts, and a block is as recent as the latest of it.
    """
    used: dict[Run, int] = {}
    for run in reversed(runs):
        segment = run.segments[HOST]
        if segment is not None and run.parent is not None:
            used[run] = latest = max(segment.last_used, used.get(run, 0))
            used[run.parent] = max(latest, segment.latest_use, used.get(run.parent, 0))
    oldest = min((used[run] for run in runs), default=0)
    below: dict[Run, int] = {}
    losses: dict[int, int] = {}
    held: set[int] = set()
    for run in reversed(runs):
        segment = run.segments[HOST]
        if segment is None or run.parent is None:
            continue
        deeper = below.pop(run, 0)
        below[run.parent] = below.get(run.parent, 0) + _loss(segment, 0, used[run], oldest) + deeper
        for slab, position in _first_positions(segment.ranges, size).items():
            losses[slab] = losses.get(slab, 0) + _loss(segment, position, used[run], oldest) + deeper
            if position < segment.protected:
                held.add(slab)
    return losses, held


def _loss(segment: Segment, position: int, used: int, oldest: int) -> int:
    """How recently the blocks of a segment from a position on were used, in all; the last of them at `used`."""
    loss = (segment.length - position) * (used - oldest + 1)
    for use in segment.part_uses:
        blocks = use.end - segment.run.start - position
        if blocks > 0 and use.last_used > used:
            loss += blocks * (use.last_used - used)
            used = use.last_used
    return loss


def _first_positions(ranges: Ranges[int], size: int) -> dict[int, int]:
    """The slabs that the slots of a segment lie in, each with the first of the segment's blocks in it."""
    positions: dict[int, int] = {}
    position = 0
    for first, length in pairs(ranges):
        if first >= 0:
            for slab in range(first // size, (first + length - 1) // size + 1):
                positions.setdefault(slab, position + max(slab * size - first, 0))
        position += length
    return positions
