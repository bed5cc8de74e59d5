"""A small vLLM: a scheduler with preemption, chunked prefill, speculative tokens and steps in flight; and its model.

The model is honest: the KV of a token is a digest of the KV before it and the token, read from the very blocks that the
request's table names, on each shard. A block that was overwritten, stored too early or loaded wrongly changes every
output behind it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcached_client.vllm.orders import StepOrders
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.mini_parts import Pool, kv_of, next_token
from tests.vllm_connector.rig import FakeRequest, FakeStep, New

SHARDS = 2
MAX_RUNNING = 4
STEP_TOKENS = 24
#: How often something else than room for blocks keeps a request from being admitted.
OTHER_LIMITS = 0.1


@dataclass(eq=False)
class Live:
    """A request and its blocks."""

    request: FakeRequest
    prompt: int
    wanted: int
    table: list[int] = field(default_factory=list)
    state: str = "waiting"  # waiting, loading, loaded, running, finished
    cached_blocks: int = 0
    steps_in_flight: int = 0
    placeholders: int = 0
    is_known: bool = False
    sampled: list[int] = field(default_factory=list)  #: by the workers, the scheduler may hear of it later
    delayed: bool = False

    @property
    def name(self) -> str:
        return self.request.request_id


class Work(NamedTuple):
    """What a step computes for a request: positions `start` to `stop`, in the blocks that it had then."""

    live: Live
    start: int
    stop: int
    table: list[int]
    preemptions: int


class Sampled(NamedTuple):
    """What a step brought a request: tokens, and how many guesses were wrong."""

    work: Work
    tokens: list[int]
    rejected: int


class Flight(NamedTuple):
    """A step on its way: what to compute, and what the connector ordered."""

    work: list[Work]
    orders: StepOrders


class MiniVllm:
    """The engine, driven step by step."""

    def __init__(self, rng: random.Random, side: SchedulerSide, pool: Pool, *, depth: int, guesses: int) -> None:
        self.rng, self.side, self.pool, self.depth, self.guesses = rng, side, pool, depth, guesses
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []
        self.by_name: dict[str, Live] = {}
        self.flights: deque[Flight] = deque()
        self.deferred: list[tuple[int, list[int]]] = []
        self.scheduled = self.processed = 0
        self.preempted: set[str] = set()
        self.outputs: dict[str, tuple[list[int], int, list[int]]] = {}
        self.memory: list[dict[int, list[str]]] = [{} for _ in range(SHARDS)]
        self.loads_failed = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], wanted: int, *, skip_reading: bool) -> None:
        live = Live(FakeRequest(name, prompt, skip_reading=skip_reading), len(prompt), wanted)
        self.by_name[name] = live
        self.waiting.append(live)
        self.side.on_new_request(live.request)

    def abort(self, live: Live) -> None:
        """The client has gone: blocks of a load under way are kept until it is over."""
        if live in self.waiting:
            self.waiting.remove(live)
        if live in self.running:
            self.running.remove(live)
        live.delayed = live.state == "loading"
        self._finish(live)

    def _finish(self, live: Live) -> None:
        live.state = "finished"
        computed = -(-live.request.num_computed_tokens // BLOCK)
        self.side.finished(live.request, live.table[:computed])
        if not live.delayed:
            self._free(live)
            del self.by_name[live.name]

    def _free(self, live: Live) -> None:
        """Give blocks back, but not before the steps that may write them are over."""
        table, live.table = live.table, []
        if live.steps_in_flight:
            self.deferred.append((self.scheduled, table))
        else:
            self.pool.give_back(reversed(table))

    def _preempt(self, live: Live) -> None:
        self._free(live)
        live.request.num_preemptions += 1
        live.request.num_computed_tokens = 0
        live.placeholders = live.cached_blocks = 0
        live.state = "waiting"
        live.is_known &= self.rng.random() < 0.5  # vLLM's two model runners differ in that
        self.preempted.add(live.name)
        self.waiting.appendleft(live)

    # --- scheduling -------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """One step, onto the flights."""
        step = FakeStep()
        work: list[Work] = []
        self._schedule_running(step, work)
        if not self.preempted:
            self._schedule_waiting(step, work)
        step.preempted_req_ids, self.preempted = self.preempted, set()
        orders = self.side.step(step)
        for live, _, stop, *_rest in work:
            live.request.num_computed_tokens = stop
            live.steps_in_flight += 1
            if self.depth > 1 and stop >= live.request.num_tokens:
                live.placeholders = stop - live.request.num_tokens + 1
        self.scheduled += bool(work)
        self.flights.append(Flight(work, orders))

    def _schedule_running(self, step: FakeStep, work: list[Work]) -> None:
        budget = STEP_TOKENS
        for live in list(self.running):
            count = min(self._wanted(live), budget)
            if count < 1 or live not in self.running:
                continue
            added = self._grow(live, live.request.num_computed_tokens + count)
            while added is None and not self.side.frees_soon:
                victim = self.running.pop()
                self._preempt(victim)
                _unschedule(step, work, victim)
                if victim is live:
                    return
                added = self._grow(live, live.request.num_computed_tokens + count)
            if added is None:
                return
            budget -= count
            self._note_known(step, live, count, (added,) if added else None)
            self._note_work(work, live, count)

    def _wanted(self, live: Live) -> int:
        """Tokens that a running request could compute, guesses included."""
        tokens = live.request.num_tokens + live.placeholders
        if live.placeholders and tokens >= live.prompt + live.wanted:
            return 0
        count = tokens - live.request.num_computed_tokens
        return count + self.rng.randrange(self.guesses + 1) if count == 1 and self.depth == 1 else count

    def _schedule_waiting(self, step: FakeStep, work: list[Work]) -> None:
        self.waiting = deque(sorted(self.waiting, key=lambda live: not live.table))  # those that hold blocks first
        budget = STEP_TOKENS - sum(step.num_scheduled_tokens.values())
        skipped: list[Live] = []
        while self.waiting and budget > 0 and len(self.running) < MAX_RUNNING:
            live = self.waiting.popleft()
            if live.state == "loading" or (live.steps_in_flight and live.request.num_preemptions):
                skipped.append(live)
                continue
            local, external = self._hits(live)
            if external is None:
                skipped.append(live)
                continue
            computed = live.request.num_computed_tokens or len(local) * BLOCK
            count = 0 if external else min(live.request.num_tokens - computed, budget)
            has_room = not external or self._fits(live, local)
            if (
                self.rng.random() < OTHER_LIMITS
                or not has_room
                or not self._admit(live, local, computed + external + count)
            ):
                skipped.append(live)
                break
            self.side.allocated(live.request, [live.table], external)
            live.request.num_computed_tokens = computed + external
            if external:
                live.state, live.cached_blocks = "loading", len(local)
                skipped.append(live)
                continue
            budget -= count
            self._start(step, work, live, count)
        self.waiting.extendleft(reversed(skipped))

    def _hits(self, live: Live) -> tuple[list[int], int | None]:
        """Blocks that a request finds in the device pool, and tokens beyond them that can be loaded."""
        if live.request.num_computed_tokens:
            return [], 0
        local = self._local_hit(live)
        tokens, is_async = self.side.matched_tokens(live.request, len(local) * BLOCK)
        assert is_async == bool(tokens)
        return local, tokens

    def _start(self, step: FakeStep, work: list[Work], live: Live, count: int) -> None:
        if live.is_known:
            step.scheduled_cached_reqs.resumed_req_ids.add(live.name)
            self._note_known(step, live, count, (list(live.table),))
        else:
            step.num_scheduled_tokens[live.name] = count
            step.scheduled_new_reqs.append(New(live.name, (list(live.table),), live.request.num_computed_tokens))
        live.is_known, live.state = True, "running"
        self.running.append(live)
        self._note_work(work, live, count)

    def _note_known(self, step: FakeStep, live: Live, count: int, added: tuple[list[int], ...] | None) -> None:
        cached = step.scheduled_cached_reqs
        cached.req_ids.append(live.name)
        cached.new_block_ids.append(added)
        cached.num_computed_tokens.append(live.request.num_computed_tokens)
        step.num_scheduled_tokens[live.name] = count

    def _note_work(self, work: list[Work], live: Live, count: int) -> None:
        start = live.request.num_computed_tokens
        work.append(Work(live, start, start + count, list(live.table), live.request.num_preemptions))
        if self.pool.has_cache:
            self._cache_blocks(live, min(start + count, live.request.num_tokens))

    def _cache_blocks(self, live: Live, tokens: int) -> None:
        for index in range(live.cached_blocks, min(tokens // BLOCK, len(live.request.block_hashes))):
            self.pool.remember(live.table[index], live.request.block_hashes[index], (index + 1) * BLOCK)
            live.cached_blocks = index + 1

    def _local_hit(self, live: Live) -> list[int]:
        hit: list[int] = []
        usable = 0 if live.request.skip_reading_prefix_cache else (live.request.num_tokens - 1) // BLOCK
        for block_hash in live.request.block_hashes[:usable]:
            if block_hash not in self.pool.cached:
                break
            hit.append(self.pool.cached[block_hash])
        return hit

    def _fits(self, live: Live, local: list[int]) -> bool:
        """Whether all of a request has room beside those that wait with blocks: else they might wait for each other."""
        holding = [each for each in self.by_name.values() if each.table and each.state != "running"]
        reserved = sum(max(-(-each.request.num_tokens // BLOCK) + 1 - len(each.table), 0) for each in holding)
        needed = -(-live.request.num_tokens // BLOCK) + 1 - sum(bool(self.pool.blocks[at].users) for at in local)
        return len(self.pool.free) - reserved >= needed

    def _admit(self, live: Live, local: list[int], tokens: int) -> bool:
        if live.table:
            return self._grow(live, tokens) is not None
        needed = -(-tokens // BLOCK) - len(local)
        if len(self.pool.free) - sum(not self.pool.blocks[index].users for index in local) < needed:
            return False
        self.pool.touch([self.pool.blocks[index] for index in local])
        taken = self.pool.take(needed)
        assert taken is not None
        live.table = [*local, *taken]
        live.cached_blocks = len(local)
        return True

    def _grow(self, live: Live, tokens: int) -> list[int] | None:
        added = self.pool.take(max(-(-tokens // BLOCK) - len(live.table), 0))
        if added is not None:
            live.table = [*live.table, *added]
        return added

    # --- workers and their output -----------------------------------------------------------------------------------

    def compute(self, flight: Flight) -> list[Sampled]:
        """The forward pass: the KV of the scheduled positions on every shard; what it samples."""
        return [self._compute(work) for work in flight.work]

    def _compute(self, work: Work) -> Sampled:
        live, table = work.live, work.table
        known = [*live.request.tokens, *live.sampled[len(live.request.tokens) - live.prompt :]]
        accepted = 0
        for position in range(work.start, work.stop):
            if position < len(known):
                token = known[position]
            else:
                right = next_token(self._read(0, table, position - 1))
                token = right if self.rng.random() < 0.5 else right + 1
                accepted += token == right and accepted == position - len(known)
            for shard in range(SHARDS):
                before = self._read(shard, table, position - 1) if position else ""
                self._write(shard, table, position, kv_of(before, token, shard))
        if work.stop < len(known):
            return Sampled(work, [], 0)
        last = len(known) - 1
        new = [next_token(self._read(0, table, last + index)) for index in range(accepted + 1)]
        live.sampled = [*known[live.prompt :], *new]
        return Sampled(work, new, work.stop - len(known) - accepted)

    def _read(self, shard: int, table: list[int], position: int) -> str:
        return self.memory[shard].setdefault(table[position // BLOCK], ["?"] * BLOCK)[position % BLOCK]

    def _write(self, shard: int, table: list[int], position: int, kv: str) -> None:
        self.memory[shard].setdefault(table[position // BLOCK], ["?"] * BLOCK)[position % BLOCK] = kv

    def update(self, sampled: list[Sampled], bad: set[int], loaded: set[str]) -> None:
        """What a step brought: bad blocks first, then tokens, then loads that are over."""
        for live in self.by_name.values():
            if live.state == "loading":
                count = -(-live.request.num_computed_tokens // BLOCK)
                first_bad = next((index for index, block in enumerate(live.table[:count]) if block in bad), count)
                live.request.num_computed_tokens = min(live.request.num_computed_tokens, first_bad * BLOCK)
        self.processed += bool(sampled)
        for work, tokens, rejected in sampled:
            work.live.steps_in_flight -= 1
            if work.live.state != "finished":
                is_stale = work.preemptions != work.live.request.num_preemptions
                self._append(work.live, tokens, rejected, is_stale=is_stale)
        over = [entry for entry in self.deferred if entry[0] <= self.processed]
        self.deferred = [entry for entry in self.deferred if entry[0] > self.processed]
        for _, table in over:
            self.pool.give_back(reversed(table))
        self.side.loaded(loaded, (), bad)
        for name in loaded:
            self._loaded(self.by_name[name])
        self.side.step_over()

    def _append(self, live: Live, new: list[int], rejected: int, *, is_stale: bool) -> None:
        request = live.request
        if not is_stale:
            request.num_computed_tokens -= rejected
            live.placeholders = max(live.placeholders - len(new) - rejected, 0)
        for token in new:
            request.append(token)
            if request.num_tokens == live.prompt + live.wanted:
                self.outputs[live.name] = (request.tokens[: live.prompt], live.wanted, request.tokens[live.prompt :])
                if live in self.running:
                    self.running.remove(live)
                else:
                    self.waiting.remove(live)
                self._finish(live)
                return
        if not is_stale and self.pool.has_cache:
            self._cache_blocks(live, min(request.num_computed_tokens, request.num_tokens))

    def _loaded(self, live: Live) -> None:
        if live.state == "finished":  # aborted meanwhile
            live.steps_in_flight = 0
            self._free(live)
            del self.by_name[live.name]
            return
        live.state = "waiting"
        if not live.request.num_computed_tokens:
            self.loads_failed += 1
            self.pool.give_back(reversed(live.table))
            live.table, live.cached_blocks = [], 0
        elif self.pool.has_cache:
            self._cache_blocks(live, live.request.num_computed_tokens)


def _unschedule(step: FakeStep, work: list[Work], victim: Live) -> None:
    """Take a request out of a step again."""
    cached = step.scheduled_cached_reqs
    if victim.name in cached.req_ids:
        index = cached.req_ids.index(victim.name)
        del cached.req_ids[index], cached.new_block_ids[index], cached.num_computed_tokens[index]
        del step.num_scheduled_tokens[victim.name]
        work[:] = [entry for entry in work if entry.live is not victim]
