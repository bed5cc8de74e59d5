"""The engine's one decision maker: who runs, which rows make up a step, when blocks become everyone's.

Life of a request, and the call of the cache that goes with each line::

    waiting       cache.fetch                   no lease, no slots; blocks come from storage, if there is any
    admitted      cache.acquire                 tokens [0, hit) are cached: computed starts there
    loading       lease.wait_loaded             its first rows are computed while the hit still arrives from the host
    prefill       lease.commit after a chunk    rows [computed, next multiple of chunk_tokens)
    decode        lease.allocate, lease.commit  one row a step; a block is committed when it is full
    finished      lease.finish                  commit and release in one message
    preempted     lease.finish                  back to waiting; what it committed is likely a hit when it returns

A prefill chunk and a decode row are the same thing: the next rows whose tokens are known. The last known row gives the
next token.

Loading overlaps with computing: the shards wait for the hit layer by layer, in the step that computes the first rows
after it. Before anything of those rows is used, `wait_loaded` says whether the hit is what they were computed from. If
it is not, they never happened. Where shards cannot wait for a layer (attached mode) the request is left out of steps
until its hit is there.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from examples.llama_engine.cache import Cache
from examples.llama_engine.config import Limits
from examples.llama_engine.generation import FinishReason, GenerationRequest, GenerationResult
from examples.llama_engine.messages import Sample, Step, StepDone, StepItem
from examples.llama_engine.running import Running, Sequence
from examples.llama_engine.storage import PrefillRate
from kvcached_client import DeadlineExceeded, NoCapacity


class StepRunner(Protocol):
    """Computes steps: `ShardGroup`, or a double."""

    def run(self, step: Step) -> StepDone:
        """Returns when K and V of the step's rows are in the pool of every shard."""


class Planned(NamedTuple):
    """Rows [running.computed, end) of one request in a step."""

    running: Running
    end: int

    @property
    def samples(self) -> bool:
        """Whether the last of them gives a token."""
        return self.end == len(self.running.sequence.tokens)


