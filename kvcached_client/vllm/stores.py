"""Stores on their way: blocks of vLLM's pool that are held until every worker has copied them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvcached_client.attached import Piece, PreparedStore
from kvcached_client.block_job import BlockJob
from kvcached_client.vllm.jobs import job_span
from kvcached_client.vllm.orders import StoreId, StoreOrder
from kvcached_client.vllm.tracked import BlockPool, Tracked


@dataclass(slots=True, eq=False)
class PendingStore:
    """Blocks of one request that were offered.

    Attributes:
        tracked: the request.
        preemptions: that it had then.
        session: whose lease they were offered for.
        start: depth of the first.
        block_ids: where they are, all held.
        earlier: other blocks of the request that the daemon asked for, held, too.
        waiting: workers that have not reported.
    """

    tracked: Tracked
    preemptions: int
    session: int
    start: int
    block_ids: list[int]
    earlier: list[int] = field(default_factory=list)
    waiting: int = 0

    @property
    def is_current(self) -> bool:
        """Whether its request still has the blocks that it had."""
        return not self.tracked.is_finished and self.tracked.preemptions == self.preemptions


class Stores:
    """The stores on their way, from the offer to the last worker's report.

    Args:
        pool: vLLM's blocks.
        shards: workers that report each store.
    """

    def __init__(self, pool: BlockPool, shards: int) -> None:
        self._pool = pool
        self._shards = shards
        self._planning: dict[int, PendingStore] = {}
        self._ready: list[tuple[StoreOrder, PendingStore]] = []
        self._copying: dict[StoreId, PendingStore] = {}

    def __len__(self) -> int:
        return len(self._planning) + len(self._ready) + len(self._copying)

    @property
    def frees_soon(self) -> bool:
        """Whether blocks come free with a store that nobody but it holds."""
        copying = (*self._planning.values(), *(store for _, store in self._ready), *self._copying.values())
        return any(not store.is_current for store in copying)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Keep blocks from being given to another request."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def free(self, block_ids: list[int]) -> None:
        """Let blocks go, so that vLLM takes those at the end of a prefix first."""
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(block_ids)])

    def offered(self, ticket: int, store: PendingStore) -> None:
        """Blocks that are held were offered to the daemon."""
        self._planning[ticket] = store

    def answered(self, ticket: int) -> PendingStore:
        """The store whose answer has come; it is out of the books until `plan`."""
        return self._planning.pop(ticket)

    def plan(self, store: PendingStore, plan: PreparedStore) -> bool:
        """Make what the daemon wants the workers' job; False where blocks that it wants are not there any more."""
        hashes = store.tracked.request.block_hashes
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
        self._ready.append((order, store))
        return True

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """What goes to the workers now."""
        ready, self._ready = self._ready, []
        for order, store in ready:
            store.waiting = self._shards
            self._copying[order.id] = store
        return tuple(order for order, _ in ready)

    def reported(self, reports: Mapping[StoreId, int]) -> list[StoreId]:
        """So many workers are through with each store, well or not. Returns those that every worker is through with."""
        over = []
        for store_id, workers in reports.items():
            store = self._copying[store_id]
            store.waiting -= workers
            if store.waiting <= 0:
                del self._copying[store_id]
                self.drop(store)
                over.append(store_id)
        return over

    def session_lost(self, session: int) -> int:
        """Forget what workers have not been told. Returns how many blocks that is."""
        lost = [store for _, store in self._ready if store.session == session]
        self._ready = [(order, store) for order, store in self._ready if store.session != session]
        for store in lost:
            self.drop(store)
        return sum(len(store.block_ids) for store in lost)

    def drop(self, store: PendingStore) -> None:
        """Let go of the blocks of a store that is in no book."""
        self.free(store.earlier + store.block_ids)

    def _blocks_of(self, store: PendingStore, piece: Piece) -> list[int] | None:
        """Where the blocks of a piece are. Those before the offer are held from now on."""
        first, last = piece.start, piece.start + piece.blocks
        if last > store.start + len(store.block_ids):
            return None
        earlier: list[int] = []
        if first < store.start:
            if not store.is_current:
                return None
            earlier = store.tracked.block_ids[first : min(last, store.start)]
            self.hold(earlier)
            store.earlier += earlier
        return earlier + store.block_ids[max(first - store.start, 0) : max(last - store.start, 0)]
