"""Computed blocks on their way to the daemon: offered in the order of their chain, as far as limits allow.

A request has one offer out at a time, since where the next one starts comes with the answer. While it lives it holds
its blocks by itself; what is offered is held beside that, so that vLLM may preempt or finish it at any moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from kvcached_client.types import TransferId
from kvcached_client.vllm.commands import DropStore, Offer, Planned
from kvcached_client.vllm.jobs import pack_keys
from kvcached_client.vllm.leases import Leases, LinkPort
from kvcached_client.vllm.orders import StoreId, StoreOrder
from kvcached_client.vllm.stores import PendingStore, Stores
from kvcached_client.vllm.tracked import Tracked

#: Stores that hold blocks at once. Further offers wait while their requests live.
STORES_MAX: Final = 64
#: Blocks of one offer: long prompts are stored in parts, and hold no more than that at a time.
OFFER_BLOCKS_MAX: Final = 1024


class Offers:
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
        self._postponed: dict[Tracked, None] = {}
        #: Finished requests with something left to do.
        self._parting: dict[Tracked, None] = {}
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

    def advance(self, tracked: Tracked) -> None:
        """Do what is next for a request's blocks, unless an answer is awaited, which leads here again."""
        self._postponed.pop(tracked, None)
        if tracked.ticket:
            return
        if tracked.lease is None:
            if tracked.is_finished:
                self._part(tracked)
            elif tracked.due:
                self._leases.seek(tracked, load=False)
        elif tracked.due > max(tracked.offered, tracked.depth):
            self._offer(tracked)
        elif tracked.is_finished:
            self._part(tracked)

    def finish(self, tracked: Tracked) -> None:
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

    def lose(self, session: int, requests: Iterable[Tracked]) -> None:
        """A session is over: what it gave is void. What workers have been told of it they end by themselves."""
        self.skipped_blocks += self._stores.session_lost(session)
        for tracked in (*requests, *self._parting):
            if tracked.session == session and tracked.lease is not None:
                tracked.forget_lease()
                tracked.is_asked = tracked.is_asked and not tracked.wants_load

    def _offer(self, tracked: Tracked) -> None:
        """Offer the blocks behind the lease's depth."""
        if len(self._stores) >= STORES_MAX or not self._link.is_taking or tracked.lease is None:
            self._put_off(tracked)
            return
        start = tracked.depth
        blocks = self._blocks_to_offer(tracked, start)
        keys = pack_keys(tracked.request.block_hashes, start, start + len(blocks))
        ticket = self._leases.next_ticket()
        if not blocks or not self._link.submit(Offer(ticket, tracked.session, tracked.lease, start, keys)):
            self._put_off(tracked)
            return
        if tracked.is_finished:  # held already, by the request
            tracked.parting_start, tracked.parting = start + len(blocks), tracked.parting[len(blocks) :]
        else:
            self._stores.hold(blocks)
        tracked.ticket = ticket
        tracked.offered = start + len(blocks)
        self._stores.offered(ticket, PendingStore(tracked, tracked.preemptions, tracked.session, start, blocks))

    def _blocks_to_offer(self, tracked: Tracked, start: int) -> list[int]:
        """The blocks from depth `start` on, up to the limit; none where they are not held any more."""
        if not tracked.is_finished:
            return tracked.block_ids[start : min(tracked.full, start + OFFER_BLOCKS_MAX)]
        known = max(start - tracked.parting_start, 0)
        self._stores.free(tracked.parting[:known])
        tracked.parting_start, tracked.parting = tracked.parting_start + known, tracked.parting[known:]
        return tracked.parting[:OFFER_BLOCKS_MAX] if tracked.parting_start == start else []

    def _put_off(self, tracked: Tracked) -> None:
        """Try again with the next step, as long as the request lives."""
        if tracked.is_finished:
            self._part(tracked)
        else:
            self._postponed[tracked] = None

    def _hold_parting(self, tracked: Tracked) -> None:
        start = tracked.offered if tracked.ticket else tracked.depth
        if len(self._stores) + len(self._parting) >= STORES_MAX:
            self.skipped_blocks += tracked.full - start
            tracked.full = tracked.due = 0
            return
        tracked.parting_start, tracked.parting = start, tracked.block_ids[start : tracked.full]
        self._stores.hold(tracked.parting)

    def _part(self, tracked: Tracked) -> None:
        """Nothing more is to be done for a finished request."""
        self._stores.free(tracked.parting)
        self.skipped_blocks += len(tracked.parting)
        tracked.parting = []
        self._leases.release(tracked)
        self._parting.pop(tracked, None)
