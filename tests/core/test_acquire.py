"""Acquire, allocate and release: whole or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvcached.core.cache import Cache
from kvcached.core.session import Leases
from kvcached.core.slots.slots import IllegalTransition
from kvcached.core.slots.states import SlotState
from kvcached_client.types import FenceSequence, LeaseId, unpack_ranges
from tests.core.engine import (
    BLOCK_SIZE,
    EPOCH,
    Engine,
    Injected,
    healthy,
    keys_of,
    make_cache,
    refused,
    snapshot,
    states,
)
from tests.core.line_count import count_lines


def test_hit_leaves_one_token_to_compute(cache: Cache) -> None:
    """A prompt that ends on a block boundary hits all its blocks but the last, unless the caller asks for all."""
    engine = Engine(cache)
    engine.store("abcd")

    assert engine.acquire("abcd", full=False).hit == 3
    assert engine.acquire("abcd", full=True).hit == 4


def test_grant_covers_the_rest_of_the_prompt_and_the_reserve(cache: Cache) -> None:
    """Exclusive slots are one formula: blocks of the prompt, partial one included, minus the hit, plus the reserve."""
    engine = Engine(cache)
    engine.store("ab")
    keys = keys_of("abc")

    grant = cache.managed.acquire(engine.session, EPOCH, "r", keys, 3 * BLOCK_SIZE + 1, 2, full=False)

    assert grant.hit == 2
    assert sum(count for _, count in unpack_ranges(grant.ranges)) == 4 - 2 + 2


def test_empty_prompt_is_an_ordinary_lease(cache: Cache) -> None:
    """No tokens and no reserve: a lease that holds nothing and can be released."""
    engine = Engine(cache)
    grant = engine.acquire("")

    assert (grant.hit, grant.hit_ranges, grant.ranges) == (0, b"", b"")
    engine.release(grant)


def test_no_capacity_evicts_nothing(cache: Cache) -> None:
    """Asking for more than is free and evictable changes nothing and says how much there is."""
    engine = Engine(cache)
    engine.store("abcdef")
    engine.acquire("ABCDEFGH")
    before = snapshot(cache)

    with refused("no_capacity") as caught:
        engine.acquire("abcdefghi0123456", full=True)

    assert caught.value.about.items() >= {"slots": 16, "free": 2, "evictable": 0}.items()
    assert snapshot(cache) == before


def test_acquire_is_idempotent_by_request(cache: Cache) -> None:
    """The same request again gets the same lease and the same slots, once."""
    engine = Engine(cache)
    engine.store("ab")
    first = engine.acquire("abcd", request="one")
    before = snapshot(cache)

    assert engine.acquire("abcd", request="one") == first
    assert snapshot(cache) == before


def test_another_prompt_under_a_live_request_is_a_conflict(cache: Cache) -> None:
    """A request id names one request at a time, even where another prompt has the same length."""
    engine = Engine(cache)
    engine.store("abcd")
    grant = engine.acquire("abcd", request="one")

    with refused("request_conflict"):
        engine.acquire("abcde", request="one")
    with refused("request_conflict"):
        engine.acquire("ABCD", request="one")
    with refused("request_conflict"):
        engine.acquire("abcd", request="one", full=False)
    engine.release(grant)
    assert engine.acquire("abcde", request="one").lease != grant.lease


@pytest.mark.parametrize(
    "step",
    ["tree.match", "tree.lock", "tree.path_ranges", "tree.touch", "tree.evict", "pool.take", "leases.add"],
)
@pytest.mark.interpreted
def test_acquire_that_fails_at_any_step_leaves_nothing_behind(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Each step of acquire in turn raises: no pin, no slot and no lease stays, and the next acquire works."""
    engine = Engine(cache)
    engine.store("abcdef")
    engine.store("ABCDEF")
    session = cache.managed.sessions[engine.session]
    owner: Any = {"tree": session.tree, "pool": session.pool, "leases": Leases}[step.split(".", maxsplit=1)[0]]

    def fail(*_: object, **__: object) -> None:
        raise Injected

    target = type(session.pool) if step == "pool.take" else owner
    with monkeypatch.context() as patch:
        patch.setattr(target, step.split(".")[1], fail)
        with pytest.raises(Injected):
            engine.acquire("abcdef01", reserve=4)  # a hit, fresh slots, and an eviction

    assert healthy(cache)
    assert (session.leases, session.leases.by_request, session.pool.protected) == ({}, {}, 0)
    assert states(cache)[SlotState.LEASED] == 0
    assert engine.acquire("abcdef01", reserve=4).hit == 6


