"""What could grow without end, or be tried without end, and does not; and what fails once and is tried again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import Ticked, WorkerDied
from kvcached.core.slots import slots as pool
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers import stores, transfer
from kvcached_client.types import ShardIndex
from tests.core.engine import Engine, refused
from tests.core.host_tier import Workers, crowd_out, host_counts, host_hit, spans

MakeTiers = Callable[..., Cache]


def test_default_quota_lets_a_load_of_the_threshold_through(new_tiers: MakeTiers) -> None:
    """A threshold above half the pool does not by itself forbid every load."""
    cache = new_tiers("ab", threshold=10)
    workers, first, second = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    first.store("abcdefghijkl")
    workers.answer_all()

    assert second.acquire("abcdefghijkl").hit == 10


def test_failed_store_is_tried_again_at_the_next_tick(new_tiers: MakeTiers) -> None:
    """A store that fails is not repeated at once, for it may fail for ever, but when time has passed."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    (order,) = workers.started()
    workers.answer(order, "disk on fire")

    assert workers.started() == []
    cache.handle(Ticked(1))
    assert [spans(order) for order in workers.started()] == [[(0, 4)]]


def test_other_replica_stores_what_a_lost_one_could_not(new_tiers: MakeTiers) -> None:
    """Where a pool is lost under its store, a replica that has the same blocks stores them at the next tick."""
    cache = new_tiers("ab", threshold=99)
    workers, first, second = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    first.store("abcd")
    (order,) = workers.started()
    second.store("abcd")
    assert workers.started() == []
    cache.handle(WorkerDied("a"))
    workers.answer(order, "its worker died")
    cache.handle(Ticked(1))

    (again,) = workers.started()
    assert (again.pool, spans(again)) == ("b", [(0, 4)])


def test_device_copy_replaces_a_corrupt_host_copy(new_tiers: MakeTiers) -> None:
    """A block whose host copy proves corrupt is stored again by the replica that still has it on its device."""
    cache = new_tiers("ab")
    workers, first, second = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    first.store("abcd")
    workers.answer_all()
    second.acquire("abcd")
    (load,) = workers.started()
    workers.answer(load, corrupt=(1,))

    assert host_hit(second, "abcd") == (1, 0)
    assert [(order.pool, spans(order)) for order in workers.started()] == [("a", [(1, 1)])]


def test_paths_that_wait_to_be_stored_are_bounded_and_counted(
    new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits that come faster than they can be noted push out the oldest, and a counter says how many."""
    monkeypatch.setattr(pool, "UNSTORED_MAX", 2)
    cache = new_tiers()
    cache.pools["a"].unstored = type(cache.pools["a"].unstored)(maxlen=2)
    engine = Engine(cache)
    for text in ("a", "b", "c", "d", "e"):
        engine.store(text)

    assert (len(cache.pools["a"].unstored), cache.counters["stores_forgotten"]) == (2, 3)


def test_paths_behind_one_fence_are_bounded_and_counted(new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that never signals its fence cannot make the daemon remember more and more."""
    monkeypatch.setattr(stores, "UNSTORED_PER_FENCE_MAX", 3)
    cache = new_tiers(slots=32)
    engine = Engine(cache)
    grant = engine.acquire("a")
    engine.commit(grant, "a", fence=5)
    for text in ("ab", "ac", "ad", "ae", "af"):
        engine.store(text)
        cache.settle()

    (hold,) = cache.managed.sessions[engine.session].holds
    assert (len(hold.unstored), cache.counters["stores_forgotten"]) == (3, 2)  # "ab" goes on with the run of "a"


def test_load_forgets_leases_that_were_released(new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that join a slow load and leave again are not remembered until its end."""
    monkeypatch.setattr(transfer, "RELEASED_LEASES_MAX", 4)
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    workers.answer_all()
    crowd_out(engine)
    workers.answer_all()
    engine.acquire("abcd")
    (load,) = workers.started()
    for _ in range(40):
        engine.release(engine.acquire("abcd"))

    assert len(cache.transfers[load.transfer].leases) <= 5


def test_shortage_that_no_copy_can_end_is_final(new_tiers: MakeTiers) -> None:
    """A request for more slots than leases leave is not told to wait for the copies under way."""
    cache = new_tiers(slots=8)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    assert len(workers.started()) == 1
    engine.acquire("wxyz")

    with refused("capacity_pending"):
        engine.acquire("mnop")
    with refused("no_capacity"):
        engine.acquire("mnopq")


def test_copy_that_another_store_still_writes_is_none_for_demotion(new_tiers: MakeTiers) -> None:
    """A device gives up no block on the strength of a host copy that another replica's store may yet fail to make."""
    cache = new_tiers("ab", slots=8, watermark=8, threshold=99)
    workers, first, second = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    first.store("abcd")
    (order,) = workers.started()
    second.store("abcd")
    cache.settle()

    assert cache.pools["b"].counts[SlotState.CACHED] == 4
    workers.answer(order)
    cache.settle()
    assert cache.pools["b"].counts[SlotState.CACHED] == 0
    assert host_counts(cache)[2] == 4


def test_shard_that_names_blocks_it_was_not_given_has_failed(new_tiers: MakeTiers) -> None:
    """A corrupt block outside the transfer, or one in a store, is a shard's mistake: nothing of it is believed."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    (order,) = workers.started()
    cache.worker_copies.shard_done(order.transfer, ShardIndex(0), "", (99,))

    assert (cache.counters["store_failed_blocks"], cache.counters["stored_blocks"]) == (4, 0)


def two_full_pools(new_tiers: MakeTiers, host_slots: int) -> tuple[Cache, Workers]:
    """Two pools of one namespace, each with a prompt of six blocks and less free than its watermark."""
    cache = new_tiers("ab", slots=8, watermark=4, host_slabs=1, slots_per_slab=host_slots)
    workers = Workers(cache)
    for replica, prompt in (("a", "abcdef"), ("b", "uvwxyz")):
        Engine(cache, replica).store(prompt)
        workers.answer_all()
    return cache, workers


def pass_time(cache: Cache, workers: Workers, ticks: range) -> None:
    """At each tick all that the workers are asked for is done."""
    for tick in ticks:
        cache.handle(Ticked(tick * 250))
        workers.answer_all()


def test_tails_that_do_not_fit_into_the_host_pool_are_not_stored_in_part(new_tiers: MakeTiers) -> None:
    """Two pools whose tails the host pool cannot take whole do not evict each other's beginnings for ever."""
    cache, workers = two_full_pools(new_tiers, host_slots=4)
    pass_time(cache, workers, range(1, 9))
    stored_blocks = cache.counters["stored_blocks"]
    pass_time(cache, workers, range(9, 17))

    assert cache.counters["stored_blocks"] == stored_blocks
    assert cache.counters["store_refused_blocks"] > 0


def test_tail_that_fits_into_the_host_pool_is_stored_before_it_leaves(new_tiers: MakeTiers) -> None:
    """What another pool has there makes room for a tail that fits whole; then the tail leaves its device."""
    cache, workers = two_full_pools(new_tiers, host_slots=6)
    pass_time(cache, workers, range(1, 9))

    assert [cache.pools[each].free >= 4 for each in "ab"] == [True, True]
