"""Write-through, holes, demotion, and what a host pool does without room."""

from __future__ import annotations

from collections.abc import Callable

from kvcached.core.cache import Cache
from kvcached.core.messages import Ticked, TransferKind
from kvcached.core.slots.host_slots import HostPool, SlabAllocator
from kvcached.core.slots.states import SlotState
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId
from tests.core.engine import EPOCH, Engine, keys_of
from tests.core.host_tier import (
    Workers,
    crowd_out,
    host_counts,
    host_hit,
    host_of,
    keys_match,
    loading,
    spans,
    state_of,
    stored,
)

MakeTiers = Callable[..., Cache]


def test_committed_blocks_are_written_through(new_tiers: MakeTiers) -> None:
    """A commit is copied to the host pool in the background, block by block under its keys, and counted when done."""
    cache = new_tiers(shards=2)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")

    assert cache.effects == []  # the reply goes out before anything is decided
    (order,) = workers.started()
    assert (order.kind, order.urgent, spans(order)) == (TransferKind.STORE, False, [(0, 4)])
    assert keys_match(order, "abcd")
    assert host_counts(cache) == (12, 4, 0)
    workers.answer(order)
    assert host_counts(cache) == (12, 0, 4)
    assert (cache.counters["stored_blocks"], workers.started()) == (4, [])


def test_device_slots_of_a_store_are_not_granted_before_it_ends(new_tiers: MakeTiers) -> None:
    """What a store reads is pinned from its start to its end, in both pools."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcd")
    (order,) = workers.started()

    assert (cache.pools["a"].evictable, host_of(cache).protected) == (0, 4)
    workers.answer(order)
    assert (cache.pools["a"].evictable, host_of(cache).protected) == (4, 0)


def test_blocks_that_the_host_pool_has_are_not_stored_again(new_tiers: MakeTiers) -> None:
    """Another replica that computes the same prompt copies only what is new."""
    cache = new_tiers("ab", threshold=99)  # it computes rather than loads
    stored(cache, "abcd", "a")
    Engine(cache, "b").store("abcdef")

    (order,) = Workers(cache).started()
    assert (order.pool, spans(order)) == ("b", [(4, 2)])


def test_health_sessions_do_not_store(new_tiers: MakeTiers) -> None:
    """What an uncounted session commits is not written through."""
    cache = new_tiers()
    session = cache.open_session("a", 0, counted=False).id
    grant = cache.managed.acquire(session, EPOCH, "probe", keys_of("ab"), 8, 0, full=True)
    slots = Engine(cache).acquire("").ranges  # of another session, so that only the probe's commit is at stake
    assert slots == b""
    ranges = cache.managed.sessions[session].leases[grant.lease].open[:]
    cache.managed.commit(session, EPOCH, grant.lease, 0, keys_of("ab"), ranges, NO_FENCE)
    cache.managed.release(session, EPOCH, grant.lease, NO_FENCE)

    assert Workers(cache).started() == []


def test_commit_under_a_fence_is_stored_after_its_signal(new_tiers: MakeTiers) -> None:
    """Blocks that an engine has only queued work for are not copied, nor what was built on them, until it is over."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd", fence=5)
    engine.release(grant)
    engine.store("abcdef")

    assert workers.started() == []
    engine.signal(4)
    assert workers.started() == []
    engine.signal(5)
    assert [spans(order) for order in workers.started()] == [[(0, 6)]]


def test_settling_again_and_again_remembers_a_fenced_path_once(new_tiers: MakeTiers) -> None:
    """Demotion that comes upon blocks behind an unsignalled fence leaves one note there, however often it looks."""
    cache = new_tiers(watermark=16)
    engine = Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd", fence=5)
    engine.release(grant)
    engine.store("abcdef")
    for _ in range(100):
        cache.settle()

    assert sum(len(hold.unstored) for hold in cache.managed.sessions[engine.session].holds) <= 2


def test_failed_store_leaves_a_hole_that_a_match_ends_at(new_tiers: MakeTiers) -> None:
    """A block without a host copy ends the host's part of a hit, though blocks behind it have one."""
    cache = new_tiers("ab")
    workers, engine, other = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    engine.store("ab")
    workers.answer_all()
    engine.store("abcd")
    (middle,) = workers.started()
    engine.store("abcdef")
    (last,) = workers.started()
    workers.answer(middle, "disk on fire")
    workers.answer(last)

    assert (spans(middle), spans(last)) == ([(2, 2)], [(4, 2)])
    assert host_hit(other, "abcdef") == (0, 2)
    assert (cache.counters["store_failed_blocks"], host_counts(cache)) == (2, (28 - 16, 0, 4))


