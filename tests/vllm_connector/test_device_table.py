"""What a vLLM adopts of the memory that an earlier one has left, and what makes it adopt nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcached.recovery.engine_pools import EnginePools
from kvcached_client.blocks.engine_table import NO_PARENT, EngineTable, Row
from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.errors import DaemonUnreachable
from kvcached_client.offload import OffloadLayout
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.transport.attach import PoolDescriptors
from kvcached_client.vllm import device_memory, device_table
from kvcached_client.vllm.computed_steps import NEVER
from kvcached_client.vllm.device_memory import RankMemory, claim_table
from kvcached_client.vllm.device_table import DeviceTable, KnownIdentity, open_table
from kvcached_client.vllm.identity import Identity
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from kvcached_client.vllm.settings import Settings
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.rig import Cached, FakeStep, New
from tests.vllm_connector.warm_world import WatchedPool, manager_of

BLOCKS = 20
RANK_BYTES = 1 << 16
LAYOUT = OffloadLayout(BLOCK, 2, 100, bytes(16))
SETTINGS = Settings(device_memory="daemon")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[EnginePools]:
    """Pools of a daemon that is asked directly."""
    pools = EnginePools(1 << 22)

    def claim(run_dir: Path, question: ClaimPool, *, deadline_ms: int) -> PoolDescriptors:
        assert run_dir.is_absolute()
        assert deadline_ms
        claimed, descriptors = pools.claim(question)
        mine = list(map(os.dup, descriptors))
        return PoolDescriptors(claimed, mine[0], mine[1] if question.rank is not None else None)

    locks: list[int] = []

    def lock(descriptor: int, wait_s: float, rank: int | None = None) -> int | None:
        del wait_s
        if (found := lock_memory(descriptor, 0, rank)) is not None:
            locks.append(found)
        return found

    def die() -> None:
        while locks:
            os.close(locks.pop())

    monkeypatch.setattr(device_memory, "claim_pool", claim)
    monkeypatch.setattr(device_memory, "lock_memory", lock)
    monkeypatch.setattr(pools, "die", die, raising=False)
    yield pools
    die()
    pools.close()


class Engine:
    """A vLLM of two ranks, from its start on."""

    def __init__(self, pools: EnginePools, claim: str, *, keyspace: bytes = b"k", other: int | None = None) -> None:
        self.ranks = [RankMemory(question(claim, rank), SETTINGS) for rank in range(2)]
        self.pool_ids = []
        for rank, memory in enumerate(self.ranks):
            size = RANK_BYTES if rank != other else 1
            mapped = memory.allocate(size)
            place = memory._place.start
            pool_id = memory.pool_id([place, place + RANK_BYTES - 1]) if mapped is not None else b""
            self.pool_ids.append(pool_id)
        self.pool = WatchedPool(BLOCKS)
        self.identify = KnownIdentity(lambda: Identity(keyspace * 32, "mini", ()))
        engine = device_table.Engine(LAYOUT, self.identify, "0.32", [BLOCK])
        self.table = open_table(question(claim, None), SETTINGS, self.pool_ids, manager_of(self.pool), engine)

    @property
    def found(self) -> int:
        return len(self.pool.cached)

    def prefill(self, name: str, blocks: int, *, ranks: int = 2) -> None:
        """A request of one step, which so many ranks compute."""
        assert self.table is not None
        taken = self.pool.take(blocks)
        assert taken is not None
        for depth, block in enumerate(taken):
            self.pool.remember(block, f"{name} {depth}".encode(), (depth + 1) * BLOCK)
        self.pool.tables[name] = [taken]
        step: Any = FakeStep([New(name, (taken,), 0)], Cached(), {name: blocks * BLOCK})
        number = self.table.step(step)
        self.table.computed(dict.fromkeys(range(ranks), number))
        self.table.finished(name)
        self.pool.give_back(reversed(taken))


def question(claim: str, rank: int | None) -> ClaimPool:
    return ClaimPool(name="mini", claim=claim, ranks=2, rank=rank, rank_bytes=RANK_BYTES, blocks=BLOCKS)


def die(pools: Any) -> None:
    """All processes of all engines are dead."""
    pools.die()


def test_next_engine_finds_what_the_last_one_has_left(pools: EnginePools) -> None:
    """A vLLM that starts again finds all blocks that were computed; so does the one after it."""
    first = Engine(pools, "first")
    assert first.found == 0
    first.identify()
    first.prefill("a", 5)
    die(pools)
    for claim in ("second", "third"):
        assert Engine(pools, claim).found == 5
        die(pools)


def test_blocks_of_an_engine_without_identity_are_dropped(pools: EnginePools) -> None:
    """An engine that dies before its weights are read leaves nothing: nobody knows with what it has computed."""
    Engine(pools, "first").prefill("a", 5)
    die(pools)
    assert Engine(pools, "second").found == 0


def test_blocks_of_other_weights_are_dropped(pools: EnginePools) -> None:
    """Other weights find nothing, and nothing is left for the first ones."""
    first = Engine(pools, "first")
    first.identify()
    first.prefill("a", 5)
    die(pools)
    assert Engine(pools, "second", keyspace=b"o").found == 0
    die(pools)
    assert Engine(pools, "third").found == 0


def test_nothing_is_adopted_if_a_rank_has_other_memory(pools: EnginePools) -> None:
    """All ranks find their blocks, or none does; and the table is dropped by the rank that writes without it."""
    first = Engine(pools, "first")
    first.identify()
    first.prefill("a", 5)
    die(pools)
    second = Engine(pools, "second", other=1)
    assert second.table is None
    assert second.found == 0
    second.ranks[0].begin_step(is_tracked=False)
    die(pools)
    assert Engine(pools, "third").found == 0


def test_rank_without_a_scheduler_drops_all_names(pools: EnginePools) -> None:
    """A worker that is given steps by a scheduler without the table drops its rows before the first; others do not."""
    first = Engine(pools, "first")
    first.identify()
    first.prefill("a", 5)
    for memory in first.ranks:
        memory.begin_step(is_tracked=True)
    assert [pool.named for pool in pools.stats()] == [5]
    first.ranks[1].begin_step(is_tracked=False)
    assert [pool.named for pool in pools.stats()] == [0]


def test_blocks_are_named_when_all_ranks_have_computed_them(pools: EnginePools) -> None:
    """A step of which one rank has not reported names nothing."""
    engine = Engine(pools, "first")
    engine.prefill("a", 5, ranks=1)
    assert [pool.named for pool in pools.stats()] == [0]
    engine.prefill("b", 2)
    assert [pool.named for pool in pools.stats()] == [7]


def test_reports_of_ranks_may_be_of_different_steps(pools: EnginePools) -> None:
    """A block is named when the last rank has reported its step or a later one, in whatever message."""
    engine = Engine(pools, "first")
    engine.identify()
    for name in ("a", "b"):
        engine.prefill(name, 3, ranks=0)
    assert engine.table is not None
    named = []
    for steps in ({0: 1}, {0: 2}, {1: 1}, {}, {1: 2}):
        engine.table.computed(steps)
        named.append((engine.table._table.named, engine.table.is_waiting))
    assert named == [(0, True), (0, True), (3, True), (3, True), (6, False)]


def test_rank_that_will_not_know_ends_the_naming(pools: EnginePools) -> None:
    """When the device of a rank has failed, nothing is named any more, and nothing is waited for."""
    engine = Engine(pools, "first")
    engine.identify()
    engine.prefill("a", 3)
    engine.prefill("b", 3, ranks=1)
    assert engine.table is not None
    engine.table.computed({1: NEVER})
    engine.prefill("c", 3)
    assert (engine.table._table.named, engine.table.is_waiting) == (3, False)


def test_second_engine_has_memory_of_its_own(pools: EnginePools) -> None:
    """While the first one lives, another of the same model gets other memory, and both are warm the next time."""
    engines = [Engine(pools, claim) for claim in ("first", "second")]
    for name, engine in zip("ab", engines, strict=True):
        engine.identify()
        engine.prefill(name, 5)
    assert len(pools.stats()) == 2
    die(pools)
    again = [Engine(pools, claim) for claim in ("third", "fourth")]
    assert [engine.found for engine in again] == [5, 5]
    assert {name for engine in again for name in engine.pool.cached} == {
        f"{name} {depth}".encode() for name in "ab" for depth in range(5)
    }


def test_memory_of_a_living_process_is_not_written(
    pools: EnginePools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that hands out the memory of a living engine is not believed: its lock decides."""
    Engine(pools, "first")
    monkeypatch.setattr(pools, "_is_used", lambda _: False)
    second = Engine(pools, "second")
    assert second.table is None
    assert [memory._mapped for memory in second.ranks] == [None, None]
    assert "another living process has the device memory" in caplog.text


