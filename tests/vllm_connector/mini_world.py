"""The scheduler's side and the link between a small vLLM and the daemon's own core, with everything going wrong."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

from kvcached_client.errors import ErrorCode, KvcachedError, request_error
from kvcached_client.vllm.daemon.commands import DropLoad, DropStore, Event, MakeUpClear, Offer, Release, Seek
from kvcached_client.vllm.daemon.thread import DaemonThread
from kvcached_client.vllm.orders import LoadOrder, SessionNote, StepOrders, StoreId, StoreOrder
from kvcached_client.vllm.scheduling.chains import Chains, unit_of
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from tests.vllm_connector.mini_daemon import BLOCK, MiniClient, MiniDaemon
from tests.vllm_connector.mini_hybrid import ListedBlock, MiniHybrid
from tests.vllm_connector.mini_parts import Pool, reference
from tests.vllm_connector.mini_states import SIZES
from tests.vllm_connector.mini_states import reference as groups_reference
from tests.vllm_connector.mini_vllm import SHARDS, MiniVllm

STEPS = 400


class SteppedThread(DaemonThread):
    """The link without its thread: a test says when it does its next thing."""

    def __init__(self, world: World) -> None:
        super().__init__(prefetch="timeout", clock=lambda: world.now)
        self._world = world

    def __del__(self) -> None:
        """A test makes some hundred of them, and does not close them."""
        self.close()

    def take(self) -> list[Event]:
        """The events so far; some of them come while the scheduler is deciding."""
        if self._world.rng.random() < 0.3:
            self.turn()
        return super().take()

    def turn(self) -> None:
        """One turn of the thread's loop."""
        if self._client is not None:
            if self._commands.due_in(self._clock()) == 0 or not self._is_alive():
                self._serve_next()
            else:
                self._end_acquire(self._begin_acquire(self._take_fetched()))
            return
        if self._pause_s:
            self._refuse_waiting((Seek, Offer, DropLoad, DropStore, Release, MakeUpClear), is_open=False)
        self._open(self._world.connect)

    def carry_out_all(self) -> None:
        """Every command, though it would wait for others."""
        while self._commands:
            self._commands.hurry()
            self.turn()

    def clear(self, timeout_s: float) -> bool:
        self._owes_clear = True
        self._commands.put(MakeUpClear(), self._clock())
        return False


class MiniWorker:
    """A worker: carries out orders some time later, for the session that it has joined."""

    def __init__(self, world: World, shard: int) -> None:
        self.world, self.shard = world, shard
        self.loads: deque[LoadOrder] = deque()
        self.stores: deque[StoreOrder] = deque()
        self.note: SessionNote | None = None
        self.joined = 0
        self.loaded: set[str] = set()
        self.bad: set[int] = set()
        self.failed: set[str] = set()
        self.stored: dict[StoreId, bool] = {}

    def begin(self, orders: StepOrders) -> None:
        self.note = orders.session or self.note
        self.loads.extend(orders.loads)
        self.stores.extend(orders.stores)

    def turn(self) -> None:
        """The next order, or the latest session joined."""
        if self.loads or self.stores:
            order = self.loads.popleft() if self.loads else self.stores.popleft()
            if self.note is not None and order.session == self.note.number:
                self._join()
            self._carry_out(order)
        else:
            self._join()

    def _join(self) -> None:
        if self.note is not None and self.joined != self.note.number:
            self.joined = self.note.number
            self.world.ended(self)

    def _carry_out(self, order: LoadOrder | StoreOrder) -> None:
        client = self.world.clients[order.session]
        blocks = [int(block) for span in order.job.spans for block in span.blocks.tolist()]
        memory = self.world.vllm.memory[self.shard]
        failed = order.session != self.joined or self.world.rng.random() < 0.03
        bad: list[int] = []
        if isinstance(order, StoreOrder):
            if not failed:
                client.daemon.store(self.shard, order.job, ["".join(memory[block]) for block in blocks])
        elif not failed:
            found = client.daemon.load(self.shard, order.job)
            bad = [index for index, content in enumerate(found) if content is None]
            for block, content in zip(blocks, found, strict=True):
                if content is not None:
                    memory[block] = self.world.states_in(content, client.daemon, order.job.generation)
        try:
            if order.session == self.joined:
                client.settle(self.shard, order.job, is_load=isinstance(order, LoadOrder), bad=bad, failed=failed)
        except KvcachedError:
            failed = True
        if isinstance(order, LoadOrder):
            self.loaded.add(order.request)
            self.bad.update(blocks if failed else [blocks[index] for index in bad])
            self.failed.update([order.request] if failed or bad else [])
        else:
            self.stored[order.id] = failed


