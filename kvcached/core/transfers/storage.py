"""The storage tier: what is written to storage, what is fetched from it, and whether there is any.

Nothing here waits, and nothing else in the core depends on it: without storage the host pool is the lowest tier.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import (
    BackupSettled,
    FetchSettled,
    StorageAnswered,
    StorageEmptied,
    StorageEvent,
    StorageLost,
    StorageReady,
    StorageSuspended,
)
from kvcached.core.slots.states import STORAGE_TRANSITIONS, StorageState, follow
from kvcached.core.transfers.prefetch import Prefetches, PrefetchLimits
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.storage_copies import BackupPolicy, Backups, Candidates, unmark_all
from kvcached.core.transfers.storage_state import Chain, Prefetch, PrefetchEnd
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import StorageTransfer
from kvcached_client.types import SessionId, TransferId


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """What the storage tier does.

    Attributes:
        backup: which blocks are written.
        watermark_percent: part of the host pool below which, where no more of it is free, `BackupPolicy.ON_EVICTION`
            writes the next victims.
        prefetch: how much prefetching there may be.
    """

    backup: BackupPolicy = BackupPolicy.NEVER
    watermark_percent: int = 0
    prefetch: PrefetchLimits = field(default_factory=PrefetchLimits)


class StorageTier:
    """Decisions about storage.

    Args:
        spec: what it does.
        table: of all transfers.
        generation: of a tree's namespace; None for a tree that no request reaches any more.
        candidates: paths that wait to be backed up.
        locks: of prefixes that prefetches continue.
        trees: tells what is in the index, where that is asked.

    Attributes:
        state: whether it can be used.
        backups, prefetches: the two directions.
        locks: of prefixes that prefetches continue.
    """

    def __init__(
        self,
        spec: StorageSpec,
        table: TransferTable,
        generation: Callable[[PrefixTree], int | None],
        candidates: Candidates,
        locks: PrefixLocks,
        trees: Callable[[], Iterable[PrefixTree]],
    ) -> None:
        self.state = StorageState.ABSENT
        self.backups = Backups(table, generation, candidates)
        self.prefetches = Prefetches(spec.prefetch, table, generation, locks)
        self._table = table
        self.locks = locks
        self._spec = spec
        self._generation = generation
        self._trees = trees
        self._now_ms = 0
        self._last_prefetch = 0

    def enter(self, state: StorageState) -> None:
        """Go along an edge of `STORAGE_TRANSITIONS`."""
        self.state = follow(STORAGE_TRANSITIONS, self.state, state, "storage")

    @property
    def is_active(self) -> bool:
        """Whether there may be something to settle."""
        return self.state is StorageState.READY or bool(self.prefetches.waiting)

    @property
    def copies(self) -> list[StorageTransfer]:
        """Those under way."""
        return [*self._table.backups.values(), *self._table.fetches.values()]

    @property
    def backups_under_way(self) -> list[StorageTransfer]:
        """Those of them that storage reads host slots for."""
        return list(self._table.backups.values())

    def prefetch(self, session: SessionId, chain: Chain, own: Container[TransferId] = ()) -> Prefetch:
        """Begin to bring blocks of a chain, or join whoever brings the same already.

        What there is of the chain by the end is locked until the session has acquired it.

        Args:
            session: who asks.
            chain: the blocks.
            own: stores of the session; those of other sessions are waited for.
        """
        known = self.prefetches.find(chain, own)
        if known is not None:
            self.locks.join(known.id, session)
            return known
        self._last_prefetch += 1
        generation = self._generation(chain.tree)
        prefetch = Prefetch(self._last_prefetch, chain, chain.tree.namespace, generation or 0, own=own)
        if self._table.paused or generation is None:
            prefetch.over(PrefetchEnd.UNAVAILABLE)
        else:
            self.prefetches.begin(prefetch, may_ask=self.state is StorageState.READY)
            self.locks.join(prefetch.id, session)
        return prefetch

    def handle(self, event: StorageEvent) -> None:
        """Take in what arrived. What is about a copy or question that is over changes nothing."""
        match event:
            case StorageReady():
                self._go(StorageState.READY)
                self.backups.candidates.admit(self._spec.backup)
            case StorageEmptied():
                for tree in self._trees():
                    unmark_all(tree)
            case StorageSuspended():
                self._halt(StorageState.SUSPENDED)
            case StorageLost():
                self._halt(StorageState.ABSENT)
                for copy in list(self._table.backups.values()):
                    self.backups.end(copy, 0, self._now_ms)
                self.prefetches.lost()
            case StorageAnswered():
                self.prefetches.answered(event.query, event.found, event.now_us)
            case FetchSettled() | BackupSettled():
                self._settle(event)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._now_ms = now_ms
        self.backups.tick(now_ms)
        self.prefetches.tick(now_ms)
        self.locks.tick(now_ms)

    def settle(self) -> None:
        """Start what may be started."""
        is_ready = self.state is StorageState.READY
        if self.prefetches.waiting:
            self.prefetches.look_again(may_ask=is_ready)
        if is_ready and not self._table.paused and self._spec.backup is not BackupPolicy.NEVER:
            self.backups.start(self._trees, self._spec.watermark_percent)

    def _settle(self, event: FetchSettled | BackupSettled) -> None:
        if isinstance(event, FetchSettled):
            self.prefetches.settled(event.transfer, event.good, event.now_us)
        elif (backup := self._table.backups.get(event.transfer)) is not None:
            self.backups.end(backup, min(max(event.written, 0), backup.blocks), self._now_ms)

    def _go(self, state: StorageState) -> None:
        """Enter a state, unless it is the present one: a process may be lost before it was ready."""
        if state is not self.state:
            self.enter(state)

    def _halt(self, state: StorageState) -> None:
        self._go(state)
        self.backups.candidates.admit(BackupPolicy.NEVER)
        self.backups.candidates.skip_all()
        self.prefetches.halt()
