"""Namespaces of engines in offload mode: declared, cleared, forgotten, and how they share the slabs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import MemberLost, MembersDied, StorageAnswered, StorageReady
from kvcached.core.namespaces import NamespaceSpec, PoolSpec
from kvcached.core.slots.states import SlotState
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, healthy, keys_of, refused
from tests.core.host_tier import Workers, host_hit, host_of
from tests.core.offload_engine import OffloadEngine, counting_walks, let_rest, space
from tests.core.tier_world import slots_of

MakeOffload = Callable[..., Cache]
SIXTEEN = "0123456789ABCDEF"


def test_namespaces_share_no_slot_and_no_block(new_offload: MakeOffload) -> None:
    """Engines of two models with the same keys store and find their own blocks, in slabs of their own."""
    cache = new_offload(slabs=4)
    one, two = OffloadEngine(cache), OffloadEngine(cache, space("n", per_slab=3))
    first = one.store("abcd")

    assert (one.hit("abcd"), two.hit("abcd")) == (4, 0)
    second = two.store("abcd")
    assert {slot // 4 for slot in first}.isdisjoint(slot // 3 for slot in second)
    assert (one.host.slabs & two.host.slabs, two.hit("abcd")) == (set(), 4)


def test_namespace_is_kept_without_engines(new_offload: MakeOffload) -> None:
    """What engines stored is there for the next engine of the same model."""
    cache = new_offload()
    engine = OffloadEngine(cache)
    engine.store("abcd")
    cache.handle(MembersDied(engine.session))

    assert OffloadEngine(cache).hit("abcd") == 4


def test_namespaces_are_bounded_by_those_in_use(new_offload: MakeOffload) -> None:
    """With as many models in use as there may be, another one is refused; an idle one makes room for it."""
    cache = new_offload(spaces=2)
    one, _ = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    one.store("ab")

    with refused("limit"):
        OffloadEngine(cache, space("o"))
    cache.handle(MembersDied(one.session))
    OffloadEngine(cache, space("o"))
    assert [root[:1] for root in cache.offload.namespaces.by_root] == [b"n", b"o"]


def test_idle_namespace_whose_engine_left_first_is_forgotten_first(new_offload: MakeOffload) -> None:
    """Of namespaces without engines the one that was used last is kept, whenever it was declared."""
    cache = new_offload(spaces=2)
    one, two = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    cache.handle(MembersDied(two.session))
    cache.handle(MembersDied(one.session))
    OffloadEngine(cache, space("o"))

    assert [root[:1] for root in cache.offload.namespaces.by_root] == [b"m", b"o"]


def test_namespace_of_a_silent_session_is_in_use(new_offload: MakeOffload) -> None:
    """As long as processes of an expired session may copy, its namespace is not forgotten."""
    cache = new_offload(spaces=1)
    engine = OffloadEngine(cache)
    engine.prepare(engine.acquire("ab"), "ab")
    cache.handle(MemberLost(engine.session))

    with refused("limit"):
        OffloadEngine(cache, space("n"))
    cache.handle(MembersDied(engine.session))
    OffloadEngine(cache, space("n"))


@pytest.mark.parametrize(
    "other", [space(per_slab=3), space(shards=1), NamespaceSpec(b"m" * 32, "model m", BLOCK_SIZE * 2, 2, 4)], ids=str
)
def test_one_name_has_one_shape(new_offload: MakeOffload, other: NamespaceSpec) -> None:
    """A namespace that was declared with blocks of another shape is not entered."""
    cache = new_offload()
    OffloadEngine(cache)

    with refused("wrong_layout"):
        OffloadEngine(cache, other)
    assert len(cache.offload.sessions) == 1


def test_block_larger_than_a_slab_is_refused(new_offload: MakeOffload) -> None:
    """A namespace whose blocks fit no slab is not made."""
    cache = new_offload()

    with refused("wrong_layout"):
        OffloadEngine(cache, space(per_slab=0))
    assert cache.trees == []


# --- clearing -------------------------------------------------------------------------------------------------------


def test_clear_ends_all_hits(new_offload: MakeOffload) -> None:
    """Nothing that was stored before is matched again, by any engine of the namespace, and only there."""
    cache = new_offload(slabs=6)
    one, two, stranger = OffloadEngine(cache), OffloadEngine(cache), OffloadEngine(cache, space("n"))
    one.store("abcd")
    stranger.store("abcd")

    generation, blocks = cache.offload.clear(two.session)
    assert blocks == 4
    assert (one.hit("abcd"), two.hit("abcd"), stranger.hit("abcd")) == (0, 0, 4)
    assert (one.states, cache.offload.namespaces.retired) == ((0, 0, 0, 0), [])
    one.store("abcd")
    assert (two.hit("abcd"), one.acquire("ab").generation) == (4, generation)


def test_copies_under_way_outlive_a_clear_in_their_own_slots(new_offload: MakeOffload) -> None:
    """Stores and loads from before a clear keep their slots until they end, and what they wrote is not found."""
    cache = new_offload(slabs=4)
    engine = OffloadEngine(cache)
    engine.store("ab")
    load, plan = engine.load(engine.acquire("ab")), engine.prepare(engine.acquire("xy"), "xy")
    cache.offload.clear(engine.session)
    (old,) = cache.offload.namespaces.retired
    fresh = engine.prepare(engine.acquire(SIXTEEN), SIXTEEN)

    assert set(slots_of(fresh.slots)).isdisjoint([*slots_of(load.slots), *slots_of(plan.slots)])
    assert (plan.generation, fresh.generation, fresh.depth) == (0, 1, 12)
    engine.commit(plan.transfer)
    assert (engine.hit("xy"), cache.offload.namespaces.retired) == (0, [old])
    engine.complete(load.transfer)
    assert cache.offload.namespaces.retired == [old]  # leases, too
    for lease in list(cache.offload.sessions[engine.session].leases):
        engine.release(lease)
    assert (cache.offload.namespaces.retired, healthy(cache)) == ([], True)


def test_lease_from_before_a_clear_loads_and_stores_nothing(new_offload: MakeOffload) -> None:
    """Its hit is gone, and what continues it is of no use; the lease itself is released as ever."""
    cache = new_offload()
    engine = OffloadEngine(cache)
    engine.store("ab")
    lease = engine.acquire("abcd")
    cache.offload.clear(engine.session)

    with refused("hit_gone"):
        engine.load(lease)
    plan = engine.prepare(lease, "abcd")
    assert (plan.transfer, plan.depth, plan.pieces) == (0, 4, [])
    engine.release(lease)
    assert engine.hit("abcd") == 0


def test_forgotten_namespace_has_its_generation_when_it_is_declared_again(new_offload: MakeOffload) -> None:
    """What storage has of a namespace is found again after its memory was given to another one; nothing cleared is."""
    cache = new_offload(spaces=1)
    engine = OffloadEngine(cache)
    generation, _ = cache.offload.clear(engine.session)
    cache.handle(MembersDied(engine.session))
    cache.handle(MembersDied(OffloadEngine(cache, space("n")).session))
    again = OffloadEngine(cache)

    assert again.acquire("ab").generation == generation
    assert cache.offload.clear(again.session)[0] > generation


# --- namespaces whose blocks are the same in storage ------------------------------------------------------------------

SAME = [replace(space(letter, shards=shards), canonical_root=b"s" * 32) for letter, shards in (("m", 2), ("n", 1))]


def test_namespaces_of_one_storage_root_have_one_generation(new_offload: MakeOffload) -> None:
    """The second one begins in the generation that the first one has, and not in one of its own."""
    cache = new_offload(slabs=4)
    one = OffloadEngine(cache, SAME[0])
    generation, _ = cache.offload.clear(one.session)
    two = OffloadEngine(cache, SAME[1])

    assert two.acquire("ab").generation == generation
    one.store("abcd")
    assert (one.hit("abcd"), two.hit("abcd")) == (4, 0)  # in the host pool they share nothing


def test_clear_of_one_clears_all_of_its_storage_root(new_offload: MakeOffload) -> None:
    """Each of them is empty and in the new generation; the count is of all, and a stranger keeps its blocks."""
    cache = new_offload(slabs=6, spaces=3)
    one, two, stranger = OffloadEngine(cache, SAME[0]), OffloadEngine(cache, SAME[1]), OffloadEngine(cache, space("o"))
    for engine in (one, two, stranger):
        engine.store("abcd")

    generation, blocks = cache.offload.clear(two.session)

    assert blocks == 8
    assert (one.hit("abcd"), two.hit("abcd"), stranger.hit("abcd")) == (0, 0, 4)
    assert {one.acquire("ab").generation, two.acquire("ab").generation} == {generation}
    assert stranger.acquire("ab").generation < generation
    assert healthy(cache)


def test_forgotten_namespace_of_a_storage_root_comes_back_in_its_generation(new_offload: MakeOffload) -> None:
    """A namespace that was forgotten before another one's clear does not find what it had stored."""
    cache = new_offload(spaces=1)
    one = OffloadEngine(cache, SAME[0])
    before = one.acquire("ab").generation
    cache.handle(MembersDied(one.session))
    two = OffloadEngine(cache, SAME[1])
    generation, _ = cache.offload.clear(two.session)
    cache.handle(MembersDied(two.session))

    assert OffloadEngine(cache, SAME[0]).acquire("ab").generation == generation > before


