"""An engine on a device pool: its scheduler commits and releases under fences, and its shards write afterwards.

Each request is a generator that yields what it waits for. The scheduler carries on with one that waits no longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from random import Random
from typing import Any, TypeVar

import msgspec

from kvcached_client import Client, KeyChain, Lease, map_pool
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    NoCapacity,
    Refused,
    RequestError,
    Stale,
    TransportError,
)
from kvcached_client.types import NO_FENCE, FenceSequence
from tests.chaos.oracle import POISON, Item, Pages
from tests.chaos.prompts import BLOCK_SIZE, Prompts
from tests.chaos.reporting import Report
from tests.chaos.shards import Order, Shards

T = TypeVar("T")
Condition = Callable[[], bool]
Steps = Generator[Condition, None, T]

_DEADLINE_MS = 1500
_REQUESTS_MAX = 8
#: Orders that shards have not answered; a scheduler with more queues nothing new.
_ORDERS_MAX = 100
_REJOIN_PATIENCE_S = 20.0
_CONNECT_PAUSE_S = 0.05
#: Refusals of a hello after which it is said again.
_TRY_LATER = {ErrorCode.POOL_BUSY, ErrorCode.WORKER_LOST, ErrorCode.CLEARING, ErrorCode.DRAINING, ErrorCode.DEADLINE}


class SessionOver(Exception):
    """The engine has to open another session."""


class EnginePlan(msgspec.Struct, frozen=True):
    """What an incarnation of an engine is told.

    Attributes:
        name: of the engine.
        number: of the incarnation.
        seed: of its choices.
        run_dir, replica: where it connects.
        shards: how many.
        reserve: slots for the time when the daemon is away.
    """

    name: str
    number: int
    seed: str
    run_dir: str
    replica: str
    shards: int
    reserve: int


class ManagedEngine:
    """One session of an engine, from its hello until it is over."""

    def __init__(self, plan: EnginePlan, shards: Shards, report: Report) -> None:
        self._plan = plan
        self._shards = shards
        self._report = report
        self._random = Random(plan.seed)
        self._parts = ExitStack()
        self._views: list[Pages] = []  #: of every layer of every shard
        self._prompts = Prompts(self._random)
        #: How long a shard computes before it writes.
        self._delays_ms = self._random.choice([(0, 0, 0, 2, 5, 20), (0, 0, 0, 2, 20, 60, 250), (0, 0, 60, 250, 800)])
        self._requests: list[tuple[Steps[None], Condition]] = []
        self._number = 0
        self._fence = 0  #: the last one that was queued
        self._passed: dict[int, int] = dict.fromkeys(range(plan.shards), 0)
        self._told_fence = 0
        self._tell_fence_at_s = 0.0
        self._lost_s: float | None = None
        self._rejoins = 0
        self._rejoin_at_s = 0.0
        self._gives_up = self._random.random() < 0.1
        self.client = self._connect()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def _connect(self) -> Client:
        while True:
            try:
                client = Client.connect(
                    self._plan.run_dir,
                    replica=self._plan.replica,
                    deadline_ms=_DEADLINE_MS,
                    reserve_blocks=self._plan.reserve,
                )
            except NoCapacity:
                self._shards.pump(_CONNECT_PAUSE_S)
            except RequestError as error:
                if error.code not in _TRY_LATER and not isinstance(error, Stale):
                    self._report.tell("refused", what="hello", error=str(error))
                self._shards.pump(_CONNECT_PAUSE_S)
            except TransportError:
                self._shards.pump(_CONNECT_PAUSE_S)
            else:
                self._report.note(f"connected session={client.session.id} epoch={client.epoch}")
                self._report.counts["sessions"] += 1
                return client

    def _join(self) -> None:
        """Every shard maps the pool of the present session.

        Raises:
            SessionOver: one could not.
        """
        order = self._shards.order("join", self.client.session.to_bytes())
        while not order.is_done:
            self._shards.pump(1.0)
            if not self.client.is_alive:
                break
        while not order.is_done:
            self._shards.pump(1.0)
        if any(order.answers.values()):
            self._report.note(f"join failed: {order.answers}")
            raise SessionOver
        self._map()

    def _map(self) -> None:
        """Map all shards here, too: slots are poisoned at once, however long the shards' queues are."""
        try:
            for shard in range(self._plan.shards):
                pool = self._parts.enter_context(map_pool(self.client.session, shard, deadline_ms=_DEADLINE_MS))
                self._views += [pool.pages(layer) for layer in range(pool.layout.groups[0].layers)]
        except KvcachedError as error:
            self._report.note(f"not mapped: {error}")
            raise SessionOver from None

    def serve(self) -> None:
        """Serve requests until the session is over.

        Raises:
            SessionOver: it is.
            ShardDied: a shard is gone.
        """
        self._join()
        while True:
            runnable = [each for each in self._requests if each[1]()]
            self._shards.pump(0 if runnable else 0.01)
            self._tell_fence()
            self._look_for_daemon()
            self._report.tell_counts()
            if len(self._requests) < _REQUESTS_MAX and self._shards.queued < _ORDERS_MAX:
                self._number += 1
                steps = self._serve_one(f"{self._plan.number}-{self._number}")
                self._requests.append((steps, lambda: True))
            if runnable:
                self._carry_on(*self._random.choice(runnable))

    def _carry_on(self, steps: Steps[None], condition: Condition) -> None:
        self._requests.remove((steps, condition))
        try:
            self._requests.append((steps, next(steps)))
        except StopIteration:
            self._report.counts["requests"] += 1

    def _look_for_daemon(self) -> None:
        client, now_s = self.client, time.monotonic()
        if client.is_alive:
            return
        if not client._channel.is_gone:
            self._report.note("session over")
            raise SessionOver
        if self._lost_s is None:
            self._lost_s = now_s
            self._rejoin_at_s = now_s + self._random.choice([0.0, 0.02, 0.3])
            self._report.note(f"daemon gone, fences {self._told_fence} of {self._fence} told")
        if self._gives_up or now_s - self._lost_s > _REJOIN_PATIENCE_S:
            raise SessionOver
        if now_s >= self._rejoin_at_s:
            self._rejoin_at_s = now_s + _CONNECT_PAUSE_S
            self._rejoin()

    def _rejoin(self) -> None:
        try:
            self.client.rejoin()
        except TransportError:
            return
        except Stale as error:
            self._report.note(f"nothing to rejoin: {error}")
            raise SessionOver from None
        except RequestError as error:
            if error.code not in _TRY_LATER:
                self._report.tell("refused", what="rejoin", error=str(error))
            raise SessionOver from None
        self._lost_s = None
        self._rejoins += 1
        self._gives_up = self._random.random() < 0.1
        self._report.counts["rejoins"] += 1
        self._report.note(f"rejoined session={self.client.session.id} epoch={self.client.epoch}")
        self._shards.order("join", self.client.session.to_bytes())

    # --- fences -----------------------------------------------------------------------------------------------------

    def _next_fence(self) -> FenceSequence:
        """A fence behind all that is queued."""
        self._fence += 1

        def passed(order: Order) -> None:
            for shard, number in order.answers.items():
                self._passed[shard] = max(self._passed[shard], number)

        self._shards.order("fence", self._fence, then=passed)
        return FenceSequence(self._fence)

    def _tell_fence(self) -> None:
        """Signal the fence that every shard has passed, at once or somewhat later."""
        passed, now_s = min(self._passed.values()), time.monotonic()
        if passed <= self._told_fence or now_s < self._tell_fence_at_s:
            return
        self._tell_fence_at_s = now_s + self._random.choice([0, 0, 0, 0.05, 0.4])
        try:
            self.client.signal_fence(FenceSequence(passed))
        except TransportError:
            return
        self._told_fence = passed
        self._report.note(f"fence {passed} signalled")

    # --- a request --------------------------------------------------------------------------------------------------

    def _serve_one(self, name: str) -> Steps[None]:
        random, prompt = self._random, self._prompts.next()
        chain = self.client.chain(prompt.tokens, salt=prompt.salt, lora=prompt.lora)
        if random.random() < 0.15:
            yield from self._prefetch(chain)
        lease = yield from self._acquire(name, chain)
        if lease is None:
            self._report.counts["requests without a lease"] += 1
            return
        self._report.note(
            f"{name} lease={lease.id} hit={lease.hit_blocks} ready={lease.ready_blocks}"
            f" table={lease.block_table.tolist()} last={chain.keys[-16:].hex()}"
        )
        yield from self._take_hit(name, lease, chain)
        if not lease.is_loading:
            yield from self._compute(name, lease, chain)
        yield from self._give_back(name, lease, chain)

    def _call(self, action: Callable[[], T]) -> Steps[T]:
        """What the daemon answers. While it is away the request waits; then it asks again."""
        while True:
            rejoins = self._rejoins
            try:
                return action()
            except DaemonUnreachable:
                self._report.counts["calls without a daemon"] += 1
                yield lambda rejoins=rejoins: self._rejoins > rejoins  # type: ignore[misc]
            except DeadlineExceeded:
                self._report.counts["calls late"] += 1
                yield self._after(0.05)
            except Stale as error:
                self._report.note(f"stale: {error}")
                raise SessionOver from None

    def _after(self, pause_s: float) -> Condition:
        until_s = time.monotonic() + pause_s
        return lambda: time.monotonic() >= until_s

    def _prefetch(self, chain: KeyChain) -> Steps[None]:
        stop = self._random.choice(["best_effort", "best_effort", "timeout"])
        try:
            result = yield from self._call(lambda: self.client.prefetch(chain, stop=stop, deadline_ms=200, full=True))  # type: ignore[arg-type]
        except RequestError as error:
            self._report.note(f"prefetch refused: {error}")
            return
        self._report.counts["blocks fetched"] += result.fetched

    def _acquire(self, name: str, chain: KeyChain) -> Steps[Lease | None]:
        random = self._random
        options: dict[str, Any] = {
            "reserve_tokens": random.choice([0, 0, BLOCK_SIZE]),
            "cache": random.choice(["all", "all", "all", "prompt", "nothing"]),
            "full": random.random() < 0.5,
            "priority": random.choice([0, 0, 0, 0, 2, -1]),
        }
        for _ in range(6):
            try:
                return (yield from self._call(lambda: self.client.acquire(name, chain, **options)))
            except RequestError as error:
                if not isinstance(error, NoCapacity) and error.code not in _TRY_LATER:
                    self._report.tell("refused", what="acquire", error=str(error))
                    return None
                yield self._after(0.03)
        return None

    def _items(self, lease: Lease, chain: KeyChain, start: int, stop: int) -> list[Item]:
        table = lease.block_table
        return [Item(depth, int(table[depth]), chain.key_range(depth, depth + 1)) for depth in range(start, stop)]

    def _compare(self, name: str, items: list[Item], kind: str) -> Order:
        """Every shard compares blocks, when it comes to it."""
        queued_s, session = time.monotonic(), self.client.session.id

        def judge(order: Order) -> None:
            self._report.counts[f"compared {kind}"] += len(items) * len(order.answers)
            self._judge(name, kind, order, items[-1].depth + 1, queued_s, session)

        return self._shards.order("compare", items, then=judge)

    def _judge(self, name: str, kind: str, order: Order, good: int, queued_s: float, session: int) -> None:
        """Report pages of the first `good` blocks that are wrong, if the session lives."""
        wrong = [(shard, each) for shard, pages in order.answers.items() for each in pages or () if each[0] < good]
        if not wrong:
            return
        try:
            self.client.match(self.client.chain([0] * BLOCK_SIZE))
        except Stale:
            self._report.counts["wrong in a session that is over"] += 1
            return
        except KvcachedError as error:
            self._report.note(f"whether the session lives is not known: {error}")
        self._report.tell(
            "wrong", request=name, hit=kind, replica=self._plan.replica, session=session, queued_s=queued_s,
            rejoins=self._rejoins, fences=f"{self._told_fence} of {self._fence} told",
            pages=[(shard, *each) for shard, each in wrong[:6]], count=len(wrong),
        )  # fmt: skip

    def _take_hit(self, name: str, lease: Lease, chain: KeyChain) -> Steps[None]:
        self._report.counts["device hit blocks"] += lease.ready_blocks
        if lease.ready_blocks:
            self._compare(name, self._items(lease, chain, 0, lease.ready_blocks), "device")
        if not lease.is_loading:
            return
        ready, layered, queued_s = lease.ready_blocks, None, time.monotonic()
        if self._random.random() < 0.6:
            items = self._items(lease, chain, ready, lease.hit_blocks)
            layered = self._shards.order("load", list(lease.loads), items)
        refusals = 0
        while lease.is_loading:
            try:
                yield from self._call(lease.wait_loaded)
            except NoCapacity:
                refusals += 1
                if refusals == 5:
                    break
                yield self._after(0.03)
        if layered is not None:
            yield lambda: layered.is_done
            hit = lease.ready_blocks
            if all(answer is not None for answer in layered.answers.values()):
                self._report.counts["compared layer by layer"] += max(hit - ready, 0) * len(layered.answers)
            self._judge(name, "loading", layered, hit, queued_s, self.client.session.id)
        if lease.ready_blocks > ready:
            self._report.counts["host hit blocks"] += lease.ready_blocks - ready
            self._compare(name, self._items(lease, chain, ready, lease.ready_blocks), "host")
        self._report.note(f"{name} loaded hit={lease.hit_blocks} table={lease.block_table.tolist()}")

    def _compute(self, name: str, lease: Lease, chain: KeyChain) -> Steps[None]:
        self._poison(lease, lease.hit_blocks)
        yield from self._commit_up_to(name, lease, chain, chain.block_count)
        if self._random.random() < 0.3:
            had = len(lease.block_table)
            try:
                yield from self._call(lambda: lease.allocate((had + 1) * BLOCK_SIZE))
            except RequestError as error:
                if not isinstance(error, NoCapacity) and error.code not in {*_TRY_LATER, ErrorCode.ALREADY_RELEASED}:
                    self._report.tell("refused", what="allocate", error=str(error))
                return
            self._poison(lease, had)
            chain.extend([self._random.randrange(20, 22)] * BLOCK_SIZE)
            yield from self._commit_up_to(name, lease, chain, chain.block_count)

    def _poison(self, lease: Lease, start: int) -> None:
        for view in self._views:
            view[lease.block_table[start:]] = POISON

    def _delay_ms(self) -> int:
        return self._random.choice(self._delays_ms)

    def _commit_up_to(self, name: str, lease: Lease, chain: KeyChain, end: int) -> Steps[None]:
        """Chunk by chunk, most under a fence: then the writes are queued, and done some time after the commit."""
        random, tries, written = self._random, 3, lease.depth
        while lease.depth < end and tries:
            stop = min(lease.depth + random.randint(1, 4), end)
            order = None
            if written < stop:
                order = self._shards.order("write", self._items(lease, chain, written, stop), self._delay_ms())
                written = stop
            fence = NO_FENCE
            if random.random() < 0.8:
                fence = self._next_fence()
            elif order is not None:
                yield lambda order=order: order.is_done  # type: ignore[misc]
                fence = FenceSequence(self._fence) if self._fence > min(self._passed.values()) else NO_FENCE
            before = lease.depth
            try:
                yield from self._call(lambda: lease.commit(stop * BLOCK_SIZE, fence=fence))  # noqa: B023
            except Refused as error:
                self._report.note(f"{name} commit refused: {error}")
                return
            self._report.counts["blocks committed"] += lease.depth - before
            self._report.counts["blocks committed before they are written"] += (lease.depth - before) * (fence > 0)
            self._report.note(f"{name} committed {before}..{lease.depth} fence={fence}")
            tries -= lease.depth < stop
            yield lambda: True

    def _give_back(self, name: str, lease: Lease, chain: KeyChain) -> Steps[None]:
        random = self._random
        if lease.granted and not lease.is_loading and random.random() < 0.4 and lease.depth:
            self._compare(name, self._items(lease, chain, 0, lease.depth), "own")
        if random.random() < 0.5:
            yield self._after(random.choice([0.01, 0.1, 0.5, 1.5]))
        own = lease.block_table[max(lease.depth, lease.hit_blocks) :].tolist()
        if own and not lease.is_loading and random.random() < 0.4:
            self._shards.order("junk", own, self._delay_ms())
        fence = self._next_fence()
        if random.random() < 0.2:
            yield lambda: min(self._passed.values()) >= fence
        try:
            yield from self._call(lambda: lease.release(fence=fence))
        except Refused as error:
            self._report.note(f"{name} release refused: {error}")
        self._report.note(f"{name} released lease={lease.id} fence={fence}")
