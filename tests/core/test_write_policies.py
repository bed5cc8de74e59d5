"""When blocks of a replica's namespace are copied to the host pool, and what changes with the policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import HurryTransfer, StartTransfer, Ticked
from kvcached.core.slots.states import SlotState
from kvcached_client.types import NO_FENCE, WritePolicy
from tests.core.engine import Engine, keys_of, refused
from tests.core.host_tier import Workers, crowd_out, host_counts, host_hit, spans, stored

MakeTiers = Callable[..., Cache]
SELECTIVE = WritePolicy.WRITE_THROUGH_SELECTIVE


def with_policy(make: MakeTiers, policy: WritePolicy, names: str = "a", **settings: int) -> Cache:
    """A cache of replicas whose namespaces have a write policy."""
    cache = make(names, **settings)
    for tree in cache.trees:
        cache.set_write_policy(tree, policy)
    return cache


# --- second sighting --------------------------------------------------------------------------------------------------


def test_block_is_stored_at_its_second_sighting(new_tiers: MakeTiers) -> None:
    """Under the selective policy a commit is not copied; the first acquire that hits it has the hit copied, no more."""
    cache = with_policy(new_tiers, SELECTIVE)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    assert workers.started() == []

    engine.release(engine.acquire("abxy"))
    assert [spans(order) for order in workers.started()] == [[(0, 2)]]
    engine.release(engine.acquire("abcd"))
    assert [spans(order) for order in workers.started()] == [[(2, 2)]]


def test_third_sighting_copies_nothing(new_tiers: MakeTiers) -> None:
    """What the host pool has, or is being given, is not stored again, and nothing waits for it."""
    cache = with_policy(new_tiers, SELECTIVE)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    engine.release(engine.acquire("abcd"))
    (order,) = workers.started()
    engine.release(engine.acquire("abcd"))
    assert (workers.started(), len(cache.pools["a"].unstored)) == ([], 0)
    workers.answer(order)
    engine.release(engine.acquire("abcd"))
    assert (workers.started(), len(cache.pools["a"].unstored)) == ([], 0)


def test_two_requests_at_once_are_two_sightings(new_tiers: MakeTiers) -> None:
    """A block that two requests compute at the same time is a duplicate for the second one, and is stored."""
    cache = with_policy(new_tiers, SELECTIVE)
    workers, engine = Workers(cache), Engine(cache)
    first, second = engine.acquire("abcd"), engine.acquire("abxy")
    engine.commit(first, "abcd")
    assert workers.started() == []
    assert engine.commit(second, "abxy").duplicates == 2

    assert [spans(order) for order in workers.started()] == [[(0, 2)]]


def test_sighting_by_another_replica_counts_where_its_device_has_the_block(new_tiers: MakeTiers) -> None:
    """Each replica's commits and hits are its own sightings: two replicas that compute a prompt once store nothing."""
    cache = with_policy(new_tiers, SELECTIVE, "ab")
    Engine(cache, "a").store("abcd")
    other = Engine(cache, "b")
    other.store("abcd")
    workers = Workers(cache)
    assert workers.started() == []
    other.release(other.acquire("abcd"))
    assert [order.pool for order in workers.started()] == ["b"]


def test_unsighted_tails_are_evicted_and_not_stored(new_tiers: MakeTiers) -> None:
    """Under the selective policy room is made from what was seen once, without a copy of it."""
    cache = with_policy(new_tiers, SELECTIVE, watermark=8)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcdefghijkl")
    assert workers.started() == []
    crowd_out(engine)

    assert (cache.counters["dropped_blocks"], host_counts(cache)) == (12, (0, 0, 0))


def test_sighting_under_a_fence_is_stored_after_its_signal(new_tiers: MakeTiers) -> None:
    """A hit on blocks whose writer has only queued its work is copied when that work is over."""
    cache = with_policy(new_tiers, SELECTIVE)
    workers, engine = Workers(cache), Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd", fence=5)
    engine.release(engine.acquire("abcd"))
    assert workers.started() == []
    engine.signal(5)

    assert [spans(order) for order in workers.started()] == [[(0, 4)]]


# --- write-back -------------------------------------------------------------------------------------------------------


