"""Stores of computed blocks: offered to the daemon in the order of their chain, as far as limits allow.

A request has at most one offer without a reply, because the reply says where the next offer starts. A running request
holds its blocks itself. Offered blocks are also held here, so that vLLM may preempt or finish the request at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcached_client.blocks.transfers import BlockJob
from kvcached_client.offload import Piece, PreparedStore
from kvcached_client.types import TransferId
from kvcached_client.vllm.commands import DropStore, LinkPort, Offer, Planned
from kvcached_client.vllm.leases import Leases
from kvcached_client.vllm.orders import StoreId, StoreOrder, job_span, pack_keys
from kvcached_client.vllm.request_state import BlockPool, RequestState


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
        waiting: number of workers that have not reported the store.
    """

    tracked: RequestState
    preemptions: int
    session: int
    start: int
    block_ids: list[int]
    earlier: list[int] = field(default_factory=list)
    waiting: int = 0

    @property
    def is_current(self) -> bool:
        """Whether the request still has the blocks that it had at the time of the offer."""
        return not self.tracked.is_finished and self.tracked.preemptions == self.preemptions


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

    @property
    def room(self) -> int:
        """Number of further blocks that may be held."""
        return max(int(len(self._pool.blocks) * HELD_SHARE_MAX) - self.held_blocks, 0)

    @property
    def frees_soon(self) -> bool:
        """Whether the end of a store frees blocks that no request holds."""
        copying = (*self._planning.values(), *(store for _, store in self._ready), *self._copying.values())
        return any(not store.is_current for store in copying)

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
        """Make an order of the blocks that the daemon wants; returns False if it wants blocks that no longer exist."""
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
        """The orders that go to the workers now."""
        ready, self._ready = self._ready, []
        for order, store in ready:
            store.waiting = self._shards
            self._copying[order.id] = store
        return tuple(order for order, _ in ready)

    def reported(self, reports: Mapping[StoreId, int]) -> list[StoreId]:
        """Count the workers that have ended each store, or failed; returns the stores that all workers have ended."""
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
        """Drop the orders of a session that workers do not have yet; returns their number of blocks."""
        lost = [store for _, store in self._ready if store.session == session]
        self._ready = [(order, store) for order, store in self._ready if store.session != session]
        for store in lost:
            self.drop(store)
        return sum(len(store.block_ids) for store in lost)

    def drop(self, store: PendingStore) -> None:
        """Free the blocks of a store that was removed."""
        self.free(store.earlier + store.block_ids)

    def _blocks_of(self, store: PendingStore, piece: Piece) -> list[int] | None:
        """The blocks of a piece in vLLM's pool. Blocks before the offer are held from now on."""
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


#: Stores that hold blocks at once. Further offers wait while their requests live.
STORES_MAX: Final = 64
#: Blocks of one offer: a long prompt is stored in parts, and holds no more blocks than this at a time.
OFFER_BLOCKS_MAX: Final = 1024