def test_commit_that_is_refused_changes_nothing(cache: Cache) -> None:
    """A commit out of order, of foreign slots or of too many slots leaves the lease where it was."""
    engine = Engine(cache)
    grant, other = engine.acquire("abcd"), engine.acquire("ABCD")
    keys, none = keys_of("abcd"), FenceSequence(0)
    mine, theirs = array("i", grant.ranges), array("i", other.ranges)
    before = snapshot(cache)

    with refused("out_of_order"):
        cache.managed.commit(engine.session, EPOCH, grant.lease, 1, keys, mine, none)
    with refused("unknown_slot"):
        cache.managed.commit(engine.session, EPOCH, grant.lease, 0, keys, theirs, none)
    with refused("bad_value"):
        cache.managed.commit(engine.session, EPOCH, grant.lease, 0, keys[:32], mine, none)
    assert snapshot(cache) == before


def test_commit_of_scattered_slots_takes_no_longer_than_sorting_them(cache: Cache) -> None:
    """Slots named one by one, in any order, cost a sort and one pass: no request can hold up the others."""
    big = make_cache(slots=40_000)
    engine = Engine(big)
    grant = engine.acquire("a" * 1, reserve=39_999)
    slots = array("i")
    for slot in range(39_998, -1, -2):
        slots.extend((slot, 1))
    keys = b"".join(index.to_bytes(16) for index in range(20_000))
    count_lines(
        lambda: big.managed.commit(engine.session, EPOCH, grant.lease, 0, keys, slots, FenceSequence(0)),
        most=60 * 20_000,
    )

    assert big.pools["a"].counts[SlotState.CACHED] == 20_000


def test_finish_commits_and_releases_or_does_neither(cache: Cache) -> None:
    """One message ends a request; when its commit is refused the lease stays."""
    engine = Engine(cache)
    grant = engine.acquire("abcd")
    ranges, none = array("i", grant.ranges), FenceSequence(0)

    with refused("out_of_order"):
        cache.managed.finish(engine.session, EPOCH, grant.lease, 2, keys_of("abcd"), ranges, none)
    assert grant.lease in cache.managed.sessions[engine.session].leases
    done = cache.managed.finish(engine.session, EPOCH, grant.lease, 0, keys_of("abcd"), ranges, none)

    assert (done.adopted, states(cache)[:3]) == (4, (12, 0, 4))


def test_decoding_extends_the_same_run(cache: Cache) -> None:
    """Blocks committed one by one while decoding are one run in the end, and neighbours in the pool."""
    engine = Engine(cache)
    grant = engine.acquire("ab")
    engine.commit(grant, "ab")
    for index, text in enumerate(["abc", "abcd", "abcde"], start=2):
        slots = array("i", cache.managed.allocate(engine.session, EPOCH, grant.lease, 1))
        cache.managed.commit(
            engine.session, EPOCH, grant.lease, index, keys_of(text)[16 * index :], slots, FenceSequence(0)
        )
    engine.release(grant)

    (run,) = cache.trees[0].runs()
    segment = run.segments[0]
    assert segment is not None
    assert (run.start, run.end, list(segment.ranges)) == (0, 5, [0, 5])


LEASES = ["held", "released", "foreign", "never"]


@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("operation", ["allocate", "commit", "release", "finish"])
def test_every_lease_state_times_every_operation(new_cache: Callable[..., Cache], lease: str, operation: str) -> None:
    """A held lease is served; a released, a foreign and an unknown one are refused by name, and nothing changes."""
    cache = new_cache(names="ab")
    engine, other = Engine(cache, "a"), Engine(cache, "b")
    held, released, foreign = engine.acquire("ab"), engine.acquire("AB"), other.acquire("ab")
    engine.release(released)
    grant = {"held": held, "released": released, "foreign": foreign, "never": None}[lease]
    lease_id = LeaseId(1 << 40) if grant is None else grant.lease
    session, none = engine.session, FenceSequence(0)
    ranges = array("i", held.ranges)
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: cache.managed.allocate(session, EPOCH, lease_id, 1),
        "commit": lambda: cache.managed.commit(session, EPOCH, lease_id, 0, keys_of("ab"), ranges, none),
        "release": lambda: cache.managed.release(session, EPOCH, lease_id, none),
        "finish": lambda: cache.managed.finish(session, EPOCH, lease_id, 0, keys_of("ab"), ranges, none),
    }
    before = snapshot(cache)

    if lease == "held":
        calls[operation]()

        assert snapshot(cache) != before
    else:
        code = {"released": "already_released", "foreign": "foreign_lease", "never": "unknown_lease"}[lease]
        with refused(code):
            calls[operation]()
        assert snapshot(cache) == before


def test_core_bug_raises_with_a_story_instead_of_freeing_twice(cache: Cache) -> None:
    """Were a lease released twice past every check, the pool would refuse and tell what happened to the slot."""
    engine = Engine(cache)
    grant = engine.acquire("ab")
    session = cache.managed.sessions[engine.session]
    lease = session.leases[grant.lease]
    engine.release(grant)
    session.leases.add(lease)

    with pytest.raises(IllegalTransition, match="release of lease 1: LEASED -> FREE"):
        engine.release(grant)
    session.leases.clear()
    session.leases.by_request.clear()
