"""Copies from the host pool to device pools, for requests whose prefix is no longer on their device.

A load is planned by `acquire`: its blocks are in the device index at once, so others join it. Where it fails, whatever
counts on its blocks is shortened, and they are taken out again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import FenceHold, ManagedLease
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import AbandonLoad, LoadsEnded, TransferKind
from kvcached.core.pins import Pins
from kvcached.core.slots.ranges import cut, pairs
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import WorkerTransfer
from kvcached_client.types import PROGRESS_SLOTS, TransferId

#: A command's message has 32 bytes a block at most.
LOAD_BLOCKS_MAX = 2048


class Loads:
    """Plans loads, and settles what follows from their end."""

    def __init__(self, table: TransferTable, end: Callable[[WorkerTransfer], None], pins: Pins) -> None:
        """`end` ends a load that no shard knows of."""
        self._table = table
        self._pins = pins
        self._end_queued = end

    def join(self, session: ManagedSession, lease: ManagedLease) -> None:
        """A lease whose hit other loads are still writing waits for them."""
        if not session.pool.counts[SlotState.FILLING]:
            return
        for load in self._table.of_pool(session.pool, TransferKind.LOAD):
            if not load.orphaned and load.crosses(lease.run, lease.depth):
                load.join(lease)
                session.counters["joined_loads"] += 1

    def settled_blocks(self, session: ManagedSession, lease: ManagedLease, keys: bytes) -> int:
        """How many of the blocks that a lease commits come before one that a load is still writing.

        Those behind it must not be built on it: where the load fails, they would have to go with it.
        """
        count, pool, tree = len(keys) // KEY_SIZE, session.pool, session.tree
        if not pool.counts[SlotState.FILLING]:
            return count
        run, depth = tree.follow(tree.resolve(lease.run, lease.depth), lease.depth, keys, pool.index)
        loads = self._table.of_pool(pool, TransferKind.LOAD)
        starts = [load.start for load in loads if not load.orphaned and load.crosses(run, depth)]
        return min([count, *(start - lease.depth for start in starts)])

    def start(self, session: ManagedSession, lease: ManagedLease, keys: bytes, limit: int) -> None:
        """Start to load what the host pool has behind a new lease's hit, into the first of its exclusive slots."""
        tree, pool = session.tree, session.pool
        if not pool.copies:
            return
        found = tree.match_host(lease.run, lease.depth, keys, limit)[1] - lease.depth
        session.counters["host_hit_blocks"] += found
        threshold = max(pool.load_threshold, 1)
        if found < threshold:
            session.counters["load_below_threshold_blocks"] += found
            return
        loads = self._table.of_pool(pool, TransferKind.LOAD)
        quota = pool.load_quota - sum(load.blocks for load in loads)
        blocks = min(found, quota) if quota >= threshold else 0
        free = sorted(set(range(PROGRESS_SLOTS)) - {load.progress for load in loads}, reverse=True)
        while blocks > 0 and free:
            count = min(blocks, LOAD_BLOCKS_MAX)
            self._start_one(session, lease, keys, count, free.pop())
            blocks, found = blocks - count, found - count
        session.counters["load_over_quota_blocks"] += found

    def _start_one(self, session: ManagedSession, lease: ManagedLease, keys: bytes, count: int, progress: int) -> None:
        tree, pool = session.tree, session.pool
        start, end = lease.depth, lease.depth + count
        source, _ = tree.match_host(lease.run, start, keys, end)
        host = tree.path_slots(source, start, end, HOST)
        device = cut(lease.open, count)[0]
        cause = f"load for lease {lease.id}"
        with ExitStack() as undo:  # if a step raises, what was done before it is taken back
            pool.move(device, SlotState.LEASED, SlotState.FILLING, cause)
            lease.load_into(count)
            undo.callback(pool.move, device, SlotState.FILLING, SlotState.FREE, f"rollback of {cause}")
            run, _ = tree.commit(lease.run, start, keys[start * KEY_SIZE : end * KEY_SIZE], device, pool.index)
            undo.callback(lambda: tree.drop(tree.resolve(run, start + 1), start, pool.index))
            for index in (pool.index, HOST, pool.index):  # two for the load, as `TransferTable.lock`, one for the lease
                tree.lock(run, end, index)
                undo.callback(tree.unlock, run, end, index)
            transfer = WorkerTransfer(
                self._table.next_id(), TransferKind.LOAD, tree, run, [Piece(start, end)], host, pool, device,
                leases=[lease], progress=progress, urgent=True,
            )  # fmt: skip
            undo.callback(self._table.worker.pop, transfer.id, None)
            tree.unlock(tree.resolve(lease.run, start), start, pool.index)
            undo.callback(lambda: tree.lock(tree.resolve(run, start), start, pool.index))
            self._order(transfer)
            undo.pop_all()
        lease.reach(run, end)
        lease.loads.add(transfer.id)

    def _order(self, load: WorkerTransfer) -> None:
        """Start a load, or let it wait for the stores that write what it reads."""
        load.wait_for(self._stores_of(load))
        for store in load.after:
            self._table.hurry(self._table.worker[store])
        if load.after:
            self._table.worker[load.id] = load
        else:
            self._table.start(load)

    def _stores_of(self, load: WorkerTransfer) -> set[TransferId]:
        """Stores under way that write what a load reads."""
        host = load.tree.members[HOST]
        if all(host.holds(first, count, SlotState.CACHED) for first, count in pairs(load.host)):
            return set()
        return {
            each.id
            for each in self._table.worker.values()
            if each.kind is TransferKind.STORE and each.tree is load.tree and _overlap(each, load)
        }

    def end(self, load: WorkerTransfer) -> None:
        """Every shard is through with a load, or it was never started."""
        tree, pool, cause = load.tree, load.pool, f"end of load {load.id}"
        good = 0 if load.failure else min(load.corrupt, default=load.blocks)
        if load.orphaned:
            pool.orphan(-load.blocks)
            pool.move(load.device, SlotState.FILLING, SlotState.FREE, cause)
            good = 0
        else:
            tree.unlock(tree.resolve(load.run, load.end), load.end, pool.index)
            if good < load.blocks:
                self._cut(load, load.start + good)
            arrived, missing = cut(load.device, good)
            pool.move(missing, SlotState.FILLING, SlotState.FREE, cause)
            pool.move(arrived, SlotState.FILLING, SlotState.CACHED, cause)
            if good:
                pool.note_cached(tree.cached_blocks(load.run, load.start, load.start + good, pool))
            self._table.counters["loaded_blocks"] += good
        self._table.counters["load_failed_blocks"] += load.blocks - good
        self._table.drop_corrupt(load)
        for lease in load.leases:
            if load.id in lease.loads:
                lease.loads.discard(load.id)
                if not lease.loads:
                    self._tell_loaded(load.pool, lease)
        if not load.was_started:
            self._table.effects.append(AbandonLoad(load.id, pool.name, load.progress))

    def _tell_loaded(self, pool: DevicePool, lease: ManagedLease) -> None:
        for session in self._table.sessions.values():
            if session.pool is pool and session.leases.get(lease.id) is lease:
                self._table.effects.append(LoadsEnded(session.id, lease.id))

    def _cut(self, load: WorkerTransfer, depth: int) -> None:
        """The path of a load ends at `depth` now: whatever counted on more of it is shortened, and it is dropped."""
        tree, pool = load.tree, load.pool
        for session in self._table.sessions.values():
            if session.pool is pool:
                _shorten(session, load.run, depth)
        self.cut_off(tree, pool, load.run, depth)
        dropped = tree.drop(tree.resolve(load.run, depth + 1), depth, pool.index)
        # loads that continue this one and ended before it have left theirs cached; FILLING ones end with their loads
        pool.move(pool.having(dropped, SlotState.CACHED), SlotState.CACHED, SlotState.FREE, f"cut of load {load.id}")

    def cut_off(self, tree: PrefixTree, pool: DevicePool, run: Run, depth: int) -> None:
        """A pool's part of the path to `run` is about to end at `depth`: loads behind that hold nothing of it any more.

        Their slots stay FILLING until they end. Queued ones end now. Nor do people's pins hold more of it.
        """
        self._pins.cut_off(tree, pool, run, depth)
        for load in self._table.of_pool(pool, TransferKind.LOAD):
            if not load.orphaned and tree.passes(load.run, load.end, run, depth):
                tree.unlock(tree.resolve(load.run, load.end), load.end, pool.index)
                load.orphan("what it continues is gone")
                if load.state is TransferState.QUEUED:
                    self._end_queued(load)


def _shorten(session: ManagedSession, run: Run, depth: int) -> None:
    """Whatever a session holds of the path to `run` beyond `depth` ends there now."""
    tree, pool = session.tree, session.pool.index
    holders: list[ManagedLease | FenceHold] = [*session.leases.values(), *session.holds]
    for holder in holders:
        if tree.passes(holder.run, holder.depth, run, depth):
            tree.unlock(tree.resolve(holder.run, holder.depth), holder.depth, pool)
            holder.reach(tree.resolve(holder.run, depth), depth)
            tree.lock(holder.run, depth, pool)


def _overlap(store: WorkerTransfer, load: WorkerTransfer) -> bool:
    """Whether a store writes a block that a load reads."""
    return any(
        load.tree.passes(load.run, load.end, store.run, max(piece.start, load.start)) and piece.end > load.start
        for piece in store.pieces
    )
