"""Prefixes that people keep cached: for how long, how much, and what ends a pin before its time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core import pins
from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import MembersDied, PoolRestored, Ticked, WorkerDied
from kvcached.core.pins import Pins
from kvcached.core.refusals import Refusal
from kvcached.core.slots.states import SlotState
from tests.core.engine import BLOCK_SIZE, Engine, healthy, keys_of, make_cache, refused
from tests.core.host_tier import Workers, crowd_out, host_hit, stored
from tests.core.offload_engine import OffloadEngine, let_rest, space

MakeTiers = Callable[..., Cache]
MakeCache = Callable[..., Cache]
NewOffload = Callable[..., Cache]


def pin(cache: Cache, text: str, ttl_ms: int = 100, replica: str = "a") -> tuple[int, int]:
    """Pin a prompt for a replica; how many blocks on the device and in the host pool."""
    made = cache.pins.pin(cache.tree_of(replica), cache.pools[replica], keys_of(text), ttl_ms)
    assert healthy(cache)
    return made.device.depth, made.host.depth


def unpin(cache: Cache, text: str, replica: str = "a") -> bool:
    return cache.pins.unpin(cache.tree_of(replica), cache.pools[replica], keys_of(text))


def test_pinned_prefix_stays_in_the_pool(new_cache: MakeCache) -> None:
    """However much others need, what is pinned is not evicted; when the pin has ended it is, as others are."""
    cache = new_cache()
    engine = Engine(cache)
    engine.store("abcdef")
    assert pin(cache, "abcd") == (4, 0)
    crowd_out(engine)
    assert engine.hit("abcdef") == 4

    assert unpin(cache, "abcd")
    assert not unpin(cache, "abcd")
    crowd_out(engine)
    assert engine.hit("abcdef") == 0
    assert (cache.counters["pins_set"], cache.counters["pins_ended"]) == (1, 1)


def test_pin_ends_at_the_tick_after_its_time(new_cache: MakeCache) -> None:
    """A pin that nobody sets again ends by itself; setting it again gives it more time, and is no second pin."""
    cache = new_cache()
    Engine(cache).store("abcd")
    pin(cache, "abcd", ttl_ms=100)
    pin(cache, "abcd", ttl_ms=200)
    cache.handle(Ticked(150))
    assert cache.pools["a"].protected == 4
    cache.handle(Ticked(200))

    assert cache.pools["a"].protected == 0
    assert healthy(cache)


def test_pin_holds_what_is_cached_and_more_when_it_is_set_again(new_cache: MakeCache) -> None:
    """A prompt that is cached in part is pinned in part; a later call with the same keys pins the rest."""
    cache = new_cache()
    engine = Engine(cache)
    assert pin(cache, "abcd") == (0, 0)
    engine.store("ab")
    assert pin(cache, "abcd") == (2, 0)
    engine.store("abcd")
    assert pin(cache, "abcd") == (4, 0)
    assert cache.pools["a"].protected == 4


def test_quota_is_a_refusal_that_changes_nothing(new_cache: MakeCache) -> None:
    """A pin over the quota of its pool is refused; the earlier pin of the same prompt is as it was."""
    cache = new_cache()  # 16 slots: 4 may be pinned
    engine = Engine(cache)
    engine.store("ab")
    pin(cache, "abcdef")
    engine.store("abcdef")
    with refused("limit"):
        pin(cache, "abcdef", ttl_ms=900)
    assert cache.pools["a"].protected == 2
    engine.store("xyz")
    with refused("limit"):
        pin(cache, "xyz")
    assert pin(cache, "xy") == (2, 0)

    cache.handle(Ticked(100))
    assert pin(cache, "xyz") == (3, 0)


def test_host_copies_are_pinned_too(new_tiers: MakeTiers) -> None:
    """With a host tier the prefix stays in both pools, each within its own quota; a worker's death costs none."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=32)
    engine = stored(cache, "abcd")
    assert pin(cache, "abcd") == (4, 4)
    engine.store("0123456789012345678901234567")
    Workers(cache).answer_all()
    crowd_out(engine)
    assert host_hit(engine, "abcd") == (4, 0)

    cache.handle(WorkerDied("a"))
    cache.handle(PoolRestored("a"))
    for text in ("ABCDEFGHIJKLMNOPQRSTUVWXYZ!?", "zyxwvutsrqponm9876543210"):
        engine.store(text)
        Workers(cache).answer_all()
    assert host_hit(engine, "abcd") == (4, 0)
    assert unpin(cache, "abcd")


def test_pin_over_blocks_of_unsignalled_work_is_cut_with_them(new_cache: MakeCache) -> None:
    """Blocks whose writer died before its work was over leave the pool, and a pin that counted on them."""
    cache = new_cache()
    engine = Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd", fence=5)
    assert pin(cache, "abcd") == (4, 0)
    cache.handle(MembersDied(engine.session))

    assert (cache.pools["a"].free, cache.pools["a"].protected) == (16, 0)
    assert unpin(cache, "abcd")


