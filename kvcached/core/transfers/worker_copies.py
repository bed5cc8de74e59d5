"""Copies between device pools and host pool: what arrives about them, and the order in which they end.

A load may depend on stores that write what it reads. It starts when the last of them is done, and fails when one does.
"""

from __future__ import annotations

from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import TransferKind
from kvcached.core.pins import Pins
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import TransferState
from kvcached.core.transfers.loads import Loads
from kvcached.core.transfers.stores import Stores
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import WorkerTransfer
from kvcached_client.types import ShardIndex, TransferId


class WorkerCopies:
    """Transfers of all device pools.

    Attributes:
        table: of all transfers.
        stores, loads: their two kinds.
        pins: what people keep cached.
    """

    def __init__(self, table: TransferTable, pins: Pins) -> None:
        self.table = table
        self.stores = Stores(table)
        self.pins = pins
        self.loads = Loads(table, self._end, pins)

    def shard_done(
        self, transfer_id: TransferId, shard: ShardIndex, error: str = "", corrupt: tuple[int, ...] = ()
    ) -> TransferState | None:
        """A shard no longer reads or writes anything for a transfer; the last shard ends the transfer.

        A report about a transfer that has ended, or a second report of a shard, changes nothing. Returns the state of
        the transfer now; None where nothing has changed.

        Args:
            transfer_id: the transfer.
            shard: the shard.
            error: why the transfer failed there; "" if it did not.
            corrupt: blocks of a load, counted through its spans, that differ from what was stored. Only the blocks
                before the first of them were copied.
        """
        transfer = self.table.worker.get(transfer_id)
        if transfer is None or shard not in transfer.waiting:
            return None
        transfer.waiting.discard(shard)
        transfer.fail(error)
        if corrupt:
            transfer.corrupt.update(block for block in corrupt if 0 <= block < transfer.blocks)
            if transfer.kind is TransferKind.STORE or not transfer.corrupt:
                transfer.fail(f"shard {shard} named blocks that it was not given")
        if not transfer.waiting:
            self._end(transfer)
        return transfer.state

    def retry_when_freed(self, tree: PrefixTree, pool: DevicePool, blocks: int) -> int | None:
        """How many slots can be granted now; None if that is too few and transfers under way may change it."""
        available, under_way = self.stores.available(tree, pool), self.table.of_pool(pool)
        if available >= blocks or not under_way:
            return available
        for transfer in under_way:
            self.table.hurry(transfer)
        return None

    def fail_queued(self, pool: DevicePool, why: str) -> None:
        """End the loads of a pool that no shard knows of."""
        for transfer in self.table.of_pool(pool):
            if transfer.state is TransferState.QUEUED:
                transfer.fail(why)
                self._end(transfer)

    def cut_off(self, tree: PrefixTree, pool: DevicePool, run: Run, depth: int) -> None:
        """See `Loads.cut_off`."""
        self.loads.cut_off(tree, pool, run, depth)

    def _end(self, transfer: WorkerTransfer) -> None:
        if self.table.worker.pop(transfer.id, None) is None:
            return  # a store that it depended on has ended it
        good = not transfer.failure and not transfer.corrupt
        transfer.enter(TransferState.DONE if good else TransferState.FAILED)
        transfer.tree.unlock_host(transfer.run, transfer.end)
        if transfer.kind is TransferKind.LOAD:
            self.loads.end(transfer)
        elif good:
            self.stores.end(transfer)
            self._start_dependents(transfer)
        else:
            self.stores.end(transfer)  # first: what a failing load drops must not be FILLING
            self._fail_dependents(transfer)
        if not good:
            # what would have gone together with its path's device part, had this not held it
            transfer.tree.drop_lost(transfer.run)

    def _start_dependents(self, store: WorkerTransfer) -> None:
        for load in self._dependents(store):
            load.after.discard(store.id)
            if not load.after:
                self.table.start(load)

    def _fail_dependents(self, store: WorkerTransfer) -> None:
        for load in self._dependents(store):
            load.fail(f"store {store.id} failed: {store.failure}")
            self._end(load)

    def _dependents(self, store: WorkerTransfer) -> list[WorkerTransfer]:
        return [load for load in self.table.worker.values() if store.id in load.after]
