"""Clearing a namespace of replicas: whatever is under way, afterwards nothing of before is found, and no slot lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.explain import explain
from kvcached.core.messages import (
    BackupSettled,
    ClearingEnded,
    FetchSettled,
    MembersDied,
    SessionExpired,
    StorageAnswered,
    StorageLost,
    StorageReady,
    Ticked,
    WorkerDied,
)
from kvcached.core.restart.rejoin import Rejoin
from kvcached.core.slots.states import PrefetchState, SessionState, SlotState
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from kvcached_client.types import NO_FENCE, MissReason
from tests.core.engine import Engine, healthy, keys_of, refused, states
from tests.core.host_tier import Workers, crowd_out, host_counts, host_of, loading, make_tiers, stored

ANEW = b"another root"


def begin(cache: Cache, replica: str = "a") -> None:
    """The first step."""
    cache.clearings.begin(cache.tree_of(replica), ANEW)
    assert healthy(cache)


def cleared(cache: Cache) -> ClearingEnded | None:
    """What the cache says of the last step, once it has decided what it decides by itself."""
    cache.settle()
    assert healthy(cache)
    return next((each for each in cache.effects if isinstance(each, ClearingEnded)), None)


def assert_empty(cache: Cache, replica: str = "a") -> None:
    """Nothing is in the index, and nothing of the pools is in use but what is set aside."""
    assert cache.tree_of(replica).run_count == 0
    assert states(cache, replica)[SlotState.CACHED] == 0
    if cache.tree_of(replica).host is not None:
        assert host_counts(cache, replica)[1:] == (0, 0)


def test_idle_namespace_is_cleared_at_once(new_tiers: Callable[..., Cache]) -> None:
    """Where nothing is under way one step does it: both tiers are empty, and the root and the version are others."""
    cache = new_tiers("ab")
    stored(cache, "abcd")
    version = cache.version
    begin(cache)

    assert cleared(cache) == ClearingEnded(("a", "b"), ANEW, 4)
    assert_empty(cache)
    assert (cache.tree_of("a").namespace, host_of(cache).namespace) == (ANEW, ANEW)
    assert cache.version > version
    assert cache.counters["cleared_blocks"] == 4


def test_other_namespaces_are_left_alone(new_tiers: Callable[..., Cache]) -> None:
    """What another namespace has cached is hit as before, and its session goes on."""
    cache = new_tiers("aB")
    stored(cache, "abcd")
    other = Engine(cache, "B")
    other.store("abc")
    begin(cache)

    assert cleared(cache) is not None
    assert other.hit("abc") == 3


def test_sessions_expire_and_what_they_may_write_is_set_aside(new_tiers: Callable[..., Cache]) -> None:
    """Leases on every replica of the namespace end; their slots are nobody's until the engine is dead."""
    cache = new_tiers("ab")
    one, two = Engine(cache, "a"), Engine(cache, "b")
    one.store("abc")
    one.acquire("abcde")
    two.acquire("xy")
    begin(cache)

    assert [each.session for each in cache.effects if isinstance(each, SessionExpired)] == [one.session, two.session]
    assert (states(cache, "a")[SlotState.QUARANTINED], states(cache, "b")[SlotState.QUARANTINED]) == (2, 2)
    with refused("session_expired"):
        one.acquire("abc")
    Workers(cache).answer_all()
    assert cleared(cache) is None  # told already
    cache.handle(MembersDied(one.session))
    cache.handle(MembersDied(two.session))
    assert cache.pools["a"].free == cache.pools["a"].slots
    assert cache.pools["b"].free == cache.pools["b"].slots


def test_fenced_slots_stay_fenced(cache: Cache) -> None:
    """Slots that queued work may still touch outlast the clear, and come back with the engine's death."""
    engine = Engine(cache)
    grant = engine.acquire("abc")
    engine.commit(grant, "abc", fence=3)
    engine.release(engine.acquire("", reserve=2), fence=4)
    begin(cache)

    assert cleared(cache) is not None
    assert (states(cache)[SlotState.FENCED], states(cache)[SlotState.QUARANTINED]) == (2, 3)
    cache.handle(MembersDied(engine.session))
    assert cache.pools["a"].free == cache.pools["a"].slots


def test_no_session_while_copies_run(new_tiers: Callable[..., Cache]) -> None:
    """A store under way is awaited; until it has ended nobody gets in, and then it has left nothing behind."""
    cache = new_tiers("ab")
    workers = Workers(cache)
    Engine(cache).store("abcd")
    (store,) = workers.started()
    begin(cache)

    assert cleared(cache) is None
    for name in "ab":
        with refused("clearing"):
            Engine(cache, name)
    workers.answer(store)
    assert cleared(cache) == ClearingEnded(("a", "b"), ANEW, 4)
    assert_empty(cache)
    assert Engine(cache, "b").hit("abcd") == 0


