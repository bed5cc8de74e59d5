"""Long random histories of both kinds of engines above storage that is slow, fails, forgets and dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.core.cache import Cache
from kvcached.core.clearing import Clearings
from kvcached.core.messages import MembersDied, StorageReady, StorageSuspended, Ticked
from kvcached.core.refusals import Refusal
from kvcached.core.slots.states import StorageState
from kvcached.core.transfers.engine_copies import StorePlan
from kvcached.core.transfers.prefetch import PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from tests.core.engine import Engine, healthy
from tests.core.history import Choose, History, Operation, play, play_drawn
from tests.core.host_tier import make_tiers
from tests.core.offload_engine import OffloadEngine, space
from tests.core.storage_world import StorageWorld
from tests.core.test_storage import store, stored, storing

T = TypeVar("T")
STEPS = 250
_POLICIES = tuple(BackupPolicy)


class StorageHistory(History):
    """Two replicas and two engines in offload mode. Everything is checked after each operation."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        spec = StorageSpec(self.one(_POLICIES), 30, PrefetchLimits(threshold_blocks=self.one((1, 1, 3))))
        self.cache: Cache = make_tiers("ab", slots=10, host_slabs=5, slots_per_slab=4, spaces=2, storage=spec)
        self.world = StorageWorld(self.cache)
        self.now_ms = 0
        self.engines = [Engine(self.cache, "a"), Engine(self.cache, "b")]
        specs = [space("m"), space("m"), space("n", per_slab=3)]
        self.offload = [OffloadEngine(self.cache, spec) for spec in specs]
        self.stores: list[tuple[OffloadEngine, StorePlan, str]] = []
        self.clears = 0
        self.weighted = [
            (self.compute, 6),
            (self.compute_offload, 6),
            (self.begin_store, 6),
            (self.end_store, 6),
            (self.prefetch, 5),
            (self.answer, 12),
            (self.time, 4),
            (self.lose, 1),
            (self.suspend, 1),
            (self.forget, 1),
            (self.clear, 1),
            (self.pause, 1),
            (self.stop, 1),
        ]

    def do(self, operation: Operation) -> None:
        """Do it, and half of the time what the cache decides by itself; check after both."""
        operation()
        self.done[operation.__name__] += 1
        self.world.check()
        if self.choose(2):
            self.world.take()
            self.world.check()

    def end(self) -> None:
        """Storage answers everything, and nothing is under way."""
        self.cache.resume()
        while self.stores:
            self.end_store()
        self.world.answer_all()
        assert self.cache.storage.copies == []
        assert not self.cache.storage.prefetches.under_way
        assert healthy(self.cache)

    def one(self, things: Sequence[T]) -> T:
        """One of some things."""
        return things[self.choose(len(things))]

    # --- steps ------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        return "".join(self.one("ab" if at else "abc") for at in range(1 + self.choose(9)))

    def compute(self) -> None:
        engine = self.one(self.engines)
        try:
            engine.store(self.text())
        except Refusal:
            self.done["no room"] += 1

    def compute_offload(self) -> None:
        store(self.world, self.one(self.offload), self.text())

    def begin_store(self) -> None:
        """A store of an engine takes a while."""
        engine, text = self.one(self.offload), self.text()
        plan = storing(engine, text)
        if plan.transfer:
            self.stores.append((engine, plan, text))

    def end_store(self) -> None:
        """It ends, well or not, or its engine dies with all of its stores."""
        if not self.stores:
            return
        engine, plan, text = self.stores.pop(self.choose(len(self.stores)))
        if (ending := self.choose(10)) > 2:
            stored(self.world, engine, plan, text)
        elif ending:
            engine.commit(plan.transfer, "no memory")
        else:
            self.cache.handle(MembersDied(engine.session))
            self.stores = [each for each in self.stores if each[0] is not engine]
            self.offload[self.offload.index(engine)] = OffloadEngine(self.cache, engine.spec)

    def prefetch(self) -> None:
        if self.choose(2):
            engine = self.one(self.engines)
            self.world.prefetch(engine.session, self.text(), epoch=engine.epoch)
        else:
            self.world.prefetch(self.one(self.offload).session, self.text())

    def answer(self) -> None:
        self.world.take()
        if self.world.under_way:
            good = self.one((None, None, 0, 0, 1))
            self.world.answer(self.choose(len(self.world.under_way)), good=good)

    def time(self) -> None:
        self.now_ms += 400
        for engine in self.engines:
            self.cache.managed.sessions[engine.session].last_heard_ms = self.now_ms
        for offload in self.offload:
            self.cache.offload.heartbeat(offload.session, self.now_ms)
        self.cache.handle(Ticked(self.now_ms))

    def lose(self) -> None:
        self.world.lose()
        if self.choose(10) < 3:
            self.world.held.clear()
        self.cache.handle(StorageReady())

    def suspend(self) -> None:
        ready = self.cache.storage.state is StorageState.READY
        self.cache.handle(StorageSuspended() if ready else StorageReady())

    def forget(self) -> None:
        self.one(self.cache.trees).shed_host("test")
        for named in [each for each in sorted(self.world.held) if not self.choose(5)]:
            self.world.held.discard(named)

    def clear(self) -> None:
        if self.choose(2):
            self.cache.offload.clear(self.one(self.offload).session)
        elif not any(pool.clearing for pool in self.cache.pools.values()):
            clearings: Clearings = self.cache.clearings
            self.clears += 1
            clearings.begin(self.cache.tree_of("a"), b"anew %d" % self.clears)
            while any(pool.clearing for pool in self.cache.pools.values()):
                self.world.take()  # workers copy, and what storage does is not waited for
            for engine in self.engines:
                self.cache.close_session(engine.session)
            self.engines = [Engine(self.cache, "a"), Engine(self.cache, "b")]

    def pause(self) -> None:
        if self.cache.is_paused():
            self.cache.resume()
        else:
            self.cache.pause()

    def stop(self) -> None:
        under_way = list(self.cache.storage.prefetches.under_way.values())
        if under_way:
            self.cache.storage.prefetches.stop(self.one(under_way))


def test_storage_never_brings_another_block() -> None:
    """Whatever storage does, a host slot that can be hit holds its block, and nothing is held in the end."""
    play(StorageHistory, range(6), STEPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_storage_never_brings_another_block_over_long_histories() -> None:
    """The same for more than a hundred histories, in which everything that can happen does."""
    seen = play(StorageHistory, range(100, 220), STEPS)

    assert {name for name, count in seen.items() if count} >= {
        "prefetched_blocks", "backed_up_blocks", "backup_failed_blocks", "prefetch_failed_blocks", "prefetches_cleared",
        "prefetches_failed", "prefetches_stopped", "prefetches_unavailable", "prefetches_below_threshold",
        "prefetches_stored", "store_waits",
    }  # fmt: skip


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_storage_never_brings_another_block_in_any_short_history(data: st.DataObject) -> None:
    """No short history brings another block; a failing one is shrunk to its shortest form."""
    play_drawn(StorageHistory, data, 30)
