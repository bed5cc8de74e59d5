"""Copies that an engine's own processes make: what is reserved and pinned for them, and what follows from their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvcached.core.attached_state import AttachedLease, AttachedSession, Exchange
from kvcached.core.bad_blocks import LetGo, free_now
from kvcached.core.effects import Effect, SlotsHandedOut, TransferKind
from kvcached.core.pool import SlotPool
from kvcached.core.ranges import Ranges, cut, no_ranges, place_of, slot_count
from kvcached.core.run import Run
from kvcached.core.states import SlotState, TransferState
from kvcached.core.tree import HOST, Piece, PrefixTree, first_blocks
from kvcached_client.types import SessionId, ShardIndex, TransferId

#: Every shard at once: the scheduler says that a copy will not be made.
EVERY_SHARD = -1
#: The failure of an exchange that nobody needs any more.
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


class Exchanges:
    """Starts and ends copies.

    Args:
        sessions: of engines in attached mode.
        next_transfer: gives transfer ids.
        effects: told of slots that processes are to write.

    Attributes:
        let_go: told of each host slot whose block has left the index because it is bad.
    """

    def __init__(
        self,
        sessions: dict[SessionId, AttachedSession],
        next_transfer: Callable[[], TransferId],
        effects: list[Effect],
        counters: Counter[str],
    ) -> None:
        self._sessions = sessions
        self._effects = effects
        self._next_transfer = next_transfer
        self._counters = counters
        self.let_go: LetGo = free_now

    def all(self) -> list[Exchange]:
        """Those of all sessions."""
        return [exchange for session in self._sessions.values() for exchange in session.exchanges.values()]

    def plan_store(self, session: AttachedSession, lease: AttachedLease, run: Run, end: int) -> StorePlan:
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
        tree.pin(tree.resolve(run, reached), reached, HOST)
        tree.unpin(tree.resolve(lease.run, lease.depth), lease.depth, HOST)
        lease.run, lease.depth = tree.resolve(run, reached), reached
        return StorePlan(transfer, reached, lease.generation, pieces, slots)

    def start(
        self,
        session: AttachedSession,
        kind: TransferKind,
        tree: PrefixTree,
        run: Run,
        pieces: list[Piece],
        slots: Ranges[int],
    ) -> Exchange:
        """Pin the path of blocks and count on every shard for them."""
        shards = {ShardIndex(shard) for shard in range(session.space.spec.shards)}
        exchange = Exchange(self._next_transfer(), kind, tree, run, pieces, slots, shards)
        tree.pin(tree.resolve(run, exchange.end), exchange.end, HOST)
        exchange.enter(TransferState.RUNNING)
        session.exchanges[exchange.id] = exchange
        return exchange

    def settled(self, exchange: Exchange, shard: int, error: str) -> bool:
        """Note that a shard is through, or that none will copy: a failure, said or not. Whether every shard is."""
        if shard == EVERY_SHARD:
            error = error or _CALLED_OFF
            exchange.waiting.clear()
        exchange.failure = exchange.failure or error
        exchange.waiting.discard(ShardIndex(shard))
        return not exchange.waiting

    def _close(self, session: AttachedSession, exchange: Exchange, state: TransferState) -> None:
        exchange.enter(state)
        del session.exchanges[exchange.id]
        exchange.tree.unpin_host(exchange.run, exchange.end)

    def end_load(self, session: AttachedSession, load: Exchange) -> None:
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

    def _drop_corrupt(self, load: Exchange, block: int) -> None:
        """The stored bytes of a block are bad: nobody reads them again."""
        tree, depth = load.tree, load.start + block
        slots = cut(cut(load.host, block)[1], 1)[0]
        readers = [
            (other, place)
            for other in self.all()
            if other.tree is tree and (place := place_of(other.host, slots[0])) is not None
        ]
        for other, place in readers:  # the last one that reads it drops it
            other.corrupt.add(place)
        run = tree.resolve(load.run, depth + 1)
        segment = run.segments[HOST]
        if readers or segment is None or depth >= run.start + segment.length:
            return
        if tree.path_slots(run, depth, depth + 1, HOST) == slots:
            tree.punch_host(run, [Piece(depth, depth + 1)])
            self.let_go(tree, slots[0], f"corrupt, found by load {load.id}")

    def drop_store(self, session: AttachedSession, store: Exchange, target: SlotState) -> None:
        """A store has failed, or its session is over: its blocks are holes again; the slots go to `target`."""
        self._close(session, store, TransferState.FAILED)
        store.tree.punch_host(store.run, store.pieces)
        pool = host_of(store.tree)
        pool.move(store.host, SlotState.FILLING, target, f"end of store {store.id}")
        if target is SlotState.QUARANTINED:
            session.quarantined.append((pool, store.host))
        self._counters["store_failed_blocks"] += store.blocks

    def end_store(self, session: AttachedSession, store: Exchange) -> None:
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