class StoreQueue:
    """Offers blocks and follows their stores.

    Args:
        link: to the daemon's thread.
        leases: for requests without a lease.
        stores: the stores in progress.

    Attributes:
        skipped_blocks: number of computed blocks that were not stored.
    """

    def __init__(self, link: LinkPort, leases: Leases, stores: Stores) -> None:
        self.skipped_blocks = 0
        self._link = link
        self._leases = leases
        self._stores = stores
        #: Requests whose next offer waits because of a limit.
        self._postponed: dict[RequestState, None] = {}
        #: Finished requests that still have blocks to offer, or a lease.
        self._parting: dict[RequestState, None] = {}
        #: Stores that failed on one worker, and that other workers have not ended.
        self._failed: set[StoreId] = set()

    @property
    def is_busy(self) -> bool:
        """Whether stores need further steps."""
        return bool(self._stores or self._parting)

    @property
    def frees_soon(self) -> bool:
        """Whether the end of a store frees blocks that no request holds."""
        return self._stores.frees_soon

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """Make the postponed offers, and return the orders that go to the workers now."""
        for tracked in list(self._postponed):
            self.advance(tracked)
        return self._stores.take_orders()

    def advance(self, tracked: RequestState) -> None:
        """Take the next step for a request's blocks. Does nothing while an event is awaited, which calls this again."""
        self._postponed.pop(tracked, None)
        if tracked.ticket:
            return
        if tracked.lease is None:
            if tracked.is_finished:
                self._part(tracked)
            elif tracked.due:
                self._leases.seek(tracked, load=False)
        elif tracked.due > max(tracked.offered, tracked.depth) or tracked.has_recomputed:
            self._offer(tracked)
        elif tracked.is_finished:
            self._part(tracked)

    def finish(self, tracked: RequestState) -> None:
        """Hold the blocks that are left to offer of a request that vLLM is about to forget."""
        if tracked.lease is None and not tracked.ticket:
            return
        if tracked.full > tracked.offered:
            self._hold_parting(tracked)
        self._parting[tracked] = None
        self.advance(tracked)

    def planned(self, event: Planned) -> None:
        """Order the store that the daemon planned for an offer."""
        store, plan = self._stores.answered(event.ticket), event.plan
        tracked, end = store.tracked, store.start + len(store.block_ids)
        is_awaited = tracked.ticket == event.ticket
        if plan.depth < end:
            self.skipped_blocks += end - max(plan.depth, store.start)
        if is_awaited:
            tracked.ticket = 0
            tracked.depth = plan.depth
            if plan.depth < end:  # no room: offer again when another block is full
                tracked.offered = max(tracked.offered, tracked.full)
        if not plan.transfer:
            self._stores.drop(store)
        elif not self._stores.plan(store, plan):
            self.skipped_blocks += len(plan.slots)
            self._link.submit(DropStore(store.session, plan.transfer, "earlier blocks no longer exist"))
        if is_awaited:
            self.advance(tracked)

    def unplanned(self, ticket: int) -> None:
        """Give up an offer of which no block can be stored."""
        store = self._stores.answered(ticket)
        self._stores.drop(store)
        self.skipped_blocks += len(store.block_ids)
        tracked = store.tracked
        if tracked.ticket == ticket:
            tracked.ticket = 0
            tracked.offered = max(tracked.offered, tracked.full)
            self.advance(tracked)

    def reported(self, done: Mapping[StoreId, int], failed: Collection[StoreId]) -> None:
        """Note the workers' reports. Cancels failed stores, because the worker may not have told the daemon."""
        self._failed.update(failed)
        for session, transfer in self._stores.reported(done):
            if (session, transfer) in self._failed:
                self._failed.remove((session, transfer))
                self._link.submit(DropStore(session, TransferId(transfer), "a worker could not store it"))

    def lose(self, session: int, requests: Iterable[RequestState]) -> None:
        """Forget leases and orders of a session that is over. Workers end the orders that they have by themselves."""
        self.skipped_blocks += self._stores.session_lost(session)
        for tracked in (*requests, *self._parting):
            if tracked.session == session and tracked.lease is not None:
                tracked.forget_lease()
                tracked.is_asked = tracked.is_asked and not tracked.wants_load

    def _offer(self, tracked: RequestState) -> None:
        """Offer the blocks after the lease's depth. The daemon may also want recomputed blocks before it."""
        if len(self._stores) >= STORES_MAX or not self._link.is_taking or tracked.lease is None:
            self._put_off(tracked)
            return
        start = tracked.depth
        blocks = self._blocks_to_offer(tracked, start)
        recomputed = tracked.block_ids[tracked.recomputed_from : start] if tracked.has_recomputed else []
        if len(recomputed) + len(blocks) > self._stores.room:
            recomputed = []
        keys = pack_keys(tracked.request.block_hashes, start, start + len(blocks))
        offer = Offer(self._leases.next_ticket(), tracked.session, tracked.lease, start, keys)
        if not (blocks or recomputed) or not self._link.submit(offer):
            self._put_off(tracked)
            return
        if tracked.is_finished:  # its blocks are held already
            tracked.parting_start, tracked.parting = start + len(blocks), tracked.parting[len(blocks) :]
        else:
            self._stores.hold(recomputed + blocks)
        tracked.ticket = offer.ticket
        tracked.offered = start + len(blocks)
        tracked.recomputed_from = None
        first, held = start - len(recomputed), recomputed + blocks
        self._stores.offered(offer.ticket, PendingStore(tracked, tracked.preemptions, tracked.session, first, held))

    def _blocks_to_offer(self, tracked: RequestState, start: int) -> list[int]:
        """The blocks from depth `start` on, up to the limits; none if they are no longer held."""
        if not tracked.is_finished:
            return tracked.block_ids[start : min(tracked.full, start + OFFER_BLOCKS_MAX, start + self._stores.room)]
        known = max(start - tracked.parting_start, 0)
        self._stores.free(tracked.parting[:known])
        tracked.parting_start, tracked.parting = tracked.parting_start + known, tracked.parting[known:]
        return tracked.parting[:OFFER_BLOCKS_MAX] if tracked.parting_start == start else []

    def _put_off(self, tracked: RequestState) -> None:
        """Try again with the next step, unless the request is finished."""
        if tracked.is_finished:
            self._part(tracked)
        else:
            self._postponed[tracked] = None

    def _hold_parting(self, tracked: RequestState) -> None:
        start = tracked.offered if tracked.ticket else tracked.depth
        has_turn = len(self._stores) + len(self._parting) < STORES_MAX
        end = min(tracked.full, start + self._stores.room) if has_turn else start
        self.skipped_blocks += tracked.full - end
        tracked.full = tracked.due = end
        tracked.parting_start, tracked.parting = start, tracked.block_ids[start : tracked.full]
        self._stores.hold(tracked.parting)

    def _part(self, tracked: RequestState) -> None:
        """Free the blocks and the lease of a finished request."""
        self._stores.free(tracked.parting)
        self.skipped_blocks += len(tracked.parting)
        tracked.parting = []
        self._leases.release(tracked)
        self._parting.pop(tracked, None)
