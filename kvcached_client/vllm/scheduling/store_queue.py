"""Stores of computed blocks: offered to the daemon in the order of their chain, as far as limits allow.

A request has at most one offer without a reply, because the reply says where the next offer starts. A running request
holds its blocks itself. Offered blocks are also held here, so that vLLM may preempt or finish the request at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from kvcached_client.types import TransferId
from kvcached_client.vllm.daemon.commands import DropStore, Offer, Pinned, Planned, Unplanned
from kvcached_client.vllm.daemon.inbox import LinkPort
from kvcached_client.vllm.orders import StoreId, StoreOrder, pack_keys
from kvcached_client.vllm.scheduling.chains import Chains
from kvcached_client.vllm.scheduling.leases import Leases
from kvcached_client.vllm.scheduling.request_state import RequestState, Step
from kvcached_client.vllm.scheduling.states import WaitingStates, completed_states
from kvcached_client.vllm.scheduling.stores import PendingStore, Stores

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
        chains: how blocks form chains.

    Attributes:
        skipped_blocks: number of computed blocks that were not stored.
        refused_pins: number of finished requests of whose blocks none could be pinned.
    """

    def __init__(self, link: LinkPort, leases: Leases, stores: Stores, chains: Chains) -> None:
        self.skipped_blocks = self.refused_pins = 0
        self._link = link
        self._leases = leases
        self._stores = stores
        self._chains = chains
        #: Requests whose next offer waits because of a limit.
        self._postponed: dict[RequestState, None] = {}
        #: Finished requests that still have blocks to offer, or a lease.
        self._parting: dict[RequestState, None] = {}
        #: Finished requests whose prompt is to be pinned once their stores are over.
        self._to_pin: dict[RequestState, None] = {}
        self._states = WaitingStates(chains)
        #: Stores that failed on one worker, and that other workers have not ended.
        self._failed: set[StoreId] = set()

    @property
    def is_busy(self) -> bool:
        """Whether stores need further steps."""
        return bool(self._stores or self._parting or self._states)

    @property
    def frees_soon(self) -> bool:
        """Whether the end of a store frees blocks that no request holds.

        vLLM then preempts nobody, so nothing counts here that waits for a further step of a request.
        """
        if not self._chains.is_grouped:
            return self._stores.frees_soon
        return bool(self._stores or self._parting) or self._states.frees_soon(self._is_storing)

    def keep(self, tracked: RequestState, full: int) -> int:
        """Hold the blocks of a request with several groups until their offer: vLLM may free them with the next step.

        Call it in the step that fills the blocks. The chain ends before a unit with a block that vLLM does not keep, or
        that may not be held.

        Args:
            tracked: the request.
            full: number of leading blocks that are full at the end of this step.

        Returns:
            Number of leading blocks that are stored, offered, or held now.
        """
        if not self._link.is_taking:
            self.drop_kept(tracked)
            return tracked.full
        if not tracked.parting:
            tracked.parting_start = tracked.offered if tracked.ticket else tracked.depth
        start = tracked.parting_start + len(tracked.parting)
        kept = self._chains.live_run(tracked, start, min(full, start + self._stores.room))
        units = (start + len(kept)) // self._chains.unit_blocks
        kept = kept[: max(units * self._chains.unit_blocks - start, 0)]
        self._stores.hold(kept)
        self._watch_held()
        tracked.parting = tracked.parting + kept
        return start + len(kept)

    def offer_kept(self, requests: Iterable[RequestState]) -> None:
        """Offer what waits for more blocks, where no step may come that fills them: vLLM cannot reset what is held.

        What a daemon that is behind does not take is freed: vLLM can sleep without it.
        """
        for tracked in [each for each in requests if each.parting and not each.ticket]:
            tracked.due = tracked.full
            self.advance(tracked)
            if not tracked.ticket and not (tracked in self._postponed and self._link.is_taking):
                self._put_aside(tracked)

    def drop_kept(self, tracked: RequestState) -> None:
        """Free the blocks of a request that wait for their offer."""
        self._stores.free(tracked.parting)
        tracked.parting = []

    def forget_kept(self, tracked: RequestState) -> None:
        """Free also the states of a request that loses its blocks."""
        self.drop_kept(tracked)
        for state in self._states.take_of(tracked):
            self.skipped_blocks += len(state.parting)
            self.drop_kept(state)

    def keep_states(self, step: Step, by_id: Mapping[str, RequestState]) -> None:
        """Hold the states that this step completes, until they are stored."""
        for request_id, units, block_ids in completed_states(step, self._chains):
            tracked = by_id.get(request_id)
            if tracked is not None and tracked.wishes.share and units > tracked.loaded_units:
                self.keep_state(tracked, units, block_ids)

    def keep_state(self, tracked: RequestState, units: int, block_ids: list[int]) -> None:
        """Hold the states behind so many units of a request's chain until they are stored.

        Call it in the step that completes them. They are not stored if the blocks before them are not, or if no more
        blocks may be held.
        """
        before = units * self._chains.unit_blocks
        if tracked.full < before or len(block_ids) > self._stores.room or not self._link.is_taking:
            self.skipped_blocks += len(block_ids)
            return
        self._stores.hold(block_ids)
        self._watch_held()
        self._states.add(tracked, units, block_ids)

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """Make the postponed offers, and return the orders that go to the workers now."""
        for tracked in list(self._postponed):
            self.advance(tracked)
        for state in self._states.take_ready(self._is_storing):
            self._parting[state] = None
            if not self._leases.seek(state, load=False):
                self._part(state)
        return self._stores.take_orders()

    def advance(self, tracked: RequestState) -> None:
        """Take the next step for a request's blocks. Does nothing while an event is awaited, which calls this again.

        An event may come in the step that preempts the request, when vLLM has given its blocks to others.
        """
        self._postponed.pop(tracked, None)
        if tracked.ticket or tracked.is_preempted:
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
        if tracked.wishes.pin_ttl_ms:
            self._to_pin[tracked] = None
        if tracked.lease is None and not tracked.ticket:
            self.drop_kept(tracked)
            self._pin_stored()
            return
        if tracked.full > tracked.offered and not self._chains.is_grouped:
            self._hold_parting(tracked)
        self._parting[tracked] = None
        self.advance(tracked)

    def take(self, event: Planned | Unplanned | Pinned) -> None:
        """Take the event of an offer or a pin."""
        match event:
            case Planned():
                self.planned(event)
            case Unplanned(ticket=ticket):
                self.unplanned(ticket)
            case Pinned(blocks=blocks):
                self.refused_pins += not blocks

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
                self._put_aside(tracked)
        if not plan.transfer:
            self._stores.drop(store)
        elif not self._stores.plan(store, plan):
            self.skipped_blocks += len(plan.slots)
            self._link.submit(
                DropStore(store.session, plan.transfer, "earlier blocks no longer exist, or are too many")
            )
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
            self._put_aside(tracked)
            self.advance(tracked)

    def reported(self, done: Mapping[StoreId, int], failed: Collection[StoreId]) -> None:
        """Note the workers' reports. Cancels failed stores, because the worker may not have told the daemon."""
        self._failed.update(failed)
        for store_id, store in self._stores.reported(done):
            if store_id in self._failed:
                self._failed.remove(store_id)
                session, transfer = store_id
                self._link.submit(DropStore(session, TransferId(transfer), "a worker could not store it"))
                continue
            for piece in store.pieces:
                self._leases.announce(store.tracked, piece.start, piece.start + piece.blocks)
        self._pin_stored()

    def lose(self, session: int, requests: Iterable[RequestState]) -> None:
        """Forget leases and orders of a session that is over. Workers end the orders that they have by themselves."""
        self.skipped_blocks += self._stores.session_lost(session)
        for tracked in (*requests, *self._parting):
            if tracked.session == session and tracked.lease is not None:
                tracked.forget_lease()
                if not tracked.is_finished:
                    self.forget_kept(tracked)
                tracked.is_asked = tracked.is_asked and not tracked.wants_load

    def _put_aside(self, tracked: RequestState) -> None:
        """Offer no more of what is full now. What waits for its offer is behind blocks that were not stored."""
        tracked.offered = max(tracked.offered, tracked.full)
        if not tracked.is_finished:
            self.drop_kept(tracked)

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
        keys = pack_keys(tracked.chain, start, start + len(blocks))
        told = self._leases.told_tokens.of(tracked, start, start + len(blocks))
        offer = Offer(self._leases.next_ticket(), tracked.session, tracked.lease, start, keys, told)
        if not (blocks or recomputed) or not self._link.submit(offer):
            self._put_off(tracked)
            return
        if self._has_kept(tracked):
            tracked.parting_start, tracked.parting = start + len(blocks), tracked.parting[len(blocks) :]
        else:
            self._stores.hold(recomputed + blocks)
        tracked.ticket = offer.ticket
        tracked.offered = start + len(blocks)
        tracked.recomputed_from = None
        self._watch_held()
        if tracked.is_prefill:
            self._link.hurry()
        first, held = start - len(recomputed), recomputed + blocks
        self._stores.offered(offer.ticket, PendingStore(tracked, tracked.preemptions, tracked.session, first, held))

    def _watch_held(self) -> None:
        """Let no offer wait for others where many blocks are held, so that they come free."""
        if self._stores.is_half_full:
            self._link.hurry()

    def _blocks_to_offer(self, tracked: RequestState, start: int) -> list[int]:
        """The blocks from depth `start` on, up to the limits; none if they are no longer held."""
        if not self._has_kept(tracked):
            return tracked.block_ids[start : min(tracked.full, start + OFFER_BLOCKS_MAX, start + self._stores.room)]
        known = max(start - tracked.parting_start, 0)
        self._stores.free(tracked.parting[:known])
        tracked.parting_start, tracked.parting = tracked.parting_start + known, tracked.parting[known:]
        if tracked.parting and tracked.parting_start != start:
            self.skipped_blocks += len(tracked.parting)
            self.drop_kept(tracked)
        return tracked.parting[:OFFER_BLOCKS_MAX]

    def _is_storing(self, tracked: RequestState) -> bool:
        """Whether blocks of a request's chain are being stored, or are about to be offered."""
        return bool(tracked.ticket) or tracked in self._parting or self._stores.has_any_of(tracked)

    def _has_kept(self, tracked: RequestState) -> bool:
        """Whether the blocks that wait for their offer are held: `RequestState.parting`."""
        return tracked.is_finished or self._chains.is_grouped

    def _put_off(self, tracked: RequestState) -> None:
        """Try again with the next step, unless the request is finished, or has no blocks to offer any more."""
        if tracked.is_finished:
            self._part(tracked)
        elif self._chains.is_grouped and not tracked.parting:
            tracked.offered = tracked.full
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
        self._watch_held()

    def _part(self, tracked: RequestState) -> None:
        """Free the blocks and the lease of a finished request."""
        self.skipped_blocks += len(tracked.parting)
        self.drop_kept(tracked)
        self._leases.release(tracked)
        self._parting.pop(tracked, None)
        self._pin_stored()

    def _pin_stored(self) -> None:
        """Pin the prompts of finished requests none of whose blocks are still to be stored."""
        for tracked in list(self._to_pin):
            waiting = self._states.has_any_of(tracked) or any(each.request is tracked.request for each in self._parting)
            if not waiting and not self._stores.has_any_of(tracked):
                del self._to_pin[tracked]
                self.refused_pins += not self._leases.pin(tracked)
