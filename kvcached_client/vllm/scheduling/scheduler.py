"""The scheduler's side of the connector: decides which blocks to load and to store, and when.

It runs in vLLM's scheduler thread; the daemon's replies come as events. The scheduler waits for those that are near, at
most some milliseconds in a step (`waiting`), and for a reset (`RESET_S_MAX`). Blocks that are being stored are held by
vLLM's reference count, so vLLM may free, preempt and finish requests at any time.

A block's key is the first 16 bytes of vLLM's block hash. The hash chains the block's token ids, the LoRA adapter's name
and path, the hash and the position of each multimodal input in the block, the digest of prompt embeddings, and in the
first block the request's `cache_salt`. If an adapter's files change, its keys do not: set another `weights_version`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from kvcached_client.vllm.daemon.commands import (
    Connected,
    DropLoad,
    Fetching,
    Found,
    Lost,
    NotFound,
    Pinned,
    Planned,
    Unplanned,
)
from kvcached_client.vllm.daemon.inbox import LinkPort
from kvcached_client.vllm.orders import LoadOrder, SessionNote, StepOrders, StoreId
from kvcached_client.vllm.scheduling.announcements import Announcements
from kvcached_client.vllm.scheduling.chains import Chains
from kvcached_client.vllm.scheduling.foreign_loads import ForeignLoads
from kvcached_client.vllm.scheduling.leases import Leases
from kvcached_client.vllm.scheduling.loads import OrderedLoad, order_load
from kvcached_client.vllm.scheduling.request_state import BlockPool, Request, RequestState, Step
from kvcached_client.vllm.scheduling.store_queue import StoreQueue
from kvcached_client.vllm.scheduling.stores import Stores
from kvcached_client.vllm.scheduling.waiting import Patience, PrefillMeter, prompt_tokens
from kvcached_client.vllm.scheduling.wishes import WishLog, read_wishes

#: Blocks of the prompt are offered as soon as they are full, because other requests may share them. Generated blocks
#: are offered in groups, or at the request's end, because an offer costs as much for one block as for many.
GENERATED_BLOCKS_PER_OFFER: Final = 4
#: How long `reset` waits for the daemon.
RESET_S_MAX: Final = 2.0


class SchedulerSide:
    """Decides for one engine. Used by the scheduler's thread only.

    Args:
        link: to the daemon's thread.
        pool: vLLM's blocks.
        chains: how blocks form chains.
        shards: number of workers; each holds a part of every block.
        hold_deadline_s: how long a request waits for the daemon's reply before it is computed, without the time of
            fetches from storage.
        may_fetch: whether requests may wait for storage.
        may_store: whether blocks that requests compute are stored.
        announces: whether vLLM publishes events of its caches. There are none of the host pool with several groups.
        clock: returns seconds.

    Attributes:
        session: the session that workers join; None without a session.
        announcements: of the blocks in the host pool, for vLLM's events.
    """

    def __init__(
        self,
        link: LinkPort,
        pool: BlockPool,
        *,
        chains: Chains,
        shards: int,
        hold_deadline_s: float,
        may_fetch: bool = True,
        may_store: bool = True,
        announces: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session: SessionNote | None = None
        self.announcements = Announcements(is_on=announces and not chains.is_grouped)
        self._link = link
        self._chains = chains
        self._hold_deadline_s = hold_deadline_s
        self._may_fetch = may_fetch
        self._may_store = may_store
        self._clock = clock
        self._by_id: dict[str, RequestState] = {}
        self._patience = Patience(link, clock)
        self._late_requests = 0
        self._wish_log = WishLog()
        self._prefill = PrefillMeter()
        self._leases = Leases(link, chains, clock, self._prefill.rate, self.announcements)
        self._store_queue = StoreQueue(link, self._leases, Stores(pool, shards), chains)
        self._foreign_loads = ForeignLoads(pool, chains)
        self._new_loads: list[LoadOrder] = []
        #: Loads in flight, by request.
        self._loading: dict[str, OrderedLoad] = {}

    # --- hooks: admission -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Ask for the hit of a request that has arrived, while it waits."""
        tracked = self._track(request)
        if self._leases.usable(tracked) and not request.skip_reading_prefix_cache:
            self._leases.ask(tracked)

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded after those that vLLM has (None = unknown yet), and whether asynchronously."""
        self._take_events()
        tracked, chains = self._current(request), self._chains
        self._foreign_loads.asked(request.request_id, computed_tokens)
        local, rest = chains.blocks_in(computed_tokens), computed_tokens % chains.unit_tokens
        usable = self._leases.usable(tracked)
        if rest or usable <= local or not tracked.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if not tracked.is_asked and not self._leases.ask(tracked):
            return 0, False
        while tracked.ticket and self._patience.wait(is_fetching=tracked.is_fetching):
            self._take_events()
        if tracked.ticket:
            if self._clock() - tracked.asked_at < self._hold_deadline_s:
                return None, False
            self._note_late(tracked)
            return 0, False
        found = min(usable, tracked.loadable)
        found -= found % chains.unit_blocks
        if found <= local or (tracked.states and found != tracked.loadable):
            return 0, False
        tracked.local_blocks = local
        return (found - local) // chains.unit_blocks * chains.unit_tokens, True

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Order the load of `external_tokens` tokens into the blocks that a request got, a list for each group.

        Raises:
            RuntimeError: no such load was announced: a bug of kvcached or vLLM. The request would wait without end.
        """
        tracked, chains = self._current(request), self._chains
        if external_tokens:
            order, self._loading[request.request_id] = order_load(tracked, chains, tables, external_tokens)
            self._new_loads.append(order)
            tracked.loaded_units = tracked.loadable // chains.unit_blocks
            tracked.load = None
        self._leases.drop_load(tracked)
        if tracked.states:
            self._leases.leave_branch(tracked)

    # --- hooks: steps -----------------------------------------------------------------------------------------------

    def step(self, step: Step) -> StepOrders:
        """The orders for the workers of a step."""
        self._take_events()
        for request_id in step.preempted_req_ids or ():
            if (tracked := self._by_id.get(request_id)) is not None:
                self._current(tracked.request)
        self._follow(step)
        self._foreign_loads.begin_step()
        self._store_queue.keep_states(step, self._by_id)
        self._prefill.begin(self._clock(), prompt_tokens(step, self._by_id))
        self._patience.begin_step(is_idle=not step.num_scheduled_tokens)
        loads, self._new_loads = tuple(self._new_loads), []
        stores = self._store_queue.take_orders()
        if not step.num_scheduled_tokens:
            self._store_queue.offer_kept(self._by_id.values())
            self._link.hurry()  # nobody is disturbed, and nothing more may come
        return StepOrders(self.session, loads, stores)

    def step_over(self) -> None:
        """Note that vLLM has processed the output of the oldest step in flight."""
        self._prefill.end(self._clock())
        self._foreign_loads.step_over()

    def loaded(self, requests: Collection[str], failed: Collection[str], bad_blocks: Collection[int]) -> None:
        """Note loads that have ended on every worker.

        Args:
            requests: the requests of these loads.
            failed: requests whose loads failed completely; these loads may end later.
            bad_blocks: blocks that were not loaded correctly; their loads may end later.
        """
        if bad_blocks:
            self._foreign_loads.failed(bad_blocks)
            for under_way in self._loading.values():
                under_way.note_bad(bad_blocks)
        for request_id in failed:
            if (loading := self._loading.get(request_id)) is not None:
                loading.bad_from = loading.start
        for request_id in requests:
            if (loading := self._loading.pop(request_id, None)) is not None and loading.bad_from is not None:
                self._link.submit(DropLoad(loading.session, loading.transfer))  # a worker may not have reported it
                if (tracked := self._by_id.get(request_id)) is not None:
                    tracked.may_load = False
                    self._recompute(tracked, loading.bad_from)

    def stored(self, done: Mapping[StoreId, int], failed: Collection[StoreId]) -> None:
        """Note how many workers have ended each store; `failed` are stores that failed on a worker."""
        self._store_queue.reported(done, failed)

    def finished(self, request: Request, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """Offer the remaining blocks of a finished request, then give its lease back.

        Args:
            request: the request; vLLM has not freed its blocks yet.
            block_ids: its blocks; with several groups, they are looked up instead.

        Returns:
            What was accepted and refused of the request's wishes, for the response; None if it had none.
        """
        tracked = self._by_id.get(request.request_id)
        if tracked is None:
            return None
        if tracked.is_prefill:
            self._await_offers(tracked)
        del self._by_id[request.request_id]
        self._leases.drop_load(tracked)
        has_begun, tracked.block_ids = bool(tracked.full or tracked.block_ids), list(block_ids)
        if tracked.wishes.share:
            # Before its first step, what counts for computed is a load in flight: of the hit, or another connector's.
            tracked.full = tracked.due = self._full_blocks(tracked, request.num_computed_tokens if has_begun else 0)
        tracked.is_finished = True
        self._store_queue.finish(tracked)
        return tracked.wishes.report()

    @property
    def is_busy(self) -> bool:
        """Whether stores need further steps."""
        return self._store_queue.is_busy or any(tracked.parting for tracked in self._by_id.values())

    @property
    def frees_soon(self) -> bool:
        """Whether the end of a store frees blocks that no request holds."""
        return self._store_queue.frees_soon

    def reset(self) -> bool:
        """Clear the namespace, so that no stored block is loaded; returns whether the daemon has confirmed it."""
        self._take_events()
        for tracked in self._by_id.values():
            self._leases.drop_load(tracked)  # also a hit that was asked for: its event may be from before the clear
            tracked.is_asked = False
        is_done = self._link.clear(RESET_S_MAX)
        if is_done:
            self.announcements.cleared()
        return is_done

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast vLLM computes prompts; 0 = unknown."""
        return self._prefill.rate.tokens_per_s

    def take_skipped(self) -> int:
        """Number of blocks since the last call that were not stored."""
        skipped, self._store_queue.skipped_blocks = self._store_queue.skipped_blocks, 0
        return skipped

    def take_late(self) -> int:
        """Number of requests since the last call that were computed without the cache because the reply was late."""
        late, self._late_requests = self._late_requests, 0
        return late

    def take_wishes(self) -> tuple[int, int]:
        """How many wishes of requests were accepted and refused since the last call."""
        self._wish_log.refused += self._store_queue.refused_pins
        self._store_queue.refused_pins = 0
        return self._wish_log.take()

    # --- helpers of the hooks ---------------------------------------------------------------------------------------

    def _track(self, request: Request) -> RequestState:
        """The state of a new request, with what it asks for."""
        params, hints = request.kv_transfer_params, request.kv_hints
        wishes = read_wishes(params, hints, may_fetch=self._may_fetch, may_store=self._may_store)
        self._wish_log.note(wishes)
        tracked = self._by_id[request.request_id] = RequestState(
            request, request.num_preemptions, wishes, group_keys=self._chains.group_keys(request)
        )
        return tracked

    def _current(self, request: Request) -> RequestState:
        """The state of a request; reset if the request was preempted."""
        tracked = self._by_id.get(request.request_id)
        if tracked is None:
            tracked = self._track(request)
        elif tracked.preemptions != request.num_preemptions:
            self._start_over(tracked)
        return tracked

    def _start_over(self, tracked: RequestState) -> None:
        """Reset the state of a request that lost its blocks, and ask for its hit again."""
        request = tracked.request
        self._leases.release(tracked)
        self._store_queue.forget_kept(tracked)
        tracked.preemptions = request.num_preemptions
        tracked.loaded_units = 0
        tracked.ticket = tracked.full = tracked.due = 0
        tracked.is_asked = False
        tracked.block_ids = []
        if self._leases.usable(tracked) and tracked.may_load and not request.skip_reading_prefix_cache:
            self._leases.ask(tracked)

    def _recompute(self, tracked: RequestState, bad_from: int) -> None:
        """Note that vLLM computes the blocks of a failed load: with several groups, the whole request."""
        if not self._chains.is_grouped:
            tracked.recomputed_from = bad_from
            return
        self._leases.release(tracked)  # the next lease begins at the first block that the daemon has lost
        self._store_queue.forget_kept(tracked)
        tracked.full = tracked.due = tracked.loaded_units = 0

    def _full_blocks(self, tracked: RequestState, computed_tokens: int) -> int:
        """Number of leading blocks that can be stored once `computed_tokens` tokens are computed.

        These are full blocks that have hashes, and that a seek can name; vLLM has no hashes for speculative tokens.
        """
        trusted = len(tracked.chain) if tracked.trusted is None else min(tracked.trusted, len(tracked.chain))
        full = min(self._chains.blocks_in(computed_tokens), trusted, self._chains.blocks_max)
        if self._chains.is_grouped:
            return self._store_queue.keep(tracked, full)
        return min(full, len(tracked.block_ids))

    def _follow(self, step: Step) -> None:
        """Note the blocks of all scheduled requests, and handle those that fill a block in this step."""
        scheduled, chains = step.num_scheduled_tokens, self._chains
        for new in step.scheduled_new_reqs:
            if (tracked := self._by_id.get(new.req_id)) is not None:
                tracked.block_ids = chains.own_blocks(new.block_ids)
                self._foreign_loads.scheduled(tracked, new.block_ids, new.num_computed_tokens)
                self._fill(tracked, new.num_computed_tokens + scheduled[new.req_id])
        cached = step.scheduled_cached_reqs
        for request_id, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (tracked := self._by_id.get(request_id)) is None:
                continue
            if added is not None:
                if request_id in cached.resumed_req_ids:
                    tracked.block_ids = chains.own_blocks(added)
                    self._foreign_loads.scheduled(tracked, added, computed)
                else:
                    tracked.block_ids += chains.own_blocks(added)
            end = computed + scheduled[request_id]
            if end >= (tracked.full // chains.unit_blocks + 1) * chains.unit_tokens:
                self._fill(tracked, end)

    def _fill(self, tracked: RequestState, computed_tokens: int) -> None:
        if not tracked.wishes.share:
            return
        tracked.full = full = max(self._full_blocks(tracked, computed_tokens), tracked.full)
        prompt_blocks = self._chains.blocks_in(tracked.request.num_prompt_tokens)
        units = 1 if tracked.due < prompt_blocks else GENERATED_BLOCKS_PER_OFFER
        if full >= tracked.due + units * self._chains.unit_blocks:
            tracked.due = full
            self._store_queue.advance(tracked)

    def _await_offers(self, tracked: RequestState) -> None:
        """Make the last offers of a prefill for another engine before its response leaves, and wait for the replies.

        Then the daemon knows of its blocks when that engine asks for them.
        """
        self._take_events()
        while tracked.ticket and self._patience.wait(is_fetching=False):
            self._take_events()

    def _note_late(self, tracked: RequestState) -> None:
        """Count a request that is computed without waiting longer; each request counts once."""
        if not tracked.is_late:
            tracked.is_late = True
            self._late_requests += 1

    def _take_events(self) -> None:
        if events := self._link.take():
            self._patience.heard()
        for event in events:
            match event:
                case Connected(note=note, tells_tokens=tells_tokens):
                    self.session = note
                    self._leases.told_tokens.is_on = tells_tokens
                case Lost(session=session):
                    self.session = None
                    self._store_queue.lose(session, self._by_id.values())
                case Fetching():
                    self._leases.fetching(event)
                case Found():
                    self._answered(self._leases.found(event))
                case NotFound():
                    self._not_found(event)
                case Planned() | Unplanned() | Pinned():
                    self._store_queue.take(event)

    def _not_found(self, event: NotFound) -> None:
        tracked = self._leases.not_found(event.ticket)
        if tracked is not None:
            if event.is_late and tracked.wants_load:
                self._note_late(tracked)
            self._answered(tracked if tracked.is_finished else None)

    def _answered(self, tracked: RequestState | None) -> None:
        if tracked is not None:
            self._store_queue.advance(tracked)
