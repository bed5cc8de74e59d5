"""Behaviours named in docs/behaviours.md that no other test of the core is about."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.insight.invariants import check
from kvcached.core.messages import PoolRestored, TransferKind, WorkerDied
from kvcached.core.slots.ranges import cut, slot_count
from kvcached.core.slots.states import SlotState
from kvcached_client.types import FenceSequence
from tests.core.engine import BLOCK_SIZE, EPOCH, Engine, keys_of, make_cache, states
from tests.core.host_tier import Workers, crowd_out, host_counts, host_hit, loading, spans, stored
from tests.core.offload_engine import OffloadEngine, make_offload

MakeTiers = Callable[..., Cache]


# --- the index --------------------------------------------------------------------------------------------------------


def test_check_finds_a_residency_that_is_no_prefix() -> None:
    """A continuation on a device that lacks a block before it is a violation that the checks name."""
    cache = make_cache()
    engine = Engine(cache)
    engine.store("abcd")
    engine.store("abXY")
    assert check(cache) == []
    beginning = next(run.segments[0] for run in cache.trees[0].runs() if run.start == 0)
    assert beginning is not None
    beginning.ranges, beginning.length = cut(beginning.ranges, 1)[0], 1

    assert any("its parent is not wholly resident" in violation for violation in check(cache))


def test_check_finds_a_hole_that_a_segment_does_not_know_of() -> None:
    """A segment that takes its first hole to be elsewhere is a violation that the checks name."""
    cache = make_offload()
    OffloadEngine(cache).store("abcd")
    (run,) = cache.trees[0].runs()
    segment = run.segments[HOST]
    assert segment is not None
    assert check(cache) == []
    segment.solid = 3

    assert any("4 blocks before a hole, not 3" in violation for violation in check(cache))


def test_check_finds_a_lock_that_nobody_holds() -> None:
    """A lock without a lease, a fence or a transfer is a violation; to take back one that is not there raises."""
    cache = make_cache()
    engine = Engine(cache)
    engine.store("abcd")
    tree = cache.trees[0]
    (run,) = tree.runs()
    tree.lock(run, 3, 0)

    assert any("locks {3: 1}, holders say {}" in violation for violation in check(cache))
    tree.unlock(run, 3, 0)
    assert check(cache) == []
    with pytest.raises(RuntimeError, match="no lock at depth 3"):
        tree.unlock(run, 3, 0)


def test_recomputed_blocks_join_their_host_copies(new_tiers: MakeTiers) -> None:
    """Blocks computed again though the host pool has them get a device copy in the same run, and no second store."""
    cache = new_tiers(threshold=99)  # it computes rather than loads
    engine = stored(cache, "abcdef")
    crowd_out(engine)
    assert host_hit(engine, "abcdef") == (0, 6)
    grant = engine.acquire("abcd")
    done = engine.commit(grant, "abcd")

    assert (grant.hit, done.adopted, done.duplicates) == (0, 4, 0)
    assert Workers(cache).started() == []
    assert host_hit(engine, "abcdef") == (4, 2)
    assert [(run.start, run.end) for run in cache.trees[0].runs()] == [(0, 6)]
    assert (host_counts(cache)[2], cache.counters["stored_blocks"]) == (6, 6)


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("error", ["", "failed"])
def test_split_under_a_copy_loses_no_block(new_tiers: MakeTiers, kind: str, error: str) -> None:
    """A run that is cut in two while its blocks are being copied gets all of them, or none if the copy fails."""
    cache = new_tiers("ab")
    workers, engine, other = Workers(cache), Engine(cache, "a"), Engine(cache, "b")
    engine.store("abcdef")
    orders = workers.started()
    if kind == "load":
        workers.answer(orders[0])
        orders = loading(other, workers, "abcdef")[1]
    engine.store("abX")  # diverges in the middle of what is being copied

    assert sorted((run.start, run.end) for run in cache.trees[0].runs()) == [(0, 2), (2, 3), (2, 6)]
    assert [spans(order) for order in orders] == [[(0, 6)]]
    workers.answer(orders[0], error)
    copied = 0 if error else 6
    assert host_hit(other, "abcdef") == ((0, copied) if kind == "store" else (copied, 6 - copied))
    assert host_hit(engine, "abcdef") == (6, 0)
    workers.answer_all()


def test_ids_are_never_given_twice(new_tiers: MakeTiers) -> None:
    """Sessions, leases and transfers get growing ids, over releases, goodbyes and a lost pool."""
    cache = new_tiers()
    workers = Workers(cache)
    ids: dict[str, list[int]] = {"session": [], "lease": [], "transfer": []}
    for text in ("ab", "AB", "01", "XY"):
        engine = Engine(cache)
        grant = engine.acquire(text)
        engine.commit(grant, text)
        engine.release(grant)
        (order,) = workers.started()
        ids["session"].append(engine.session)
        ids["lease"].append(grant.lease)
        ids["transfer"].append(order.transfer)
        if text == "AB":
            cache.handle(WorkerDied("a"))
            cache.handle(PoolRestored("a"))
        else:
            cache.close_session(engine.session)
        workers.answer(order)

    assert all(given == sorted(set(given)) for given in ids.values())


def test_root_is_no_victim(cache: Cache) -> None:
    """A pool of which every block was evicted goes on: the root is there, and the next prompt is a run below it."""
    engine = Engine(cache)
    root = cache.trees[0].root
    for text in ("abcd", "ABCD"):
        engine.store(text)
        crowd_out(engine)
        assert (list(cache.trees[0].runs()), states(cache)[SlotState.FREE]) == ([], 16)
    engine.store("abcd")

    (run,) = cache.trees[0].runs()
    assert (cache.trees[0].root, run.parent, engine.hit("abcd")) == (root, root, 4)


# --- leases -----------------------------------------------------------------------------------------------------------


def leased(cache: Cache) -> int:
    return states(cache)[SlotState.LEASED]


@given(
    tokens=st.integers(0, 9 * BLOCK_SIZE), reserve=st.integers(0, 5), cached=st.integers(0, 9), is_full=st.booleans()
)
def test_granted_slots_are_one_formula(tokens: int, reserve: int, cached: int, is_full: bool) -> None:
    """Hit and exclusive slots are together the prompt's blocks, a partial one included, and the reserve, always."""
    cache = make_cache()
    engine = Engine(cache)
    engine.store("abcdefghi"[:cached])
    keys = keys_of("abcdefghi"[: tokens // BLOCK_SIZE])
    grant = cache.managed.acquire(engine.session, EPOCH, "r", keys, tokens, reserve, full=is_full)

    usable = tokens // BLOCK_SIZE if is_full else max(tokens - 1, 0) // BLOCK_SIZE
    assert grant.hit == slot_count(array("i", grant.hit_ranges)) == min(cached, usable)
    assert grant.hit + slot_count(array("i", grant.ranges)) == -(-tokens // BLOCK_SIZE) + reserve
    assert leased(cache) == slot_count(array("i", grant.ranges))


def test_reserve_belongs_to_its_lease(cache: Cache) -> None:
    """Two requests on one prefix have reserves and unfilled blocks of their own, free again with each release."""
    engine = Engine(cache)
    engine.store("abcd")
    first, second = engine.acquire("abcde", reserve=2), engine.acquire("abcdX", reserve=3)
    engine.commit(first, "abcde")

    assert leased(cache) == 2 + 4
    engine.release(first)
    assert leased(cache) == 4
    engine.release(second)
    assert states(cache)[:3] == (11, 0, 5)


# --- eviction and tiers -----------------------------------------------------------------------------------------------


def lines_of_an_eviction(prompts: int) -> int:
    """Lines of Python that freeing 64 blocks takes in a full pool of prompts of 8 blocks under one beginning."""
    cache = make_cache(slots=8 * prompts + 4)
    engine = Engine(cache)
    beginning = bytes(64)
    for number in range(prompts):
        keys = beginning + b"".join((number * 8 + index + 1).to_bytes(16) for index in range(8))
        grant = cache.managed.acquire(
            engine.session, EPOCH, f"{number}", keys, len(keys) // 16 * BLOCK_SIZE, 0, full=True
        )
        slots = array("i", grant.ranges)
        cache.managed.finish(
            engine.session, EPOCH, grant.lease, grant.hit, keys[grant.hit * 16 :], slots, FenceSequence(0)
        )
    pool, lines = cache.pools["a"], 0
    free = pool.free

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        cache.trees[0].evict(64, 0, "test")
    finally:
        sys.settrace(None)
    assert pool.free == free + 64
    return lines


def test_eviction_takes_no_longer_in_a_larger_tree() -> None:
    """Freeing some blocks costs as many steps among twenty prompts as among a thousand: nothing is scanned."""
    small, large = lines_of_an_eviction(20), lines_of_an_eviction(1000)

    assert large <= small * 1.1 + 10


def test_hit_on_blocks_that_are_being_stored_is_ready(new_tiers: MakeTiers) -> None:
    """A copy to the host pool is no obstacle to a reader, and who ends first, copy or lease, frees nothing early."""
    cache = new_tiers()
    workers, engine = Workers(cache), Engine(cache)
    pool = cache.pools["a"]
    engine.store("abcd")
    (first,) = workers.started()
    grant = engine.acquire("abcd")

    assert (grant.hit, grant.ready, grant.loads, pool.evictable) == (4, 4, (), 0)
    engine.release(grant)
    assert pool.evictable == 0  # the copy reads on
    grant = engine.acquire("abcd")
    workers.answer(first)
    assert pool.evictable == 0  # the lease reads on
    engine.release(grant)
    assert (pool.evictable, host_hit(engine, "abcd")) == (4, (4, 0))


def test_load_leaves_the_host_copy_in_place(new_tiers: MakeTiers) -> None:
    """The host pool keeps what it has lent to a device: the next eviction there needs no copy, and loses nothing."""
    cache = new_tiers()
    engine = stored(cache, "abcd")
    for turn in (1, 2):
        crowd_out(engine)
        workers = Workers(cache)
        grant, (order,) = loading(engine, workers, "abcd")
        assert (order.kind, spans(order)) == (TransferKind.LOAD, [(0, 4)])
        workers.answer(order)
        engine.release(grant)

        assert host_counts(cache)[2] == 4
        assert workers.started() == []
        assert (cache.counters["stored_blocks"], cache.counters["loaded_blocks"]) == (4, 4 * turn)
    assert cache.counters["dropped_blocks"] == 0