@pytest.mark.parametrize("error", ["", "copy failed"])
def test_running_load_is_awaited(new_tiers: Callable[..., Cache], error: str) -> None:
    """A load that runs, and one that has joined it, leave nothing behind, however it ends."""
    cache = new_tiers()
    engine = stored(cache, "abcdef")
    crowd_out(engine)
    workers = Workers(cache)
    _, (load,) = loading(engine, workers, "abcd")
    engine.acquire("abcd", request="joined")
    begin(cache)

    assert cleared(cache) is None
    assert cache.pools["a"].counts[SlotState.FILLING] == 4
    workers.answer(load, error)
    assert cleared(cache) is not None
    assert_empty(cache)


def test_load_that_waits_for_a_store_fails_at_once(new_tiers: Callable[..., Cache]) -> None:
    """A queued load is not started any more: only the store that it waits for is awaited."""
    cache = new_tiers("ab")
    workers = Workers(cache)
    Engine(cache, "a").store("abcd")
    (store,) = workers.started()
    other = Engine(cache, "b")
    assert other.acquire("abcd").loads
    assert len(cache.transfers) == 2
    begin(cache)

    assert list(cache.transfers) == [store.transfer]
    workers.answer(store)
    assert cleared(cache) is not None
    assert workers.started() == []
    assert_empty(cache)


def test_nothing_of_before_is_stored_later(new_tiers: Callable[..., Cache]) -> None:
    """What waited to be copied to the host pool, behind a fence or after a failure, is forgotten."""
    cache = new_tiers()
    workers = Workers(cache)
    engine = Engine(cache)
    engine.commit(engine.acquire("xyz"), "xyz", fence=1)
    engine.store("abcd")
    (store,) = workers.started()
    begin(cache)
    workers.answer(store, "copy failed")
    assert cleared(cache) is not None
    cache.close_session(engine.session)
    cache.handle(Ticked(1))  # when failed stores are tried again

    assert workers.started() == []
    assert_empty(cache)


def test_late_acknowledgement_changes_nothing(new_tiers: Callable[..., Cache]) -> None:
    """A store of before that is acknowledged a second time, after the clear, puts nothing into the index."""
    cache = new_tiers()
    workers = Workers(cache)
    Engine(cache).store("abcd")
    (store,) = workers.started()
    begin(cache)
    workers.answer(store)
    assert cleared(cache) is not None
    workers.under_way[store.transfer] = store
    workers.answer(store)

    assert healthy(cache)
    assert_empty(cache)


def test_lost_workers_do_not_hold_it_up(new_tiers: Callable[..., Cache]) -> None:
    """The pool's workers die meanwhile: when their copies are settled the clear is made, before others run again."""
    cache = new_tiers("ab")
    workers = Workers(cache)
    Engine(cache).store("abcd")
    (store,) = workers.started()
    begin(cache)
    cache.handle(WorkerDied("a"))
    assert cleared(cache) is None
    workers.answer(store, "worker died")

    assert cleared(cache) is not None
    assert_empty(cache)


def test_expired_session_of_before_a_restart_cannot_come_back(cache: Cache) -> None:
    """An engine that has not declared itself yet since a restart has nothing to declare any more."""
    session = cache.restore_session("a")
    begin(cache)
    assert cleared(cache) is not None

    with refused("no_session"):
        Rejoin(cache).resume(session.id, 0, NO_FENCE)
    assert session.state is SessionState.EXPIRED
    cache.handle(MembersDied(session.id))


def test_cleared_blocks_are_told_of(new_tiers: Callable[..., Cache]) -> None:
    """Who asks why a prompt missed is told that its blocks were cleared."""
    cache = new_tiers()
    stored(cache, "abcd")
    begin(cache)
    assert cleared(cache) is not None

    miss = explain(cache, cache.tree_of("a"), cache.pools["a"], keys_of("abcd"), 4)
    assert (miss.hit, miss.reason) == (0, MissReason.CLEARED)


def test_estimates_begin_anew(new_tiers: Callable[..., Cache]) -> None:
    """Of what engines asked for before a clear nothing counts afterwards, and the same work counts as the first did."""
    cache = new_tiers("aB")
    other, reuse = Engine(cache, "B"), cache.tree_of("a").reuse
    other.store("xy")
    assert reuse is not None
    told = []
    for _ in range(2):
        engine = stored(cache, "abcd")
        engine.acquire("abcd")
        told.append(reuse.asked_blocks)
        begin(cache)
        assert cleared(cache) is not None
        cache.handle(MembersDied(engine.session))
        told.append(reuse.asked_blocks)

    other_reuse = cache.tree_of("B").reuse
    assert other_reuse is not None
    assert (told, other_reuse.asked_blocks) == ([8, 0, 8, 0], 2)


