"""Hits through the host pool: what is loaded, who waits for it, and what is left when it fails."""

from __future__ import annotations

from collections.abc import Callable

from kvcached.core.cache import Cache
from kvcached.core.messages import AbandonLoad, HurryTransfer, LoadsEnded, PoolRestored, WorkerDied
from kvcached.core.slots.states import SlotState
from kvcached_client.types import LeaseId
from tests.core.engine import Engine, keys_of, refused
from tests.core.host_tier import (
    Workers,
    crowd_out,
    host_counts,
    host_hit,
    keys_match,
    loading,
    loads,
    spans,
    state_of,
    stored,
)

MakeTiers = Callable[..., Cache]


def test_evicted_prompt_comes_back_from_the_host_pool(new_tiers: MakeTiers) -> None:
    """A preempted request's blocks are a hit again once they are loaded, the same bytes under the same keys."""
    cache = new_tiers(shards=2)
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)
    grant, (order,) = loading(engine, workers, "abcdef")

    assert (grant.hit, grant.ready, grant.loads) == (4, 0, ((order.transfer, order.progress),))
    assert (order.urgent, spans(order), keys_match(order, "abcd")) == (True, [(0, 4)], True)
    assert order.spans[0].device.tobytes() == grant.hit_ranges
    assert state_of(cache.pools["a"], order.spans[0].device) == {"FILLING"}
    assert cache.managed.load(engine.session, engine.epoch, grant.lease) is None
    workers.answer(order)
    assert LoadsEnded(engine.session, grant.lease) in workers.take()
    loaded = cache.managed.load(engine.session, engine.epoch, grant.lease)
    assert loaded is not None
    assert (loaded.hit, loaded.ranges, cache.counters["loaded_blocks"]) == (4, b"", 4)
    engine.commit(grant, "abcdef")


def test_device_hit_goes_on_in_the_host_pool(new_tiers: MakeTiers) -> None:
    """A hit is what the device has, ready at once, and behind it what the host pool has."""
    cache = new_tiers("ab", threshold=2)
    stored(cache, "abcdef", "a")
    engine = Engine(cache, "b")
    first, (order,) = loading(engine, Workers(cache), "abc")
    Workers(cache)
    assert (first.hit, spans(order)) == (3, [(0, 3)])
    workers = Workers(cache)
    workers.under_way[order.transfer] = order
    workers.answer(order)

    grant, (more,) = loading(engine, workers, "abcdefgh")

    assert (grant.hit, grant.ready, spans(more), more.spans[0].parent) == (6, 3, [(3, 3)], keys_of("abc")[-16:])
    workers.answer(more)


def test_replica_hits_what_another_one_stored(new_tiers: MakeTiers) -> None:
    """Replicas of a namespace share the host pool; another namespace sees nothing of it."""
    cache = new_tiers("abX")
    stored(cache, "abcd", "a")
    other, foreign = Engine(cache, "b"), Engine(cache, "X")

    assert (host_hit(other, "abcd"), host_hit(foreign, "abcd")) == ((0, 4), (0, 0))
    assert (other.acquire("abcd").hit, foreign.acquire("abcd").hit) == (4, 0)
    Workers(cache).answer_all()


def test_few_blocks_are_computed_rather_than_loaded(new_tiers: MakeTiers) -> None:
    """Below the threshold no load is started, which is counted, and the hit ends where the device's does."""
    cache = new_tiers(threshold=4)
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)

    assert (loading(engine, workers, "abc")[0].hit, loads(workers.take())) == (0, [])
    assert cache.counters["load_below_threshold_blocks"] == 3
    assert engine.acquire("abcd").hit == 4
    workers.answer_all()


def test_loads_keep_to_their_quota(new_tiers: MakeTiers) -> None:
    """Loads under way write no more blocks than the quota; the rest of the prompt is computed, and counted."""
    cache = new_tiers(slots=32, quota=5)
    engine = stored(cache, "abcd")
    engine.store("ABCD")
    Workers(cache).answer_all()
    crowd_out(engine)
    workers = Workers(cache)
    first, second, third = engine.acquire("abcd"), engine.acquire("ABCD"), engine.acquire("ABX")

    assert (first.hit, second.hit, third.hit) == (4, 1, 1)
    assert cache.counters["load_over_quota_blocks"] == 3 + 1
    assert not cache.counters["load_below_threshold_blocks"]
    workers.answer_all()
    assert engine.acquire("abcd").hit == 4