class World:
    """Everything, driven by one random generator."""

    pools = (16, 28, 60)  #: numbers of blocks, of which one world has one

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.daemon = self.daemon_of(slabs=rng.choice([3, 6, 30]))
        self.clients: dict[int, MiniClient] = {}
        self.link = SteppedThread(self)
        self.pool: Any
        self.side: SchedulerSide
        self.vllm: Any
        self.build(rng)
        self.workers = [MiniWorker(self, shard) for shard in range(SHARDS)]
        self.added = 0
        self.seen: Counter[str] = Counter()
        self.waiting_loads: Counter[str] = Counter()
        self.prefixes = [[rng.randrange(11) for _ in range(rng.randrange(30))] for _ in range(3)]

    def build(self, rng: random.Random) -> None:
        """The engine, its blocks, and its connector."""
        self.pool = self.pool_of(rng)
        self.side = SchedulerSide(
            self.link, self.pool, chains=self.chains(), shards=SHARDS, hold_deadline_s=1.0, clock=lambda: self.now
        )
        self.vllm = self.engine_of(rng)

    def daemon_of(self, *, slabs: int) -> MiniDaemon:
        """A daemon."""
        return MiniDaemon(self.rng, slabs=slabs)

    def states_in(self, content: str, daemon: MiniDaemon, generation: int) -> list[str]:
        """What the model has computed, of the bytes of a block that a daemon found in this generation."""
        return [content[at : at + 8] for at in range(0, len(content), 8)]

    def pool_of(self, rng: random.Random) -> Pool:
        """The engine's blocks."""
        return Pool(rng.choice(self.pools), has_cache=rng.random() < 0.5)

    def chains(self) -> Chains:
        """How the blocks of the engine form chains."""
        return Chains(BLOCK)

    def engine_of(self, rng: random.Random) -> Any:
        """The engine."""
        depth = rng.choice([1, 2])
        return MiniVllm(rng, self.side, self.pool, depth=depth, guesses=rng.choice([0, 3]))

    def expected(self, prompt: list[int], wanted: int) -> list[int]:
        """The output of a request without a cache."""
        return reference(prompt, wanted)

    # --- the daemon's part ------------------------------------------------------------------------------------------

    def connect(self) -> Any:
        if self.daemon.is_dead or self.daemon.is_slow:
            raise request_error(ErrorCode.INTERNAL, "no daemon", "wait")
        client = MiniClient(self.daemon, 0)
        self.clients[self.link._number + 1] = client
        return client

    def ended(self, worker: MiniWorker) -> None:
        """Sessions that every worker has left are over."""
        for number, client in self.clients.items():
            if number < min(each.joined for each in self.workers) and not client.daemon.is_dead:
                client.end()

    # --- what happens -----------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if len(self.vllm.by_name) < 12:
            prompt = self.prompt()
            self.added += 1
            self.vllm.add(f"r{self.added}", prompt, self.rng.randrange(1, 12), skip_reading=self.rng.random() < 0.1)

    def prompt(self) -> list[int]:
        """What a request asks."""
        return [
            *self.rng.choice(self.prefixes),
            *(self.rng.randrange(11) for _ in range(self.rng.randrange(1, 9))),
        ]

    def abort(self) -> None:
        live = [each for each in self.vllm.by_name.values() if each.state != "finished"]
        if live:
            self.vllm.abort(self.rng.choice(live))

    def preempt_all(self) -> None:
        """As a reset of the prefix cache with running requests does."""
        for live in reversed(list(self.vllm.running)):
            self.vllm.running.remove(live)
            self.vllm._preempt(live)

    def reset(self) -> None:
        if self.pool.forget_all():
            self.seen["resets"] += 1
            self.side.reset()

    def expire(self) -> None:
        if self.link._client is not None:
            session = self.daemon.core.sessions.get(self.link._client.session.id)  # type: ignore[call-overload]
            if session is not None and self.link._client.is_alive:
                self.daemon.core.expire(session)
                self.seen["expired"] += 1

    def kill(self) -> None:
        self.seen["killed"] += 1
        self.daemon.is_dead = True
        self.daemon = self.daemon_of(slabs=6)

    def damage(self) -> None:
        self.daemon.damage()

    def slow(self) -> None:
        self.daemon.is_slow = not self.daemon.is_slow

    def tick(self) -> None:
        self.now += self.rng.choice([0.01, 0.3, 2.0])

    def engine(self) -> None:
        """The engine's loop: schedule while there is room in the pipeline, else take in the oldest step.

        vLLM gives the orders of a step before or after its kernels: copies may be over before the step is computed.
        """
        vllm = self.vllm
        if len(vllm.flights) < vllm.depth:
            vllm.schedule()
            return
        flight = vllm.flights.popleft()
        for order in flight.orders.loads:
            self.waiting_loads[order.request] = SHARDS
        for worker in self.workers if (is_before := self.rng.random() < 0.5) else ():
            worker.begin(flight.orders)
            for _ in range(self.rng.randrange(4)):
                worker.turn()
        sampled = vllm.compute(flight)
        loaded: set[str] = set()
        bad: set[int] = set()
        done: Counter[StoreId] = Counter()
        failed: set[StoreId] = set()
        for worker in self.workers:
            if not is_before:
                worker.begin(flight.orders)
            for request in worker.loaded:
                self.waiting_loads[request] -= 1
                if not self.waiting_loads[request]:
                    loaded.add(request)
            bad |= worker.bad
            done.update(dict.fromkeys(worker.stored, 1))
            failed.update(store for store, has_failed in worker.stored.items() if has_failed)
            worker.loaded, worker.bad, worker.stored = set(), set(), {}
        self.seen["loads"] += len(loaded)
        vllm.update(sampled, bad, loaded)
        self.side.stored(done, failed)

    def link_turn(self) -> None:
        self.link.turn()

    def worker_turn(self) -> None:
        self.rng.choice(self.workers).turn()

    def run(self) -> None:
        usual = [(self.engine, 60), (self.link_turn, 40), (self.worker_turn, 40), (self.arrive, 8), (self.tick, 4)]
        faults = [
            (self.abort, 2),
            (self.preempt_all, 1),
            (self.reset, 2),
            (self.expire, 1),
            (self.kill, 0.3),
            (self.damage, 2),
            (self.slow, 1),
        ]
        operations, weights = zip(*usual, *faults, strict=True)
        for _ in range(STEPS):
            self.rng.choices(operations, weights)[0]()
            self.check()
        self.drain()

    def check(self) -> None:
        """What must hold at any time."""
        self.daemon.check()

    def check_outputs(self) -> None:
        """Every answer is the one that is computed without a cache."""
        for name, (prompt, wanted, output) in self.vllm.outputs.items():
            assert output == self.expected(prompt, wanted), f"{name} got another output than computed"

    @property
    def held_blocks(self) -> int:
        """How many blocks have a user."""
        return sum(block.users > 0 for block in self.pool.blocks)

    def drain(self) -> None:
        """No faults any more: every request ends, and nothing is left behind."""
        self.daemon.is_slow = False
        for _ in range(3000):
            if not self.vllm.by_name and not self.side.is_busy and not self.vllm.flights:
                break
            self.now += 0.1
            for _ in range(4):
                self.link.turn()
            for worker in self.workers:
                worker.turn()
            self.engine()
        assert not self.vllm.by_name, f"{list(self.vllm.by_name)} never ended"
        assert not self.side.is_busy
        self.link.carry_out_all()
        self.side._take_events()
        self.link.carry_out_all()
        self.check()
        for session in self.daemon.core.sessions.values():
            assert not session.leases, "leases were not given back"
            if self.link._client is not None and session.id == self.link._client.session.id:
                assert not session.transfers, "transfers were not ended"
        assert not self.held_blocks, "blocks are still held"
        side, offers = self.side, self.side._store_queue
        notes = (side._by_id, side._loading, side._new_loads, side._leases._seeking)
        assert not any((*notes, offers._postponed, offers._parting, offers._failed)), "notes were left behind"
        self.check_outputs()


class GroupsWorld(World):
    """With an engine of two groups of layers, one of which has a sliding window."""

    pools = (40, 60, 120)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.prefixes = [[rng.randrange(11) for _ in range(rng.randrange(8, 45))] for _ in range(2)]

    def chains(self) -> Chains:
        return Chains(BLOCK, unit=unit_of(SIZES, BLOCK), live=self._lists)

    def _lists(self, request: str) -> list[list[ListedBlock]]:
        lists: list[list[ListedBlock]] = self.vllm.lists(request)
        return lists

    def engine_of(self, rng: random.Random) -> Any:
        return MiniHybrid(rng, self.side, self.pool, depth=rng.choice([1, 2]))

    def expected(self, prompt: list[int], wanted: int) -> list[int]:
        return groups_reference(prompt, wanted)