def test_replica_works_after_it(new_tiers: Callable[..., Cache]) -> None:
    """The next engine stores, loses its device copies and loads them back, as in a new pool."""
    cache = new_tiers()
    engine = stored(cache, "abcd")
    begin(cache)
    assert cleared(cache) is not None
    cache.handle(MembersDied(engine.session))
    engine = stored(cache, "abcdef")
    crowd_out(engine)
    workers = Workers(cache)
    grant, (load,) = loading(engine, workers, "abcdef")
    workers.answer(load)

    assert (grant.hit, engine.hit("abcdef")) == (6, 6)


def test_backups_are_not_awaited_and_none_begins() -> None:
    """Those that wait for their turn never begin, and those under way are not awaited: their slots are set aside."""
    cache = make_tiers("a", slots=64, host_slabs=8, slots_per_slab=16, storage=StorageSpec(BackupPolicy.EVERY))
    cache.handle(StorageReady())
    engine, workers = Engine(cache), Workers(cache)
    for first in "abcdefghijklmnop":
        engine.store(first + "xyz")
        workers.answer_all()
    under_way = [copy.id for copy in cache.storage.copies]
    assert cache.storage.backups.candidates.waiting
    begin(cache)

    assert cleared(cache) is not None
    assert_empty(cache)
    assert [copy.id for copy in cache.storage.copies] == under_way
    while cache.storage.copies:
        read = sum(copy.blocks for copy in cache.storage.copies)
        assert host_of(cache).counts[SlotState.QUARANTINED] == read
        cache.handle(BackupSettled(cache.storage.copies[0].id, 4))
        assert healthy(cache)

    assert host_of(cache).counts[SlotState.QUARANTINED] == 0


def test_slots_that_storage_writes_are_nobodys_until_it_is_through() -> None:
    """A clear does not wait for a fetch, and nobody gets its slots before storage has said that it is over."""
    cache = make_tiers("a", slots=16, host_slabs=2, slots_per_slab=4, storage=StorageSpec(BackupPolicy.NEVER))
    cache.handle(StorageReady())
    engine = Engine(cache)
    found = cache.prefetch(engine.session, engine.epoch, keys_of("abcd"), 16, 0.0, full=True)
    cache.handle(StorageAnswered(found.id, 4, 0))
    (copy,) = cache.storage.copies
    begin(cache)

    assert cleared(cache) is not None
    assert host_of(cache).counts[SlotState.FILLING] == copy.blocks
    cache.handle(FetchSettled(copy.id, 4, 0))
    assert healthy(cache)
    assert (host_of(cache).counts[SlotState.FILLING], found.state) == (0, PrefetchState.OVER)
    assert_empty(cache)


def test_path_that_several_backups_lock_leaves_the_index_at_once() -> None:
    """Backups of branches of one prefix lock it more than once; what they do not read is free, the rest set aside."""
    cache = make_tiers("a", slots=64, host_slabs=8, slots_per_slab=16, storage=StorageSpec(BackupPolicy.EVERY))
    cache.handle(StorageReady())
    engine, workers = Engine(cache), Workers(cache)
    for text in ("abcd", "abxy", "abxz"):
        engine.store(text)
        workers.answer_all()
        cache.settle()
    assert len(cache.storage.copies) > 1
    begin(cache)

    assert cleared(cache) is not None
    assert_empty(cache)
    cache.handle(StorageLost())
    assert healthy(cache)
    assert host_of(cache).counts[SlotState.QUARANTINED] == 0


def test_clear_after_a_clear_leaves_what_storage_reads_yet_set_aside() -> None:
    """A hung backup outlives two clears: its slots are nobody's until it has ended, and those of the next one too."""
    cache = make_tiers("a", slots=64, host_slabs=8, slots_per_slab=16, storage=StorageSpec(BackupPolicy.EVERY))
    cache.handle(StorageReady())
    for root in (b"second root", b"third root"):
        Engine(cache).store("abcd")
        Workers(cache).answer_all()
        cache.settle()
        cache.clearings.begin(cache.tree_of("a"), root)
        assert cleared(cache) is not None
    assert [copy.blocks for copy in cache.storage.copies] == [4, 4]
    assert host_of(cache).counts[SlotState.QUARANTINED] == 8
    cache.handle(StorageLost())

    assert healthy(cache)
    assert host_of(cache).counts[SlotState.QUARANTINED] == 0
