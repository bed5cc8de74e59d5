"""A device pool that sleeps: nobody gets on it, nothing is lost that the host pool can take, and it wakes empty."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import MembersDied, PoolEmptied, PoolRestored, Ticked, WorkerDied
from kvcached.core.refusals import Refusal
from kvcached.core.slots.states import POOL_TRANSITIONS, PoolState, SlotState
from kvcached_client.types import WritePolicy
from tests.core.engine import Engine, healthy, keys_of, refused, states
from tests.core.host_tier import Workers, host_hit, stored

UNTIL_MS = 1_000


def begin(cache: Cache, replica: str = "a") -> None:
    cache.sleeps.begin(replica, UNTIL_MS)
    assert healthy(cache)


def emptied(cache: Cache) -> list[PoolEmptied]:
    """What the cache says once it has decided what it decides by itself."""
    cache.settle()
    assert healthy(cache)
    return [each for each in cache.effects if isinstance(each, PoolEmptied)]


def gone(engine: Engine) -> None:
    engine.cache.handle(MembersDied(engine.session))


def to_sleep(cache: Cache, replica: str = "a") -> None:
    """All of the way, where nothing is under way."""
    begin(cache, replica)
    workers = Workers(cache)
    workers.answer_all()
    cache.settle()
    cache.sleeps.asleep(replica)
    assert healthy(cache)


@pytest.mark.parametrize("source", PoolState)
@pytest.mark.parametrize("target", PoolState)
def test_states_follow_the_table(cache: Cache, source: PoolState, target: PoolState) -> None:
    """No edge but those of the table is possible."""
    pool = cache.pools["a"]
    pool.state = source
    if (source, target) in POOL_TRANSITIONS:
        pool.enter(target)
        assert pool.state is target
    else:
        with pytest.raises(RuntimeError, match="pool a cannot go from"):
            pool.enter(target)


def test_stored_blocks_leave_at_once_and_are_hit_after_waking(new_tiers: Callable[..., Cache]) -> None:
    """What the host pool has is dropped from the device, and loaded from there when the pool is awake again."""
    cache = new_tiers("a")
    gone(stored(cache, "abcd"))
    begin(cache)

    assert emptied(cache) == [PoolEmptied("a", 4, 0)]
    assert cache.pools["a"].free == cache.pools["a"].slots
    cache.sleeps.asleep("a")
    cache.sleeps.wake("a")
    cache.sleeps.awake("a")
    assert host_hit(Engine(cache), "abcd") == (0, 4)


def test_what_the_host_pool_lacks_is_stored_first(new_tiers: Callable[..., Cache]) -> None:
    """Blocks that were never stored are stored before they leave the device, under each policy that stores any."""
    for policy in set(WritePolicy) - {WritePolicy.NEVER}:
        cache = new_tiers("a")
        cache.set_write_policy(cache.tree_of("a"), policy)
        engine = Engine(cache)
        engine.store("abcd")
        gone(engine)
        begin(cache)
        workers = Workers(cache)
        (store,) = workers.started()
        assert not [each for each in cache.effects if isinstance(each, PoolEmptied)]
        assert states(cache)[SlotState.CACHED] == 4
        workers.answer(store)

        assert emptied(cache) == [PoolEmptied("a", 4, 0)]
        cache.sleeps.asleep("a")
        cache.sleeps.wake("a")
        cache.sleeps.awake("a")
        assert host_hit(Engine(cache), "abcd") == (0, 4)


@pytest.mark.parametrize("why", ["no host pool", "never", "paused", "deadline"])
def test_what_is_not_stored_is_dropped(new_tiers: Callable[..., Cache], why: str) -> None:
    """Without a host pool, under `never`, in a pause and at the deadline, blocks are dropped, and counted."""
    cache = new_tiers("a", host_slabs=0 if why == "no host pool" else 2)
    if why == "never":
        cache.set_write_policy(cache.tree_of("a"), WritePolicy.NEVER)
    if why in {"paused", "deadline"}:
        cache.pause("a")
    engine = Engine(cache)
    engine.store("abcd")
    cache.settle()
    gone(engine)
    if why == "deadline":
        cache.resume("a")
        cache.handle(Ticked(UNTIL_MS))
    begin(cache)

    assert emptied(cache) == [PoolEmptied("a", 4, 4)]
    assert cache.pools["a"].free == cache.pools["a"].slots


def test_copies_under_way_are_waited_for_past_the_deadline(new_tiers: Callable[..., Cache]) -> None:
    """A worker may touch a slot until it has said that it does not: no deadline ends that."""
    cache = new_tiers("a")
    engine = Engine(cache)
    engine.store("abcd")
    workers = Workers(cache)
    (store,) = workers.started()
    gone(engine)
    begin(cache)
    cache.handle(Ticked(UNTIL_MS))

    assert emptied(cache) == []
    workers.answer(store)
    assert emptied(cache) == [PoolEmptied("a", 4, 0)]


def test_lost_workers_are_waited_for_until_the_deadline(new_tiers: Callable[..., Cache]) -> None:
    """New workers store what is left; where none come in time, it is dropped."""
    for come in (True, False):
        cache = new_tiers("a")
        engine = Engine(cache)
        cache.handle(WorkerDied("a"))
        engine.store("abcd")
        gone(engine)
        begin(cache)
        assert emptied(cache) == []
        if come:
            cache.handle(PoolRestored("a"))
            Workers(cache).answer_all()
            cache.settle()
        else:
            cache.handle(Ticked(UNTIL_MS))
        assert [each.dropped for each in emptied(cache)] in ([], [0 if come else 4])
        assert cache.pools["a"].free == cache.pools["a"].slots


def test_session_is_waited_for(new_tiers: Callable[..., Cache]) -> None:
    """As long as somebody has a session, fences included, nothing of it is touched; its end lets the pool go on."""
    cache = new_tiers("a")
    engine = Engine(cache)
    engine.release(engine.acquire("abc"), fence=3)
    begin(cache)

    cache.handle(Ticked(UNTIL_MS))
    assert emptied(cache) == []
    gone(engine)
    assert emptied(cache) == [PoolEmptied("a", 0, 0)]


@pytest.mark.parametrize("state", [PoolState.FALLING_ASLEEP, PoolState.ASLEEP, PoolState.WAKING])
def test_nobody_gets_on_a_pool_that_is_not_awake(new_tiers: Callable[..., Cache], state: PoolState) -> None:
    """A hello is refused with a code of its own; other replicas of the namespace serve, and hit in the host pool."""
    cache = new_tiers("ab")
    gone(stored(cache, "abcd"))
    begin(cache)
    if state is not PoolState.FALLING_ASLEEP:
        cache.settle()
        cache.sleeps.asleep("a")
    if state is PoolState.WAKING:
        cache.sleeps.wake("a")
    with refused("asleep"):
        Engine(cache)
    assert host_hit(Engine(cache, "b"), "abcd") == (0, 4)
    assert healthy(cache)


def test_only_what_is_asleep_can_wake(new_tiers: Callable[..., Cache]) -> None:
    """Sleep goes on where it was asked for, is refused while the pool wakes; wake is refused in all other states."""
    cache = new_tiers("a")
    with pytest.raises(Refusal, match="POOL_NOT_ASLEEP"):
        cache.sleeps.wake("a")
    begin(cache)
    begin(cache)
    with pytest.raises(Refusal, match="POOL_NOT_ASLEEP"):
        cache.sleeps.wake("a")
    assert len(emptied(cache)) == 1
    cache.sleeps.asleep("a")
    cache.sleeps.wake("a")
    with pytest.raises(Refusal, match="POOL_ASLEEP"):
        cache.sleeps.begin("a", UNTIL_MS)
    cache.sleeps.asleep("a")  # its memory could not be made
    cache.sleeps.wake("a")
    version = cache.version
    cache.sleeps.awake("a")
    assert cache.version > version


def test_pins_hold_no_pool_awake(new_tiers: Callable[..., Cache]) -> None:
    """A pin loses its device part and keeps that of the host pool; its end is as that of any."""
    cache = new_tiers("a")
    gone(stored(cache, "abcd"))
    tree, pool = cache.tree_of("a"), cache.pools["a"]
    cache.pins.pin(tree, pool, keys_of("abcd"), 10 * UNTIL_MS)
    to_sleep(cache)

    assert (cache.pins.blocks(tree, pool), cache.pins.blocks(tree, None)) == (0, 4)
    assert cache.pins.unpin(tree, pool, keys_of("abcd"))
    assert healthy(cache)


def test_pin_that_is_set_while_a_pool_falls_asleep_is_of_the_host_pool(new_tiers: Callable[..., Cache]) -> None:
    """It locks nothing of the device pool, which would not be empty otherwise when its memory is given back."""
    cache = new_tiers("a")
    engine = stored(cache, "abcd")
    begin(cache)
    tree, pool = cache.trees[0], cache.pools["a"]
    pin = cache.pins.pin(tree, pool, keys_of("abcd"), 10 * UNTIL_MS)
    assert (pin.device.depth, pin.host.depth) == (0, 4)
    gone(engine)
    assert emptied(cache) == [PoolEmptied("a", 4, 0)]
    cache.sleeps.asleep("a")
    assert healthy(cache)


def test_clear_goes_on_beside_sleep(new_tiers: Callable[..., Cache]) -> None:
    """A namespace is cleared while its pool falls asleep, and again while it sleeps: nothing of before is hit."""
    cache = new_tiers("a")
    gone(stored(cache, "abcd"))
    cache.clearings.begin(cache.tree_of("a"), b"anew")
    begin(cache)
    assert len(emptied(cache)) == 1
    cache.sleeps.asleep("a")
    cache.clearings.begin(cache.tree_of("a"), b"once more")
    cache.settle()
    assert healthy(cache)
    cache.sleeps.wake("a")
    cache.sleeps.awake("a")
    assert host_hit(Engine(cache), "abcd") == (0, 0)


def test_pool_larger_than_the_host_pool_falls_asleep(new_tiers: Callable[..., Cache]) -> None:
    """The host pool keeps what it has room for, the most recently used; the rest is dropped."""
    cache = new_tiers("a", slots=16, host_slabs=1, slots_per_slab=8)
    cache.set_write_policy(cache.tree_of("a"), WritePolicy.WRITE_BACK)
    engine = Engine(cache)
    for text in ("abcd", "efgh", "ijkl", "mnop"):
        engine.store(text)
    gone(engine)
    to_sleep(cache)

    cache.sleeps.wake("a")
    cache.sleeps.awake("a")
    engine = Engine(cache)
    assert [host_hit(engine, text)[1] for text in ("abcd", "efgh", "ijkl", "mnop")] == [0, 0, 4, 4]
