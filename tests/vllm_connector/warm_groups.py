"""A small vLLM with two groups of layers on memory that outlives it; see `warm_world`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvcached_client.blocks.engine_table import EngineTable, PoolHead, Row, table_bytes
from kvcached_client.vllm.orders import StepOrders
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.mini_hybrid import SHARDS, MiniHybrid, Sampled, Work, hash_in_group
from tests.vllm_connector.mini_parts import Block, Pool
from tests.vllm_connector.mini_states import SIZES, ListedStates
from tests.vllm_connector.rig import FakeRequest, FakeStep
from tests.vllm_connector.test_simulation import GroupsWorld
from tests.vllm_connector.warm_world import DyingTable, Fuse, Killed, WatchedPool

STEPS_MAX = 300


class GroupRemains:
    """What outlives an engine.

    Attributes:
        tokens: of each name that a block can have.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.table = bytearray(table_bytes(blocks))
        EngineTable(memoryview(self.table), blocks).begin(PoolHead(bytes(16), "mini", blocks, 1, ((0, 0),) * SHARDS))
        self.memory: list[dict[int, list[str]]] = [{} for _ in range(SHARDS)]
        self.tokens: dict[bytes, list[int]] = {}

    def note(self, request: FakeRequest) -> None:
        """Note what the names of a request's blocks stand for."""
        for group, size in enumerate(SIZES):
            for tokens in range(size, len(request.block_hashes) * BLOCK + 1, size):
                name = hash_in_group(request.block_hashes[tokens // BLOCK - 1], group)
                self.tokens.setdefault(name, request.tokens[:tokens])

    def check(self, rows: Sequence[Row]) -> None:
        """Each named block holds what its name says, on all shards."""
        for row in rows:
            tokens, group = self.tokens[row.name], row.name[-1]
            for shard in range(SHARDS):
                states = ListedStates()
                states._shard = shard
                for at, token in enumerate(tokens):
                    states.compute(token, at)
                expected = states._lists[group][-SIZES[group] :]
                assert self.memory[shard].get(row.block) == expected, f"block {row.block} holds something else"


class DyingHybrid(MiniHybrid):
    """May be killed in the middle of a pass."""

    world: WarmGroupsWorld

    def schedule(self) -> None:
        super().schedule()
        self.world.numbers.append(self.world.last_number)

    def _compute(self, work: Work) -> Sampled:
        for at in range(work.start, work.stop):
            self.world.fuse.burn()
            sampled = super()._compute(work._replace(start=at, stop=at + 1))
        return sampled._replace(work=work)


class TellingSide:
    """The scheduler's side, beside the keeper of the table, which is called as the connector calls it."""

    def __init__(self, world: WarmGroupsWorld) -> None:
        self._world = world
        self._side = world.side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def allocated(self, request: FakeRequest, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        self._world.device.allocated(request.request_id, is_loading=external_tokens > 0)
        self._side.allocated(request, tables, external_tokens)

    def step_over(self) -> None:
        self._world.device.step_over()
        self._side.step_over()

    def step(self, step: FakeStep) -> StepOrders:
        for live in self._world.vllm.by_name.values():
            self._world.remains.note(live.request)
        self._world.last_number = self._world.device.step(step)
        return self._side.step(step)

    def finished(self, request: FakeRequest, blocks: Sequence[int]) -> Any:
        self._world.remains.note(request)
        self._world.device.finished(request.request_id)
        return self._side.finished(request, blocks)


class WarmGroupsWorld(GroupsWorld):
    """One engine, from its start on what another one has left until it is killed."""

    def __init__(self, seed: int, remains: GroupRemains) -> None:
        self.remains = remains
        self.fuse = Fuse()
        self.last_number = 0
        self.numbers: list[int] = []
        super().__init__(seed)
        self.prefixes = [[place * 3 % 11 for place in range(length)] for length in (20, 37)]  # of all lives
        self.table = DyingTable(memoryview(remains.table), remains.blocks, self.fuse)
        pool: Any = self.pool
        self.device = DeviceBlocks(self.table, pool, SIZES, self.blocks_of)
        found = self.table.rows()
        remains.check(found)
        self.adopted = self.device.adopt()
        assert self.adopted == len(found)

    def blocks_of(self, request_id: str) -> list[list[Block]]:
        """The blocks of a request now."""
        live = self.vllm.by_name.get(request_id)
        return [[self.pool.blocks[block] for block in table] for table in (live.tables if live else ([], []))]

    def pool_of(self, rng: random.Random) -> Pool:
        return WatchedPool(self.remains.blocks, is_null_free=True)

    def engine_of(self, rng: random.Random) -> Any:
        side: Any = TellingSide(self)
        vllm = DyingHybrid(rng, side, self.pool)
        vllm.world = self
        vllm.memory = self.remains.memory
        return vllm

    def engine(self) -> None:
        is_over = len(self.vllm.flights) >= self.vllm.depth
        super().engine()
        if is_over:
            self.device.computed(self.numbers.pop(0))

    def cached(self) -> set[int]:
        """Blocks that vLLM would find and whose steps are over."""
        cached = {block.block_id for block in self.pool.blocks if block.block_hash is not None}
        return cached - self.device._filled.keys()

    def held(self) -> set[int]:
        """Blocks of requests."""
        return {block for live in self.vllm.by_name.values() for table in live.tables for block in table}

    def live_and_die(self) -> None:
        """Serve for a while, then be killed: between two things, or in the middle of one."""
        rng = self.rng
        operations = [
            (self.engine, 60), (self.link_turn, 40), (self.worker_turn, 40), (self.arrive, 10), (self.tick, 4),
            (self.abort, 2), (self.preempt_all, 1), (self.reset, 1), (self.table.new_epoch, 0.5), (self.expire, 1),
            (self.damage, 1),
        ]  # fmt: skip
        things, weights = zip(*operations, strict=True)
        last = rng.randrange(STEPS_MAX)
        try:
            for number in range(last + 100):
                if number == last:
                    self.fuse.left = rng.randrange(40)
                rng.choices(things, weights)[0]()
        except Killed:
            self.seen["killed inside"] += 1
        for live in self.vllm.by_name.values():
            self.remains.note(live.request)
        for name, (prompt, wanted, output) in self.vllm.outputs.items():
            assert output == self.expected(prompt, wanted), f"{name} got another output than computed"
