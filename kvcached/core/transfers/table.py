"""Transfers under way: their ids, their pins, their start, and what somebody's waiting for one changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import Effect, HurryTransfer, Span, StartTransfer, TransferKind, span_of
from kvcached.core.slots.ranges import append, cut, one_range, place_of, section
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.transfer import EngineTransfer, ShardTransfer, StorageTransfer, WorkerTransfer
from kvcached_client.types import SessionId, TransferId


class TransferTable:
    """Every transfer that has not ended.

    Attributes:
        worker, engine: those that shards make, by who makes them.
        backups, fetches: those of storage, by their direction.
        paused: none but those of device pools are started, because somebody has asked for that; those have pauses of
            their own.
        sessions: of the cache.
        effects: of the cache.
        counters: of the cache.
    """

    def __init__(
        self, sessions: dict[SessionId, ManagedSession], effects: list[Effect], counters: Counter[str]
    ) -> None:
        self.worker: dict[TransferId, WorkerTransfer] = {}
        self.engine: dict[TransferId, EngineTransfer] = {}
        self.backups: dict[TransferId, StorageTransfer] = {}
        self.fetches: dict[TransferId, StorageTransfer] = {}
        self.sessions = sessions
        self.effects = effects
        self.counters = counters
        self.paused = False
        self._last = 0

    def pause(self) -> None:
        """Somebody asks that no copies of engines and of storage are started."""
        self.paused = True

    def resume(self) -> None:
        """The end of `pause`."""
        self.paused = False

    def of_pool(self, pool: DevicePool, kind: TransferKind | None = None) -> list[WorkerTransfer]:
        """A pool's transfers."""
        return [each for each in self.worker.values() if each.pool is pool and kind in (None, each.kind)]

    def hurry(self, transfer: WorkerTransfer) -> None:
        """Somebody waits for a transfer now."""
        if not transfer.urgent and transfer.state is TransferState.RUNNING:
            self.effects.append(HurryTransfer(transfer.id, transfer.pool.name))
        transfer.hurry()

    def next_id(self) -> TransferId:
        """An id that no transfer of this daemon has had."""
        self._last += 1
        return TransferId(self._last)

    # --- blocks that prove bad --------------------------------------------------------------------------------------

    def drop_corrupt(self, load: ShardTransfer) -> None:
        """Host copies that a load found to be other than what was stored must not be read again."""
        tree = load.tree
        self.counters["corrupt_blocks"] += len(load.corrupt)
        for block in sorted(load.corrupt, reverse=True):
            depth = load.start + block
            run = tree.resolve(load.run, depth + 1)
            segment = run.segments[HOST]
            slots = section(load.host, block, block + 1)
            if segment is None or depth >= run.start + segment.length or self.pass_on(load, slots[0]):
                continue  # it has gone meanwhile, or goes when the last load that reads it has ended
            if tree.path_slots(run, depth, depth + 1, HOST) == slots:
                tree.punch_host(run, [Piece(depth, depth + 1)])
                self._store_again(tree, run, depth)
                self.free_unread(tree, slots[0], SlotState.CACHED, f"corrupt, found by load {load.id}")

    def pass_on(self, load: ShardTransfer, slot: int) -> bool:
        """The bytes in a host slot are bad: tell the other transfers that read it; False if there are none.

        The last one of them that ends drops the block.
        """
        others: Iterable[ShardTransfer] = self.worker.values() if load.tree.pools else self.engine.values()
        readers = [
            (other, place)
            for other in others
            if other.tree is load.tree and (place := place_of(other.host, slot)) is not None
        ]
        for other, place in readers:
            other.corrupt.add(place)
        return bool(readers)

    def _store_again(self, tree: PrefixTree, run: Run, depth: int) -> None:
        """Where a device still has a block that the host pool lost, it is copied again."""
        for pool in tree.pools:
            segment = run.segments[pool.index]
            if segment is not None and depth < run.start + segment.length:
                self.counters["stores_forgotten"] += pool.note_unstored(run, depth + 1)
                return

    def free_unread(self, tree: PrefixTree, slot: int, state: SlotState, cause: str) -> None:
        """Free a slot that no index knows, unless a backup reads it: then it is QUARANTINED until that has ended."""
        ranges, pool = one_range(slot, 1), tree.members[HOST]
        backups = (each for each in self.backups.values() if each.tree is tree)
        reader = next((each for each in backups if place_of(each.host, slot) is not None), None)
        if reader is None:
            pool.move(ranges, state, SlotState.FREE, cause)
            return
        if state is SlotState.CACHED:
            pool.move(ranges, state, SlotState.QUARANTINED, cause)
        append(reader.set_aside, ranges)

    # --- the end of a store -------------------------------------------------------------------------------------------

    def end_store(self, store: ShardTransfer, target: SlotState) -> None:
        """Nobody writes the slots of a store any more: its blocks are CACHED, or are holes again."""
        tree, good = store.tree, target is SlotState.CACHED
        self.counters["stored_blocks" if good else "store_failed_blocks"] += store.blocks
        if not good:
            tree.punch_host(store.run, store.pieces)
        tree.members[HOST].move(store.host, SlotState.FILLING, target, f"end of store {store.id}")
        if good:
            tree.announce_host(store.run, store.pieces)
        if good and tree.listener is not None:
            tree.listener.stored(tree, store.run, store.end)

    # --- transfers of workers ---------------------------------------------------------------------------------------

    def lock(self, transfer: WorkerTransfer) -> None:
        """Lock its path in both pools."""
        tree, end = transfer.tree, transfer.end
        tree.lock(tree.resolve(transfer.run, end), end, transfer.pool.index)
        tree.lock(tree.resolve(transfer.run, end), end, HOST)

    def start(self, transfer: WorkerTransfer) -> None:
        """Order it from every shard."""
        tree, run = transfer.tree, transfer.run
        self.worker[transfer.id] = transfer
        transfer.order()
        self.effects.append(
            StartTransfer(
                transfer.id,
                transfer.pool.name,
                transfer.kind,
                tuple(_spans(tree, run, transfer)),
                transfer.urgent,
                transfer.progress,
            )
        )


def _spans(tree: PrefixTree, run: Run, transfer: WorkerTransfer) -> Iterable[Span]:
    device, host = transfer.device, transfer.host
    for start, end in transfer.pieces:
        mine, device = cut(device, end - start)
        theirs, host = cut(host, end - start)
        keys = tree.path_keys(tree.resolve(run, end), max(start - 1, 0), end)
        yield span_of(start, keys, theirs, mine)