def test_pin_over_a_load_that_fails_is_cut_with_it(new_tiers: MakeTiers) -> None:
    """Blocks that could not be loaded are pinned on the device no more."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=32)
    engine, workers = stored(cache, "abcd"), Workers(cache)
    crowd_out(engine)
    engine.acquire("abcd")
    workers.take()
    assert pin(cache, "abcd") == (4, 4)
    workers.answer(next(iter(workers.under_way.values())), "disk on fire")

    assert (cache.pins.blocks(cache.trees[0], cache.pools["a"]), healthy(cache)) == (0, True)
    assert unpin(cache, "abcd")


def test_corrupt_copy_leaves_a_pinned_path(new_tiers: MakeTiers) -> None:
    """A pinned host copy that proves bad is not read again, pin or not."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=32)
    engine, workers = stored(cache, "abcd"), Workers(cache)
    crowd_out(engine)
    pin(cache, "abcd")
    engine.acquire("abcd")
    workers.take()
    workers.answer(next(iter(workers.under_way.values())), corrupt=(1,))

    assert (host_hit(engine, "abcd"), healthy(cache)) == ((1, 0), True)
    assert unpin(cache, "abcd")
    assert healthy(cache)


def test_clear_ends_pins(new_tiers: MakeTiers) -> None:
    """What a cleared namespace had pinned is cleared with the rest."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=32)
    stored(cache, "abcd")
    pin(cache, "abcd")
    cache.clearings.begin(cache.trees[0], b"new namespace")
    cache.settle()

    assert (cache.pools["a"].counts[SlotState.CACHED], unpin(cache, "abcd")) == (0, False)


def test_offload_namespace_is_pinned_in_the_host_pool(new_offload: NewOffload) -> None:
    """Engines in offload mode find a pinned prompt however much others store; a clear ends it."""
    cache = new_offload(slabs=4)
    engine = OffloadEngine(cache)
    engine.store("abcd")
    tree = cache.trees[0]
    assert cache.pins.pin(tree, None, keys_of("abcd"), 100).host.depth == 4
    for text in ("01234567", "zyxwvuts", "ABCDEFGH"):
        engine.store(text)
    assert engine.hit("abcd") == 4
    assert check(cache) == []

    engine.core.clear(engine.session)
    assert (engine.hit("abcd"), cache.pins.unpin(tree, None, keys_of("abcd"))) == (0, False)


def test_namespace_without_engines_gives_its_pinned_blocks_to_one_that_has(new_offload: NewOffload) -> None:
    """Pins hold against blocks of their own namespace; another one's engines do not starve for them."""
    cache = new_offload(slabs=2)
    engine = OffloadEngine(cache, space("m"))
    engine.store("abcd")
    cache.pins.pin(cache.trees[0], None, keys_of("ab"), 10_000)
    cache.handle(MembersDied(engine.session))
    let_rest(cache)
    other = OffloadEngine(cache, space("n"))
    other.store("01234567")

    assert (other.hit("01234567"), cache.pins.blocks(cache.trees[0], None)) == (8, 0)


@pytest.mark.parametrize("percent", [0, 50])
def test_quota_is_configured(percent: int) -> None:
    """The share of a pool that may be pinned is that of the configuration; 0 means none."""
    cache = Cache([], epoch=1, session_ttl_ms=1000)
    pins = Pins(cache.counters, percent)

    assert pins.quota(make_cache().pools["a"]) == 16 * percent // 100


def test_lease_on_a_pinned_prefix_is_its_own(new_cache: MakeCache) -> None:
    """A lease and a pin on one path end each by itself."""
    cache = new_cache()
    engine = Engine(cache)
    engine.store("abcd")
    grant = engine.acquire("abcd")
    pin(cache, "ab")
    engine.release(grant)
    assert cache.pools["a"].protected == 2
    assert cache.managed.match(engine.session, engine.epoch, keys_of("abcd"), 4 * BLOCK_SIZE, full=True) == (4, 0)
    unpin(cache, "ab")
    assert cache.pools["a"].protected == 0


def test_pins_of_nothing_take_nobodys_place(new_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are as many as may be, a pin of which nothing is cached gives way; those that keep blocks do not."""
    monkeypatch.setattr(pins, "PINS_MAX", 2)
    cache = new_cache()
    Engine(cache).store("abcd")
    assert [pin(cache, name) for name in ("x", "y", "a", "ab")] == [(0, 0), (0, 0), (1, 0), (2, 0)]
    with pytest.raises(Refusal, match="PINS_FULL"):
        pin(cache, "ax")
    assert (unpin(cache, "x"), unpin(cache, "ab")) == (False, True)
