"""No new copies while somebody has asked for that: requests go on without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.explain import explain
from kvcached.core.messages import StartTransfer, Ticked
from kvcached_client.types import MissReason, TransferId
from tests.core.engine import Engine, keys_of, refused
from tests.core.host_tier import Workers, crowd_out, host_hit, stored
from tests.core.offload_engine import OffloadEngine


@pytest.mark.parametrize("replica", ["a", ""])
def test_nothing_is_stored_while_paused(new_tiers: Callable[..., Cache], replica: str) -> None:
    """What is committed meanwhile is copied after the end of the pause, a tick of the clock notwithstanding."""
    cache = new_tiers()
    workers = Workers(cache)
    cache.pause(replica)
    Engine(cache).store("abcd")
    cache.handle(Ticked(1))
    assert workers.started() == []
    cache.resume(replica)

    (store,) = workers.started()
    assert len(store.spans[0].keys) == 4 * 16


def test_nothing_is_demoted_while_paused(new_tiers: Callable[..., Cache]) -> None:
    """The watermark is left as it is, and nothing is stored for it."""
    cache = new_tiers(slots=8, watermark=4)
    engine = Engine(cache)
    cache.pause()
    engine.store("abcdef")

    assert Workers(cache).started() == []
    assert cache.pools["a"].free == 2


def test_hit_of_a_paused_replica_is_what_its_device_has(new_tiers: Callable[..., Cache]) -> None:
    """Blocks that only the host pool has are computed; the host pool keeps them, and why is told."""
    cache = new_tiers()
    engine = stored(cache, "abcdef")
    crowd_out(engine)
    cache.pause("a")
    engine.store("ab")
    held = host_hit(engine, "abcdef")
    miss = explain(cache, cache.tree_of("a"), cache.pools["a"], keys_of("abcdef"), 6)
    grant = engine.acquire("abcdef")

    assert (sum(held), grant.hit, grant.loads) == (6, 2, ())
    assert (miss.hit, miss.reason) == (2, MissReason.PAUSED)
    engine.release(grant)
    cache.resume("a")
    assert engine.acquire("abcdef").hit == 6


def test_copies_under_way_go_on(new_tiers: Callable[..., Cache]) -> None:
    """A load that runs, and one that waits for a store, end as they would have; another request still joins them."""
    cache = new_tiers("ab")
    workers = Workers(cache)
    engine = Engine(cache, "a")
    engine.store("abcd")
    (store,) = workers.started()
    other = Engine(cache, "b")
    grant = other.acquire("abcd")
    cache.pause()
    assert (cache.copies_under_way(), cache.copies_under_way("b"), grant.hit) == (2, 1, 4)
    assert other.acquire("abcd").loads == grant.loads

    workers.answer(store)
    (load,) = workers.started()
    assert (cache.copies_under_way(), cache.copies_under_way("a")) == (1, 0)
    workers.answer(load)
    assert cache.copies_under_way() == 0
    assert other.hit("abcd") == 4


def test_other_replicas_are_not_paused(new_tiers: Callable[..., Cache]) -> None:
    """A pause of one replica leaves the others, of its own namespace too, and offload engines as they were."""
    cache = new_tiers("ab")
    cache.pause("a")
    Engine(cache, "b").store("abcd")

    assert [each.pool for each in Workers(cache).started()] == ["b"]
    assert not cache.offload.paused


def test_pauses_are_not_counted(new_tiers: Callable[..., Cache]) -> None:
    """Pausing twice is ended by one resume, that of everything included, and a resume of what runs does nothing."""
    cache = new_tiers()
    cache.resume("a")
    cache.pause("a")
    cache.pause()
    cache.resume()
    Engine(cache).store("abcd")

    assert len(Workers(cache).started()) == 1


def test_pause_of_everything_ends_with_the_pause_of_a_part(new_tiers: Callable[..., Cache]) -> None:
    """Who has paused everything is not told that it holds after one replica has been resumed."""
    cache = new_tiers()
    cache.pause()
    assert (cache.is_paused(), cache.is_paused("a")) == (True, True)
    cache.resume("a")

    assert (cache.is_paused(), cache.is_paused("a")) == (False, False)
    cache.pause("a")
    assert cache.is_paused()


def test_offload_engines_compute_while_paused(new_offload: Callable[..., Cache]) -> None:
    """Loads are refused with a name, stores find nothing to do; afterwards both go on, with the same leases."""
    cache = new_offload()
    engine = OffloadEngine(cache)
    engine.store("abcd")
    lease = engine.acquire("abcd")
    longer = engine.acquire("abcdef")
    cache.pause()

    with refused("paused"):
        engine.core.prepare_load(engine.session, lease.id, 0, 4)
    plan = engine.prepare(longer, "abcdef")
    assert (plan.transfer, plan.depth, plan.pieces) == (TransferId(0), 4, [])
    assert cache.copies_under_way() == 0
    cache.resume()
    assert engine.core.prepare_load(engine.session, lease.id, 0, 4).transfer
    assert engine.prepare(longer, "abcdef").depth == 6
    assert cache.copies_under_way() == 2
    assert not any(isinstance(each, StartTransfer) for each in cache.effects)
