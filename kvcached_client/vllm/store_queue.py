"""Computed blocks on their way to the daemon: offered in the order of their chain, as far as limits allow.

A request has one offer out at a time, since where the next one starts comes with the answer. While it lives it holds
its blocks by itself; what is offered is held beside that, so that vLLM may preempt or finish it at any moment.
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
        preemptions: that it had then.
        session: whose lease they were offered for.
        start: depth of the first.
        block_ids: where they are, all held.
        earlier: other blocks of the request that the daemon asked for, held, too.
        waiting: workers that have not reported.
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
        """Whether its request still has the blocks that it had."""
        return not self.tracked.is_finished and self.tracked.preemptions == self.preemptions


#: Of vLLM's blocks, the part that offers may hold: the others are left to requests, however long stores take.
HELD_SHARE_MAX: Final = 1 / 4


class Stores:
    """The stores on their way, from the offer to the last worker's report.

    Args:
        pool: vLLM's blocks.
        shards: workers that report each store.

    Attributes:
        held_blocks: blocks that are held; one that is held twice counts twice.
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
        """Blocks that may be held beside those that are."""
        return max(int(len(self._pool.blocks) * HELD_SHARE_MAX) - self.held_blocks, 0)

    @property
    def frees_soon(self) -> bool:
        """Whether blocks come free with a store that nobody but it holds."""
        copying = (*self._planning.values(), *(store for _, store in self._ready), *self._copying.values())
        return any(not store.is_current for store in copying)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from being given to another request."""
        self.held_blocks += len(block_ids)
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def free(self, block_ids: list[int]) -> None:
        """Let blocks go, so that vLLM takes those at the end of a prefix first."""
        self.held_blocks -= len(block_ids)
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


#: Stores that hold blocks at once. Further offers wait while their requests live.
STORES_MAX: Final = 64
#: Blocks of one offer: long prompts are stored in parts, and hold no more than that at a time.
OFFER_BLOCKS_MAX: Final = 1024


class StoreQueue:
    """Offers blocks and follows what becomes of them.

    Args:
        link: to the daemon.
        leases: for requests that have none yet, or none any more.
        stores: where blocks are held.

    Attributes:
        skipped_blocks: computed blocks that were offered, or to be offered, and not stored.
    """

    def __init__(self, link: LinkPort, leases: Leases, stores: Stores) -> None:
        self.skipped_blocks = 0
        self._link = link
        self._leases = leases
        self._stores = stores
        #: Requests that could be offered but for a limit.
        self._postponed: dict[RequestState, None] = {}
        #: Finished requests with something left to do.
        self._parting: dict[RequestState, None] = {}
        #: Stores that failed on a worker while others are at it.
        self._failed: set[StoreId] = set()

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that needs further steps."""
        return bool(self._stores or self._parting)

    @property
    def frees_soon(self) -> bool:
        """Whether blocks come free with a store that nobody but it holds."""
        return self._stores.frees_soon

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """Offer what was postponed; stores that go to the workers now."""
        for tracked in list(self._postponed):
            self.advance(tracked)
        return self._stores.take_orders()

    def advance(self, tracked: RequestState) -> None:
        """Do what is next for a request's blocks, unless an answer is awaited, which leads here again."""
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
        """A request is about to be forgotten by vLLM: hold what is left to offer."""
        if tracked.lease is None and not tracked.ticket:
            return
        if tracked.full > tracked.offered:
            self._hold_parting(tracked)
        self._parting[tracked] = None
        self.advance(tracked)

    def planned(self, event: Planned) -> None:
        """The daemon has said what of an offer to copy where."""
        store, plan = self._stores.answered(event.ticket), event.plan
        tracked, end = store.tracked, store.start + len(store.block_ids)
        is_awaited = tracked.ticket == event.ticket
        if plan.depth < end:
            self.skipped_blocks += end - max(plan.depth, store.start)
        if is_awaited:
            tracked.ticket = 0
            tracked.depth = plan.depth
            if plan.depth < end:  # no room: again when another block is full
                tracked.offered = max(tracked.offered, tracked.full)
        if not plan.transfer:
            self._stores.drop(store)
        elif not self._stores.plan(store, plan):
            self.skipped_blocks += len(plan.slots)
            self._link.submit(DropStore(store.session, plan.transfer, "earlier blocks are not there any more"))
        if is_awaited:
            self.advance(tracked)

    def unplanned(self, ticket: int) -> None:
        """Nothing of an offer can be stored."""
        store = self._stores.answered(ticket)
        self._stores.drop(store)
        self.skipped_blocks += len(store.block_ids)
        tracked = store.tracked
        if tracked.ticket == ticket:
            tracked.ticket = 0
            tracked.offered = max(tracked.offered, tracked.full)
            self.advance(tracked)

    def reported(self, done: Mapping[StoreId, int], failed: Collection[StoreId]) -> None:
        """So many workers are through with each store; some failed on a worker, which may not have told the daemon."""
        self._failed.update(failed)
        for session, transfer in self._stores.reported(done):
            if (session, transfer) in self._failed:
                self._failed.remove((session, transfer))
                self._link.submit(DropStore(session, TransferId(transfer), "a worker could not store it"))

    def lose(self, session: int, requests: Iterable[RequestState]) -> None:
        """A session is over: what it gave is void. What workers have been told of it they end by themselves."""
        self.skipped_blocks += self._stores.session_lost(session)
        for tracked in (*requests, *self._parting):
            if tracked.session == session and tracked.lease is not None:
                tracked.forget_lease()
                tracked.is_asked = tracked.is_asked and not tracked.wants_load

    def _offer(self, tracked: RequestState) -> None:
        """Offer the blocks behind the lease's depth. The daemon may want those before it that were computed again."""
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
        if tracked.is_finished:  # held already, by the request
            tracked.parting_start, tracked.parting = start + len(blocks), tracked.parting[len(blocks) :]
        else:
            self._stores.hold(recomputed + blocks)
        tracked.ticket = offer.ticket
        tracked.offered = start + len(blocks)
        tracked.recomputed_from = None
        first, held = start - len(recomputed), recomputed + blocks
        self._stores.offered(offer.ticket, PendingStore(tracked, tracked.preemptions, tracked.session, first, held))

    def _blocks_to_offer(self, tracked: RequestState, start: int) -> list[int]:
        """The blocks from depth `start` on, up to the limits; none where they are not held any more."""
        if not tracked.is_finished:
            return tracked.block_ids[start : min(tracked.full, start + OFFER_BLOCKS_MAX, start + self._stores.room)]
        known = max(start - tracked.parting_start, 0)
        self._stores.free(tracked.parting[:known])
        tracked.parting_start, tracked.parting = tracked.parting_start + known, tracked.parting[known:]
        return tracked.parting[:OFFER_BLOCKS_MAX] if tracked.parting_start == start else []

    def _put_off(self, tracked: RequestState) -> None:
        """Try again with the next step, as long as the request lives."""
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
        """Nothing more is to be done for a finished request."""
        self._stores.free(tracked.parting)
        self.skipped_blocks += len(tracked.parting)
        tracked.parting = []
        self._leases.release(tracked)
        self._parting.pop(tracked, None)
