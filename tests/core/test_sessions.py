"""Sessions, fences and deaths: nothing that a process may still write is ever granted again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import MemberLost, MembersDied, SessionEnded, SessionExpired, Ticked, WorkerDied
from kvcached.core.refusals import Refusal, Why
from kvcached.core.slots.states import SESSION_TRANSITIONS, SessionState
from kvcached_client.types import FenceSequence, LeaseId
from tests.core.engine import EPOCH, TTL_MS, Engine, keys_of, refused, snapshot, states


def test_dead_engine_leaves_its_blocks_and_nothing_else(cache: Cache) -> None:
    """Confirmed death frees every slot that the engine could write and keeps what it had committed."""
    engine = Engine(cache)
    engine.store("abcd")
    engine.acquire("abcdefgh", reserve=2)
    cache.handle(MembersDied(engine.session))

    assert states(cache) == (12, 0, 4, 0, 0)
    assert cache.pools["a"].protected == 0
    assert cache.effects == [SessionEnded(engine.session, 6)]
    assert Engine(cache).acquire("abcdefgh").hit == 4


def test_goodbye_gives_everything_back_but_what_was_written(cache: Cache) -> None:
    """After a goodbye nothing is held, and what was committed stays, but for blocks whose fence had not signalled."""
    engine = Engine(cache)
    engine.commit(engine.acquire("ab"), "ab", fence=5)
    cache.managed.heartbeat(engine.session, FenceSequence(5), 0)
    engine.commit(engine.acquire("abcd"), "abcd", fence=6)
    cache.close_session(engine.session)

    assert states(cache) == (14, 0, 2, 0, 0)
    assert Engine(cache).hit("abcd") == 2


def test_silent_session_is_quarantined_not_freed(cache: Cache) -> None:
    """After its TTL the leases are gone, but the slots it could write are granted to nobody until it is dead."""
    engine = Engine(cache)
    engine.store("ab")
    engine.acquire("abcdef")
    for now_ms in (1, TTL_MS // 2, TTL_MS, TTL_MS + 1):
        cache.handle(Ticked(now_ms))

    assert states(cache) == (10, 0, 2, 0, 4)
    assert cache.effects == [SessionExpired(engine.session, 4)]
    with refused("session_expired"):
        engine.hit("ab")
    with refused("session_expired"):
        engine.signal(1, TTL_MS + 1)
    cache.handle(MembersDied(engine.session))
    assert states(cache) == (14, 0, 2, 0, 0)


def test_heartbeat_keeps_a_session(cache: Cache) -> None:
    """A session whose heartbeats arrive never expires, whatever else it does."""
    engine = Engine(cache)
    for now_ms in range(1, 20 * TTL_MS, TTL_MS // 2):
        cache.handle(Ticked(now_ms))
        engine.signal(0, now_ms)

    assert cache.effects == []
    assert engine.hit("ab") == 0


@pytest.mark.parametrize("stall_ms", [100 * TTL_MS, TTL_MS // 2 + 1])
def test_late_clock_expires_nobody(cache: Cache, stall_ms: int) -> None:
    """After a suspended machine or a stalled daemon, silence is counted anew: heartbeats may lie unread."""
    engine = Engine(cache)
    now_ms = 1
    cache.handle(Ticked(now_ms))
    now_ms += TTL_MS // 2
    cache.handle(Ticked(now_ms))
    now_ms += stall_ms
    cache.handle(Ticked(now_ms))
    cache.handle(Ticked(now_ms + TTL_MS // 2))
    cache.handle(Ticked(now_ms + TTL_MS))
    assert cache.effects == []
    cache.handle(Ticked(now_ms + TTL_MS + 1))

    assert cache.effects == [SessionExpired(engine.session, 0)]


def test_lost_member_quarantines_until_the_last_is_dead(cache: Cache) -> None:
    """One dead process ends the group; the others may still write, so its slots wait for them."""
    engine = Engine(cache)
    engine.acquire("abcd")
    cache.handle(MemberLost(engine.session))

    assert states(cache) == (12, 0, 0, 0, 4)
    with refused("session_expired"):
        engine.acquire("x")
    with pytest.raises(Refusal) as told:
        cache.managed.sessions.active(engine.session)
    assert told.value.why is Why.SESSION_LOST_MEMBER
    cache.handle(MembersDied(engine.session))
    assert states(cache) == (16, 0, 0, 0, 0)


def test_released_slots_wait_for_their_fence(cache: Cache) -> None:
    """Slots released with a fence are granted again only once it has signalled, and pins hold until then."""
    engine = Engine(cache)
    engine.store("ab")
    grant = engine.acquire("abcd")
    engine.release(grant, fence=3)

    assert states(cache) == (12, 0, 2, 2, 0)
    assert cache.pools["a"].protected == 2
    engine.signal(2)
    assert states(cache) == (12, 0, 2, 2, 0)
    engine.signal(3)
    assert states(cache) == (14, 0, 2, 0, 0)
    assert cache.pools["a"].protected == 0


def test_release_waits_for_the_fences_of_its_commits(cache: Cache) -> None:
    """A release without a fence, after a commit with one, frees nothing that the commit's work may still touch."""
    engine = Engine(cache)
    first, second = engine.acquire("ab"), engine.acquire("abcd")
    engine.commit(first, "ab")
    engine.commit(second, "abc", fence=9)
    engine.release(second)

    assert states(cache)[3] == 3  # two duplicates and the slot that was never used
    engine.signal(9)
    assert states(cache)[3] == 0


