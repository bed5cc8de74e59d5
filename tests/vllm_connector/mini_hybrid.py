"""A small vLLM with two groups of layers: full attention, and a sliding window with larger blocks.

It frees the blocks that have left the window before each step, as vLLM's hybrid cache manager does. The model is
honest, as that of `mini_vllm`: the state of a token is made of states that are read from the blocks of the request.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from kvcached_client.vllm.orders import StepOrders
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.mini_parts import Pool
from tests.vllm_connector.mini_states import FULL, NULL, SIZES, WINDOWED, BlockStates, skipped_blocks
from tests.vllm_connector.rig import FakeRequest, FakeStep, New

SHARDS = 2
MAX_RUNNING = 4
STEP_TOKENS = 24
UNIT_TOKENS = 2 * BLOCK


class ListedBlock(NamedTuple):
    """A block in the list of a request's group."""

    block_id: int

    @property
    def is_null(self) -> bool:
        return self.block_id == NULL


@dataclass(eq=False)
class Live:
    """A request, and its blocks by group."""

    request: FakeRequest
    prompt: int
    wanted: int
    tables: list[list[int]] = field(default_factory=lambda: [[], []])
    state: str = "waiting"  # waiting, loading, running, finished
    steps_in_flight: int = 0
    tokens_in_flight: int = 0  #: that they compute
    placeholders: int = 0
    sampled: list[int] = field(default_factory=list)  #: by the workers, the scheduler may hear of it later

    @property
    def name(self) -> str:
        return self.request.request_id


class Work(NamedTuple):
    """What a step computes for a request: positions `start` to `stop`, in the blocks that it had then."""

    live: Live
    start: int
    stop: int
    tables: list[list[int]]
    preemptions: int


class Flight(NamedTuple):
    """A step on its way."""

    work: list[Work]
    orders: StepOrders


class Sampled(NamedTuple):
    """The token that a step brought a request, if any."""

    work: Work
    token: int | None


