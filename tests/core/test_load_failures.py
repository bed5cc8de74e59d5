"""Loads that fail: hits get shorter, bad copies go, and nothing else is lost with them."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import LoadsEnded
from kvcached.core.slots.ranges import cut
from kvcached.core.slots.states import SlotState
from kvcached_client.types import FenceSequence
from tests.core.engine import Engine, keys_of
from tests.core.host_tier import (
    Workers,
    crowd_out,
    host_counts,
    host_hit,
    loading,
    loads,
    state_of,
    stored,
)
from tests.core.line_count import count_lines
from tests.core.offload_engine import OffloadEngine, space

MakeTiers = Callable[..., Cache]


@pytest.mark.parametrize(("error", "corrupt", "left"), [("boom", (), 0), ("", (2,), 2), ("", (1, 3), 1)])
def test_hit_is_cut_where_a_load_failed(new_tiers: MakeTiers, error: str, corrupt: tuple[int, ...], left: int) -> None:
    """Every lease that counted on the load gets a shorter hit, and slots for what it must compute now."""
    cache = new_tiers()
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)
    first, (order,) = loading(engine, workers, "abcd")
    second, _ = loading(engine, workers, "abcX")
    workers.answer(order, error, corrupt)

    for grant, text in ((first, "abcd"), (second, "abcX")):
        loaded = cache.managed.load(engine.session, engine.epoch, grant.lease)
        assert loaded is not None
        assert loaded.hit == left
        assert sum(array("i", loaded.ranges)[1::2]) == grant.hit - left
        assert cache.managed.load(engine.session, engine.epoch, grant.lease) == loaded
        slots = cut(cache.managed.sessions[engine.session].leases[grant.lease].open, 4 - left)[0]
        keys = keys_of(text)[16 * left :]
        done = cache.managed.commit(engine.session, engine.epoch, grant.lease, left, keys, slots, FenceSequence(0))
        assert done.depth == 4
    assert cache.counters["load_failed_blocks"] == 4 - left


def test_corrupt_copies_are_never_read_again(new_tiers: MakeTiers) -> None:
    """A block whose stored bytes are bad leaves the host pool, and with it what could only be reached through it."""
    cache = new_tiers()
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)
    grant, (order,) = loading(engine, workers, "abcd")
    workers.answer(order, corrupt=(1,))
    engine.release(grant)

    assert host_hit(engine, "abcd") == (1, 0)
    assert (cache.counters["corrupt_blocks"], cache.counters["host_dropped_blocks"]) == (1, 2)


def test_corrupt_copy_that_another_load_reads_leaves_with_that_load(new_tiers: MakeTiers) -> None:
    """Its slot is given to nobody while somebody copies from it, and the other load counts it as corrupt too."""
    cache = new_tiers("abc")
    stored(cache, "abcd", "c")
    workers, one, other = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    first, (load,) = loading(one, workers, "abcd")
    second, (reader,) = loading(other, workers, "abcd")
    workers.answer(load, corrupt=(1,))
    assert host_counts(cache) == (12, 0, 4)
    workers.answer(reader)

    assert host_counts(cache) == (13, 0, 3)
    for engine, grant in ((one, first), (other, second)):
        loaded = cache.managed.load(engine.session, engine.epoch, grant.lease)
        assert loaded is not None
        assert loaded.hit == 1


def test_corrupt_copy_leaves_though_a_deeper_load_is_under_way(
    new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt comes in several loads; bad bytes in the first are dropped while the second still runs."""
    monkeypatch.setattr("kvcached.core.transfers.loads.LOAD_BLOCKS_MAX", 2)
    cache = new_tiers()
    engine = stored(cache, "abcd")
    crowd_out(engine)
    workers = Workers(cache)
    grant, (first, second) = loading(engine, workers, "abcd")
    workers.answer(first, corrupt=(0,))
    assert host_hit(engine, "abcd") == (0, 0)
    workers.answer(second)

    assert cache.pools["a"].counts[SlotState.FILLING] == 0
    assert host_counts(cache) == (16, 0, 0)
    loaded = cache.managed.load(engine.session, engine.epoch, grant.lease)
    assert loaded is not None
    assert loaded.hit == 0


