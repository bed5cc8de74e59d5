"""What leaves first, seen from requests: by priority, and under each eviction policy."""

from __future__ import annotations

import random

import pytest

from kvcached.core.cache import Cache
from kvcached.core.eviction.by_priority import POLICIES
from kvcached.core.insight.invariants import check
from kvcached.core.namespaces import PoolSpec
from kvcached.core.refusals import Refusal
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, keys_of
from tests.core.host_tier import Workers, crowd_out, host_hit, make_tiers
from tests.core.offload_engine import OffloadEngine, make_offload


def make(policy: str, *, slots: int = 16, host_slabs: int = 0, per_slab: int = 16) -> Cache:
    """A cache with one pool, whose device and host slots are evicted by a policy."""
    spec = PoolSpec("a", b"namespace", BLOCK_SIZE, slots, host_slots_per_slab=per_slab, eviction_policy=policy)
    return Cache([spec], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=host_slabs, host_eviction_policy=policy)


def acquire(engine: Engine, text: str, priority: int) -> None:
    """Compute and release a prompt of a priority, unless part of it has to be loaded first."""
    name = f"{text} at {priority}"
    grant = engine.cache.managed.acquire(
        engine.session, engine.epoch, name, keys_of(text), len(text) * BLOCK_SIZE, 0, full=True, priority=priority
    )
    if grant.hit < len(text) and not grant.loads:
        engine.commit(grant, text)
    engine.release(grant)


def take(engine: Engine, slots: int) -> None:
    """Need so many slots for a moment."""
    engine.release(engine.acquire("", reserve=slots))


# --- two segments -----------------------------------------------------------------------------------------------------


def test_prompt_that_was_hit_again_outlives_a_scan() -> None:
    """Under slru a prompt with a second request stays while newer ones without one go; under lru it goes first."""
    left = {}
    for policy in POLICIES:
        cache = make(policy, slots=20)
        engine = Engine(cache)
        engine.store("abcd")
        engine.release(engine.acquire("abcd"))
        for text in ("0123", "4567", "89xy", "pqrs"):
            engine.store(text)
        take(engine, 4)
        left[policy] = engine.hit("abcd"), engine.hit("0123")
        assert check(cache) == []

    assert left == {"lru": (0, 4), "slru": (4, 0)}


def test_new_part_of_a_prompt_goes_before_the_part_that_was_hit() -> None:
    """A conversation's last turn, which nobody has hit, leaves without the turns before it, though it is one run."""
    cache = make("slru")
    engine = Engine(cache)
    engine.store("abcd")
    engine.store("abcdefgh")  # hits four blocks, goes on in the same run
    engine.store("0123")
    assert len(list(cache.trees[0].runs())) == 2
    take(engine, 10)

    assert (engine.hit("abcdefgh"), engine.hit("0123")) == (4, 2)
    assert check(cache) == []


def test_prefix_that_branches_is_hit_and_its_branches_are_not() -> None:
    """A common beginning was found by a second request; when its branches have gone it outlives what was not."""
    cache = make("slru")
    engine = Engine(cache)
    engine.store("abxy")
    engine.store("abuv")
    take(engine, 14)
    assert engine.hit("abxy") == 2

    engine.store("0123456789")
    take(engine, 13)
    assert (engine.hit("abxy"), engine.hit("0123456789")) == (2, 1)
    assert check(cache) == []


def test_host_pool_has_its_own_two_segments() -> None:
    """A prompt that is loaded again counts as hit in the host pool, and stays there while others go."""
    cache = make("slru", slots=32, host_slabs=1, per_slab=20)
    engine, workers = Engine(cache), Workers(cache)
    engine.store("abcd")
    workers.answer_all()
    crowd_out(engine)
    grant = engine.acquire("abcd")
    workers.answer_all()
    engine.release(grant)
    for text in ("0123", "4567", "89mn", "pqrs", "xyz"):
        engine.store(text)
        workers.answer_all()
    crowd_out(engine)

    assert [host_hit(engine, text)[1] for text in ("abcd", "0123", "4567", "xyz")] == [4, 1, 4, 3]
    assert check(cache) == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_under_every_policy(policy: str, seed: int) -> None:
    """Over random prompts, priorities, evictions and copies every invariant holds, and no slot is lost."""
    rng = random.Random(seed)
    cache = make(policy, slots=24, host_slabs=2, per_slab=8)
    engine, workers = Engine(cache), Workers(cache)
    for step in range(250):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 9)))
        try:
            acquire(engine, text, rng.randrange(-2, 3))
        except Refusal:
            workers.answer_all()
        if step % 3 == 0:
            workers.answer_all()
        if step % 25 == 0:
            assert check(cache) == []
    workers.answer_all()
    crowd_out(engine)

    assert (check(cache), cache.pools["a"].free) == ([], 24)


