"""A vLLM with its own scheduler, which loads from a daemon's core and is killed on memory that outlives it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from vllm import __version__
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvcached.core.slots.states import SessionState
from kvcached_client.blocks.engine_table import EngineTable, Row, table_bytes
from kvcached_client.offload import OffloadLayout
from kvcached_client.vllm import connector
from kvcached_client.vllm.device_table import DeviceTable, Engine, KnownIdentity
from kvcached_client.vllm.identity import Identity
from kvcached_client.vllm.orders import group_key
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from tests.vllm.scheduler.engine import SHARDS, OwnScheduler, Report, Workers, config_of
from tests.vllm.scheduler.model import DIGEST_LENGTH, STATE_LENGTH, VOCABULARY, Memory, Model
from tests.vllm_connector.mini_daemon import MiniDaemon
from tests.vllm_connector.mini_world import MiniWorker, World
from tests.vllm_connector.warm_world import DyingTable, Fuse, until_killed

#: A session with more tokens ends.
SESSION_TOKENS = 90
#: Blocks beside which there is room for one.
ROOMY = 60


class Promise(NamedTuple):
    """What a block holds: tokens end in it."""

    group: int
    tokens: tuple[int, ...]


class Promises:
    """What the hashes of requests stand for: a group, and the tokens up to the end of a block of it.

    Attributes:
        names: of blocks in vLLM's pool.
        keys: of blocks in the daemon.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.names: dict[bytes, Promise] = {}
        self.keys: dict[bytes, Promise] = {}

    def note(self, request: Any, hash_tokens: int) -> None:
        """Note the hashes of a request."""
        tokens = tuple(request.all_token_ids)
        for index, block_hash in enumerate(request.block_hashes):
            end = (index + 1) * hash_tokens
            for group, layers in enumerate(self._model.groups):
                if end % layers.block == 0:
                    promise = Promise(group, tokens[:end])
                    self.names[bytes(make_block_hash_with_group_id(block_hash, group))] = promise
                    key = group_key(block_hash, group) if self._model.is_grouped else bytes(block_hash[:16])
                    self.keys[key] = promise

    def epoch(self, promise: Promise, states: Sequence[str], shard: int) -> int:
        """The earliest epoch of states, which must be as promised."""
        found = [state[:DIGEST_LENGTH] for state in states]
        expected = self._model.block(promise.tokens, promise.group, shard)
        assert found == expected, f"group {promise.group}, {len(promise.tokens)} tokens: {found}, not {expected}"
        return min(int(state[DIGEST_LENGTH:]) for state in states)


class Remains:
    """What outlives an engine: its blocks, their table, and a daemon.

    Attributes:
        has_table: whether engines find their blocks again. With drafts and without vLLM's cache there is no table.
        epochs: how often the table's epoch has changed.
        generations: how often it had when a generation of the daemon's namespace began.
    """

    def __init__(self, model: Model, blocks: int, *, policy: str) -> None:
        self.model, self.blocks, self.policy = model, blocks, policy
        self.has_table = not model.drafts and policy == "fcfs"
        self.table = bytearray(table_bytes(blocks))
        EngineTable(memoryview(self.table), blocks).new_epoch()
        self.memory: list[Memory] = [{} for _ in range(SHARDS)]
        self.promises = Promises(model)
        self.epochs = 0
        self.generations: dict[tuple[MiniDaemon, int], int] = {}
        self.daemon: MiniDaemon | None = None
        self.prompts: list[list[int]] = []

    def check(self, rows: Sequence[Row]) -> None:
        """Each named block holds what its name says, on all shards, computed in the table's epoch."""
        for row in rows:
            for shard, memory in enumerate(self.memory):
                epoch = self.promises.epoch(self.promises.names[row.name], memory.get(row.block, ()), shard)
                assert epoch == self.epochs, f"block {row.block} is of epoch {epoch}, the table of {self.epochs}"

    def check_daemon(self) -> None:
        """Each block in the daemon holds what its key says, on all shards."""
        for shard, memory in enumerate(self.daemon.memory if self.daemon is not None else ()):
            for key, _, content in memory.values():
                if key != b"damaged":
                    self.promises.epoch(self.promises.keys[key], states_in(content), shard)


def states_in(content: str) -> list[str]:
    """The states in the bytes of a block."""
    return [content[at : at + STATE_LENGTH] for at in range(0, len(content), STATE_LENGTH)]