def test_loads_behind_one_that_failed_are_worth_nothing(new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that arrived before the one it continues failed is dropped with it, whether it has ended or not."""
    monkeypatch.setattr("kvcached.core.transfers.loads.LOAD_BLOCKS_MAX", 2)
    cache = new_tiers()
    engine = stored(cache, "abcdef")
    crowd_out(engine)
    workers = Workers(cache)
    grant, (first, second, third) = loading(engine, workers, "abcdef")
    workers.answer(second)
    workers.answer(first, "failed")

    assert cache.pools["a"].counts[SlotState.FILLING] == 2
    assert cache.pools["a"].orphaned == 2
    assert state_of(cache.pools["a"], second.spans[0].device) == {"FREE"}
    assert LoadsEnded(engine.session, grant.lease) in workers.take()
    workers.answer(third)
    assert state_of(cache.pools["a"], third.spans[0].device) == {"FREE"}
    assert host_hit(engine, "abcdef") == (0, 6)


def test_orphaned_load_keeps_nothing_that_was_lost_meanwhile(
    new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a dead load still held of a path that has lost a block goes when that load ends."""
    monkeypatch.setattr("kvcached.core.transfers.loads.LOAD_BLOCKS_MAX", 2)
    cache = new_tiers()
    engine = Engine(cache)
    workers = Workers(cache)
    for text in ("ab", "abcdef"):
        engine.store(text)
        workers.started()
    hole, rest = workers.under_way.values()
    workers.answer(rest)
    workers.answer(hole, "failed")
    assert engine.cache.pools["a"].counts[SlotState.CACHED] == 6
    engine.release(engine.acquire("ab"))
    filler = engine.acquire("", reserve=14)  # evicts [2, 6) from the device
    engine.release(filler)
    grant, (first, second) = loading(engine, workers, "abcdef")
    workers.answer(first, "failed")
    engine.release(grant)
    crowd_out(engine)  # and [0, 2), which nobody else has
    assert cache.counters["dropped_blocks"] == 2
    workers.answer(second)

    assert host_counts(cache) == (16, 0, 0)


def test_store_never_reaches_behind_a_load_under_way(new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that would go with a load if it failed are not stored before it has ended."""
    monkeypatch.setattr("kvcached.core.transfers.loads.LOAD_BLOCKS_MAX", 2)
    cache = new_tiers("ab", watermark=16)
    stored(cache, "abcd", "a")
    workers, one, other = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    crowd_out(one)
    grant, (first, second) = loading(one, workers, "abcd")
    workers.answer(second)  # [2, 4) has arrived, [0, 2) has not
    engine_grant, (third, fourth) = loading(other, workers, "abcd")
    workers.answer(fourth, corrupt=(0, 1))  # now [2, 4) has no good host copy
    one.release(grant)
    other.release(engine_grant)
    assert [each for each in workers.started() if each.pool == "a"] == []

    workers.answer(first, "failed")
    workers.answer(third)


def test_commit_behind_anothers_load_is_cut_short(new_tiers: MakeTiers) -> None:
    """Blocks from the first on that a load is writing are not taken in; the answer's depth says where to go on."""
    cache = new_tiers("ab")
    engine = Engine(cache, "b")
    grant = engine.acquire("abcdef")  # nothing is there yet: it computes
    stored(cache, "abcd", "a")
    workers = Workers(cache)
    _, (order,) = loading(engine, workers, "abcd")
    done = engine.commit(grant, "abcdef")

    assert (done.depth, done.adopted) == (0, 0)
    workers.answer(order)
    again = engine.commit(grant, "abcdef")
    assert (again.depth, again.duplicates, again.adopted) == (6, 4, 2)


def test_commit_behind_a_short_one_may_name_its_slots_as_one_range(
    new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that a commit did not take in stay in the order of their blocks: one range may hold them and the next."""
    monkeypatch.setattr("kvcached.core.transfers.loads.LOAD_BLOCKS_MAX", 2)
    cache = new_tiers("ab")
    engine = Engine(cache, "b")
    grant = engine.acquire("abcdef")
    stored(cache, "abcd", "a")
    workers = Workers(cache)
    _, (first, second) = loading(engine, workers, "abcd")
    workers.answer(first)
    short = engine.commit(grant, "abcd")
    workers.answer(second)
    slots = cut(array("i", grant.ranges), short.depth)[1]

    rest = cache.managed.commit(
        engine.session, engine.epoch, grant.lease, short.depth, keys_of("abcdef")[32:], slots, FenceSequence(0)
    )

    assert (short.depth, rest.depth, len(slots)) == (2, 6, 2)


def test_retry_of_a_request_whose_hit_was_cut_gets_the_same_answer(
    new_tiers: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request again is answered as before, whatever has become of its loads: that is for `load` to tell."""
    monkeypatch.setattr("kvcached.core.transfers.loads.LOAD_BLOCKS_MAX", 2)
    cache = new_tiers()
    engine = stored(cache, "abcdef")
    crowd_out(engine)
    workers = Workers(cache)
    first = engine.acquire("abcdef", request="one")
    orders = loads(workers.take())
    workers.answer(orders[1], "failed")
    crowd_out(engine)

    again = engine.acquire("abcdef", request="one")

    assert again == first
    workers.answer(orders[0])
    workers.answer(orders[2])
    loaded = cache.managed.load(engine.session, engine.epoch, first.lease)
    assert loaded is not None
    assert (loaded.hit, sum(array("i", loaded.ranges)[1::2])) == (2, 4)
    assert engine.acquire("abcdef", request="one") == first
    assert cache.managed.load(engine.session, engine.epoch, first.lease) == loaded
    slots = array("i", loaded.ranges)
    keys = keys_of("abcdef")[2 * 16 :]
    cache.managed.commit(engine.session, engine.epoch, first.lease, 2, keys, slots, FenceSequence(0))


@pytest.mark.parametrize("distance", [1, 2], ids=["all", "every second"])
def test_report_of_many_corrupt_blocks_costs_some_steps_for_each(
    new_offload: Callable[..., Cache], distance: int
) -> None:
    """However many blocks of a long load are bad, the report holds up nobody, nor does a store of what was lost."""
    length = 4000
    cache = new_offload(slabs=1)
    engine, text = OffloadEngine(cache, space(per_slab=length, shards=1)), "".join(map(chr, range(length)))
    engine.store(text)
    lease = engine.acquire(text)
    load, bad = engine.load(lease), range(0, length, distance)
    count_lines(lambda: engine.complete(load.transfer, *bad), most=100 * length)
    assert (engine.hit(text), cache.counters["corrupt_blocks"]) == (0, len(bad))
    assert engine.states == (len(bad), 0, length - len(bad), 0)

    other = engine.acquire(text)
    count_lines(lambda: engine.prepare(other, text), most=100 * length)
    assert engine.states == (0, len(bad), length - len(bad), 0)
    engine.commit(next(iter(cache.offload.sessions[engine.session].transfers)))
    assert engine.hit(text) == length


def test_many_corrupt_blocks_that_others_read_cost_some_steps_for_each(new_offload: Callable[..., Cache]) -> None:
    """Other loads of the same blocks are told of all that are bad at once, and the last one of them drops these."""
    length = 1000
    cache = new_offload(slabs=1)
    engine, text = OffloadEngine(cache, space(per_slab=length, shards=1)), "".join(map(chr, range(length)))
    engine.store(text)
    mine, theirs = (engine.load(engine.acquire(text)) for _ in range(2))
    count_lines(lambda: engine.complete(mine.transfer, *range(length)), most=100 * length)
    assert engine.states == (0, 0, length, 0)
    count_lines(lambda: engine.complete(theirs.transfer), most=100 * length)

    assert engine.states == (length, 0, 0, 0)