def test_request_joins_the_load_of_another(new_tiers: MakeTiers) -> None:
    """Blocks are loaded once: a second request names the same load, and both are told of its end."""
    cache = new_tiers()
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)
    first, (order,) = loading(engine, workers, "abcd")
    second, more = loading(engine, workers, "abcX")

    assert (second.hit, second.ready, second.loads, more) == (3, 0, first.loads, [])
    assert cache.counters["joined_loads"] == 1
    assert first.hit_ranges[:4] == second.hit_ranges[:4]
    workers.answer(order)
    assert set(workers.take()) == {LoadsEnded(engine.session, lease) for lease in (first.lease, second.lease)}


def test_request_that_shares_only_the_ready_part_waits_for_nothing(new_tiers: MakeTiers) -> None:
    """A hit that ends before a load begins is ready."""
    cache = new_tiers("ab")
    stored(cache, "abcd", "a")
    engine = Engine(cache, "b")
    workers = Workers(cache)
    engine.release(loading(engine, workers, "ab")[0])
    workers.answer_all()
    loading(engine, workers, "abcd")

    assert (engine.acquire("abX").ready, engine.acquire("abX").loads) == (2, ())
    workers.answer_all()


# --- loads that depend on stores --------------------------------------------------------------------------------------


def waiting_load(cache: Cache, workers: Workers) -> tuple[Engine, LeaseId]:
    """A load into pool "b" of blocks that pool "a" is just storing; its engine and lease."""
    Engine(cache, "a").store("abcd")
    workers.started()
    other = Engine(cache, "b")
    grant = other.acquire("abcd")
    assert (grant.hit, grant.ready, len(grant.loads)) == (4, 0, 1)
    return other, grant.lease


def test_load_hurries_the_store_that_it_depends_on(new_tiers: MakeTiers) -> None:
    """A load of blocks that are still being stored is not started, and hands its urgency on, once."""
    cache = new_tiers("ab")
    workers = Workers(cache)
    engine, _ = waiting_load(cache, workers)
    (store,) = workers.under_way.values()
    assert engine.acquire("abc").hit == 3

    assert workers.take() == [HurryTransfer(store.transfer, "a")]
    workers.answer(store)
    (load,) = loads(workers.take())
    assert (load.pool, spans(load), load.spans[0].host) == ("b", [(0, 4)], store.spans[0].host)
    workers.answer(load)


def test_load_fails_with_the_store_that_it_depends_on(new_tiers: MakeTiers) -> None:
    """Then it was never started: its entry of the progress pages is marked, and who waits is told."""
    cache = new_tiers("ab")
    workers = Workers(cache)
    engine, lease = waiting_load(cache, workers)
    ((load, progress),) = [(each.id, each.progress) for each in cache.transfers.values() if each.after]
    workers.take()
    workers.answer(next(iter(workers.under_way.values())), "copy failed")

    assert set(workers.take()) == {LoadsEnded(engine.session, lease), AbandonLoad(load, "b", progress)}
    assert cache.transfers == {}
    loaded = cache.managed.load(engine.session, engine.epoch, lease)
    assert loaded is not None
    assert (loaded.hit, len(loaded.ranges)) == (0, 8)
    assert host_counts(cache) == (16, 0, 0)
    assert cache.pools["b"].counts[SlotState.FILLING] == 0