def test_engine_without_a_daemon_has_its_own_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If no daemon answers, vLLM starts as without the setting, and says so."""

    def claim(*_: object, **__: object) -> None:
        raise DaemonUnreachable("nobody")

    monkeypatch.setattr(device_memory, "claim_pool", claim)
    memory = RankMemory(question("first", 0), SETTINGS)
    assert memory.allocate(RANK_BYTES) is None
    assert memory.pool_id([1]) == b""
    memory.begin_step(is_tracked=False)
    assert claim_table(question("first", None), SETTINGS) is None
    assert "no device memory from the daemon" in caplog.text


@pytest.mark.parametrize("sizes", [(1,), (RANK_BYTES, RANK_BYTES)])
def test_allocations_that_are_not_expected_are_vllms_own(sizes: tuple[int, ...], pools: EnginePools) -> None:
    """Of another size, or a second one: then no block of the first counts either."""
    memory = RankMemory(question("first", 0), SETTINGS)
    for size in sizes:
        memory.allocate(size)
    assert memory.pool_id([memory._place.start]) == b""


def test_memory_of_which_vllm_has_taken_only_a_part_keeps_no_rows(pools: EnginePools) -> None:
    """A vLLM that allocates again writes the first memory without a scheduler: the rows of it go before that."""
    first = Engine(pools, "first")
    first.identify()
    first.prefill("a", 5)
    die(pools)
    memory = RankMemory(question("second", 0), SETTINGS)
    for _ in range(2):
        memory.allocate(RANK_BYTES)
    memory.begin_step(is_tracked=False)
    die(pools)
    assert Engine(pools, "third").found == 0


def test_tensors_elsewhere_are_noticed(pools: EnginePools) -> None:
    """If one of vLLM's tensors is not in the memory, the rank has none."""
    memory = RankMemory(question("first", 0), SETTINGS)
    buffer = memory.allocate(RANK_BYTES)
    assert buffer is not None
    start = memory._place.start
    assert memory.pool_id([start, start + 100])
    assert memory.pool_id([start, start + RANK_BYTES]) == b""