# --- in batches ------------------------------------------------------------------------------------------------------


def prompt(number: int) -> str:
    """Four blocks that no other number has."""
    return chr(0x4E00 + number) + "abc"


def test_eviction_frees_a_part_of_the_pool_at_once() -> None:
    """All of a pool is used before anything is evicted, and then a 64th of it goes at once."""
    cache = make("lru", slots=640)
    engine, pool = Engine(cache), cache.pools["a"]
    batches = []
    for number in range(400):
        before = cache.counters["evicted_blocks"]
        engine.store(prompt(number))
        batches.append(cache.counters["evicted_blocks"] - before)
    assert (batches[:160], pool.free) == ([0] * 160, 0)
    assert {batch for batch in batches if batch} == {12}  # ten, and what is left of the last prompt
    assert check(cache) == []


# --- priorities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_lower_priorities_go_first(policy: str) -> None:
    """However old the blocks of a request with a high priority are, those of lower ones go before them."""
    cache = make(policy)
    engine = Engine(cache)
    for text, priority in (("abcd", 2), ("0123", 0), ("xyuv", -1)):
        acquire(engine, text, priority)
    lost: list[str] = []
    for _ in range(3):
        take(engine, 16 - 4 * (2 - len(lost)))
        lost.append(next(text for text in ("abcd", "0123", "xyuv") if not engine.hit(text) and text not in lost))

    assert lost == ["xyuv", "0123", "abcd"]
    assert check(cache) == []


def test_blocks_have_the_highest_priority_of_those_that_use_them() -> None:
    """A hit by a request of a higher priority raises that of the blocks; one of a lower priority leaves it."""
    cache = make("lru")
    engine = Engine(cache)
    acquire(engine, "abcd", 0)
    acquire(engine, "abcd", 3)
    acquire(engine, "abcd", -4)
    acquire(engine, "0123", 1)
    acquire(engine, "xyuv", 1)
    take(engine, 12)

    assert (engine.hit("abcd"), engine.hit("0123"), engine.hit("xyuv")) == (4, 0, 0)


def test_beginning_of_a_prompt_has_the_priority_of_what_continued_it() -> None:
    """When the end of a prompt with a high priority is evicted, what comes before it is not taken for unimportant."""
    cache = make("lru")
    engine = Engine(cache)
    for text, priority in (("abxy", 0), ("abuv", 0), ("abxy", 5)):
        acquire(engine, text, priority)
    held = cache.managed.acquire(engine.session, engine.epoch, "r", keys_of("0123456789"), 40, 0, full=True, priority=4)
    engine.commit(held, "0123456789")
    take(engine, 4)
    assert (engine.hit("abxy"), engine.hit("abuv")) == (2, 2)
    engine.release(held)
    take(engine, 13)

    assert (engine.hit("abxy"), engine.hit("0123456789")) == (2, 1)
    assert check(cache) == []


def test_host_copies_have_the_priority_of_the_blocks() -> None:
    """What is copied from a device keeps its priority in the host pool."""
    cache = make("lru", slots=32, host_slabs=1, per_slab=8)
    engine, workers = Engine(cache), Workers(cache)
    for text, priority in (("abcd", 1), ("0123", 0), ("xyuv", 0)):
        acquire(engine, text, priority)
        workers.answer_all()
    crowd_out(engine)

    assert [host_hit(engine, text)[1] for text in ("abcd", "0123", "xyuv")] == [4, 0, 4]
    assert check(cache) == []


def test_priorities_of_engines_in_offload_mode() -> None:
    """Their requests' priorities order the host pool."""
    cache = make_offload(slabs=2)
    engine = OffloadEngine(cache)
    for text, priority in (("abcd", 1), ("0123", 0), ("xyuv", 0)):
        lease = engine.core.acquire(
            engine.session, text, keys_of(text), len(text) * BLOCK_SIZE, full=True, priority=priority
        )
        plan = engine.prepare(lease, text)
        engine.commit(plan.transfer)
        engine.release(lease)

    assert [engine.hit(text) for text in ("abcd", "0123", "xyuv")] == [4, 0, 4]
    assert check(cache) == []


def test_load_back_counts_as_a_use_of_the_host_copy() -> None:
    """What is loaded from the host pool is not the next to be evicted there."""
    cache = make_tiers(slots=32, host_slabs=1, slots_per_slab=8)
    engine, workers = Engine(cache), Workers(cache)
    for text in ("abcd", "0123"):
        engine.store(text)
        workers.answer_all()
    crowd_out(engine)
    grant = engine.acquire("abcd")
    workers.answer_all()
    engine.release(grant)
    engine.store("xyuv")
    workers.answer_all()
    crowd_out(engine)

    assert [host_hit(engine, text)[1] for text in ("abcd", "0123", "xyuv")] == [4, 0, 4]
