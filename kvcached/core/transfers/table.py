"""Transfers under way: their ids, their pins, their start, and what somebody's waiting for one changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.pieces import pieces_of
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import Effect, HurryTransfer, Span, StartTransfer, TransferKind, span_of
from kvcached.core.slots.ranges import Ranges, append, cut, every_slot, from_slots, places_of, slots_at
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.transfer import EngineTransfer, ShardTransfer, StorageTransfer, WorkerTransfer
from kvcached_client.types import SessionId, TransferId


class TransferTable:
    """Every transfer that has not ended.

    Attributes:
        worker, engine: those that shards make, by who makes them.
        engine_stores: stores among those of engines by their tree and first host slot, which no other writes.
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
        self.engine_stores: dict[tuple[PrefixTree, int], EngineTransfer] = {}
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
        """Host copies that a load found to be other than what was stored must not be read again.

        There may be as many as the load has blocks: what is looked through is looked through once for all of them.
        """
        tree, places = load.tree, sorted(load.corrupt)
        self.counters["corrupt_blocks"] += len(places)
        if not places:
            return
        slots = slots_at(load.host, places)
        run, end = tree.host_end(load.run, load.end)
        present = slots_at(tree.path_slots(run, load.start, end, HOST), places)  # the last may have gone meanwhile
        read = self.pass_on(load, sorted(slots[: len(present)]))  # these go when the last that reads them has ended
        found = zip(places, slots, present, strict=False)
        bad = [(load.start + place, slot) for place, slot, now in found if slot == now and slot not in read]
        if bad:
            tree.punch_host(run, pieces_of(depth for depth, _ in bad))
            self._store_again(tree, load.run, [depth for depth, _ in bad])
            cause = f"corrupt, found by load {load.id}"
            self.free_unread(tree, from_slots(slot for _, slot in bad), SlotState.CACHED, cause)

    def pass_on(self, load: ShardTransfer, slots: list[int]) -> set[int]:
        """The bytes in host slots are bad: tell the other transfers that read them. Returns which they read.

        The last one of them that ends drops the block.
        """
        read: set[int] = set()
        others: Iterable[ShardTransfer] = self.worker.values() if load.tree.pools else self.engine.values()
        for other in others if slots else ():
            if other.tree is load.tree:
                for place, slot in places_of(other.host, slots):
                    other.corrupt.add(place)
                    read.add(slot)
        return read

    def _store_again(self, tree: PrefixTree, run: Run, depths: list[int]) -> None:
        """Where a device still has blocks that the host pool lost, they are copied again: one path a pool."""
        noted: set[int] = set()
        for depth in reversed(depths) if tree.pools else ():
            run = tree.resolve(run, depth + 1)
            has = (pool for pool in tree.pools if _reaches(run, pool.index, depth))
            pool = next(has, None)
            if pool is not None and pool.index not in noted:
                noted.add(pool.index)
                self.counters["stores_forgotten"] += pool.note_unstored(run, depth + 1)

    def free_unread(self, tree: PrefixTree, slots: Ranges[int], state: SlotState, cause: str) -> None:
        """Free slots that no index knows; those that a backup reads are QUARANTINED until that has ended."""
        left, pool = sorted(every_slot(slots)), tree.members[HOST]
        for backup in self.backups.values():
            read = {slot for _, slot in places_of(backup.host, left)} if backup.tree is tree else set()
            if read:
                kept, left = from_slots(sorted(read)), [slot for slot in left if slot not in read]
                if state is SlotState.CACHED:
                    pool.move(kept, state, SlotState.QUARANTINED, cause)
                append(backup.set_aside, kept)
        pool.move(from_slots(left), state, SlotState.FREE, cause)

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


def _reaches(run: Run, pool: int, depth: int) -> bool:
    """Whether a device pool holds the block of a run at `depth`."""
    segment = run.segments[pool]
    return segment is not None and depth < run.start + segment.length


def _spans(tree: PrefixTree, run: Run, transfer: WorkerTransfer) -> Iterable[Span]:
    device, host = transfer.device, transfer.host
    for start, end in transfer.pieces:
        mine, device = cut(device, end - start)
        theirs, host = cut(host, end - start)
        keys = tree.path_keys(tree.resolve(run, end), max(start - 1, 0), end)
        yield span_of(start, keys, theirs, mine)