def test_missing_ancestors_are_stored_first(new_tiers: MakeTiers) -> None:
    """A later store of the path fills the holes before it, in the order of the chain."""
    cache = new_tiers("ab")
    workers, engine = Workers(cache), Engine(cache, "a")
    engine.store("ab")
    (first,) = workers.started()
    engine.store("abcd")
    (second,) = workers.started()
    workers.answer(first, "failed")
    workers.answer(second)
    engine.store("abcdef")

    (again,) = workers.started()
    assert (spans(again), host_hit(Engine(cache, "b"), "abcdef")) == ([(0, 2)], (0, 4))
    workers.answer(again)
    (order,) = workers.started()
    assert spans(order) == [(4, 2)]
    assert keys_match(order, "abcdef")
    workers.answer(order)
    assert host_hit(Engine(cache, "b"), "abcdef") == (0, 6)


def test_block_that_loses_its_last_copy_takes_its_descendants(new_tiers: MakeTiers) -> None:
    """When a hole's block leaves the device too, nothing behind it could be reached: it goes at once, counted."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    engine.store("ab")
    (first,) = workers.started()
    engine.store("abcd")
    (second,) = workers.started()
    workers.answer(first, "failed")
    workers.answer(second)
    assert host_counts(cache) == (14, 0, 2)

    crowd_out(engine)

    assert (cache.counters["dropped_blocks"], cache.counters["host_dropped_blocks"]) == (2, 2)
    assert host_counts(cache) == (16, 0, 0)
    assert list(cache.trees[0].runs()) == []


def test_copy_on_another_device_keeps_what_is_behind_a_hole(new_tiers: MakeTiers) -> None:
    """A hole is no loss while some replica's pool has the block."""
    cache = new_tiers("ab", threshold=99)
    workers, engine, other = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    engine.store("ab")
    (first,) = workers.started()
    other.store("ab")  # while the host pool is being given it: no store of its own
    engine.store("abcd")
    (second,) = workers.started()
    workers.answer(first, "failed")
    workers.answer(second)
    crowd_out(engine)

    assert (cache.counters["dropped_blocks"], cache.counters["host_dropped_blocks"]) == (0, 0)
    assert host_hit(other, "abcd") == (2, 2)
    crowd_out(other)
    assert (cache.counters["dropped_blocks"], cache.counters["host_dropped_blocks"]) == (2, 2)


# --- room in the host pool --------------------------------------------------------------------------------------------


def test_host_pool_evicts_the_tail_that_was_used_longest_ago(new_tiers: MakeTiers) -> None:
    """Room for a store is made from the end of the least recently used chain."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=8)
    engine = stored(cache, "abcd")
    engine.store("ABCD")
    Workers(cache).answer_all()
    engine.release(engine.acquire("abcd"))  # uses it again
    engine.store("xyz")
    Workers(cache).answer_all()
    crowd_out(engine)

    assert cache.counters["host_evicted_blocks"] == 3
    assert [host_hit(engine, text)[1] for text in ("abcd", "ABCD", "xyz")] == [4, 1, 3]


def test_host_pool_never_evicts_what_a_transfer_holds(new_tiers: MakeTiers) -> None:
    """Host slots that a store writes or a load reads stay, even where a store is refused for want of room."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=8)
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)
    grant, (load,) = loading(engine, workers, "abcd")
    engine.store("ABCD")
    (store,) = workers.started()
    engine.store("01234567")

    assert workers.started() == []
    assert cache.counters["store_refused_blocks"] == 8
    assert state_of(host_of(cache), load.spans[0].host) == {"CACHED"}
    assert state_of(host_of(cache), store.spans[0].host) == {"FILLING"}
    workers.answer(load)
    workers.answer(store)
    engine.release(grant)


def test_refused_blocks_are_stored_as_far_as_there_is_room(new_tiers: MakeTiers) -> None:
    """What does not fit is refused from the end and counted; the beginning is stored."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=4)
    engine = stored(cache, "abcdef")

    assert host_hit(engine, "abcdef") == (6, 0)
    assert (cache.counters["stored_blocks"], cache.counters["store_refused_blocks"]) == (4, 2)


def test_room_is_not_made_by_evicting_what_the_store_continues(new_tiers: MakeTiers) -> None:
    """A store of later blocks of a chain never costs the chain's beginning."""
    cache = new_tiers(slots=32, host_slabs=1, slots_per_slab=4)
    engine = stored(cache, "abcd")
    engine.store("abcdef")
    Workers(cache).answer_all()
    crowd_out(engine)

    assert host_hit(engine, "abcdef") == (0, 4)
    assert cache.counters["host_evicted_blocks"] == 0


