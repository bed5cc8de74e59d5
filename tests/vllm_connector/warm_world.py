"""A small vLLM whose blocks are in memory that outlives it, and which is killed at any instant.

Its successor gets the memory and the table as they were at that instant, and adopts what the table names. The world
knows what each block must hold, and in which epoch of the table each byte was computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from kvcached_client.blocks.engine_table import EngineTable, Row, table_bytes
from kvcached_client.vllm.orders import StepOrders
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.mini_parts import Block, Pool, kv_of
from tests.vllm_connector.mini_vllm import SHARDS, MiniVllm
from tests.vllm_connector.mini_world import World
from tests.vllm_connector.rig import FakeRequest, FakeStep, hashes_of

STEPS_MAX = 300
LIVES = 6


class Killed(Exception):
    """The engine was killed; nothing of it goes on."""


class Fuse:
    """Kills the engine at one of the instants at which it changes what outlives it."""

    def __init__(self) -> None:
        self.left = -1

    def burn(self) -> None:
        """One such instant.

        Raises:
            Killed: it was the last one.
        """
        if self.left == 0:
            raise Killed
        self.left -= 1


class DyingTable(EngineTable):
    """A table whose writer may be killed before and after each of its writes."""

    def __init__(self, memory: memoryview, blocks: int, fuse: Fuse) -> None:
        super().__init__(memory, blocks)
        self._fuse = fuse

    def write(self, row: Row) -> None:
        self._fuse.burn()
        super().write(row)
        self._fuse.burn()

    def clear(self, block: int) -> None:
        self._fuse.burn()
        super().clear(block)

    def stamp(self, blocks: Sequence[int], stamp: int) -> None:
        self._fuse.burn()
        super().stamp(blocks, stamp)


class WatchedPool(Pool):
    """Blocks with call-backs before they are handed out; equal blocks may be cached twice, as in vLLM.

    Attributes:
        tables: numbers of the blocks of requests, a list for each group.
    """

    def __init__(self, count: int, *, is_null_free: bool = False) -> None:
        super().__init__(count, has_cache=True)
        self._watchers: dict[int, Callable[[Any], None]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        if not is_null_free:
            self.free.popleft()  # block 0 stands for none

    def blocks_of(self, request_id: str) -> list[list[Block]]:
        """The blocks of a request, as `DeviceBlocks` takes them."""
        return [[self.blocks[block] for block in table] for table in self.tables.get(request_id, [[]])]

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        released = list(blocks)
        for block in released:
            self._watchers[block.block_id] = on_reuse
        self.free_blocks(released)

    def _insert_block_hash(self, block_hash: bytes, block: Block, num_tokens: int | None) -> None:
        assert num_tokens
        self.remember(block.block_id, block_hash, num_tokens)

    def remember(self, block_id: int, block_hash: bytes, tokens: int) -> None:
        block = self.blocks[block_id]
        assert block.block_hash in (None, block_hash)
        block.block_hash, block.block_hash_num_tokens = block_hash, tokens
        self.cached.setdefault(block_hash, block_id)

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        for block_id in list(self.free)[:count]:
            if (watcher := self._watchers.pop(block_id, None)) is not None:
                watcher(self.blocks[block_id])
            block = self.blocks[block_id]
            if block.block_hash is not None and self.cached.get(block.block_hash) != block_id:
                block.block_hash = None
        return super().take(count)

    def forget_all(self) -> bool:
        if any(block.users for block in self.blocks):
            return False
        for block_id, watcher in list(self._watchers.items()):
            watcher(self.blocks[block_id])
        self._watchers.clear()
        return super().forget_all()


def manager_of(pool: WatchedPool) -> Any:
    """VLLM's cache manager, as far as `open_table` uses it."""
    return SimpleNamespace(block_pool=pool, get_blocks=lambda name: SimpleNamespace(blocks=pool.blocks_of(name)))


class Remains:
    """What outlives an engine.

    Attributes:
        epochs: how often the table's epoch has changed.
        born: for each shard, block and position, in which of these epochs it was computed, with all before it.
        tokens: of each block hash there was.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.table = bytearray(table_bytes(blocks))
        EngineTable(memoryview(self.table), blocks).new_epoch()
        self.memory: list[dict[int, list[str]]] = [{} for _ in range(SHARDS)]
        self.born: list[dict[tuple[int, int], int]] = [{} for _ in range(SHARDS)]
        self.epochs = 0
        self.tokens: dict[bytes, list[int]] = {}

    def note(self, request: FakeRequest) -> None:
        """Note what the hashes of a request stand for."""
        for index, block_hash in enumerate(hashes_of(request.tokens)):
            self.tokens.setdefault(block_hash, request.tokens[: (index + 1) * BLOCK])

    def loading(self, block: int) -> None:
        """A block will be loaded. The daemon's own blocks are of the present epoch: a clear drops them, too."""
        for born in self.born:
            born.update({(block, place): self.epochs for place in range(BLOCK)})

    def check(self, rows: Sequence[Row]) -> None:
        """Each named block holds what its hash says, on all shards, computed in the table's epoch."""
        for row in rows:
            tokens = self.tokens[row.name]
            for shard in range(SHARDS):
                kv = [""]
                for token in tokens:
                    kv.append(kv_of(kv[-1], token, shard))
                assert self.memory[shard].get(row.block) == kv[-BLOCK:], f"block {row.block} holds something else"
                born = {self.born[shard].get((row.block, place)) for place in range(BLOCK)}
                assert born == {self.epochs}, f"block {row.block} is of epoch {born}, the table of {self.epochs}"


