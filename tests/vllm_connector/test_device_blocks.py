"""The table of a vLLM's blocks in memory of the daemon: at any instant, a block that it names holds what it says."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvcached_client.blocks.engine_table import NO_PARENT, EngineTable, Row
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks, in_order_of_use
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.rig import Cached, FakeStep, New
from tests.vllm_connector.warm_world import Remains, WarmWorld, WatchedPool, lives


def lived(seed: int) -> Counter[str]:
    return lives(seed, WarmWorld, Remains(random.Random(seed).choice([17, 29, 61])))


@pytest.mark.parametrize("seed", range(30))
def test_engine_is_killed_at_any_instant(seed: int) -> None:
    """Adopted blocks hold what they are found by, from this epoch; answers are as computed without a cache."""
    lived(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engine_is_killed_at_any_instant_often() -> None:
    """The same, from 75 other seeds; blocks were adopted, and engines killed in the middle of things."""
    seen = sum((lived(seed) for seed in range(1000, 1075)), Counter[str]())
    assert min(seen["adopted"], seen["killed inside"]) > 200, seen


@pytest.mark.parametrize("seed", range(20))
def test_all_that_was_computed_is_named(seed: int) -> None:
    """Without a clear, the table names each block that vLLM finds; those of living requests at their next step."""
    world = WarmWorld(seed, Remains(90))
    things = [world.engine, world.link_turn, world.worker_turn, world.arrive, world.abort]
    for _ in range(200):
        world.rng.choices(things, [60, 30, 30, 10, 1])[0]()
        named = {row.block for row in world.table.rows()}
        assert named <= world.cached() <= named | world.held()


class Engine:
    """A keeper of a table, driven by hand."""

    def __init__(self, remains: Remains) -> None:
        self.pool = WatchedPool(remains.blocks)
        self.table = EngineTable(memoryview(remains.table), remains.blocks)
        pool: Any = self.pool
        self.device = DeviceBlocks(self.table, pool, [BLOCK], self.pool.blocks_of)

    def prefill(self, request: str, name: str, blocks: int, *, local: int = 0) -> list[int]:
        """A step that fills so many blocks of a new request; these."""
        taken = self.pool.take(blocks)
        assert taken is not None
        return self.scheduled(request, name, taken, local=local)

    def scheduled(
        self, request: str, name: str, taken: list[int], *, local: int = 0, is_preempted: bool = False
    ) -> list[int]:
        """A step with a request that begins, or begins again after it has lost its blocks."""
        for depth, block in enumerate(taken):
            if depth >= local:
                self.pool.remember(block, f"{name} {depth}".encode(), (depth + 1) * BLOCK)
        self.pool.tables[request] = [taken]
        self.device.allocated(request, is_loading=False)
        step: Any = FakeStep([New(request, (taken,), local * BLOCK)], Cached(), {request: len(taken) * BLOCK})
        step.preempted_req_ids = {request} if is_preempted else None
        self.number = self.device.step(step)
        return taken

    def end(self, request: str, blocks: list[int]) -> None:
        """A request ends."""
        self.device.finished(request)
        self.pool.give_back(reversed(blocks))

    def named(self) -> list[bytes]:
        return [row.name for row in self.table.rows()]


def test_blocks_are_named_when_their_step_is_computed() -> None:
    """Not before: not when a step before it is, and a step that ends names those of earlier ones, too."""
    engine = Engine(Remains(20))
    engine.prefill("a", "a", 2)
    first = engine.number
    engine.prefill("b", "b", 1)
    assert engine.named() == []
    engine.device.computed(first)
    assert sorted(engine.named()) == [b"a 0", b"a 1"]
    engine.device.computed(engine.number)
    assert sorted(engine.named()) == [b"a 0", b"a 1", b"b 0"]


def test_block_that_is_handed_out_is_not_named() -> None:
    """From the moment at which vLLM gives it away, whatever its new owner does, and also if its step is not over."""
    engine = Engine(Remains(5))
    blocks = engine.prefill("a", "a", 2)
    engine.device.computed(engine.number)
    engine.end("a", blocks)
    others = engine.prefill("b", "b", 2)
    engine.end("b", others)
    assert sorted(engine.named()) == [b"a 0", b"a 1"]
    assert engine.pool.take(4) is not None
    assert engine.named() == []
    engine.device.computed(engine.number)
    assert engine.named() == []


def test_reset_of_the_prefix_cache_drops_all_names() -> None:
    """At once: a vLLM that is killed right after a reset comes back without any block."""
    engine = Engine(Remains(10))
    blocks = engine.prefill("a", "a", 3)
    engine.device.computed(engine.number)
    engine.end("a", blocks)
    assert engine.pool.forget_all()
    assert engine.named() == []


def test_nothing_of_before_a_clear_is_named() -> None:
    """Neither what was under way, nor what builds on what vLLM still has in its cache; a new prompt is."""
    engine = Engine(Remains(20))
    blocks = engine.prefill("a", "a", 2)
    engine.device.computed(engine.number)
    engine.prefill("b", "b", 1)
    engine.table.new_epoch()
    engine.device.computed(engine.number)
    engine.pool.touch([engine.pool.blocks[block] for block in blocks])
    more = engine.pool.take(1)
    assert more is not None
    engine.scheduled("c", "a", [*blocks, *more], local=2)
    engine.prefill("d", "d", 1)
    engine.device.computed(engine.number)
    assert engine.named() == [b"d 0"]


def test_loaded_blocks_are_named() -> None:
    """Blocks from the host pool are named with the step that uses them; bad ones are not, until they are computed."""
    engine = Engine(Remains(20))
    taken = engine.pool.take(4)
    assert taken is not None
    engine.pool.tables["a"] = [taken]
    engine.device.arrived("a")
    engine.device.allocated("a", is_loading=True)
    for depth, block in enumerate(taken[:3]):
        engine.pool.remember(block, f"a {depth}".encode(), (depth + 1) * BLOCK)
    engine.device.allocated("a", is_loading=False)
    step: Any = FakeStep([New("a", (taken,), 3 * BLOCK)], Cached(), {"a": 1})
    number = engine.device.step(step)
    engine.device.computed(number)
    assert sorted(engine.named()) == [b"a 0", b"a 1", b"a 2"]
    engine.device.forget({taken[1]})
    assert sorted(engine.named()) == [b"a 0", b"a 2"]


def test_loaded_blocks_of_before_a_clear_are_not_named() -> None:
    """A request that arrived before a clear may load what the daemon found before it."""
    engine = Engine(Remains(20))
    engine.device.arrived("a")
    engine.table.new_epoch()
    taken = engine.pool.take(2)
    assert taken is not None
    engine.pool.tables["a"] = [taken]
    engine.device.allocated("a", is_loading=True)
    engine.pool.remember(taken[0], b"a 0", BLOCK)
    engine.device.allocated("a", is_loading=False)
    step: Any = FakeStep([New("a", (taken,), BLOCK)], Cached(), {"a": BLOCK})
    engine.pool.remember(taken[1], b"a 1", 2 * BLOCK)
    engine.device.computed(engine.device.step(step))
    assert engine.named() == []


def test_block_whose_hash_comes_with_the_output_is_named() -> None:
    """VLLM that schedules ahead knows a block's last token late, and may take the block from its request at once."""
    engine = Engine(Remains(20))
    blocks = engine.prefill("a", "a", 1)
    blocks += engine.pool.take(1) or ()
    cached = Cached(req_ids=["a"], new_block_ids=[None], num_computed_tokens=[2 * BLOCK - 1])
    step: Any = FakeStep([], cached, {"a": 1})
    engine.device.computed(engine.device.step(step))
    engine.pool.remember(blocks[1], b"a 1", 2 * BLOCK)
    engine.device.step_over()
    engine.pool.tables["a"] = [[]]
    engine.pool.give_back(reversed(blocks))
    engine.device.computed(engine.device._number)
    assert sorted(engine.named()) == [b"a 0", b"a 1"]
    engine.pool.touch([engine.pool.blocks[block] for block in blocks])
    engine.scheduled("a", "a", [*blocks, *(engine.pool.take(1) or ())], local=2, is_preempted=True)
    engine.device.computed(engine.number)
    assert sorted(engine.named()) == [b"a 0", b"a 1", b"a 2"]