# --- slabs ----------------------------------------------------------------------------------------------------------


def test_idle_namespace_gives_its_room_slab_by_slab(new_offload: MakeOffload) -> None:
    """A full pool whose owner has left makes room for another model, no more of it than that one needs."""
    cache = new_offload(slabs=4)
    engine = OffloadEngine(cache)
    engine.store(SIXTEEN)
    cache.handle(MembersDied(engine.session))
    other = OffloadEngine(cache, space("n"))
    other.store("abcdef")

    assert (other.hit("abcdef"), len(other.host.slabs)) == (6, 2)
    assert OffloadEngine(cache).hit(SIXTEEN) == 8


@pytest.mark.parametrize(("slabs", "runs_per_slab", "wanted"), [(512, 1 << 20, 8 + 8), (64, 4, 8 + 7)])
def test_idle_namespace_gives_several_slabs_a_look(
    new_offload: MakeOffload, monkeypatch: pytest.MonkeyPatch, slabs: int, runs_per_slab: int, wanted: int
) -> None:
    """Room in a large pool, or in one of many short prompts, is made by few looks through all of them."""
    monkeypatch.setattr("kvcached.core.slots.host_slots.RUNS_PER_SLAB", runs_per_slab)
    cache = new_offload(slabs=slabs)
    engine = OffloadEngine(cache, space(per_slab=1))
    for letter in map(chr, range(slabs)):
        engine.store(letter)
    cache.handle(MembersDied(engine.session))
    let_rest(cache)
    looked, other = counting_walks(cache), OffloadEngine(cache, space("n", per_slab=1))
    for letter in map(chr, range(wanted)):
        other.store(letter)

    assert (looked["walks"], len(other.host.slabs), cache.slab_allocator.unallocated) == (2, wanted, 0)