class MiniHybrid:
    """The engine, driven step by step, with up to `depth` steps on their way."""

    def __init__(self, rng: random.Random, side: SchedulerSide, pool: Pool, *, depth: int) -> None:
        self.rng, self.side, self.pool, self.depth = rng, side, pool, depth
        pool.free.remove(NULL)
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []
        self.by_name: dict[str, Live] = {}
        self.flights: deque[Flight] = deque()
        self.deferred: list[tuple[int, list[int]]] = []
        self.scheduled = self.processed = 0
        self.preempted: set[str] = set()
        self.outputs: dict[str, tuple[list[int], int, list[int]]] = {}
        self.memory: list[dict[int, list[str]]] = [{} for _ in range(SHARDS)]
        self.failed: set[str] = set()
        self.loads_failed = self.preemptions = 0

    def lists(self, name: str) -> list[list[ListedBlock]]:
        """The blocks of a request as they are now."""
        return [[ListedBlock(block) for block in table] for table in self.by_name[name].tables]

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
        self._finish(live)

    def _finish(self, live: Live) -> None:
        is_loading, live.state = live.state == "loading", "finished"
        self._drop_skipped(live)
        self.side.finished(live.request, [])
        if not is_loading:
            self._free(live)
            del self.by_name[live.name]

    def _free(self, live: Live) -> None:
        """Give blocks back, but not before the steps that may write them are over."""
        blocks = [block for table in live.tables for block in reversed(table) if block != NULL]
        live.tables = [[], []]
        if live.steps_in_flight:
            self.deferred.append((self.scheduled, blocks))
        else:
            self.pool.give_back(blocks)

    def _preempt(self, live: Live) -> None:
        self._free(live)
        self.preemptions += 1
        live.request.num_preemptions += 1
        live.request.num_computed_tokens = live.placeholders = live.tokens_in_flight = 0
        live.state = "waiting"
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
        for live, start, stop, *_rest in work:
            live.request.num_computed_tokens = stop
            live.steps_in_flight += 1
            live.tokens_in_flight += stop - start
            if self.depth > 1 and stop >= live.request.num_tokens:
                live.placeholders = stop - live.request.num_tokens + 1
        self.scheduled += bool(work)
        self.flights.append(Flight(work, orders))

    def _schedule_running(self, step: FakeStep, work: list[Work]) -> None:
        budget = STEP_TOKENS
        for live in list(self.running):
            computed = live.request.num_computed_tokens
            count = min(_wanted(live), budget)
            if count < 1 or live not in self.running:
                continue
            self._drop_skipped(live)
            while not (has_room := self._grow(live, computed + count)) and not self.side.frees_soon:
                victim = self.running.pop()
                self._preempt(victim)
                _unschedule(step, work, victim)
                if victim is live:
                    return
            if not has_room:
                return
            budget -= count
            cached = step.scheduled_cached_reqs
            cached.req_ids.append(live.name)
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(computed)
            self._note_work(step, work, live, count)

    def _schedule_waiting(self, step: FakeStep, work: list[Work]) -> None:
        self.waiting = deque(sorted(self.waiting, key=lambda live: not any(live.tables)))  # who holds blocks, first
        budget = STEP_TOKENS - sum(step.num_scheduled_tokens.values())
        skipped: list[Live] = []
        while self.waiting and budget > 0 and len(self.running) < MAX_RUNNING:
            live = self.waiting.popleft()
            skipped.append(live)
            if live.state == "loading" or (live.steps_in_flight and live.request.num_preemptions):
                continue
            local, external = self._hits(live)
            if external is None:
                continue
            computed = live.request.num_computed_tokens or local + external
            count = 0 if external else min(live.request.num_tokens - computed, budget)
            if self.rng.random() < 0.1 or not self._admit(live, local, external, count):
                break
            self.side.allocated(live.request, live.tables, external)
            live.request.num_computed_tokens = computed
            if external:
                live.state = "loading"
                continue
            skipped.pop()
            budget -= count
            live.state = "running"
            self.running.append(live)
            step.scheduled_new_reqs.append(New(live.name, tuple(map(list, live.tables)), computed))
            self._note_work(step, work, live, count)
        self.waiting.extendleft(reversed(skipped))

    def _note_work(self, step: FakeStep, work: list[Work], live: Live, count: int) -> None:
        start = live.request.num_computed_tokens
        step.num_scheduled_tokens[live.name] = count
        tables = [list(table) for table in live.tables]
        work.append(Work(live, start, start + count, tables, live.request.num_preemptions))
        self._remember(live, start + count)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _hits(self, live: Live) -> tuple[int, int | None]:
        """Tokens that a request finds in the device pool, and tokens behind them that can be loaded."""
        if live.request.num_computed_tokens:
            return 0, 0
        local = self._local_hit(live)
        tokens, is_async = self.side.matched_tokens(live.request, local)
        assert is_async == bool(tokens)
        return local, tokens

    def _cached(self, live: Live, group: int, index: int) -> int | None:
        last = (index + 1) * SIZES[group] // BLOCK - 1
        return self.pool.cached.get(hash_in_group(live.request.block_hashes[last], group))

    def _local_hit(self, live: Live) -> int:
        """The longest hit in the device pool: all blocks of full attention, and those in the window."""
        if live.request.skip_reading_prefix_cache:
            return 0
        for tokens in range((live.request.num_tokens - 1) // UNIT_TOKENS * UNIT_TOKENS, 0, -UNIT_TOKENS):
            full = [self._cached(live, FULL, index) for index in range(tokens // SIZES[FULL])]
            windowed = range(skipped_blocks(tokens), tokens // SIZES[WINDOWED])
            if None not in full and None not in [self._cached(live, WINDOWED, index) for index in windowed]:
                return tokens
        return 0

    def _admit(self, live: Live, local: int, external: int, count: int) -> bool:
        """Give a request its first blocks, if it has room to its end beside those that wait with blocks."""
        if any(live.tables):
            return self._grow(live, live.request.num_computed_tokens + count)
        holding = [each for each in self.by_name.values() if any(each.tables) and each.state != "running"]
        reserved = sum(_blocks(each.prompt + each.wanted) for each in holding)
        if len(self.pool.free) - reserved < _blocks(live.prompt + live.wanted) + 2:
            return False
        computed = local + external
        tables = [[self._cached(live, FULL, index) or NULL for index in range(local // SIZES[FULL])], []]
        skipped = skipped_blocks(computed)
        tables[WINDOWED] = [
            (self._cached(live, WINDOWED, index) or NULL) if index >= skipped else NULL
            for index in range(max(local // SIZES[WINDOWED], skipped))
        ]
        self.pool.touch([self.pool.blocks[block] for table in tables for block in table if block != NULL])
        live.tables = tables
        if self._grow(live, computed + count):
            return True
        self._free(live)
        return False

    def _grow(self, live: Live, tokens: int) -> bool:
        wanted = [max(-(-tokens // SIZES[group]) - len(live.tables[group]), 0) for group in (FULL, WINDOWED)]
        taken = self.pool.take(sum(wanted))
        if taken is None:
            return False
        for group, blocks in ((FULL, taken[: wanted[FULL]]), (WINDOWED, taken[wanted[FULL] :])):
            live.tables[group] += blocks
            for memory in self.memory:
                memory.update((block, ["outdated"] * SIZES[group]) for block in blocks)
        return True

    def _drop_skipped(self, live: Live) -> None:
        """Free what has left the window, of the steps that are over."""
        table = live.tables[WINDOWED]
        processed = live.request.num_computed_tokens - live.tokens_in_flight
        gone = range(min(skipped_blocks(processed), len(table)))
        self.pool.give_back(table[index] for index in reversed(gone) if table[index] != NULL)
        for index in gone:
            table[index] = NULL

    def _remember(self, live: Live, tokens: int) -> None:
        hashes = live.request.block_hashes
        for group, table in enumerate(live.tables):
            for index in range(min(tokens, len(hashes) * BLOCK) // SIZES[group]):
                if table[index] != NULL:
                    tokens = (index + 1) * SIZES[group]
                    self.pool.remember(table[index], hash_in_group(hashes[tokens // BLOCK - 1], group), tokens)

    # --- workers and their output -----------------------------------------------------------------------------------

    def compute(self, flight: Flight) -> list[Sampled]:
        """The forward pass, on every shard."""
        return [self._compute(work) for work in flight.work]

    def _compute(self, work: Work) -> Sampled:
        live = work.live
        tokens = [*live.request.tokens, *live.sampled[len(live.request.tokens) - live.prompt :]]
        shards = [BlockStates(shard, self.memory[shard], work.tables) for shard in range(SHARDS)]
        for at in range(work.start, work.stop):
            for states in shards:
                states.compute(tokens[at], at)
        if work.stop < len(tokens):
            return Sampled(work, None)
        token = shards[0].sample(work.stop - 1)
        live.sampled = [*tokens[live.prompt :], token]
        return Sampled(work, token)

    def update(self, sampled: list[Sampled], bad: set[int], loaded: set[str]) -> None:
        """What a step brought: tokens, and loads that are over."""
        for live in self.by_name.values():
            if live.state in ("loading", "finished") and bad.intersection(chain(*live.tables)):
                self.failed.add(live.name)
        self.processed += bool(sampled)
        for work, token in sampled:
            self._take(work, token)
        over = [entry for entry in self.deferred if entry[0] <= self.processed]
        self.deferred = [entry for entry in self.deferred if entry[0] > self.processed]
        for _, blocks in over:
            self.pool.give_back(blocks)
        self.side.loaded(loaded, loaded & self.failed, ())
        for name in loaded:
            self._loaded(self.by_name[name])
        self.side.step_over()

    def _take(self, work: Work, token: int | None) -> None:
        """What a step brought a request, which may have lost its blocks meanwhile."""
        live, request = work.live, work.live.request
        live.steps_in_flight -= 1
        if live.state == "finished":
            return
        is_stale = work.preemptions != request.num_preemptions
        if not is_stale:
            live.tokens_in_flight -= work.stop - work.start
        if token is None:
            return
        request.append(token)
        if request.num_tokens == live.prompt + live.wanted:
            self.outputs[live.name] = (request.tokens[: live.prompt], live.wanted, request.tokens[live.prompt :])
            (self.running if live in self.running else self.waiting).remove(live)
            self._finish(live)
        elif not is_stale:
            live.placeholders = max(live.placeholders - 1, 0)
            self._remember(live, min(request.num_computed_tokens, request.num_tokens))

    def _loaded(self, live: Live) -> None:
        has_failed = live.name in self.failed
        self.failed.discard(live.name)
        if live.state == "finished":  # aborted meanwhile
            self._free(live)
            del self.by_name[live.name]
            return
        live.state = "waiting"
        if has_failed:
            self.loads_failed += 1
            live.request.num_computed_tokens = 0
            self._free(live)
        else:
            self._remember(live, live.request.num_computed_tokens)


def hash_in_group(block_hash: bytes, group: int) -> bytes:
    """As vLLM's pool names a block."""
    return block_hash + group.to_bytes(4)


def _wanted(live: Live) -> int:
    """Tokens that a running request could compute."""
    tokens = live.request.num_tokens + live.placeholders
    if live.placeholders and tokens >= live.prompt + live.wanted:
        return 0
    return tokens - live.request.num_computed_tokens


def _blocks(tokens: int) -> int:
    """Blocks of all groups for so many tokens."""
    return sum(-(-tokens // size) for size in SIZES)


def _unschedule(step: FakeStep, work: list[Work], victim: Live) -> None:
    """Take a request out of a step again."""
    cached = step.scheduled_cached_reqs
    if victim.name in cached.req_ids:
        index = cached.req_ids.index(victim.name)
        del cached.req_ids[index], cached.new_block_ids[index], cached.num_computed_tokens[index]
        del step.num_scheduled_tokens[victim.name]
        work[:] = [entry for entry in work if entry.live is not victim]