class Scheduler:
    """Continuous batching over leases.

    Args:
        cache: where blocks come from.
        runner: computes the steps.
        limits: what one step may hold.
    """

    def __init__(self, cache: Cache, runner: StepRunner, limits: Limits) -> None:
        self._cache = cache
        self._runner = runner
        self._limits = limits
        self._block_size = cache.layout.block_size
        self._waiting: deque[Sequence] = deque()
        self._running: list[Running] = []  #: in order of admission
        self._pool_full = False  #: admission failed, or somebody was preempted, and nobody has ended since
        self._submitted = 0
        self._rate = PrefillRate()

    @property
    def idle(self) -> bool:
        """Whether every submitted request is over."""
        return not self._waiting and not self._running

    def submit(self, request: GenerationRequest) -> str:
        """Queue a request; returns the name its result will have."""
        self._submitted += 1
        name = f"request-{self._submitted}"
        sequence = Sequence(name, request, time.monotonic_ns(), list(request.prompt))
        sequence.fetch = self._cache.fetch(request.prompt, self._rate.tokens_per_s)
        self._waiting.append(sequence)
        return name

    def step(self) -> list[GenerationResult]:
        """Admit what fits, compute one step, commit; returns the requests that ended in it.

        Raises:
            KvcachedError: the daemon is gone or the session has ended.
            ShardDied: the shards cannot go on.
        """
        if self._cache.go_on():
            self._pool_full = False
        results = self._admit()
        self._start_arrived()
        batch = self._plan(results)
        if batch:
            done = self._run(batch)
            samples = iter(done.samples)
            with self._cache.together():
                for index, planned in enumerate(batch):
                    sample = next(samples) if planned.samples else None
                    if self._was_read(planned.running, unread=index in done.unread):
                        results.extend(self._advance(planned, sample))
        return results

    def _run(self, batch: list[Planned]) -> StepDone:
        began_s = time.monotonic()
        done = self._runner.run(Step([self._item(planned) for planned in batch]))
        rows = [planned.end - planned.running.computed for planned in batch]
        if max(rows) > 1 and not done.unread:
            self._rate.observe(sum(rows), time.monotonic() - began_s)
        return done

    def _next_waiting(self) -> Sequence | None:
        """The first that waits for nothing from storage. If nobody runs, storage is waited for."""
        for sequence in self._waiting:
            if sequence.fetch is None or sequence.fetch.is_over or not self._running:
                self._waiting.remove(sequence)
                if sequence.fetch is not None:
                    sequence.fetch.wait()
                    sequence.fetch = None
                return sequence
        return None

    def _admit(self) -> list[GenerationResult]:
        """Start waiting requests, in order, while leases are granted."""
        rejected: list[GenerationResult] = []
        while not self._pool_full and len(self._running) < self._limits.running_max:
            sequence = self._next_waiting()
            if sequence is None:
                break
            try:
                self._running.append(self._acquire(sequence))
            except NoCapacity:
                if not self._running and self._cache.await_daemon():
                    self._waiting.appendleft(sequence)
                    continue
                if not self._running:
                    rejected.append(sequence.result("no_capacity"))
                    continue
                # tried again when a lease has been released: until then the answer would be the same
                self._waiting.appendleft(sequence)
                self._pool_full = True
        return rejected

    def _acquire(self, sequence: Sequence) -> Running:
        # the lease takes what the chain holds now for the prompt: output joins it afterwards, on re-admission too
        chain = self._cache.chain(sequence.request.prompt)
        lease = self._cache.acquire(sequence.name, chain, cache=sequence.request.cache)
        chain.extend(sequence.output)
        device_tokens = lease.ready_blocks * self._block_size
        is_loading = lease.is_loading
        running = Running(sequence, lease, chain, lease.hit_tokens, device_tokens, is_loading and not lease.loads)
        if not is_loading:
            running.note_hit()
        return running

    def _start_arrived(self) -> None:
        """Requests that were held back start where their hit ends. If there are no others, wait for the first."""
        for running in [each for each in self._running if each.is_held_back]:
            if running.lease.is_loading:
                if not all(each.is_held_back for each in self._running):
                    continue
                running.lease.wait_loaded()
            running.is_held_back = False
            running.computed = running.lease.hit_tokens
            running.note_hit()

    def _plan(self, results: list[GenerationResult]) -> list[Planned]:
        """The rows of this step, decode rows first: a prefill never delays them. Appends requests it had to end."""
        batch: list[Planned] = []
        budget = self._limits.step_tokens
        ready = [each for each in self._running if not each.is_held_back]
        for running in sorted(ready, key=lambda each: len(each.sequence.tokens) - each.computed > 1):
            boundary = (running.computed // self._limits.chunk_tokens + 1) * self._limits.chunk_tokens
            end = min(len(running.sequence.tokens), boundary)
            if end - running.computed > budget:
                break
            if running in self._running and self._make_room(running, end, results):
                batch.append(Planned(running, end))
                budget -= end - running.computed
        return [planned for planned in batch if planned.running in self._running]

    def _make_room(self, running: Running, end: int, results: list[GenerationResult]) -> bool:
        """Slots for tokens [0, end), if need be at the cost of those admitted last; False if that was its own turn."""
        while running in self._running:
            try:
                running.lease.allocate(end)
                return True
            except NoCapacity:
                if self._cache.await_daemon():
                    continue  # nobody loses what it has because of a restart
                if self._running == [running]:
                    results.append(self._finish(running, "no_capacity"))
                else:
                    self._preempt(self._running[-1])
        return False

    def _preempt(self, running: Running) -> None:
        self._give_back(running)
        self._waiting.appendleft(running.sequence)
        # what it gave back is for the others; alone it can have it all at once
        self._pool_full = bool(self._running)

    def _give_back(self, running: Running) -> None:
        self._running.remove(running)
        if running.lease.is_loading:
            running.lease.release()  # nothing is computed yet that could be committed
        else:
            running.lease.finish(running.computed)

    def _item(self, planned: Planned) -> StepItem:
        running, end = planned
        blocks = -(-end // self._block_size)
        return StepItem(
            tokens=np.asarray(running.sequence.tokens[running.computed : end], dtype=np.int32).tobytes(),
            start=running.computed,
            block_table=running.lease.block_table[:blocks].tobytes(),
            sample=planned.samples,
            logits=running.sequence.request.logits,
            loads=running.lease.loads if running.lease.is_loading else (),
        )

    def _was_read(self, running: Running, *, unread: bool) -> bool:
        """Whether the step's rows of this request were computed from its cached blocks.

        If not, they are discarded: the request continues from the hit that it has, or waits for slots to compute in.
        """
        if running.lease.is_loading:
            try:
                hit_tokens = running.lease.wait_loaded()
            except NoCapacity:
                self._preempt(running)
                return False
            except DeadlineExceeded:
                return False  # still loading: the same rows again in the next step
            unread |= hit_tokens < running.computed
            running.computed = hit_tokens
            running.note_hit()
        return not unread

    def _advance(self, planned: Planned, sample: Sample | None) -> list[GenerationResult]:
        """The planned rows are in the pool: take the token that follows them, commit the blocks they filled.

        `commit` sends nothing while no block is full, so it may be called after every step.
        """
        running, end = planned
        running.computed = end
        if sample:
            self._take(running, sample)
            if reason := running.sequence.finish_reason():
                return [self._finish(running, reason)]
        running.lease.commit(end)
        return []

    def _take(self, running: Running, sample: Sample) -> None:
        sequence = running.sequence
        sequence.first_token_ns = sequence.first_token_ns or time.monotonic_ns()
        sequence.tokens.append(sample.token)
        running.chain.extend([sample.token])
        if sequence.request.logits:
            sequence.logits.append(sample.logits)

    def _finish(self, running: Running, reason: FinishReason) -> GenerationResult:
        self._give_back(running)
        self._pool_full = False
        return running.sequence.result(reason)
