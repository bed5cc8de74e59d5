"""Copies from device pools to the host pool: of what was committed or hit, and of what is about to leave a device.

Which of these, the namespace's write policy says. Under write-back nothing leaves a device before its copy has ended;
whoever needs its slots waits for that, unless no copy can be made.

A store is planned when it can start: blocks that are still there and still lack a host copy. From then on they are in
the host index, so a load may count on it and depend on it. Where it fails they are taken out again, and copied again
alone; see `kvcached.core.slots.doubts`. What is given up, and all behind it, stays on the device alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached.core.index.host_tree import HOST, SLACK_DIVISOR
from kvcached.core.index.pieces import Piece, first_blocks
from kvcached.core.index.run import Run, Segment
from kvcached.core.index.tree import BATCH_DIVISOR, PrefixTree
from kvcached.core.lease import FenceHold
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import TransferKind
from kvcached.core.slots.ranges import Ranges, join, no_ranges, slot_count
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import WorkerTransfer
from kvcached_client.types import WritePolicy

#: Stores under way in one pool: one to copy, and the next ones to be on the way to the workers.
STORES_MAX = 8
#: A load that arrives waits for the store under way, so stores are short.
STORE_BLOCKS_MAX = 256
#: Paths that wait for one fence to be stored. Beyond that they are left to demotion.
UNSTORED_PER_FENCE_MAX = 256
#: Tails without a host copy that one demotion looks behind.
UNSTORED_TAILS_PASSED_MAX = 16
#: Under these policies a tail is stored, if it has not been, before it leaves a device ahead of need.
_STORE_TAILS = frozenset({WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK})


class Stores:
    """Plans stores, and settles what follows from their end."""

    def __init__(self, table: TransferTable) -> None:
        self._table = table

    def settle(self, tree: PrefixTree, pool: DevicePool) -> None:
        """Start the stores of what was committed or hit, and make room."""
        if pool.copies:
            self._store_unstored(tree, pool)
            self.demote(tree, pool)

    def _store_unstored(self, tree: PrefixTree, pool: DevicePool) -> None:
        """Start stores of what was committed or hit, as many as may be under way."""
        if tree.write_policy is WritePolicy.NEVER:
            pool.unstored.clear()  # of before the policy was set, or a failed copy that was to be made again
            pool.doubtful.clear()
        room = self._room(pool) if pool.unstored else 0
        while room > 0 and pool.unstored:
            run, depth = pool.unstored.popleft()
            room -= self.store(tree, pool, run, depth)
            if pool.doubts:
                room = self._room(pool)
        while pool.doubtful and not self._table.of_pool(pool, TransferKind.STORE):
            run, depth = pool.doubtful.popleft()
            self.store(tree, pool, run, depth)

    def _room(self, pool: DevicePool) -> int:
        """How many stores may be started: none beside one whose failure is to tell of its own blocks alone."""
        under_way = self._table.of_pool(pool, TransferKind.STORE)
        return 0 if any(pool.doubts.has_any(store.device) for store in under_way) else STORES_MAX - len(under_way)

    def note_hit(self, session: ManagedSession, run: Run, depth: int) -> None:
        """A second request has the path ``[0, depth)``: reason enough to copy it where the policy waits for one."""
        tree = session.tree
        is_wanted = session.writes_through and tree.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        if is_wanted and tree.missing_in_host(run, depth):
            self._table.counters["stores_forgotten"] += session.pool.note_unstored(run, depth)

    def store(self, tree: PrefixTree, pool: DevicePool, run: Run, depth: int, *, whole: bool = False) -> bool:
        """Start to copy what the host pool lacks of the path ``[0, depth)``; False if nothing was started.

        `whole`: nothing, if the host pool has no room for all of it. A tail of which the beginning is stored cannot
        leave the device, and two pools that store the beginnings of theirs would evict each other's for ever.
        """
        run, depth = self._settled_end(tree, pool, run, depth)
        hold = self._unsignalled(pool, tree, run, depth)
        if hold is not None:
            if len(hold.unstored) < UNSTORED_PER_FENCE_MAX or run in hold.unstored:
                hold.unstored[run] = max(depth, hold.unstored.get(run, 0))
            else:
                self._table.counters["stores_forgotten"] += 1
            return False
        missing = tree.missing_in_host(run, depth)
        pieces = first_blocks(missing, STORE_BLOCKS_MAX)
        if pool.doubts:
            pieces, is_to_wait = self._undoubted(tree, pool, run, pieces, whole=whole)
            if is_to_wait and not whole:
                pool.doubtful.append((run, depth))
        if not pieces:
            return False
        if whole and not _has_room(tree, _count(missing), run, depth):
            self._table.counters["store_refused_blocks"] += _count(missing)
            pool.pause_stores()
            return False
        wanted = _count(pieces)
        slots = tree.reserve_host(wanted, f"store for pool {pool.name}", tenant=run.tenant, keep=(run, depth))
        got = slot_count(slots)
        if got < wanted:
            self._table.counters["store_refused_blocks"] += _count(missing) - got
            pieces = first_blocks(pieces, got)
            pool.pause_stores()
        elif wanted < _count(missing):
            pool.unstored.appendleft((run, depth))
        if not pieces:
            return False
        self._start_store(tree, pool, tree.resolve(run, pieces[-1].end), pieces, slots)
        return True

    def _undoubted(
        self, tree: PrefixTree, pool: DevicePool, run: Run, pieces: list[Piece], *, whole: bool
    ) -> tuple[list[Piece], bool]:
        """Which of these blocks one store may have now, and whether it waits for others to end."""
        device = _device_slots(tree, pool, run, pieces)
        count, is_alone = pool.doubts.next_store(device)
        if is_alone and count and self._table.of_pool(pool, TransferKind.STORE):
            return [], True
        if whole and pool.doubts.gives_up(device):
            return [], False
        return first_blocks(pieces, count), False

    def _start_store(
        self, tree: PrefixTree, pool: DevicePool, run: Run, pieces: list[Piece], slots: Ranges[int]
    ) -> None:
        device = _device_slots(tree, pool, run, pieces)
        transfer = WorkerTransfer(self._table.next_id(), TransferKind.STORE, tree, run, pieces, slots, pool, device)
        tree.put_host(run, pieces, slots)
        tree.share_priority(run, pool.index, HOST)
        self._table.lock(transfer)
        self._table.start(transfer)

    def _settled_end(self, tree: PrefixTree, pool: DevicePool, run: Run, depth: int) -> tuple[Run, int]:
        """How much of the path ``[0, depth)`` the pool holds before the first block that a load is still writing.

        What comes behind that goes with the load if it fails, so a store must not hold it.
        """
        run, depth = _resident_end(tree, pool, run, depth)
        for load in self._table.of_pool(pool, TransferKind.LOAD):
            if not load.orphaned and load.crosses(run, depth):
                depth = load.start
        return tree.resolve(run, depth), depth

    def _unsignalled(self, pool: DevicePool, tree: PrefixTree, run: Run, depth: int) -> FenceHold | None:
        """The first fence until which blocks of the path may still be written; None where they are settled."""
        for session in self._table.sessions.values():
            for hold in session.holds if session.pool is pool else ():
                if hold.suspect < hold.depth and tree.passes(run, depth, hold.run, hold.suspect):
                    return hold
        return None

    def demote(self, tree: PrefixTree, pool: DevicePool) -> None:
        """Keep slots free: the watermark and from time to time some more, or as many as somebody waits for.

        The device copy of the least valuable tails that the host pool holds is dropped. Others are stored first where
        the policy has them stored, and go when that has ended.
        """
        free = pool.free
        batch = pool.slots // BATCH_DIVISOR if free < pool.watermark else 0
        wanted = max(pool.watermark + batch, pool.demand) - free
        if wanted <= 0:
            pool.meet_demand()
            return
        passed, wanted = self._drop_stored(tree, pool, wanted)
        self._store_tails(tree, pool, passed, wanted)

    def empty(self, tree: PrefixTree, pool: DevicePool) -> None:
        """Drop all device copies that the host pool holds, and start to store others. Nobody uses the pool."""
        passed, _ = self._drop_stored(tree, pool, pool.slots)
        room = self._room(pool)
        for segment in passed:
            tree.policies[pool.index].add(segment)
            if room > 0 and not pool.stores_paused:
                room = self._store_tail(tree, pool, segment, room)

    def _drop_stored(self, tree: PrefixTree, pool: DevicePool, wanted: int) -> tuple[list[Segment], int]:
        """Drop tails that the host pool holds; the others that were seen, and how many slots are wanted still."""
        policy, slack = tree.policies[pool.index], pool.slots // SLACK_DIVISOR
        freed: list[Ranges[int]] = []
        passed: list[Segment] = []
        while wanted > 0 and len(passed) < UNSTORED_TAILS_PASSED_MAX and (segment := policy.pop()) is not None:
            stored = min(tree.stored_tail(segment), policy.most(segment))
            if stored:
                freed.append(tree.trim_tail(segment, stored, wanted, pool.index, slack=slack))
                wanted -= slot_count(freed[-1])
            else:
                passed.append(segment)
        slots = join(freed)
        pool.move(slots, SlotState.CACHED, SlotState.FREE, "demotion")
        self._table.counters["demoted_blocks"] += slot_count(slots)
        return passed, wanted

    def _store_tails(self, tree: PrefixTree, pool: DevicePool, tails: list[Segment], wanted: int) -> None:
        """File tails without a host copy again, and start to store those that the policy has stored.

        Under write-back those are no more than it takes to free `wanted` slots, with what is being stored already.
        """
        under_way = self._table.of_pool(pool, TransferKind.STORE)
        room = self._room(pool)
        is_on_need = tree.write_policy is WritePolicy.WRITE_BACK
        wanted -= sum(store.blocks for store in under_way)
        for segment in tails:
            tree.policies[pool.index].add(segment)
            is_due = tree.write_policy in _STORE_TAILS and (wanted > 0 or not is_on_need)
            if is_due and room > 0 and not pool.stores_paused:
                wanted -= segment.evictable_tail
                room = self._store_tail(tree, pool, segment, room)

    def _store_tail(self, tree: PrefixTree, pool: DevicePool, segment: Segment, room: int) -> int:
        """Start to store a tail, if all of it can be; how many more stores may be started then."""
        started = self.store(tree, pool, segment.run, segment.run.start + segment.length, whole=True)
        return self._room(pool) if pool.doubts else room - started

    def write_back(self, tree: PrefixTree, pool: DevicePool, count: int) -> bool:
        """Somebody needs `count` slots, more than are free: whether to wait for blocks that are being written back.

        False without that policy, where nothing can be stored, and where the slots are free now.
        """
        if tree.write_policy is not WritePolicy.WRITE_BACK or tree.host is None or not pool.copies:
            return False
        pool.need(count)
        self.demote(tree, pool)
        under_way = self._table.of_pool(pool, TransferKind.STORE) if pool.free < count else []
        for store in under_way:
            self._table.hurry(store)
        return bool(under_way)

    def try_again(self, pools: Iterable[DevicePool]) -> None:
        """Some time has passed: what failed is stored anew, and nobody waits any more who did not ask again."""
        for pool in pools:
            pool.resume_stores()
            pool.meet_demand()
            for run, depth in pool.failed_stores:
                self._table.counters["stores_forgotten"] += pool.note_unstored(run, depth)
            pool.failed_stores.clear()

    def available(self, tree: PrefixTree, pool: DevicePool) -> int:
        """How many slots can be granted now: what is being written back cannot, nor what would have to be."""
        waits = tree.write_policy is WritePolicy.WRITE_BACK and pool.copies
        if waits and tree.host is not None and self._table.of_pool(pool, TransferKind.STORE):
            return pool.free
        return pool.free + pool.evictable

    def end(self, store: WorkerTransfer) -> None:
        """Every shard is through with a store, and no load depends on it any more if it failed."""
        tree, pool = store.tree, store.pool
        tree.unlock(tree.resolve(store.run, store.end), store.end, pool.index)
        if store.state is TransferState.DONE:
            pool.doubts.note_stored(store.device)
            self._table.end_store(store, SlotState.CACHED)
            return
        self._table.counters["store_given_up_blocks"] += pool.doubts.note_failed(store.device)
        pool.pause_stores()
        for holder in tree.pools:  # another replica may have the same blocks
            if _resident_end(tree, holder, store.run, store.end)[1] > store.start:
                holder.failed_stores.append((store.run, store.end))
        self._table.end_store(store, SlotState.FREE)


def _resident_end(tree: PrefixTree, pool: DevicePool, run: Run, depth: int) -> tuple[Run, int]:
    """How much of the path ``[0, depth)`` the pool still holds, and the run where that ends."""
    run = tree.resolve(run, depth)
    while run.parent is not None:
        segment = run.segments[pool.index]
        if segment is not None:
            return run, min(depth, run.start + segment.length)
        run, depth = run.parent, run.start
    return run, 0


def _device_slots(tree: PrefixTree, pool: DevicePool, run: Run, pieces: list[Piece]) -> Ranges[int]:
    """The device slots of these blocks, in the order of the blocks: doubts tell of how many of the first ones."""
    device = no_ranges()
    for piece in pieces:
        device.extend(tree.path_slots(run, piece.start, piece.end, pool.index))
    return device


def _has_room(tree: PrefixTree, count: int, run: Run, depth: int) -> bool:
    """Whether the host pool can take so many more blocks of the path ``[0, depth)``, and evict none of it."""
    host = tree.host
    if host is None:
        return False
    while host.free < count and host.grow():
        pass
    run, depth = tree.host_end(run, depth)
    tree.lock(run, depth, HOST)
    try:
        # Every copy under way is protected, but for those of engines, which end soon.
        held = host.counts[SlotState.CACHED] + host.counts[SlotState.FILLING]
        return host.free + held - host.protected >= count
    finally:
        tree.unlock_host(run, depth)


def _count(pieces: list[Piece]) -> int:
    return sum(piece.end - piece.start for piece in pieces)
