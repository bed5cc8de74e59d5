"""Stores in progress: which blocks of vLLM's pool they hold, and what workers have reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.offload import Piece, PreparedStore
from kvcached_client.vllm.orders import StoreId, StoreOrder, job_span
from kvcached_client.vllm.scheduling.request_state import BlockPool, RequestState


@dataclass(slots=True, eq=False)
class PendingStore:
    """Blocks of one request that were offered.

    Attributes:
        tracked: the request.
        preemptions: the request's number of preemptions at the time of the offer.
        session: number of the lease's session.
        start: depth of the first block.
        block_ids: the blocks in vLLM's pool; all are held.
        earlier: earlier blocks of the request that the daemon asked for; also held.
        pieces: the blocks that the daemon wants.
        waiting: number of workers that have not reported the store.
    """

    tracked: RequestState
    preemptions: int
    session: int
    start: int
    block_ids: list[int]
    earlier: list[int] = field(default_factory=list)
    pieces: tuple[Piece, ...] = ()
    waiting: int = 0

    @property
    def is_current(self) -> bool:
        """Whether the request still has the blocks that it had at the time of the offer."""
        return not self.tracked.is_finished and self.tracked.request.num_preemptions == self.preemptions


#: The share of vLLM's blocks that offers may hold. The others stay available to requests, however long stores take.
HELD_SHARE_MAX: Final = 1 / 4


class Stores:
    """The stores in progress, from the offer to the last worker's report.

    Args:
        pool: vLLM's blocks.
        shards: number of workers that report each store.

    Attributes:
        held_blocks: number of blocks that are held; a block that is held twice counts twice.
    """

    def __init__(self, pool: BlockPool, shards: int) -> None:
        self.held_blocks = 0
        self._pool = pool
        self._shards = shards
        self._planning: dict[int, PendingStore] = {}
        self._ready: list[tuple[StoreOrder, PendingStore]] = []
        self._copying: dict[StoreId, PendingStore] = {}

    def __len__(self) -> int:
        return len(self._planning) + len(self._ready) + len(self._copying)

    def has_any_of(self, tracked: RequestState) -> bool:
        """Whether blocks or states of a request are being stored."""
        return any(store.tracked.request is tracked.request for store in self._all())

    @property
    def room(self) -> int:
        """Number of further blocks that may be held."""
        return max(int(len(self._pool.blocks) * HELD_SHARE_MAX) - self.held_blocks, 0)

    @property
    def is_half_full(self) -> bool:
        """Whether half of the blocks that may be held are held."""
        return self.room <= self.held_blocks

    @property
    def frees_soon(self) -> bool:
        """Whether the end of a store frees blocks that no request holds."""
        return any(not store.is_current for store in self._all())

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold blocks, so that vLLM does not give them to another request."""
        self.held_blocks += len(block_ids)
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def free(self, block_ids: list[int]) -> None:
        """Free blocks in an order in which vLLM reuses the end of a prefix first."""
        self.held_blocks -= len(block_ids)
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(block_ids)])

    def offered(self, ticket: int, store: PendingStore) -> None:
        """Note an offer of held blocks to the daemon."""
        self._planning[ticket] = store

    def answered(self, ticket: int) -> PendingStore:
        """Remove and return the store of an offer whose event has come; `plan` adds it again."""
        return self._planning.pop(ticket)

    def plan(self, store: PendingStore, plan: PreparedStore) -> bool:
        """Make an order of the blocks that the daemon wants.

        Returns:
            False if it wants blocks before the offer that no longer exist, or more of them than may be held.
        """
        hashes = store.tracked.chain
        spans = []
        at = 0
        for piece in plan.pieces:
            blocks = self._blocks_of(store, piece)
            if blocks is None:
                self.drop(store)
                return False
            spans.append(job_span(hashes, piece.start, blocks, plan.slots[at : at + piece.blocks]))
            at += piece.blocks
        order = StoreOrder(store.session, BlockJob(plan.transfer, plan.generation, tuple(spans)))
        store.pieces = plan.pieces
        self._ready.append((order, store))
        return True

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """The orders that go to the workers now."""
        ready, self._ready = self._ready, []
        for order, store in ready:
            store.waiting = self._shards
            self._copying[order.id] = store
        return tuple(order for order, _ in ready)

    def reported(self, reports: Mapping[StoreId, int]) -> list[tuple[StoreId, PendingStore]]:
        """Count the workers that have ended each store, or failed; returns the stores that all workers have ended."""
        over = []
        for store_id, workers in reports.items():
            store = self._copying[store_id]
            store.waiting -= workers
            if store.waiting <= 0:
                del self._copying[store_id]
                self.drop(store)
                over.append((store_id, store))
        return over

    def session_lost(self, session: int) -> int:
        """Drop the orders of a session that workers do not have yet; returns their number of blocks."""
        lost = [store for _, store in self._ready if store.session == session]
        self._ready = [(order, store) for order, store in self._ready if store.session != session]
        for store in lost:
            self.drop(store)
        return sum(len(store.block_ids) for store in lost)

    def drop(self, store: PendingStore) -> None:
        """Free the blocks of a store that was removed."""
        self.free(store.earlier + store.block_ids)

    def _all(self) -> tuple[PendingStore, ...]:
        return (*self._planning.values(), *(store for _, store in self._ready), *self._copying.values())

    def _blocks_of(self, store: PendingStore, piece: Piece) -> list[int] | None:
        """The blocks of a piece in vLLM's pool; None if they cannot be held. Those before the offer are held now."""
        first, last = piece.start, piece.start + piece.blocks
        if last > store.start + len(store.block_ids):
            return None
        earlier: list[int] = []
        if first < store.start:
            if not store.is_current:
                return None
            stop = min(last, store.start)
            earlier = store.tracked.block_ids[first:stop]
            if len(earlier) < stop - first or len(earlier) > self.room:
                return None
            self.hold(earlier)
            store.earlier += earlier
        return earlier + store.block_ids[max(first - store.start, 0) : max(last - store.start, 0)]