def test_request_that_was_taken_back_is_not_named() -> None:
    """A session that goes on with another input may have a state of a token that it has not: nothing builds on that."""
    engine = Engine(Remains(20))
    blocks = engine.prefill("a", "a", 2)
    engine.device.computed(engine.number)
    engine.scheduled("a", "a", [*blocks, *(engine.pool.take(1) or ())], local=2)
    engine.device.computed(engine.number)
    assert sorted(engine.named()) == [b"a 0", b"a 1"]


def test_nothing_is_named_that_builds_on_a_block_of_before_a_clear_in_front_of_a_new_one() -> None:
    """VLLM may find a block of before a clear, and behind it one that another request has computed since."""
    engine = Engine(Remains(20))
    old = engine.prefill("a", "a", 1)
    engine.device.computed(engine.number)
    engine.table.new_epoch()
    new = engine.prefill("b", "a", 2)
    engine.device.computed(engine.number)
    assert sorted(engine.named()) == [b"a 0", b"a 1"]
    engine.scheduled("c", "a", [*old, new[1], *(engine.pool.take(1) or ())], local=2)
    engine.device.computed(engine.number)
    assert sorted(engine.named()) == [b"a 0", b"a 1"]


def test_adopted_blocks_are_reused_in_the_order_of_their_use() -> None:
    """Unnamed blocks first, then the prompt that was used longest ago, each from its end on."""
    remains = Remains(12)
    engine = Engine(remains)
    prompts = {name: engine.prefill(name, name, 3) for name in ("a", "b")}
    engine.device.computed(engine.number)
    for name in ("b", "a"):  # a is used last, though it was computed first
        engine.end(name, prompts[name])

    later = Engine(remains)
    assert later.device.adopt() == 6
    assert [later.pool.cached[f"{name} {depth}".encode()] for name in "ab" for depth in range(3)] == [
        *prompts["a"],
        *prompts["b"],
    ]
    assert list(later.pool.free)[-6:] == [*reversed(prompts["b"]), *reversed(prompts["a"])]
    assert later.pool.take(5 + 3) is not None
    assert sorted(later.named()) == [b"a 0", b"a 1", b"a 2"]


def test_head_of_a_chain_is_used_as_late_as_its_end() -> None:
    """A request that was under way when its engine was killed keeps its first blocks longer than its last ones."""
    rows = [
        Row(5, 1, 1, NO_PARENT, 0, b"head"),
        Row(6, 3, 1, 5, 1, b"end"),
        Row(7, 2, 1, NO_PARENT, 0, b"other"),
    ]
    assert [row.name for row in in_order_of_use(rows)] == [b"other", b"end", b"head"]