def test_idle_namespaces_with_a_slab_each_make_room(new_offload: MakeOffload) -> None:
    """Where all slabs are one each of models that nobody has used for long, a newcomer gets them all."""
    cache = new_offload(slabs=3, spaces=4)
    for letter in "mno":
        engine = OffloadEngine(cache, space(letter))
        engine.store("abcd")
        cache.handle(MembersDied(engine.session))
    let_rest(cache)
    newcomer = OffloadEngine(cache, space("p"))
    newcomer.store("0123456789AB")

    assert (newcomer.hit("0123456789AB"), len(cache.offload.namespaces.by_root)) == (12, 1)


def test_slab_is_held_back_for_a_namespace_in_use_that_has_none(new_offload: MakeOffload) -> None:
    """The first model to fill the pool leaves a slab to each that was declared before."""
    cache = new_offload(slabs=4)
    engine, other = OffloadEngine(cache), OffloadEngine(cache, space("n"))
    engine.store(SIXTEEN)

    assert len(engine.host.slabs) == 3
    assert len(other.store("abcd")) == 4


def test_namespace_does_not_make_room_for_itself(new_offload: MakeOffload) -> None:
    """A fetch that goes on after its engine has left gets a slab of others; its namespace is not forgotten for it."""
    cache = new_offload(slabs=4)
    cache.handle(StorageReady())
    OffloadEngine(cache).store(SIXTEEN)
    engine = OffloadEngine(cache, space("n"))
    fetch = cache.prefetch(engine.session, 0, keys_of("wxyz"), 4 * BLOCK_SIZE, 0.0, full=True)
    cache.close_session(engine.session)
    cache.handle(StorageAnswered(fetch.id, 4, 1))

    assert engine.host in cache.slab_allocator.pools
    assert len(engine.host.slabs) == 1
    assert healthy(cache)


def test_offload_engines_and_device_pools_share_the_slabs() -> None:
    """A replica gets its share of the room that engines in offload mode have filled, and all of it when they rest."""
    replica = PoolSpec("a", b"namespace", BLOCK_SIZE, 16, 1, 4, 0, 1, None)
    cache = Cache([replica], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=4, namespaces_max=2)
    offload = OffloadEngine(cache)
    offload.store("0123456789AB")
    engine, workers = Engine(cache), Workers(cache)
    engine.store("abcdefgh")
    workers.answer_all()

    assert (host_hit(engine, "abcdefgh"), host_of(cache).counts[SlotState.CACHED]) == ((8, 0), 8)
    cache.handle(MembersDied(offload.session))
    let_rest(cache)
    engine.store("ABCDEF")
    workers.answer_all()
    assert host_of(cache).counts[SlotState.CACHED] > 8
    assert healthy(cache)