def test_identity_is_made_once() -> None:
    """The daemon's thread and the scheduler share one reading of the weights."""
    made = []

    def identify() -> Identity:
        made.append(1)
        return Identity(bytes(32), "mini", ())

    known = KnownIdentity(identify)
    assert known.known is None
    assert known() is known()
    assert known.known is known()
    assert made == [1]


def test_identity_that_cannot_be_made_is_asked_for_again() -> None:
    """An error is told to who asks, and does not keep the next one from asking."""
    answers: list[Callable[[], Identity]] = [lambda: Identity(bytes(32), "mini", ())]

    def identify() -> Identity:
        if len(answers) == 1:
            answers.append(answers[0])
            raise DaemonUnreachable("once")
        return answers[0]()

    known = KnownIdentity(identify)
    with contextlib.suppress(DaemonUnreachable):
        known()
    assert known().label == "mini"


def test_table_of_a_new_engine_forgets_rows_of_no_identity() -> None:
    """Rows without an identity are gone for good once an engine has started on them."""
    memory = bytearray(1 << 16)
    table = EngineTable(memoryview(memory), BLOCKS)
    table.new_epoch()
    table.write(Row(3, 1, table.epoch, NO_PARENT, 0, b"hash"))
    pool: Any = WatchedPool(BLOCKS)
    identify = KnownIdentity(lambda: Identity(bytes(32), "mini", ()))
    blocks = DeviceBlocks(table, pool, [BLOCK], pool.blocks_of)
    device = DeviceTable(table, blocks, device_table.Engine(LAYOUT, identify, "", [BLOCK]), 1)
    assert device.adopt() == 0
    assert table.rows() == []
    assert identify.known is None
