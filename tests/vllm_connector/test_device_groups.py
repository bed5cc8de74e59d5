"""The table of a vLLM whose groups of layers share its blocks: what it names holds what it says."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvcached_client.blocks.engine_table import EngineTable
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.mini_hybrid import hash_in_group
from tests.vllm_connector.mini_states import FULL, NULL, SIZES, WINDOWED
from tests.vllm_connector.rig import Cached, FakeStep, New
from tests.vllm_connector.warm_groups import GroupRemains, WarmGroupsWorld
from tests.vllm_connector.warm_world import WatchedPool, lives


def lived(seed: int) -> Counter[str]:
    return lives(seed, WarmGroupsWorld, GroupRemains(random.Random(seed).choice([41, 61, 121])))


@pytest.mark.parametrize("seed", range(20))
def test_engine_is_killed_at_any_instant(seed: int) -> None:
    """Adopted blocks of both groups hold what they are found by; answers are as computed without a cache."""
    lived(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_is_killed_at_any_instant_often() -> None:
    """The same, from 60 other seeds; blocks were adopted, and engines killed in the middle of things."""
    seen = sum((lived(seed) for seed in range(1000, 1060)), Counter[str]())
    assert min(seen["adopted"], seen["killed inside"]) > 150, seen


@pytest.mark.parametrize("seed", range(15))
def test_all_that_was_computed_is_named(seed: int) -> None:
    """Without a clear, the table names each block that vLLM finds; those of living requests at their next step."""
    world = WarmGroupsWorld(seed, GroupRemains(160))
    things = [world.engine, world.link_turn, world.worker_turn, world.arrive, world.abort]
    for _ in range(250):
        world.rng.choices(things, [60, 30, 30, 10, 1])[0]()
        named = {row.block for row in world.table.rows()}
        assert named <= world.cached() <= named | world.held()


class Engine:
    """A keeper of a table, driven by hand."""

    def __init__(self, remains: GroupRemains) -> None:
        self.pool = WatchedPool(remains.blocks)
        self.table = EngineTable(memoryview(remains.table), remains.blocks)
        pool: Any = self.pool
        self.device = DeviceBlocks(self.table, pool, SIZES, self.pool.blocks_of)

    def step(self, request: str, computed_tokens: int) -> None:
        """A step in which a request begins, which ends at once."""
        step: Any = FakeStep([New(request, ([], []), computed_tokens)], Cached(), {request: 1})
        self.device.allocated(request, is_loading=False)
        self.device.computed(self.device.step(step))

    def go_on(self, request: str, computed_tokens: int) -> None:
        """A step of a request that computes a token, which ends at once."""
        cached = Cached(req_ids=[request], new_block_ids=[None], num_computed_tokens=[computed_tokens])
        step: Any = FakeStep([], cached, {request: 1})
        self.device.computed(self.device.step(step))

    def hash(self, block: int, name: str, group: int, tokens: int) -> None:
        self.pool.remember(block, hash_in_group(f"{name} {tokens}".encode(), group), tokens)

    def named(self) -> list[int]:
        return [row.block for row in self.table.rows()]


def test_blocks_without_a_hash_are_passed_over() -> None:
    """VLLM names no block at which no request could continue; those behind it are found again all the same."""
    engine = Engine(GroupRemains(20))
    engine.pool.tables["a"] = [[1, 2, 3, 4, 5, 6], [NULL, 7, 8]]
    for depth in range(6):
        engine.hash(1 + depth, "a", FULL, (depth + 1) * BLOCK)
    engine.hash(8, "a", WINDOWED, 3 * SIZES[WINDOWED])
    engine.step("a", 0)
    assert engine.named() == [1, 2, 3, 4, 5, 6, 8]

    later = Engine(GroupRemains(20))
    later.table._memory[:] = engine.table._memory
    assert later.device.adopt() == 7
    assert later.pool.blocks[8].block_hash_num_tokens == 3 * SIZES[WINDOWED]
    assert later.pool.blocks[6].block_hash_num_tokens == 6 * BLOCK


def test_part_of_a_block_is_not_named() -> None:
    """VLLM may find a block by fewer tokens than it has room for, while it fills; it is named once it is full."""
    engine = Engine(GroupRemains(20))
    engine.pool.tables["a"] = [[1, 2], [7]]
    engine.hash(1, "a", FULL, BLOCK)
    engine.hash(7, "a", WINDOWED, BLOCK)
    engine.step("a", 0)
    assert engine.named() == [1]
    engine.pool.blocks[7].block_hash = None
    engine.hash(7, "a", WINDOWED, SIZES[WINDOWED])
    engine.go_on("a", 2 * BLOCK)
    assert engine.named() == [1, 7]


def test_state_is_named_once_its_block_is_full() -> None:
    """A state is written in place by every step of its block; the blocks before it never were."""
    engine = Engine(GroupRemains(20))
    engine.pool.tables["a"] = [[1, 2, 3, 4, 5], [NULL, NULL, 7]]
    for depth in range(4):
        engine.hash(1 + depth, "a", FULL, (depth + 1) * BLOCK)
    engine.step("a", 0)
    assert engine.named() == [1, 2, 3, 4]
    engine.pool.tables["a"] = [[1, 2, 3, 4, 5, 6], [NULL, NULL, 7, 8]]
    engine.hash(7, "a", WINDOWED, 3 * SIZES[WINDOWED])
    engine.go_on("a", 3 * SIZES[WINDOWED] - 1)
    assert engine.named() == [1, 2, 3, 4, 7]
    engine.pool.tables["a"] = [[1, 2, 3, 4, 5, 6], [NULL, NULL, NULL, 8]]  # it was copied, and nobody needs it
    engine.go_on("a", 3 * SIZES[WINDOWED])
    assert engine.named() == [1, 2, 3, 4, 7]

    later = Engine(GroupRemains(20))
    later.table._memory[:] = engine.table._memory
    assert later.device.adopt() == 5
    assert later.pool.blocks[7].block_hash_num_tokens == 3 * SIZES[WINDOWED]


@pytest.mark.parametrize("is_cleared", [False, True])
def test_hit_inside_a_block_is_of_no_epoch_once_there_was_a_clear(is_cleared: bool) -> None:
    """A block that vLLM finds by fewer tokens than it has room for is not named: of what epoch it is, nobody knows."""
    engine = Engine(GroupRemains(20))
    engine.pool.tables["a"] = [[1], [NULL]]
    engine.step("a", 0)
    if is_cleared:
        engine.table.new_epoch()
    engine.pool.tables["b"] = [[2, 3], [4]]
    engine.hash(3, "b", FULL, 2 * BLOCK)
    engine.step("b", BLOCK // 2)
    assert engine.named() == ([] if is_cleared else [3])


def test_blocks_that_never_get_a_hash_are_looked_at_until_their_step_is_over() -> None:
    """VLLM names no decoded block of a window by default: what is full costs nothing at each step from then on."""
    engine = Engine(GroupRemains(20))
    engine.pool.tables["a"] = [[1, 2], [7]]
    engine.step("a", 0)
    engine.device.step_over()
    engine.hash(1, "a", FULL, BLOCK)
    engine.hash(2, "a", FULL, 2 * BLOCK)
    engine.go_on("a", SIZES[WINDOWED] - 1)
    assert engine.device._behind
    engine.device.step_over()
    assert not engine.device._behind
    engine.pool.tables["a"] = [[1, 2, 3, 4], [7, 8]]
    for depth in (2, 3):
        engine.hash(1 + depth, "a", FULL, (depth + 1) * BLOCK)
    engine.hash(8, "a", WINDOWED, 2 * SIZES[WINDOWED])
    engine.go_on("a", 2 * SIZES[WINDOWED] - 1)
    assert engine.named() == [1, 2, 3, 4, 8]


@pytest.mark.parametrize("group", [FULL, WINDOWED])
def test_nothing_is_named_that_builds_on_a_group_of_before_a_clear(group: int) -> None:
    """One group's last block of an earlier epoch is enough, whatever the other's is of."""
    engine = Engine(GroupRemains(20))
    engine.pool.tables["a"] = [[1, 2], [3]]
    engine.hash(1, "a", FULL, BLOCK)
    engine.hash(2, "a", FULL, 2 * BLOCK)
    engine.hash(3, "a", WINDOWED, SIZES[WINDOWED])
    engine.step("a", 0)
    engine.table.new_epoch()
    fresh = {FULL: [3], WINDOWED: [1, 2]}[group]
    for row in engine_rows(engine):
        if row.block in fresh:
            engine.table.write(row._replace(epoch=engine.table.epoch))
    engine.pool.tables["b"] = [[1, 2, 4, 5], [3, 6]]
    engine.hash(5, "b", FULL, 4 * BLOCK)
    engine.step("b", 2 * BLOCK)
    assert engine.named() == fresh


def engine_rows(engine: Engine) -> list[Any]:
    """All rows, of whatever epoch."""
    return [row for block in range(engine.table.blocks) if (row := engine.table._row(block)) is not None and row.name]
