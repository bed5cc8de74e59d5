"""Copies that an engine's own processes make: what is reserved and locked for them, and what follows from their end."""

from __future__ import annotations

from typing import NamedTuple

from kvcached.core.index.host_tree import HOST, Piece, first_blocks
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import OffloadLease
from kvcached.core.messages import SlotsHandedOut, TransferKind
from kvcached.core.session import OffloadSession
from kvcached.core.slots.ranges import Ranges, no_ranges, slot_count
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

    def end(self, session: OffloadSession, copy: EngineTransfer, unwritten: SlotState = SlotState.FREE) -> None:
        """Every shard is through with a copy, or its session is over. What a store has not written goes to that state.

        Blocks that proved bad, or were not written, leave the index.
        """
        good = not copy.failure and not copy.corrupt
        copy.enter(TransferState.DONE if good else TransferState.FAILED)
        del self._table.engine[copy.id], session.transfers[copy.id]
        copy.tree.unlock_host(copy.run, copy.end)
        if copy.kind is TransferKind.LOAD:
            self._count(copy)
            self._table.drop_corrupt(copy)
        else:
            self._table.end_store(copy, SlotState.CACHED if good else unwritten)
            if not good and unwritten is SlotState.QUARANTINED:
                session.quarantined.append((host_of(copy.tree), copy.host))
        copy.tree.drop_lost(copy.run)  # a store of what it continues may have failed

    def _count(self, load: EngineTransfer) -> None:
        arrived = 0 if load.failure else min(load.corrupt, default=load.blocks)
        self._counters["loaded_blocks"] += arrived
        ending = "load_called_off_blocks" if load.failure == _CALLED_OFF else "load_failed_blocks"
        self._counters[ending] += load.blocks - arrived


def host_of(tree: PrefixTree) -> SlotPool:
    """The host slots of a tree."""
    return tree.members[HOST]