class DyingVllm(MiniVllm):
    """Tells its table's keeper what the connector tells it, and may be killed in the middle of a pass."""

    world: WarmWorld

    def schedule(self) -> None:
        super().schedule()
        self.world.numbers.append(self.world.last_number)

    def _write(self, shard: int, table: list[int], position: int, kv: str) -> None:
        self.world.fuse.burn()
        born = self.world.remains.born[shard]
        before = self.world.remains.epochs
        if position:
            before = min(before, born.get((table[(position - 1) // BLOCK], (position - 1) % BLOCK), before))
        born[table[position // BLOCK], position % BLOCK] = before
        super()._write(shard, table, position, kv)


class TellingSide:
    """The scheduler's side, beside the keeper of the table, which is called as the connector calls it."""

    def __init__(self, world: WarmWorld) -> None:
        self._world = world
        self._side = world.side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def allocated(self, request: FakeRequest, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        self._world.device.allocated(request.request_id, is_loading=external_tokens > 0)
        for block in tables[0][-(-request.num_computed_tokens // BLOCK) :] if external_tokens else ():
            self._world.remains.loading(block)
        self._side.allocated(request, tables, external_tokens)

    def on_new_request(self, request: FakeRequest) -> None:
        self._world.device.arrived(request.request_id)
        self._side.on_new_request(request)

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

    def loaded(self, requests: set[str], failed: Sequence[str], bad: set[int]) -> None:
        self._world.device.forget(bad)
        self._side.loaded(requests, failed, bad)


class WarmWorld(World):
    """One engine, from its start on what another one has left until it is killed."""

    sizes: Sequence[int] = (BLOCK,)  #: tokens in a block of each group of layers

    def __init__(self, seed: int, remains: Remains) -> None:
        self.remains = remains
        self.fuse = Fuse()
        self.last_number = 0
        self.numbers: list[int] = []
        super().__init__(seed)
        self.table = DyingTable(memoryview(remains.table), remains.blocks, self.fuse)
        pool: Any = self.pool
        self.device = DeviceBlocks(self.table, pool, self.sizes, self.blocks_of)
        found = self.table.rows()
        remains.check(found)
        self.adopted = self.device.adopt()
        assert self.adopted == len(found)

    def blocks_of(self, request_id: str) -> list[list[Block]]:
        """The blocks of a request now."""
        live = self.vllm.by_name.get(request_id)
        tables = [[] for _ in self.sizes] if live is None else self.tables_of(live)
        return [[self.pool.blocks[block] for block in table] for table in tables]

    def tables_of(self, live: Any) -> list[list[int]]:
        """The numbers of the blocks of a request, for each group."""
        return [live.table]

    def pool_of(self, rng: random.Random) -> Pool:
        return WatchedPool(self.remains.blocks)

    def engine_of(self, rng: random.Random) -> Any:
        side: Any = TellingSide(self)
        vllm = DyingVllm(rng, side, self.pool, depth=rng.choice([1, 2]), guesses=rng.choice([0, 3]))
        vllm.world = self
        vllm.memory = self.remains.memory
        return vllm

    def engine(self) -> None:
        vllm = self.vllm
        is_over = len(vllm.flights) >= vllm.depth
        super().engine()
        if is_over:
            self.device.computed(self.numbers.pop(0))

    def clear_namespace(self) -> None:
        """The daemon drops the rows; vLLM keeps what it has in its own cache."""
        self.table.new_epoch()
        self.remains.epochs += 1

    def cached(self) -> set[int]:
        """Blocks that vLLM would find and whose steps are over."""
        cached = {block.block_id for block in self.pool.blocks if block.block_hash is not None}
        return cached - self.device._filled.keys()

    def held(self) -> set[int]:
        """Blocks of requests."""
        return {block for live in self.vllm.by_name.values() for table in self.tables_of(live) for block in table}

    def live_and_die(self) -> None:
        """Serve for a while, then be killed."""
        rng = self.rng
        operations = [
            (self.engine, 60), (self.link_turn, 40), (self.worker_turn, 40), (self.arrive, 10), (self.tick, 4),
            (self.abort, 2), (self.preempt_all, 1), (self.reset, 1), (self.clear_namespace, 0.5), (self.expire, 1),
            (self.damage, 1),
        ]  # fmt: skip
        self.seen["killed inside"] += until_killed(rng, self.fuse, operations, STEPS_MAX)
        for live in self.vllm.by_name.values():
            self.remains.note(live.request)
        self.check_outputs()


def until_killed(
    rng: random.Random, fuse: Fuse, operations: Sequence[tuple[Callable[[], None], float]], steps_max: int
) -> bool:
    """Let things happen, by their weights, until the engine is killed: whether in the middle of one, or between two."""
    things, weights = zip(*operations, strict=True)
    last = rng.randrange(steps_max)
    try:
        for number in range(last + 100):
            if number == last:
                fuse.left = rng.randrange(40)
            rng.choices(things, weights)[0]()
    except Killed:
        return True
    return False


def lives(seed: int, world_of: Callable[[int, Any], WarmWorld], remains: Remains) -> Counter[str]:
    """Engines on the same memory, one after the other, each of which is killed; the last one answers everything."""
    seen: Counter[str] = Counter()
    for life in range(LIVES):
        world = world_of(seed * 1000 + life, remains)
        world.live_and_die()
        seen += world.seen
        seen["adopted"] += world.adopted
    world = world_of(seed * 1000 + LIVES, remains)
    for _ in range(100):
        world.rng.choice([world.engine, world.arrive, world.link_turn, world.worker_turn])()
    world.drain()
    seen["adopted"] += world.adopted
    return seen