def test_store_that_fails_after_its_pool_was_lost_takes_its_loads_along(new_tiers: MakeTiers) -> None:
    """Whatever else the failing store was writing behind a lost block goes in order, not under the load's feet."""
    cache = new_tiers("ab", slots=16)
    workers, engine, other = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    for text in ("ab", "abcd", "abcdef"):
        engine.store(text)
        workers.started()
    first, second, third = workers.under_way.values()
    workers.answer(first)
    wrong = other.acquire("ab")
    (load,) = loads(workers.take())
    workers.answer(load, corrupt=(0, 1))  # [0, 2) is a hole now, [2, 4) and [4, 6) are being stored
    other.release(wrong)
    cache.pools["a"].unstored.clear()  # what would store [0, 2) by itself
    engine.store("abcdefgh")
    (last,) = workers.started()
    assert spans(last) == [(0, 2), (6, 2)]
    grant = other.acquire("ab")
    assert grant.hit == 2
    cache.handle(WorkerDied("a"))
    workers.answer(second, "worker died")  # [2, 4) has no copy any more
    workers.answer(last, "worker died")
    workers.answer(third, "worker died")

    assert host_counts(cache) == (16, 0, 0)
    assert cache.transfers == {}


# --- shortage and deaths ----------------------------------------------------------------------------------------------


def test_shortage_that_copies_will_end_is_called_pending(new_tiers: MakeTiers) -> None:
    """While stores hold the slots that a request lacks, it is told to wait; the wait hurries them and is answered."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcdefgh")
    (order,) = workers.started()

    with refused("capacity_pending"):
        engine.acquire("0123456789AB")
    assert cache.managed.retry_when_freed(engine.session, engine.epoch, 8) == 8
    assert cache.managed.retry_when_freed(engine.session, engine.epoch, 12) is None
    assert workers.take() == [HurryTransfer(order.transfer, "a")]
    workers.answer(order)
    assert cache.managed.retry_when_freed(engine.session, engine.epoch, 12) == 16
    assert engine.acquire("0123456789AB").hit == 0
    with refused("no_capacity"):
        engine.acquire("abcdefgh")
    assert cache.managed.retry_when_freed(engine.session, engine.epoch, 12) == 4


def test_nothing_is_loaded_while_a_pool_has_no_workers(new_tiers: MakeTiers) -> None:
    """The hit is what the device has; other replicas load, and so does this one when it has workers again."""
    cache = new_tiers("ab")
    stored(cache, "abcd", "a")
    other, engine = Engine(cache, "b"), Engine(cache, "a")
    crowd_out(engine)
    cache.handle(WorkerDied("a"))

    assert engine.acquire("abcd").hit == 0
    assert host_hit(other, "abcd") == (0, 4)
    cache.handle(PoolRestored("a"))
    workers = Workers(cache)
    grant, (order,) = loading(engine, workers, "abcd")
    assert (grant.hit, spans(order)) == (4, [(0, 4)])
    workers.answer(order)


def test_slots_of_a_copy_wait_until_its_worker_is_dead(new_tiers: MakeTiers) -> None:
    """A load's slots are nobody's while its worker may write them, though other workers are there already."""
    cache = new_tiers()
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)
    _, (load,) = loading(engine, workers, "abcd")
    cache.handle(WorkerDied("a"))
    cache.handle(PoolRestored("a"))

    assert cache.pools["a"].counts[SlotState.FILLING] == 4
    workers.answer(load, "worker died")
    assert cache.pools["a"].counts[SlotState.FILLING] == 0


def test_pool_of_a_tenth_of_the_work_serves_all_of_it_from_the_host(new_tiers: MakeTiers) -> None:
    """Under pressure: forty prompts on a pool for four; the second time round every block is a hit, none is dropped."""
    cache = new_tiers(slots=16, slots_per_slab=100, watermark=4)
    workers, engine = Workers(cache), Engine(cache)
    prompts = [f"{chr(ord('A') + index)}xyz" for index in range(40)]
    for turn in range(2):
        for prompt in prompts:
            grant = engine.acquire(prompt)
            assert grant.hit == 4 * turn
            workers.answer_all()
            assert cache.managed.load(engine.session, engine.epoch, grant.lease) is not None
            engine.commit(grant, prompt)
            engine.release(grant)
            workers.answer_all()

    counters = cache.counters
    assert (counters["loaded_blocks"] + counters["hit_blocks"], counters["dropped_blocks"]) == (160, 0)
    assert (counters["stored_blocks"], host_counts(cache)[2]) == (160, 160)
