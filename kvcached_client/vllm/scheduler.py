"""The scheduler's side of the connector: which blocks to load and to store, and when.

It runs in vLLM's scheduler thread: what the daemon has to say comes as events of the link. It makes that thread wait
for an answer that is near, for some milliseconds of a step at most (`patience`), and for a reset (`RESET_S_MAX`).
vLLM's blocks that are being stored are held by reference count, so vLLM frees, preempts and finishes as it likes.

What a block's key stands for: it is the first 16 bytes of vLLM's block hash. That chains the token ids with, in every
block, the LoRA adapter's name and path, the hash of each multimodal input in it and where it begins, the digest of
prompt embeddings, and in the first block the request's `cache_salt`. An adapter whose files change under the same path
keeps its keys: set `weights_version` then, or give it another name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvcached_client.blocks.transfers import BlockJob
from kvcached_client.types import TransferId
from kvcached_client.vllm.commands import (
    Connected,
    DropLoad,
    Fetching,
    Found,
    LinkPort,
    Lost,
    NotFound,
    Planned,
    Unplanned,
)
from kvcached_client.vllm.leases import Leases
from kvcached_client.vllm.orders import LoadOrder, SessionNote, StepOrders, StoreId, job_span
from kvcached_client.vllm.request_state import BlockPool, Request, RequestState, Step
from kvcached_client.vllm.store_queue import StoreQueue, Stores
from kvcached_client.vllm.waiting import Patience, PrefillMeter, prompt_tokens

#: Blocks of the prompt are offered as soon as they are full: other requests may share them. Generated ones wait for
#: their like, or for the request's end, since an offer costs the scheduler as much for one block as for a hundred.
GENERATED_BLOCKS_PER_OFFER: Final = 4
#: How long `reset` waits for the daemon.
RESET_S_MAX: Final = 2.0


@dataclass(slots=True)
class _Loading:
    """A load that workers have been told of: into which blocks, and from which depth on they are bad."""

    session: int
    transfer: TransferId
    start: int  #: depth of the first block
    blocks: tuple[int, ...]
    bad_from: int | None = None  #: depth of the first block that is bad

    def note_bad(self, block_ids: Collection[int]) -> None:
        """Some blocks, maybe of other loads, do not hold what was to be loaded."""
        for depth, block in enumerate(self.blocks, self.start):
            if block in block_ids:
                self.bad_from = depth if self.bad_from is None else min(self.bad_from, depth)
                return


class SchedulerSide:
    """Decides for one engine. Used by the scheduler's thread only.

    Args:
        link: to the daemon.
        pool: vLLM's blocks.
        block_size: tokens of a block.
        shards: workers, each of which holds a part of every block.
        hold_deadline_s: how long a request waits for the daemon's answer before it is computed; the time that blocks
            take to come from storage does not count.
        clock: in seconds.

    Attributes:
        session: what workers are to join; None while the daemon is not reached.
    """

    def __init__(
        self,
        link: LinkPort,
        pool: BlockPool,
        *,
        block_size: int,
        shards: int,
        hold_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session: SessionNote | None = None
        self._link = link
        self._block_size = block_size
        self._hold_deadline_s = hold_deadline_s
        self._clock = clock
        self._by_id: dict[str, RequestState] = {}
        self._patience = Patience(link, clock)
        self._late_requests = 0
        self._prefill = PrefillMeter()
        self._leases = Leases(link, block_size, clock, self._prefill.rate)
        self._store_queue = StoreQueue(link, self._leases, Stores(pool, shards))
        self._new_loads: list[LoadOrder] = []
        #: Loads under way, by request.
        self._loading: dict[str, _Loading] = {}

    # --- hooks: admission -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request has arrived: ask for its hit while it waits."""
        tracked = self._by_id[request.request_id] = RequestState(request, request.num_preemptions)
        if self._leases.usable(tracked) and not request.skip_reading_prefix_cache:
            self._leases.ask(tracked)

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after those that vLLM has can be loaded, None = not known yet; whether they come async."""
        self._take_events()
        tracked = self._current(request)
        local, rest = divmod(computed_tokens, self._block_size)
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
        found = min(usable, 0 if tracked.load is None else len(tracked.load.slots))
        if found <= local:
            return 0, False
        tracked.local_blocks = local
        return (found - local) * self._block_size, True

    def allocated(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """A request has blocks; `external_tokens` of them are to be loaded.

        Raises:
            RuntimeError: they were not announced: a fault of kvcached or vLLM. The request would wait for ever.
        """
        tracked = self._current(request)
        if not external_tokens:
            self._leases.drop_load(tracked)
            return
        load, start = tracked.load, tracked.local_blocks
        if load is None:
            raise RuntimeError(f"vLLM awaits {external_tokens} tokens for {request.request_id}, which nobody announced")
        loaded = block_ids[start : start + external_tokens // self._block_size]
        span = job_span(request.block_hashes, start, loaded, load.slots[start : start + len(loaded)])
        job = BlockJob(load.transfer, load.generation, (span,))
        self._new_loads.append(LoadOrder(tracked.session, request.request_id, job))
        self._loading[request.request_id] = _Loading(tracked.session, load.transfer, start, tuple(loaded))
        tracked.load = None
        tracked.wants_load = False

    # --- hooks: steps -----------------------------------------------------------------------------------------------

    def step(self, step: Step) -> StepOrders:
        """What goes to the workers with a step."""
        self._take_events()
        for request_id in step.preempted_req_ids or ():
            if (tracked := self._by_id.get(request_id)) is not None:
                self._current(tracked.request)
        self._follow(step)
        self._prefill.begin(self._clock(), prompt_tokens(step, self._by_id))
        self._patience.begin_step(is_idle=not step.num_scheduled_tokens)
        loads, self._new_loads = tuple(self._new_loads), []
        return StepOrders(self.session, loads, self._store_queue.take_orders())

    def step_over(self) -> None:
        """The output of a step was taken in: of the oldest one that was on its way."""
        self._prefill.end(self._clock())

    def loaded(self, requests: Collection[str], failed: Collection[str], bad_blocks: Collection[int]) -> None:
        """Loads are over on every worker.

        Args:
            requests: whose.
            failed: requests whose loads failed as a whole; they may be over later.
            bad_blocks: blocks that do not hold what was to be loaded; the same.
        """
        if bad_blocks:
            for under_way in self._loading.values():
                under_way.note_bad(bad_blocks)
        for request_id in failed:
            if (loading := self._loading.get(request_id)) is not None:
                loading.bad_from = loading.start
        for request_id in requests:
            loading = self._loading.pop(request_id, None)
            if loading is not None and loading.bad_from is not None:
                self._link.submit(DropLoad(loading.session, loading.transfer))  # a worker may not have told the daemon
                if (tracked := self._by_id.get(request_id)) is not None:
                    tracked.may_load = False
                    tracked.recomputed_from = loading.bad_from

    def stored(self, done: Mapping[StoreId, int], failed: Collection[StoreId]) -> None:
        """So many workers are through with each store; `failed` are those that failed on some worker."""
        self._store_queue.reported(done, failed)

    def finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """A request is over: offer what is left of it, then give its lease back."""
        tracked = self._by_id.pop(request.request_id, None)
        if tracked is None:
            return
        self._leases.drop_load(tracked)
        tracked.block_ids = list(block_ids)
        # A load under way is within the hit.
        tracked.full = tracked.due = self._confirmed(tracked, request.num_computed_tokens)
        tracked.is_finished = True
        self._store_queue.finish(tracked)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that needs further steps."""
        return self._store_queue.is_busy

    @property
    def frees_soon(self) -> bool:
        """Whether blocks come free without a preemption."""
        return self._store_queue.frees_soon

    def reset(self) -> bool:
        """Nothing that was stored is loaded any more; whether the daemon has said so."""
        self._take_events()
        for tracked in self._by_id.values():
            self._leases.drop_load(tracked)  # one that is being asked for, too: its answer may tell of what was before
            tracked.is_asked = False
        return self._link.clear(RESET_S_MAX)

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast vLLM computes prompts; 0 = not known yet."""
        return self._prefill.rate.tokens_per_s

    def take_skipped(self) -> int:
        """Blocks that were not stored since the last call."""
        skipped, self._store_queue.skipped_blocks = self._store_queue.skipped_blocks, 0
        return skipped

    def take_late(self) -> int:
        """Requests since the last call that went without the cache because its answer was late."""
        late, self._late_requests = self._late_requests, 0
        return late

    # --- what hooks are made of -------------------------------------------------------------------------------------

    def _current(self, request: Request) -> RequestState:
        """What is known of a request, which begins anew where it was preempted."""
        tracked = self._by_id.get(request.request_id)
        if tracked is None:
            tracked = self._by_id[request.request_id] = RequestState(request, request.num_preemptions)
        elif tracked.preemptions != request.num_preemptions:
            self._start_over(tracked)
        return tracked

    def _start_over(self, tracked: RequestState) -> None:
        """It lost its blocks and will come back with others; its hit may be another one, too."""
        request = tracked.request
        self._leases.release(tracked)
        tracked.preemptions = request.num_preemptions
        tracked.ticket = tracked.full = tracked.due = 0
        tracked.is_asked = False
        tracked.block_ids = []
        if self._leases.usable(tracked) and tracked.may_load and not request.skip_reading_prefix_cache:
            self._leases.ask(tracked)

    def _confirmed(self, tracked: RequestState, computed_tokens: int) -> int:
        """Full blocks in so many tokens, as far as vLLM has their hashes: it has none for speculative tokens."""
        full = computed_tokens // self._block_size
        return min(full, len(tracked.request.block_hashes), len(tracked.block_ids))

    def _follow(self, step: Step) -> None:
        """Note which blocks requests have, and look at those that fill one in this step."""
        scheduled, block_size = step.num_scheduled_tokens, self._block_size
        for new in step.scheduled_new_reqs:
            if (tracked := self._by_id.get(new.req_id)) is not None:
                tracked.block_ids = list(new.block_ids[0])
                self._fill(tracked, new.num_computed_tokens + scheduled[new.req_id])
        cached = step.scheduled_cached_reqs
        for request_id, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (tracked := self._by_id.get(request_id)) is None:
                continue
            if added is not None:
                if request_id in cached.resumed_req_ids:
                    tracked.block_ids = list(added[0])
                else:
                    tracked.block_ids += added[0]
            end = computed + scheduled[request_id]
            if end >= (tracked.full + 1) * block_size:
                self._fill(tracked, end)

    def _fill(self, tracked: RequestState, computed_tokens: int) -> None:
        tracked.full = full = max(self._confirmed(tracked, computed_tokens), tracked.full)
        prompt_blocks = tracked.request.num_prompt_tokens // self._block_size
        if full >= tracked.due + (1 if tracked.due < prompt_blocks else GENERATED_BLOCKS_PER_OFFER):
            tracked.due = full
            self._store_queue.advance(tracked)

    def _note_late(self, tracked: RequestState) -> None:
        """Count a request that is computed without waiting any longer. Asked again, it does not count again."""
        if not tracked.is_late:
            tracked.is_late = True
            self._late_requests += 1

    def _take_events(self) -> None:
        events = self._link.take()
        if events:
            self._patience.heard()
        for event in events:
            match event:
                case Connected(note=note):
                    self.session = note
                case Lost(session=session):
                    self.session = None
                    self._store_queue.lose(session, self._by_id.values())
                case Fetching():
                    self._leases.fetching(event)
                case Found():
                    self._answered(self._leases.found(event))
                case NotFound():
                    self._not_found(event)
                case Planned():
                    self._store_queue.planned(event)
                case Unplanned(ticket=ticket):
                    self._store_queue.unplanned(ticket)

    def _not_found(self, event: NotFound) -> None:
        tracked = self._leases.not_found(event.ticket)
        if tracked is None:
            return
        if event.is_late and tracked.wants_load:
            self._note_late(tracked)
        self._answered(tracked if tracked.is_finished else None)

    def _answered(self, tracked: RequestState | None) -> None:
        if tracked is not None:
            self._store_queue.advance(tracked)