def test_commit_is_not_copied_under_write_back(new_tiers: MakeTiers) -> None:
    """Under write-back neither a commit nor a hit makes a copy, as long as slots are free."""
    cache = with_policy(new_tiers, WritePolicy.WRITE_BACK)
    engine = Engine(cache)
    engine.store("abcd")
    engine.release(engine.acquire("abcd"))

    assert Workers(cache).started() == []


def test_watermark_writes_back_before_it_frees(new_tiers: MakeTiers) -> None:
    """Below the watermark the oldest tail is stored with what comes before it, and its slots are free after the end."""
    cache = with_policy(new_tiers, WritePolicy.WRITE_BACK, watermark=12)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcdef")
    (order,) = workers.started()

    assert (spans(order), cache.pools["a"].free) == ([(0, 6)], 10)
    workers.answer(order)
    cache.settle()
    assert (cache.pools["a"].free, host_hit(engine, "abcdef")) == (12, (4, 2))


def test_slots_are_granted_after_the_acknowledgement(new_tiers: MakeTiers) -> None:
    """Whoever needs slots of blocks without a copy waits until they are written back, which is urgent then."""
    cache = with_policy(new_tiers, WritePolicy.WRITE_BACK)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcdefghijkl")
    with refused("capacity_pending"):
        engine.acquire("", reserve=10)
    effects = workers.take()
    (order,) = [effect for effect in effects if isinstance(effect, StartTransfer)]
    assert [effect.transfer for effect in effects if isinstance(effect, HurryTransfer)] == [order.transfer]
    assert cache.managed.retry_when_freed(engine.session, engine.epoch, 10) is None
    workers.answer(order)
    cache.settle()

    assert cache.managed.retry_when_freed(engine.session, engine.epoch, 10) == 16
    grant = engine.acquire("", reserve=10)
    assert (cache.counters["dropped_blocks"], host_hit(engine, "abcdefghijkl")) == (0, (6, 6))
    engine.release(grant)


def test_refused_request_loses_nothing(new_tiers: MakeTiers) -> None:
    """A request that waits for a write-back has had nothing evicted that the host pool does not have."""
    cache = with_policy(new_tiers, WritePolicy.WRITE_BACK)
    engine = Engine(cache)
    engine.store("abcdefgh")
    engine.store("uvwxyz")
    with refused("capacity_pending"):
        engine.acquire("0123456789")

    assert (engine.hit("abcdefgh"), engine.hit("uvwxyz")) == (8, 6)


def test_waiting_request_gets_its_slots_over_several_rounds(new_tiers: MakeTiers) -> None:
    """More blocks than stores under way may have at once are written back one after the other for one request."""
    cache = with_policy(new_tiers, WritePolicy.WRITE_BACK, slots=4096, host_slabs=2, slots_per_slab=4096)
    workers, engine = Workers(cache), Engine(cache)
    grant = engine.acquire("", reserve=4096)
    keys = b"".join(index.to_bytes(16) for index in range(1, 4097))
    slots = cache.managed.sessions[engine.session].leases[grant.lease].open[:]
    engine.cache.managed.commit(engine.session, engine.epoch, grant.lease, 0, keys, slots, NO_FENCE)
    engine.release(grant)
    with refused("capacity_pending"):
        engine.acquire("", reserve=3000)
    while cache.managed.retry_when_freed(engine.session, engine.epoch, 3000) is None:
        workers.take()
        workers.answer(next(iter(workers.under_way.values())))
        cache.settle()

    engine.release(engine.acquire("", reserve=3000))
    assert (cache.counters["dropped_blocks"], cache.counters["evicted_blocks"]) == (0, 0)


@pytest.mark.parametrize("obstacle", ["no room", "failure", "pause"])
def test_blocks_that_cannot_be_written_back_are_evicted(new_tiers: MakeTiers, obstacle: str) -> None:
    """Where no copy can be made a request does not wait for one: what it needs is evicted, and counted as dropped."""
    cache = with_policy(new_tiers, WritePolicy.WRITE_BACK, slots_per_slab=0 if obstacle == "no room" else 16)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcdefghijkl")
    cache.pools["a"].paused = obstacle == "pause"
    if obstacle == "failure":
        with refused("capacity_pending"):
            engine.acquire("", reserve=10)
        workers.take()
        workers.answer(next(iter(workers.under_way.values())), "disk on fire")
        cache.settle()

    engine.release(engine.acquire("", reserve=10))
    assert cache.counters["dropped_blocks"] == 6


