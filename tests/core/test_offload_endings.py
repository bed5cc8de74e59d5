"""Sessions of engines in offload mode that go silent, die or say goodbye: who may have their slots, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import (
    MemberLost,
    MembersDied,
    SessionEnded,
    SessionExpired,
    SlabAllocated,
    SlotsHandedOut,
    SlotsReclaimed,
    Ticked,
    TransferKind,
)
from kvcached.core.slots.ranges import one_range
from kvcached_client.types import ShardIndex
from tests.core.engine import BLOCK_SIZE, TTL_MS, keys_of, refused
from tests.core.offload_engine import OffloadEngine, endings
from tests.core.tier_world import slots_of

MakeOffload = Callable[..., Cache]


@pytest.fixture
def cache(new_offload: MakeOffload) -> Cache:
    """Four slabs of four blocks."""
    return new_offload()


@pytest.fixture
def engine(cache: Cache) -> OffloadEngine:
    """A session of two shards."""
    return OffloadEngine(cache)


def silence(cache: Cache) -> None:
    """Let every session expire."""
    for now_ms in (1, TTL_MS // 2, TTL_MS, TTL_MS + 1):
        cache.handle(Ticked(now_ms))


def test_slabs_and_slots_are_told_of_before_they_are_written(cache: Cache, engine: OffloadEngine) -> None:
    """A slab that goes to a namespace, and slots that processes are to write, are effects, in this order."""
    root = engine.spec.root
    engine.prepare(engine.acquire("abcde"), "abcde")

    assert cache.effects == [
        SlabAllocated(root, 0),
        SlabAllocated(root, 1),
        SlotsHandedOut(engine.session, root, one_range(0, 5)),
    ]
    version = cache.version
    engine.prepare(engine.acquire("x"), "x")
    assert cache.version == version  # nobody got a slab
    engine.core.clear(engine.session)
    assert cache.version > version


def test_stores_of_a_silent_session_are_set_aside_until_it_is_dead(cache: Cache, engine: OffloadEngine) -> None:
    """After its TTL nobody gets the slots that its shards may write; when they are dead, everybody."""
    engine.store("ab")
    engine.prepare(engine.acquire("abcd"), "abcd")
    silence(cache)

    assert engine.states == (0, 0, 2, 2)
    assert endings(cache) == [SessionExpired(engine.session, 2)]
    other = OffloadEngine(cache)
    assert len(slots_of(other.prepare(other.acquire("0123456789ABCDEF"), "0123456789ABCDEF").slots)) == 14
    cache.handle(MembersDied(engine.session))
    assert endings(cache)[-1] == SessionEnded(engine.session, 2)
    reclaimed = [effect for effect in cache.effects if isinstance(effect, SlotsReclaimed)]
    assert [slots_of(effect.slots) for effect in reclaimed] == [[2, 3]]
    assert engine.states == (2, 14, 0, 0)


def test_an_expired_session_is_told_so(cache: Cache, engine: OffloadEngine) -> None:
    """Nothing that it says is done, and its leases are gone."""
    engine.store("ab")
    lease = engine.acquire("abcd")
    store, load = engine.prepare(lease, "abcd"), engine.load(lease)
    cache.handle(MemberLost(engine.session))

    for call in (
        lambda: engine.acquire("ab"),
        lambda: engine.release(lease),
        lambda: engine.commit(store.transfer),
        lambda: engine.complete(load.transfer, 0),
        lambda: cache.offload.heartbeat(engine.session, 0),
        lambda: cache.offload.clear(engine.session),
    ):
        with refused("session_expired"):
            call()
    cache.handle(MembersDied(engine.session))
    with refused("no_session"):
        engine.acquire("ab")
    assert OffloadEngine(cache).hit("ab") == 2


def test_loads_of_a_lost_session_keep_their_blocks_until_it_is_dead(cache: Cache, engine: OffloadEngine) -> None:
    """What shards may read yet is not evicted; once they are dead, it is like everything else."""
    engine.store("ab")
    engine.load(engine.acquire("ab"))
    cache.handle(MemberLost(engine.session))
    other = OffloadEngine(cache)
    crowd = other.acquire("0123456789ABCDEF")

    assert other.prepare(crowd, "0123456789ABCDEF").depth == 14
    cache.handle(MembersDied(engine.session))
    assert other.prepare(crowd, "0123456789ABCDEF").depth == 16


def test_load_of_a_lost_session_ends_with_its_last_report(cache: Cache, engine: OffloadEngine) -> None:
    """A report may come behind the goodbye, by another connection: it is refused, and nothing waits for a death."""
    engine.store("ab")
    load = engine.load(engine.acquire("ab"))
    cache.handle(MemberLost(engine.session))
    for shard in (0, 0, 1):
        assert cache.offload.sessions
        with refused("session_expired"):
            cache.offload.transfer_done(engine.session, TransferKind.LOAD, load.transfer, shard)

    assert endings(cache)[-1] == SessionEnded(engine.session, 0)
    other = OffloadEngine(cache)
    assert other.prepare(other.acquire("0123456789ABCDEF"), "0123456789ABCDEF").depth == 16


def test_what_a_late_report_says_of_bad_blocks_counts(cache: Cache, engine: OffloadEngine) -> None:
    """Others do not load a block that a lost session has found corrupt; a store that it had ended late is not used."""
    engine.store("ab")
    load = engine.load(engine.acquire("ab"))
    store = engine.prepare(engine.acquire("abcd"), "abcd")
    cache.handle(MemberLost(engine.session))
    for kind, transfer, bad in ((TransferKind.LOAD, load.transfer, (0,)), (TransferKind.STORE, store.transfer, ())):
        for shard in (0, 1):
            with refused("session_expired"):
                cache.offload.transfer_done(engine.session, kind, transfer, shard, "", bad)

    assert OffloadEngine(cache).hit("abcd") == 0
    assert engine.states[3] == 2  # its shards may still write there


def test_blocks_found_corrupt_by_a_session_that_dies_are_dropped(cache: Cache, engine: OffloadEngine) -> None:
    """What one shard has told counts, though the load never ended."""
    engine.store("ab")
    load = engine.load(engine.acquire("ab"))
    cache.offload.transfer_done(engine.session, TransferKind.LOAD, load.transfer, 0, "", (0,))
    cache.handle(MembersDied(engine.session))

    assert OffloadEngine(cache).hit("ab") == 0


def test_session_without_copies_under_way_ends_at_once(cache: Cache, engine: OffloadEngine) -> None:
    """A lost process, or a goodbye, of a session that has nothing to copy ends it: it does not expire first."""
    engine.store("ab")
    engine.acquire("abcd")
    cache.handle(MemberLost(engine.session))

    assert endings(cache) == [SessionEnded(engine.session, 0)]
    assert (cache.offload.sessions, cache.counters["sessions_expired"]) == ({}, 0)


def test_silent_session_without_copies_leaves_nothing(cache: Cache, engine: OffloadEngine) -> None:
    """It has expired, and is over, too: there is nothing to wait for."""
    engine.acquire("abcd")
    silence(cache)

    assert endings(cache) == [SessionExpired(engine.session, 0), SessionEnded(engine.session, 0)]


def test_heartbeats_and_late_ticks_keep_a_session(cache: Cache, engine: OffloadEngine) -> None:
    """A session that is heard lives, and where the daemon itself stood still nobody is blamed for silence."""
    for now_ms in (1, 500, 1000, 1500):
        cache.handle(Ticked(now_ms))
        cache.offload.heartbeat(engine.session, now_ms)
    cache.handle(Ticked(90_000))

    assert engine.hit("ab") == 0
    for now_ms in (90_500, 91_000, 91_001):
        cache.handle(Ticked(now_ms))
    assert cache.offload.sessions == {}


def test_goodbye_of_all_gives_everything_back(cache: Cache, engine: OffloadEngine) -> None:
    """Where no process of a session will copy any more, stores under way are given up and everything is free."""
    engine.store("ab")
    lease = engine.acquire("abcd")
    engine.prepare(lease, "abcd")
    engine.load(lease)
    cache.close_session(engine.session)

    assert engine.states == (2, 0, 2, 0)
    assert endings(cache) == [SessionEnded(engine.session, 2)]
    assert engine.host.protected == 0
    assert cache.offload.transfers == []


def test_copies_that_a_shard_has_left_behind_fail(cache: Cache, engine: OffloadEngine) -> None:
    """A store and a load that only it had not made are over, and their slots free; others go on until they are made."""
    engine.store("ab")
    lease = engine.acquire("abcd")
    store, load, other = engine.prepare(lease, "abcd"), engine.load(lease), engine.prepare(engine.acquire("x"), "x")
    for kind, transfer in ((TransferKind.STORE, store.transfer), (TransferKind.LOAD, load.transfer)):
        cache.offload.transfer_done(engine.session, kind, transfer, 1)
    assert cache.offload.shard_left(engine.session, ShardIndex(0)) == [store.transfer, load.transfer]

    assert list(cache.offload.sessions[engine.session].transfers) == [other.transfer]
    assert (engine.hit("abcd"), engine.states) == (2, (5, 1, 2, 0))
    cache.offload.transfer_done(engine.session, TransferKind.STORE, other.transfer, 1)
    assert (engine.hit("x"), engine.states[1]) == (0, 0)


def test_no_copy_waits_for_a_shard_that_has_left(cache: Cache, engine: OffloadEngine) -> None:
    """Copies are refused until a process is that shard again; nothing else is, and an acquire announces no load."""
    engine.store("ab")
    lease = engine.acquire("abcd")
    cache.offload.shard_left(engine.session, ShardIndex(1))
    with refused("out_of_order"):
        engine.load(lease)
    with refused("out_of_order"):
        engine.prepare(lease, "abcd")
    held = cache.offload.acquire(engine.session, "r", keys_of("ab"), 2 * BLOCK_SIZE, full=True, load_from=0)
    assert (held.hit, held.load, engine.hit("ab")) == (2, 0, 2)

    cache.offload.shard_joined(engine.session, ShardIndex(1))
    engine.commit(engine.prepare(lease, "abcd").transfer)
    assert engine.hit("abcd") == 4


def test_load_of_a_lost_session_ends_with_the_shard_that_leaves(cache: Cache, engine: OffloadEngine) -> None:
    """Nobody reads its slots any more."""
    engine.store("ab")
    engine.load(engine.acquire("ab"))
    cache.handle(MemberLost(engine.session))
    cache.offload.shard_left(engine.session, ShardIndex(0))
    assert engine.session in cache.offload.sessions
    cache.offload.shard_left(engine.session, ShardIndex(1))
    assert endings(cache)[-1] == SessionEnded(engine.session, 0)