def test_fenced_commit_is_matchable_and_not_evictable(cache: Cache) -> None:
    """Before its fence signals, a block serves its own session and cannot be evicted, even when the lease is gone."""
    engine = Engine(cache)
    grant = engine.acquire("ab")
    engine.commit(grant, "ab", fence=1)
    engine.release(grant)

    assert engine.hit("ab") == 2
    assert cache.pools["a"].evictable == 0
    engine.signal(1)
    assert cache.pools["a"].evictable == 2


@pytest.mark.parametrize(("dies", "slots"), [(True, (14, 0, 2, 0, 0)), (False, (12, 0, 2, 0, 2))])
def test_unsignalled_blocks_leave_the_tree_with_their_session(cache: Cache, dies: bool, slots: tuple[int, ...]) -> None:
    """Blocks whose fence never signalled may hold anything: they are dropped, with all that builds on them."""
    engine = Engine(cache)
    engine.store("ab")
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd", fence=1)
    engine.release(grant)
    cache.handle(MembersDied(engine.session) if dies else MemberLost(engine.session))

    assert states(cache) == slots
    cache.close_session(engine.session)
    assert Engine(cache).hit("abcd") == 2


def test_duplicate_of_a_settled_block_is_not_suspect(cache: Cache) -> None:
    """A fenced commit of a block that was there already does not put the first copy in doubt."""
    engine = Engine(cache)
    first, second = engine.acquire("ab"), engine.acquire("ab")
    engine.commit(first, "ab")
    engine.commit(second, "ab", fence=9)
    cache.handle(MembersDied(engine.session))

    assert Engine(cache).hit("ab") == 2


def test_worker_death_loses_no_block_and_ends_no_session(new_cache: Callable[..., Cache]) -> None:
    """What a pool has cached is hit as before by its session, which goes on, and by one that is opened meanwhile."""
    cache = new_cache(names="ab")
    engine = Engine(cache, "a")
    engine.store("abcd")
    grant = engine.acquire("abX")
    before = states(cache, "a")
    cache.handle(WorkerDied("a"))

    assert states(cache, "a") == before
    assert cache.pools["a"].epoch == EPOCH
    assert engine.hit("abcd") == 4
    engine.release(grant)
    cache.close_session(engine.session)
    assert Engine(cache, "a").hit("abcd") == 4


def test_stale_epoch_is_refused(cache: Cache) -> None:
    """A request that speaks of another epoch changes nothing."""
    engine = Engine(cache)
    before = snapshot(cache)

    with refused("stale_epoch"):
        cache.managed.acquire(engine.session, EPOCH - 1, "r", keys_of("ab"), 8, 0, full=True)
    assert snapshot(cache) == before


def in_state(cache: Cache, state: SessionState) -> Engine:
    """An engine with a lease whose session has gone to `state`."""
    engine = Engine(cache)
    engine.acquire("ab", request="held")
    if state is SessionState.EXPIRED:
        cache.handle(MemberLost(engine.session))
    elif state is SessionState.ENDED:
        cache.handle(MembersDied(engine.session))
    cache.effects.clear()
    return engine


OPERATIONS: dict[str, Callable[[Cache, Engine], object]] = {
    "heartbeat": lambda cache, engine: engine.signal(1),
    "match": lambda cache, engine: engine.hit("ab"),
    "acquire": lambda cache, engine: engine.acquire("cd"),
    "allocate": lambda cache, engine: cache.managed.allocate(engine.session, EPOCH, LeaseId(1), 1),
    "release": lambda cache, engine: cache.managed.release(engine.session, EPOCH, LeaseId(1), FenceSequence(0)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", SessionState)
def test_every_session_state_times_every_request(cache: Cache, state: SessionState, operation: str) -> None:
    """Only an active session is served; an expired and an ended one are told so, and nothing changes."""
    engine = in_state(cache, state)
    before = snapshot(cache)

    if state is SessionState.ACTIVE:
        OPERATIONS[operation](cache, engine)
    else:
        with refused("session_expired" if state is SessionState.EXPIRED else "no_session"):
            OPERATIONS[operation](cache, engine)
        assert snapshot(cache) == before


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("event", [MemberLost, MembersDied, None])
def test_every_session_state_times_every_end(
    cache: Cache, state: SessionState, event: type[MemberLost | MembersDied] | None
) -> None:
    """News of an end may come in any state, and twice: what can follow the state follows, all else changes nothing."""
    engine = in_state(cache, state)
    for _ in range(2):
        if event is None:
            cache.close_session(engine.session)
        else:
            cache.handle(event(engine.session))
    session = cache.managed.sessions.get(engine.session)
    after = session.state if session else SessionState.ENDED

    wanted = SessionState.EXPIRED if event is MemberLost else SessionState.ENDED
    assert after == (wanted if (state, wanted) in SESSION_TRANSITIONS else state)
    assert states(cache)[4] == (2 if after is SessionState.EXPIRED else 0)
