"""Long random histories of both kinds of engines above storage that is slow, fails, forgets and dies."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcached.core.cache import Cache
from kvcached.core.clearing import Clearings
from kvcached.core.messages import StorageReady, StorageSuspended, Ticked
from kvcached.core.refusals import Refusal
from kvcached.core.slots.states import StorageState
from kvcached.core.transfers.prefetch import PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from tests.core.engine import Engine, healthy
from tests.core.host_tier import make_tiers
from tests.core.offload_engine import OffloadEngine, space
from tests.core.storage_world import StorageWorld
from tests.core.test_storage import store

STEPS = 250
_POLICIES = tuple(BackupPolicy)


class History:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        spec = StorageSpec(_POLICIES[seed % 3], 30, PrefetchLimits(threshold_blocks=self.random.choice((1, 1, 3))))
        self.cache: Cache = make_tiers("ab", slots=10, host_slabs=5, slots_per_slab=4, spaces=2, storage=spec)
        self.world = StorageWorld(self.cache)
        self.now_ms = 0
        self.engines = [Engine(self.cache, "a"), Engine(self.cache, "b")]
        self.offload = [OffloadEngine(self.cache, space("m")), OffloadEngine(self.cache, space("n", per_slab=3))]
        self.seen: Counter[str] = Counter()
        self.steps = (
            *(self.compute,) * 6, *(self.compute_offload,) * 6, *(self.prefetch,) * 5, *(self.answer,) * 12,
            *(self.time,) * 4, self.lose, self.suspend, self.forget, self.clear, self.pause, self.stop,
        )  # fmt: skip

    def play(self) -> Counter[str]:
        for _ in range(STEPS):
            step = self.random.choice(self.steps)
            step()
            self.seen[step.__name__] += 1
            self.world.check()
            if self.random.random() < 0.5:
                self.world.take()
                self.world.check()
        self.cache.resume()
        self.world.answer_all()
        assert self.cache.storage.copies == []
        assert not self.cache.storage.prefetches.under_way
        assert healthy(self.cache)
        return self.seen + self.cache.counters

    # --- steps ------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        return "".join(self.random.choice("ab" if at else "abc") for at in range(self.random.randint(1, 9)))

    def compute(self) -> None:
        engine = self.random.choice(self.engines)
        try:
            engine.store(self.text())
        except Refusal:
            self.seen["no room"] += 1

    def compute_offload(self) -> None:
        store(self.world, self.random.choice(self.offload), self.text())

    def prefetch(self) -> None:
        if self.random.random() < 0.5:
            engine = self.random.choice(self.engines)
            self.world.prefetch(engine.session, self.text(), epoch=engine.epoch)
        else:
            self.world.prefetch(self.random.choice(self.offload).session, self.text())

    def answer(self) -> None:
        self.world.take()
        if self.world.under_way:
            good = self.random.choice((None, None, 0, 0, 1))
            self.world.answer(self.random.randrange(len(self.world.under_way)), good=good)

    def time(self) -> None:
        self.now_ms += 400
        for engine in self.engines:
            self.cache.managed.sessions[engine.session].last_heard_ms = self.now_ms
        for offload in self.offload:
            self.cache.offload.heartbeat(offload.session, self.now_ms)
        self.cache.handle(Ticked(self.now_ms))

    def lose(self) -> None:
        self.world.lose()
        if self.random.random() < 0.3:
            self.world.held.clear()
        self.cache.handle(StorageReady())

    def suspend(self) -> None:
        ready = self.cache.storage.state is StorageState.READY
        self.cache.handle(StorageSuspended() if ready else StorageReady())

    def forget(self) -> None:
        self.random.choice(self.cache.trees).shed_host("test")
        for named in [each for each in sorted(self.world.held) if self.random.random() < 0.2]:
            self.world.held.discard(named)

    def clear(self) -> None:
        if self.random.random() < 0.7:
            self.cache.offload.clear(self.random.choice(self.offload).session)
        elif not any(pool.clearing for pool in self.cache.pools.values()):
            clearings: Clearings = self.cache.clearings
            clearings.begin(self.cache.tree_of("a"), self.random.randbytes(9))
            self.world.answer_all()
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
            self.cache.storage.prefetches.stop(self.random.choice(under_way))


def play(seeds: range) -> Counter[str]:
    """What was seen in all of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += History(seed).play()
    return seen


def test_storage_never_brings_another_block() -> None:
    """Whatever storage does, a host slot that can be hit holds its block, and nothing is held in the end."""
    play(range(6))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_storage_never_brings_another_block_over_long_histories() -> None:
    """The same for hundreds of histories, in which everything that can happen does."""
    seen = play(range(100, 400))

    assert {name for name, count in seen.items() if count} >= {
        "prefetched_blocks", "backed_up_blocks", "backup_failed_blocks", "prefetch_failed_blocks", "prefetches_cleared",
        "prefetches_failed", "prefetches_stopped", "prefetches_unavailable", "prefetches_below_threshold",
    }  # fmt: skip
