"""Copies that an engine's own processes make: what is reserved and locked for them, and what follows from their end."""

from __future__ import annotations

from typing import NamedTuple

from kvcached.core.index.host_tree import HOST, Piece, first_blocks
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import OffloadLease
from kvcached.core.messages import SlotsHandedOut, TransferKind
from kvcached.core.session import OffloadSession
from kvcached.core.slots.ranges import Ranges, cut, no_ranges, slot_count
from kvcached.core.slots.slots import SlotPool
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached_client.types import ShardIndex, TransferId

#: Every shard at once: the scheduler says that a copy will not be made.
EVERY_SHARD = -1
#: The failure of a copy that nobody needs any more.
_CALLED_OFF = "called off"


class StorePlan(NamedTuple):
    """Answer to `prepare_store`.

    Attributes:
        transfer: 0 where there is nothing to copy.
        depth: of the lease now: where its next store starts.
        generation: of the namespace, for the blocks' headers.
        pieces: which blocks to copy.
        slots: where to, one slot for each block.
    """

    transfer: TransferId
    depth: int
    generation: int
    pieces: list[Piece]
    slots: Ranges[int]


class EngineCopies:
    """Starts and ends copies.

    Args:
        table: of all transfers.
    """

    def __init__(self, table: TransferTable) -> None:
        self._table = table
        self._effects = table.effects
        self._counters = table.counters

    def all(self) -> list[EngineTransfer]:
        """Those of all sessions."""
        return list(self._table.engine.values())

    def plan_store(self, session: OffloadSession, lease: OffloadLease, run: Run, end: int) -> StorePlan:
        """Reserve slots for what the path ``[0, end)`` lacks, as far as there is room; the lease reaches as far."""
        tree = lease.tree
        missing = tree.missing_in_host(run, end)
        wanted = sum(piece.end - piece.start for piece in missing)
        slots = tree.reserve_host(wanted, f"store of session {session.id}") if wanted else no_ranges()
        got = slot_count(slots)
        pieces = first_blocks(missing, got)
        self._counters["store_refused_blocks"] += wanted - got
        transfer = TransferId(0)
        if pieces:
            tree.put_host(run, pieces, slots)
            transfer = self.start(session, TransferKind.STORE, tree, run, pieces, slots).id
            self._effects.append(SlotsHandedOut(session.id, tree.namespace, slots))
        reached = end if got == wanted else max(tree.missing_in_host(run, end)[0].start, lease.depth)
        tree.lock(tree.resolve(run, reached), reached, HOST)
        tree.unlock(tree.resolve(lease.run, lease.depth), lease.depth, HOST)
        lease.reach(tree.resolve(run, reached), reached)
        return StorePlan(transfer, reached, lease.generation, pieces, slots)

    def start(
        self,
        session: OffloadSession,
        kind: TransferKind,
        tree: PrefixTree,
        run: Run,
        pieces: list[Piece],
        slots: Ranges[int],
    ) -> EngineTransfer:
        """Lock the path of blocks and count on every shard for them."""
        shards = {ShardIndex(shard) for shard in range(session.namespace.spec.shards)}
        copy = EngineTransfer(self._table.next_id(), kind, tree, run, pieces, slots, waiting=shards)
        tree.lock(tree.resolve(run, copy.end), copy.end, HOST)
        copy.enter(TransferState.RUNNING)
        self._table.engine[copy.id] = session.transfers[copy.id] = copy
        return copy

    def settled(self, copy: EngineTransfer, shard: int, error: str) -> bool:
        """Note that a shard is through, or that none will copy: a failure, said or not. Whether every shard is."""
        if shard == EVERY_SHARD:
            error = error or _CALLED_OFF
            copy.waiting.clear()
        copy.fail(error)
        copy.waiting.discard(ShardIndex(shard))
        return not copy.waiting

    def _close(self, session: OffloadSession, copy: EngineTransfer, state: TransferState) -> None:
        copy.enter(state)
        del self._table.engine[copy.id], session.transfers[copy.id]
        copy.tree.unlock_host(copy.run, copy.end)

    def end_load(self, session: OffloadSession, load: EngineTransfer) -> None:
        """Every shard is through with a load: blocks that proved bad leave the index."""
        good = not load.failure and not load.corrupt
        self._close(session, load, TransferState.DONE if good else TransferState.FAILED)
        arrived = 0 if load.failure else min(load.corrupt, default=load.blocks)
        self._counters["loaded_blocks"] += arrived
        ending = "load_called_off_blocks" if load.failure == _CALLED_OFF else "load_failed_blocks"
        self._counters[ending] += load.blocks - arrived
        self._counters["corrupt_blocks"] += len(load.corrupt)
        for block in sorted(load.corrupt, reverse=True):
            self._drop_corrupt(load, block)
        load.tree.drop_lost(load.run)

    def _drop_corrupt(self, load: EngineTransfer, block: int) -> None:
        """The stored bytes of a block are bad: nobody reads them again."""
        tree, depth = load.tree, load.start + block
        slots = cut(cut(load.host, block)[1], 1)[0]
        run = tree.resolve(load.run, depth + 1)
        segment = run.segments[HOST]
        if self._table.pass_on(load, slots[0]) or segment is None or depth >= run.start + segment.length:
            return
        if tree.path_slots(run, depth, depth + 1, HOST) == slots:
            tree.punch_host(run, [Piece(depth, depth + 1)])
            self._table.free_bad(tree, slots[0], f"corrupt, found by load {load.id}")

    def drop_store(self, session: OffloadSession, store: EngineTransfer, target: SlotState) -> None:
        """A store has failed, or its session is over: its blocks are holes again; the slots go to `target`."""
        self._close(session, store, TransferState.FAILED)
        store.tree.punch_host(store.run, store.pieces)
        pool = host_of(store.tree)
        pool.move(store.host, SlotState.FILLING, target, f"end of store {store.id}")
        if target is SlotState.QUARANTINED:
            session.quarantined.append((pool, store.host))
        self._counters["store_failed_blocks"] += store.blocks

    def end_store(self, session: OffloadSession, store: EngineTransfer) -> None:
        """Every shard is through with a store."""
        if store.failure:
            self.drop_store(session, store, SlotState.FREE)
            return
        self._close(session, store, TransferState.DONE)
        host_of(store.tree).move(store.host, SlotState.FILLING, SlotState.CACHED, f"end of store {store.id}")
        self._counters["stored_blocks"] += store.blocks
        if store.tree.listener is not None:
            store.tree.listener.stored(store.tree, store.run, store.end)
        store.tree.drop_lost(store.run)  # a store of what it continues may have failed


def host_of(tree: PrefixTree) -> SlotPool:
    """The host slots of a tree."""
    return tree.members[HOST]
