"""Blocks that no copy can read: found by few failures, given up, and in nobody's way."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import PoolRestored, StartTransfer, Ticked, WorkerDied
from kvcached.core.slots.doubts import Doubts
from kvcached.core.slots.ranges import every_slot, from_slots, no_ranges, one_range
from kvcached.core.slots.states import PoolState
from kvcached.core.transfers.stores import STORES_MAX
from kvcached_client.types import WritePolicy
from tests.core.engine import Engine
from tests.core.host_tier import Workers, host_counts, host_hit

MakeTiers = Callable[..., Cache]
TEXT = "".join(chr(ord("A") + number) for number in range(300))
#: No worker dies so often where bad blocks are found.
DEATHS_MAX = 50


class Page:
    """Workers that die of each store out of some slots, with all that is under way, and come back."""

    def __init__(self, cache: Cache, *bad: int) -> None:
        self.cache = cache
        self.bad = bad
        self.deaths = 0
        self.workers = Workers(cache)
        self._now_ms = 0

    def _reads(self, order: StartTransfer) -> bool:
        return any(slot in self.bad for span in order.spans for slot in every_slot(span.device))

    def run(self, ticks: int = 20) -> None:
        """Let so much time pass, in which all is copied that can be."""
        for _ in range(ticks):
            self.workers.started()
            while self.workers.under_way:
                if any(map(self._reads, self.workers.under_way.values())):  # before any other is through
                    self.die()
                else:
                    self.workers.answer(next(iter(self.workers.under_way.values())))
                self.workers.started()
                assert check(self.cache) == []
            self._now_ms += 10
            self.cache.handle(Ticked(self._now_ms))

    def die(self) -> None:
        """The workers die with all that is under way, and come back."""
        self.deaths += 1
        assert self.deaths < DEATHS_MAX
        self.cache.handle(WorkerDied("a"))
        for order in list(self.workers.under_way.values()):
            self.workers.answer(order, "its worker died")
        self.cache.handle(PoolRestored("a"))


def in_order(slots: int) -> list[int]:
    return list(range(slots))


def in_reverse(slots: int) -> list[int]:
    return list(reversed(range(slots)))


def shuffled(slots: int) -> list[int]:
    return random.Random(slots).sample(range(slots), slots)


@pytest.mark.parametrize("placed", [in_order, in_reverse, shuffled])
@pytest.mark.parametrize(
    ("blocks", "bad", "deaths"),
    [(1, 0, 2), (3, 0, 3), (3, 2, 3), (16, 7, 3), (256, 0, 4), (256, 255, 4), (300, 280, 4)],
)
def test_bad_block_is_found_by_few_failures(
    new_tiers: MakeTiers, blocks: int, bad: int, deaths: int, placed: Callable[[int], list[int]]
) -> None:
    """Of a path all blocks before the bad one are stored, and no further store is tried of it and what is behind.

    Wherever its blocks lie in the pool.
    """
    cache = new_tiers(slots=320, host_slabs=32)
    engine = Engine(cache)
    slots = placed(blocks)
    grant = engine.acquire(TEXT[:blocks])
    engine.commit(grant, TEXT[:blocks], slots=from_slots(slots))
    engine.release(grant)
    page = Page(cache, slots[bad])
    page.run()

    assert (page.deaths, cache.counters["store_given_up_blocks"]) == (deaths, 1)
    assert host_counts(cache)[2] == bad
    engine.store(TEXT[:blocks])
    page.run()
    assert page.deaths == deaths


def test_other_paths_get_through(new_tiers: MakeTiers) -> None:
    """Paths whose stores failed beside that of a bad block are stored; those of later requests are, too."""
    cache = new_tiers(slots=64, host_slabs=8)
    engine = Engine(cache)
    for first in range(0, 24, 3):
        engine.store(TEXT[first : first + 3])
    page = Page(cache, 4)
    page.run()
    engine.store(TEXT[30:33])
    page.run()

    assert (page.deaths, host_counts(cache)[2]) == (3, 25)  # of nine paths of three blocks one ends before its second
    assert host_hit(Engine(cache), TEXT[30:33]) == (3, 0)


def test_demotion_passes_what_is_given_up(new_tiers: MakeTiers) -> None:
    """It makes room by other tails, and costs no worker; eviction takes the block when its slot is needed."""
    cache = new_tiers(slots=16, watermark=4, host_slabs=8)
    engine = Engine(cache)
    engine.store(TEXT[:3])
    page = Page(cache, 1)
    page.run()
    for first in range(10, 100, 3):
        engine.store(TEXT[first : first + 3])
        page.run(2)

    assert (page.deaths, cache.pools["a"].free >= 4) == (3, True)
    assert cache.counters["dropped_blocks"] <= 3


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_sleep_ends_the_doubt(new_tiers: MakeTiers, policy: WritePolicy) -> None:
    """A pool with a block that is given up falls asleep with all others stored; awake, its slots are as good as new."""
    cache = new_tiers(slots=16, host_slabs=8)
    tree = cache.managed.trees["a"]
    tree.set_write_policy(policy)
    engine = Engine(cache)
    engine.store(TEXT[:3])
    engine.store(TEXT[10:13])
    cache.managed.end(cache.managed.sessions[engine.session])
    page = Page(cache, 1)
    cache.sleeps.begin("a", 1 << 40)
    page.run()
    assert not cache.sleeps.is_any_falling()
    assert (page.deaths, cache.counters["store_given_up_blocks"]) == (3, 1)
    assert host_counts(cache)[2] == 4

    cache.sleeps.asleep("a")
    cache.sleeps.wake("a")
    cache.sleeps.awake("a")
    assert cache.pools["a"].state is PoolState.AWAKE
    assert not cache.pools["a"].doubts


def many_tails(cache: Cache) -> Engine:
    """A pool with more tails of one block than are stored at a time, none of them stored."""
    cache.managed.trees["a"].set_write_policy(WritePolicy.WRITE_BACK)
    engine = Engine(cache)
    for letter in TEXT[: STORES_MAX + 4]:
        engine.store(letter)
    return engine


def test_sleep_stores_nothing_beside_a_doubted_tail(new_tiers: MakeTiers) -> None:
    """With more tails than stores at a time, and two bad slots, these blocks are given up and no other."""
    cache = new_tiers(slots=16, host_slabs=8)
    engine = many_tails(cache)
    cache.managed.end(cache.managed.sessions[engine.session])
    cache.sleeps.begin("a", 1 << 40)
    Page(cache, 3, 8).run()

    assert not cache.sleeps.is_any_falling()
    assert (cache.counters["store_given_up_blocks"], host_counts(cache)[2]) == (2, STORES_MAX + 2)


def test_demotion_stores_nothing_beside_a_doubted_tail(new_tiers: MakeTiers) -> None:
    """Nor where it alone stores them again, because nothing was to be stored for a while."""
    cache = new_tiers(slots=16, watermark=16, host_slabs=8)
    many_tails(cache)
    page = Page(cache, 3, 8)
    page.workers.started()
    page.die()
    cache.managed.trees["a"].set_write_policy(WritePolicy.NEVER)
    page.run(2)
    cache.managed.trees["a"].set_write_policy(WritePolicy.WRITE_BACK)
    page.run()

    assert (cache.counters["store_given_up_blocks"], host_counts(cache)[2]) == (2, STORES_MAX + 2)


def test_store_that_succeeds_ends_the_doubt() -> None:
    """Failures count only while no store of the slot has succeeded."""
    doubts, slots = Doubts(), one_range(3, 2)
    assert doubts.next_store(no_ranges()) == (0, False)
    for _ in range(3):
        assert (doubts.note_failed(slots), doubts.next_store(slots), doubts.has_any(one_range(4, 9))) == (
            0,
            (2, True),
            True,
        )
        assert doubts.next_store(one_range(0, 8)) == (3, False)
        doubts.note_stored(one_range(0, 8))
        assert (len(doubts), doubts.has_any(slots), doubts.next_store(slots)) == (0, False, (2, False))
