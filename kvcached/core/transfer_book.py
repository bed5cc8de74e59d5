"""Transfers under way: their ids, their pins, their start, and what somebody's waiting for one changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcached.core.answers import Grant
from kvcached.core.bad_blocks import LetGo, free_now
from kvcached.core.effects import BlockSpan, Effect, HurryTransfer, StartTransfer, TransferKind
from kvcached.core.lease import Lease
from kvcached.core.pool import DevicePool
from kvcached.core.ranges import cut
from kvcached.core.run import KEY_SIZE, Run
from kvcached.core.session import Session
from kvcached.core.states import TransferState
from kvcached.core.transfer import Transfer
from kvcached.core.tree import HOST, PrefixTree
from kvcached_client.types import SessionId, ShardIndex, TransferId


class TransferBook:
    """What stores and loads share.

    Attributes:
        transfers: those that have not ended.
        sessions: of the cache.
        effects: of the cache.
        counters: of the cache.
        let_go: told of each host slot whose block has left the index because it is bad.
    """

    def __init__(self, sessions: dict[SessionId, Session], effects: list[Effect], counters: Counter[str]) -> None:
        self.transfers: dict[TransferId, Transfer] = {}
        self.sessions = sessions
        self.effects = effects
        self.counters = counters
        self.let_go: LetGo = free_now
        self._last = 0

    def of_pool(self, pool: DevicePool, kind: TransferKind | None = None) -> list[Transfer]:
        """A pool's transfers, those of its lost memory included."""
        return [each for each in self.transfers.values() if each.pool is pool and kind in (None, each.kind)]

    def hurry(self, transfer: Transfer) -> None:
        """Somebody waits for a transfer now."""
        if not transfer.urgent and transfer.state is TransferState.RUNNING:
            self.effects.append(HurryTransfer(transfer.id, transfer.pool.name))
        transfer.urgent = True

    def next_id(self) -> TransferId:
        """An id that no transfer of this daemon has had."""
        self._last += 1
        return TransferId(self._last)

    def grant(self, session: Session, lease: Lease) -> Grant:
        """What a lease holds, and the loads that part of its hit waits for."""
        tree, pool = session.tree, session.pool
        run = tree.resolve(lease.run, lease.hit)
        hit_ranges = tree.path_ranges(run, lease.hit, pool.index)
        loads = [self.transfers[transfer] for transfer in sorted(lease.loads)]
        ready = min((load.start for load in loads), default=lease.hit)
        tickets = tuple((load.id, load.progress) for load in loads)
        return Grant(lease.id, lease.hit, ready, tickets, hit_ranges, lease.open.tobytes())

    def pin(self, transfer: Transfer) -> None:
        """Pin its path in both pools."""
        tree, end = transfer.tree, transfer.end
        tree.pin(tree.resolve(transfer.run, end), end, transfer.pool.index)
        tree.pin(tree.resolve(transfer.run, end), end, HOST)

    def start(self, transfer: Transfer) -> None:
        """Order it from every shard."""
        tree, run = transfer.tree, transfer.run
        self.transfers[transfer.id] = transfer
        transfer.enter(TransferState.RUNNING)
        transfer.was_started = True
        transfer.waiting = {ShardIndex(shard) for shard in range(transfer.pool.shards)}
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


def _spans(tree: PrefixTree, run: Run, transfer: Transfer) -> Iterable[BlockSpan]:
    device, host = transfer.device, transfer.host
    for start, end in transfer.pieces:
        mine, device = cut(device, end - start)
        theirs, host = cut(host, end - start)
        run_here = tree.resolve(run, end)
        keys = tree.path_keys(run_here, max(start - 1, 0), end)
        parent = keys[:KEY_SIZE] if start else b""
        yield BlockSpan(start, parent, keys[KEY_SIZE:] if start else keys, mine, theirs)