def test_copies_that_are_there_make_room_without_a_wait(new_tiers: MakeTiers) -> None:
    """Under write-back a device copy goes at once where the host pool has the block."""
    cache = new_tiers()
    engine = stored(cache, "abcdefghijkl")
    cache.set_write_policy(cache.trees[0], WritePolicy.WRITE_BACK)
    grant = engine.acquire("", reserve=10)

    assert (cache.counters["demoted_blocks"], cache.counters["evicted_blocks"]) == (6, 0)
    assert host_hit(engine, "abcdefghijkl") == (6, 6)
    engine.release(grant)


def test_demand_of_a_request_that_gave_up_ends_with_a_tick(new_tiers: MakeTiers) -> None:
    """Slots are kept ready for somebody who waits, not for ever: after the next tick the watermark counts again."""
    cache = with_policy(new_tiers, WritePolicy.WRITE_BACK)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcdefghijkl")
    with refused("capacity_pending"):
        engine.acquire("", reserve=10)
    cache.handle(Ticked(1))
    workers.answer_all()

    assert (cache.pools["a"].demand, cache.pools["a"].free) == (0, 4)


# --- never, and changes -----------------------------------------------------------------------------------------------


def test_never_stores_nothing_and_loads_what_is_there(new_tiers: MakeTiers) -> None:
    """Under `never` no copy is made, whatever happens; copies of before are still loaded."""
    cache = new_tiers(watermark=8)
    engine = stored(cache, "abcd")
    cache.set_write_policy(cache.trees[0], WritePolicy.NEVER)
    engine.store("uvwxyz012")
    engine.release(engine.acquire("uvwxyz012"))
    cache.handle(Ticked(1))
    workers = Workers(cache)
    assert workers.started() == []
    crowd_out(engine)

    assert host_hit(engine, "abcd") == (0, 4)
    assert host_counts(cache)[2] == 4
    assert engine.acquire("abcd").loads


@pytest.mark.parametrize("policy", [SELECTIVE, WritePolicy.WRITE_BACK, WritePolicy.NEVER])
def test_change_calls_off_what_waits(new_tiers: MakeTiers, policy: WritePolicy) -> None:
    """Commits that wait to be copied, behind a fence or behind others, are left out once the policy is another one."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd", fence=5)
    engine.store("uvw")
    version = cache.version
    cache.set_write_policy(cache.trees[0], policy)
    engine.signal(5)

    assert (workers.started(), cache.version) == ([], version + 1)
    cache.set_write_policy(cache.trees[0], policy)
    assert cache.version == version + 1


def test_change_lets_copies_under_way_end(new_tiers: MakeTiers) -> None:
    """A store that workers carry out when the policy changes is completed, and counts."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    (order,) = workers.started()
    cache.set_write_policy(cache.trees[0], WritePolicy.NEVER)
    workers.answer(order)

    assert host_counts(cache)[2] == 4


def test_change_to_write_through_reaches_back_along_the_path(new_tiers: MakeTiers) -> None:
    """The next commit under write-through has what comes before it copied, too."""
    cache = with_policy(new_tiers, WritePolicy.NEVER)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    cache.set_write_policy(cache.trees[0], WritePolicy.WRITE_THROUGH)
    assert workers.started() == []
    engine.store("abcdef")

    assert [spans(order) for order in workers.started()] == [[(0, 6)]]


def test_policy_of_one_namespace_is_not_that_of_another(new_tiers: MakeTiers) -> None:
    """Two namespaces of one daemon have each its policy."""
    cache = new_tiers("aX")
    cache.set_write_policy(cache.tree_of("X"), WritePolicy.NEVER)
    for name in "aX":
        Engine(cache, name).store("abcd")

    assert [order.pool for order in Workers(cache).started()] == ["a"]


def test_retry_of_an_acquire_is_no_sighting(new_tiers: MakeTiers) -> None:
    """The same request asked again has sighted nothing that it had not sighted already."""
    cache = with_policy(new_tiers, SELECTIVE)
    workers, engine = Workers(cache), Engine(cache)
    engine.acquire("abcd", request="r")
    engine.acquire("abcd", request="r")

    assert (workers.started(), cache.counters["acquires"]) == ([], 1)
    assert cache.pools["a"].counts[SlotState.LEASED] == 4
    assert cache.managed.match(engine.session, engine.epoch, keys_of("abcd"), 16, full=True) == (0, 0)