def test_long_path_without_any_room_is_refused_and_not_tried_forever(new_tiers: MakeTiers) -> None:
    """A commit of more blocks than one store takes, into a host pool that takes none, ends."""
    cache = new_tiers(slots=600, host_slabs=1, slots_per_slab=0)
    engine = Engine(cache)
    grant = engine.acquire("", reserve=520)
    keys = b"".join(index.to_bytes(16) for index in range(520))
    session = cache.managed.sessions[engine.session]
    slots = session.leases[grant.lease].open[:]
    slots[1] = 520
    cache.managed.commit(engine.session, EPOCH, grant.lease, 0, keys, slots, FenceSequence(0))

    assert Workers(cache).started() == []
    assert cache.counters["store_refused_blocks"] == 520


def test_long_path_is_stored_in_short_transfers(new_tiers: MakeTiers) -> None:
    """Hundreds of blocks are several stores, so that a load does not wait long behind one."""
    cache = new_tiers(slots=600, host_slabs=1, slots_per_slab=600)
    engine = Engine(cache)
    grant = engine.acquire("", reserve=520)
    keys = b"".join(index.to_bytes(16) for index in range(520))
    slots = cache.managed.sessions[engine.session].leases[LeaseId(grant.lease)].open[:]
    cache.managed.commit(engine.session, EPOCH, grant.lease, 0, keys, slots, FenceSequence(0))

    assert [spans(order) for order in Workers(cache).started()] == [[(0, 256)], [(256, 256)], [(512, 8)]]


# --- slabs ------------------------------------------------------------------------------------------------------------


def test_slab_is_held_back_for_every_namespace_without_one(new_tiers: MakeTiers) -> None:
    """The first namespace to fill the host pool leaves a slab for each of the others."""
    cache = new_tiers("aXY", slots=64, host_slabs=4, slots_per_slab=4)
    engine = Engine(cache, "a")
    engine.store("abcdefghijklmnop")
    Workers(cache).answer_all()

    assert [len(host_of(cache, name).slabs) for name in "aXY"] == [2, 0, 0]
    for name in "XY":
        stored(cache, "abcd", name)
    assert [len(host_of(cache, name).slabs) for name in "aXY"] == [2, 1, 1]
    assert cache.counters["store_refused_blocks"] == 8


def test_empty_slab_goes_to_the_namespace_that_asks(new_tiers: MakeTiers) -> None:
    """A slab whose slots are all free is given back when another namespace needs one; one with a block is not."""
    stock = SlabAllocator(3)
    first, second = HostPool(stock, 4), HostPool(stock, 2)
    assert [first.grow(), first.grow(), first.grow(), second.grow()] == [True, True, False, True]
    slots = first.take(5, SlotState.FILLING, "store")

    assert not second.grow()
    first.move(slots, SlotState.FILLING, SlotState.FREE, "it failed")
    assert second.grow()
    assert (len(first.slabs), len(second.slabs), first.slabs & second.slabs) == (1, 2, set())
    assert (first.counts, first.free) == (first.count_states(), 4)
    assert not second.grow()  # nobody loses the last one


# --- demotion ---------------------------------------------------------------------------------------------------------


def test_demotion_keeps_the_watermark_free(new_tiers: MakeTiers) -> None:
    """Beyond the watermark, tails that the host pool has leave the device, without another copy and without loss."""
    cache = new_tiers(watermark=10)
    engine = stored(cache, "abcdefgh")

    assert (cache.pools["a"].free, cache.counters["demoted_blocks"]) == (10, 2)
    assert host_hit(engine, "abcdefgh") == (6, 2)


def test_demotion_takes_no_tail_that_is_not_stored(new_tiers: MakeTiers) -> None:
    """A tail without a host copy is stored first, and leaves the device when that has ended."""
    cache = new_tiers(watermark=12)
    workers, engine = Workers(cache), Engine(cache)
    engine.store("abcdef")
    (failing,) = workers.started()
    workers.answer(failing, "failed")
    assert workers.started() == []  # not again at once
    assert cache.counters["demoted_blocks"] == 0

    cache.handle(Ticked(1))
    (again,) = workers.started()
    assert (spans(again), cache.pools["a"].free) == ([(0, 6)], 10)
    workers.answer(again)
    cache.settle()
    assert (cache.pools["a"].free, host_hit(engine, "abcdef")) == (12, (4, 2))


def test_demotion_spares_what_a_lease_reads(new_tiers: MakeTiers) -> None:
    """A pinned prefix stays on its device however short of slots that is."""
    cache = new_tiers(watermark=16)
    workers, engine = Workers(cache), Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd")
    workers.answer_all()

    assert cache.pools["a"].free == 12
    engine.release(grant)
    cache.settle()
    assert (cache.pools["a"].free, host_hit(engine, "abcd")) == (16, (0, 4))
