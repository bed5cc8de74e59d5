"""Copies between device pools and host pool: what arrives about them, and the order in which they end.

A load may depend on stores that write what it reads. It starts when the last of them is done, and fails when one does.
"""

from __future__ import annotations

from collections import Counter

from kvcached.core.effects import Effect, TransferKind
from kvcached.core.events import ShardSettled
from kvcached.core.loads import Loads
from kvcached.core.pinned import Pins
from kvcached.core.pool import DevicePool
from kvcached.core.run import Run
from kvcached.core.session import Session
from kvcached.core.states import TransferState
from kvcached.core.stores import Stores
from kvcached.core.transfer import Transfer
from kvcached.core.transfer_book import TransferBook
from kvcached.core.tree import PrefixTree
from kvcached_client.types import SessionId


class Tiers:
    """Transfers of all trees.

    Attributes:
        book: those under way.
        stores, loads: their two kinds.
        pins: what people keep cached.
    """

    def __init__(
        self, sessions: dict[SessionId, Session], effects: list[Effect], counters: Counter[str], pins: Pins
    ) -> None:
        self.book = TransferBook(sessions, effects, counters)
        self.stores = Stores(self.book)
        self.pins = pins
        self.loads = Loads(self.book, self._end, pins)

    def on_shard_settled(self, event: ShardSettled) -> None:
        """One shard is through with a transfer; the last one ends it. Acknowledgements of what has ended are old."""
        transfer = self.book.transfers.get(event.transfer)
        if transfer is None or event.shard not in transfer.waiting:
            return
        transfer.waiting.discard(event.shard)
        transfer.failure = transfer.failure or event.error
        if len(event.corrupt):
            transfer.corrupt.update(block for block in event.corrupt if 0 <= block < transfer.blocks)
            if transfer.kind is TransferKind.STORE or not transfer.corrupt:
                transfer.failure = transfer.failure or f"shard {event.shard} named blocks that it was not given"
        if not transfer.waiting:
            self._end(transfer)

    def vacancy(self, tree: PrefixTree, pool: DevicePool, blocks: int) -> int | None:
        """How many slots can be granted now; None if that is too few and transfers under way may change it."""
        available, under_way = self.stores.available(tree, pool), self.book.of_pool(pool)
        if available >= blocks or not under_way:
            return available
        for transfer in under_way:
            self.book.hurry(transfer)
        return None

    def pool_lost(self, tree: PrefixTree, pool: DevicePool) -> None:
        """A pool's memory is gone: its transfers hold nothing in it any more.

        Call it before the pool's residency is dropped and its epoch grows, and `fail_queued` afterwards.
        """
        for transfer in self.book.of_pool(pool):
            if transfer.is_current and not transfer.orphaned:
                tree.unpin(tree.resolve(transfer.run, transfer.end), transfer.end, pool.index)
        self.pins.pool_lost(tree, pool)

    def fail_queued(self, pool: DevicePool, why: str) -> None:
        """End the loads of a pool that no shard knows of."""
        for transfer in self.book.of_pool(pool):
            if transfer.state is TransferState.QUEUED:
                transfer.failure = transfer.failure or why
                self._end(transfer)

    def cut_off(self, tree: PrefixTree, pool: DevicePool, run: Run, depth: int) -> None:
        """See `Loads.cut_off`."""
        self.loads.cut_off(tree, pool, run, depth)

    def _end(self, transfer: Transfer) -> None:
        if self.book.transfers.pop(transfer.id, None) is None:
            return  # a store that it depended on has ended it
        good = not transfer.failure and not transfer.corrupt
        transfer.enter(TransferState.DONE if good else TransferState.FAILED)
        transfer.tree.unpin_host(transfer.run, transfer.end)
        if transfer.kind is TransferKind.LOAD:
            self.loads.end(transfer)
        elif good:
            self.stores.end(transfer)
            self._start_dependents(transfer)
        else:
            self.stores.end(transfer)  # first: what a failing load drops must not be FILLING
            self._fail_dependents(transfer)
        if not good or not transfer.is_current:
            # what would have gone together with its path's device part, had this not held it
            transfer.tree.drop_lost(transfer.run)

    def _start_dependents(self, store: Transfer) -> None:
        for load in self._dependents(store):
            load.after.discard(store.id)
            if not load.after:
                self.book.start(load)

    def _fail_dependents(self, store: Transfer) -> None:
        for load in self._dependents(store):
            load.failure = load.failure or f"store {store.id} failed: {store.failure}"
            self._end(load)

    def _dependents(self, store: Transfer) -> list[Transfer]:
        return [load for load in self.book.transfers.values() if store.id in load.after]