class SchedulerWorld(World):
    """One engine, from its start on what another one has left until it is killed.

    Args:
        seed: of everything that happens.
        config: the folder of vLLM's model.
        remains: of the engine before.
    """

    def __init__(self, seed: int, config: Path, remains: Remains) -> None:
        self.config, self.remains = config, remains
        self.fuse = Fuse()
        super().__init__(seed)
        self.prefixes = [[place * number % 7 for place in range(length)] for number, length in ((3, 20), (5, 43))]
        self.table = DyingTable(memoryview(remains.table), remains.blocks, self.fuse)
        self.adopted = self._open_table()
        self.noted: dict[str, list[bytes]] = {}  #: the last hash of requests
        self.computed = [0] * SHARDS  #: the last step that each worker has reported
        remains.check(self.table.rows())

    def build(self, rng: random.Random) -> None:
        is_async = rng.random() < 0.7
        remains = self.remains
        workers = Workers(remains.model, remains.memory, epoch=lambda: remains.epochs, instant=self.fuse.burn, rng=rng)
        config = config_of(self.config, remains.model, remains.blocks, is_async=is_async, policy=remains.policy)
        with (
            mock.patch.object(connector, "DaemonThread", return_value=self.link),
            mock.patch.object(connector, "SchedulerSide", partial(SchedulerSide, clock=lambda: self.now)),
        ):
            self.vllm = OwnScheduler(config, remains.model.groups, workers, is_async=is_async)
        self.pool, self.side = self.vllm.pool, self.vllm.connector._scheduler

    def _open_table(self) -> int:
        """Adopt what the table names."""
        if not self.remains.has_table:
            return 0
        sizes = [layers.block for layers in self.remains.model.groups]
        manager = self.vllm.manager
        blocks = DeviceBlocks(self.table, self.pool, sizes, lambda request: manager.get_blocks(request).blocks)
        identify = KnownIdentity(lambda: Identity(bytes(32), "own", ()))
        identify()
        engine = Engine(OffloadLayout(1, sizes[0], SHARDS, bytes(32)), identify, "own", sizes)
        self.vllm.connector._device = table = DeviceTable(self.table, blocks, engine, SHARDS)
        return table.adopt()

    def daemon_of(self, *, slabs: int) -> MiniDaemon:
        if self.remains.daemon is None or self.remains.daemon.is_dead:
            size = self.remains.model.groups[0].block
            self.remains.daemon = MiniDaemon(self.rng, slabs=slabs, block_size=size)
        return self.remains.daemon

    def states_in(self, content: str, daemon: MiniDaemon, generation: int) -> list[str]:
        """Blocks of the daemon are of the epoch in which their generation began: a clear drops them, too."""
        epoch = self.remains.generations[daemon, generation]
        return [f"{state[:DIGEST_LENGTH]}{epoch:04}" for state in states_in(content)]

    def expected(self, prompt: list[int], wanted: int) -> list[int]:
        return self.remains.model.output(prompt, wanted)

    @property
    def held_blocks(self) -> int:
        held: int = len(self.pool.blocks) - 1 - self.pool.get_num_free_blocks()
        return held

    # --- what happens -----------------------------------------------------------------------------------------------

    def engine(self) -> None:
        vllm = self.vllm
        if len(vllm.flights) < vllm.depth:
            self.seen["vLLM stuck"] += vllm.abort_if_stuck()
            vllm.schedule()
            self._note_hashes()
            return
        flight = vllm.flights.popleft()
        is_before = self.rng.random() < 0.5
        for worker in self.workers if is_before else ():
            worker.begin(flight.orders)
            for _ in range(self.rng.randrange(4)):
                worker.turn()
        sampled = vllm.workers.compute(flight.output)
        for worker in () if is_before else self.workers:
            worker.begin(flight.orders)
        reports = [self._report(worker, flight.number) for worker in self.workers]
        requests = dict(vllm.by_name)
        self.seen["loads"] += len(vllm.update(flight, sampled, reports))
        self._note_hashes(requests)  # of those that have ended as well: their last blocks are stored
        self._go_on()
        self._note_hashes()

    def _go_on(self) -> None:
        """Sessions get further input some time, or end."""
        for name in self.vllm.sessions:
            if self.rng.random() < 0.5:
                goes_on = self.vllm.by_name[name].num_tokens < SESSION_TOKENS and self.rng.random() < 0.7
                more = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(1, 9))]
                self.vllm.add(name, more, self.rng.randrange(1, 12), is_session=goes_on)
                self.seen["sessions go on"] += goes_on

    def _report(self, worker: MiniWorker, number: int) -> Report:
        """What a worker says after a step: that it is computed, it may say later."""
        report = Report(worker.loaded, worker.failed, worker.bad, worker.stored)
        worker.loaded, worker.failed, worker.bad, worker.stored = set(), set(), set(), {}
        if self.rng.random() < 0.7:
            self.computed[worker.shard] = report.computed = number
        return report

    def _note_hashes(self, requests: Mapping[str, Any] | None = None) -> None:
        for name, request in (requests or self.vllm.by_name).items():
            if self.noted.get(name) != request.block_hashes[-1:]:
                self.noted[name] = request.block_hashes[-1:]
                self.remains.promises.note(request, self.vllm.hash_tokens)

    def arrive(self) -> None:
        """Now and then a session: one, for those that wait hold blocks, and vLLM never takes them.

        With states there is none: vLLM would go on with a state that has seen a token which it takes back. With drafts,
        vLLM 0.32 takes what it has guessed beyond the answer's end for computed.
        """
        model = self.remains.model
        is_wrong = model.has_states or bool(model.drafts and __version__.startswith("0.32."))
        has_session = any(request.resumable for request in self.vllm.by_name.values())
        if not (is_wrong or has_session) and self.remains.blocks >= ROOMY and self.rng.random() < 0.3:
            self.added += 1
            self.vllm.add(f"r{self.added}", self.prompt(), self.rng.randrange(1, 12), is_session=True)
        else:
            super().arrive()

    def prompt(self) -> list[int]:
        """Half of the prompts were there before, in this life or an earlier one."""
        prompts = self.remains.prompts
        if not prompts or self.rng.random() < 0.5:
            prompts.append(super().prompt())
            return prompts[-1]
        return self.rng.choice(prompts)

    def abort(self) -> None:
        living = [name for name, request in self.vllm.by_name.items() if not request.is_finished()]
        if living:
            self.vllm.abort(self.rng.choice(living))

    def preempt_all(self) -> None:
        with contextlib.suppress(RuntimeError):  # blocks that are being loaded stay
            self.vllm.scheduler.reset_prefix_cache(reset_running_requests=True)

    def reset(self) -> None:
        """VLLM drops its own cache, with or without that of the daemon."""
        is_all = self.rng.random() < 0.3
        self.seen["resets"] += self.vllm.scheduler.reset_prefix_cache(reset_connector=is_all)

    def clear_namespace(self) -> None:
        """The daemon clears the namespace; vLLM keeps what it has in its own cache."""
        for namespace in list(self.daemon.core.namespaces.by_root.values()):
            self.daemon.core.namespaces.clear(namespace)
        self.table.new_epoch()
        self.remains.epochs += 1

    def check(self) -> None:
        super().check()
        for namespace in self.daemon.core.namespaces.by_root.values():
            self.remains.generations.setdefault((self.daemon, namespace.generation), self.remains.epochs)
        self.remains.check(self.table.rows())
        self.remains.check_daemon()

    def live_and_die(self, things: int) -> None:
        """Serve for a while, then be killed."""
        operations: list[tuple[Callable[[], None], float]] = [
            (self.engine, 60), (self.link_turn, 40), (self.worker_turn, 40), (self.arrive, 10), (self.tick, 4),
            (self.abort, 2), (self.preempt_all, 0.5), (self.reset, 4), (self.clear_namespace, 0.4), (self.expire, 0.5),
            (self.damage, 1), (self.slow, 0.5), (self.kill, 0.15),
        ]  # fmt: skip
        checked = [(partial(self._do_and_check, operation), weight) for operation, weight in operations]
        self.seen["killed inside"] += until_killed(self.rng, self.fuse, checked, things)
        self._note_hashes()
        self.check_outputs()
        for session in list(self.daemon.core.sessions.values()):
            if session.state is SessionState.ACTIVE:
                self.daemon.core.expire(session)
            if session.state is not SessionState.ENDED:
                self.daemon.core.end(session)
        self.daemon.is_slow = False

    def _do_and_check(self, operation: Callable[[], None]) -> None:
        operation()
        self.check()

    def serve_all(self, things: int) -> None:
        """Serve to the end; see `drain`."""
        for _ in range(things):
            self.rng.choice([self.engine, self.arrive, self.link_turn, self.worker_turn])()
            self.check()
        self.drain()
