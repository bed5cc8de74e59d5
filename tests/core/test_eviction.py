"""What leaves first, seen from requests: by priority, and under each eviction policy."""

from __future__ import annotations

import random

import pytest

from kvcached.core.cache import Cache
from kvcached.core.eviction.by_priority import POLICIES, ByPriority
from kvcached.core.eviction.slru import SegmentedLeastRecentlyUsed
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.insight.invariants import check
from kvcached.core.messages import BackupSettled, Grant, StartBackup, StorageReady
from kvcached.core.namespaces import PoolSpec
from kvcached.core.refusals import Refusal
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, keys_of
from tests.core.host_tier import Workers, crowd_out, host_hit, make_tiers
from tests.core.offload_engine import OffloadEngine, make_offload, space


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


def make_stored(policy: str, backup: BackupPolicy) -> Cache:
    """A cache whose host pool has a hundred slots and storage below it, which looks at all victims to come."""
    cache = Cache(
        [],
        epoch=EPOCH,
        session_ttl_ms=TTL_MS,
        host_slabs=10,
        namespaces_max=1,
        host_eviction_policy=policy,
        storage=StorageSpec(backup, 100),
    )
    cache.handle(StorageReady())
    return cache


def back_up(cache: Cache) -> None:
    """Storage writes whatever it is asked to, until nothing is."""
    cache.settle()
    while cache.effects:
        orders, cache.effects[:] = [each for each in cache.effects if isinstance(each, StartBackup)], []
        for order in orders:
            cache.handle(BackupSettled(order.transfer, sum(len(span.keys) // KEY_SIZE for span in order.spans)))
        cache.settle()


def upper_blocks(cache: Cache) -> list[int]:
    """What can be evicted from the upper segments of each of a cache's pools now, which is what they count."""
    found = []
    for policy in cache.trees[0].policies:
        assert isinstance(policy, ByPriority)
        count = 0
        for each in policy._policies.values():
            if isinstance(each, SegmentedLeastRecentlyUsed):
                upper = [segment for segment, place in each._places.items() if place.half == 1]
                assert each._blocks[1] == sum(segment.evictable_tail for segment in upper)
                count += each._blocks[1]
        found.append(count)
    return found


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


def prompts(*letters: str) -> list[str]:
    """Ten blocks for each letter."""
    return [letter + "012345678" for letter in letters]


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_nobody_asks_for_any_more_make_room_in_a_device_pool(policy: str) -> None:
    """However many old prompts were hit, new ones are kept from their first request on."""
    cache = make(policy, slots=100)
    engine = Engine(cache)
    for text in [each for each in prompts(*"abcdefghij") for _ in range(2)]:
        acquire(engine, text, 0)
    hits = []
    for _ in range(3):
        hits.append([engine.hit(text) for text in prompts(*"wxyz")])
        for text in prompts(*"wxyz"):
            acquire(engine, text, 0)

    assert hits == [[0] * 4, [10] * 4, [10] * 4]
    assert (upper_blocks(cache), check(cache)) == ([20 if policy == "slru" else 0, 0], [])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backup", BackupPolicy)
def test_prompts_that_nobody_asks_for_any_more_make_room_in_the_host_pool(policy: str, backup: BackupPolicy) -> None:
    """As in a device pool, also where the next victims are looked at for storage."""
    cache = make_stored(policy, backup)
    engine = OffloadEngine(cache, space(per_slab=10))
    for text in [each for each in prompts(*"abcdefghij") for _ in range(2)]:
        engine.store(text)
        back_up(cache)
    hits = []
    for _ in range(3):
        hits.append([engine.hit(text) for text in prompts(*"wxyz")])
        for text in prompts(*"wxyz"):
            engine.store(text)
            back_up(cache)

    assert hits == [[0] * 4, [10] * 4, [10] * 4]
    assert (upper_blocks(cache), check(cache)) == ([20 if policy == "slru" else 0], [])


def test_prompt_of_which_a_part_has_gone_is_still_the_next_to_go() -> None:
    """A prompt that has left the protected segment goes as a whole, though room is needed a few blocks at a time."""
    cache = make("slru", slots=60)
    engine = Engine(cache)
    for text in [each for each in prompts(*"abcdef") for _ in range(2)]:
        acquire(engine, text, 0)
    left = []
    for slots in (3, 6, 9, 12):
        take(engine, slots)
        left.append([engine.hit(text) for text in prompts(*"abcdef")])

    assert left == [[7, *[10] * 5], [4, *[10] * 5], [1, *[10] * 5], [0, 8, *[10] * 4]]
    assert check(cache) == []


def test_looks_at_the_next_victims_do_not_change_them() -> None:
    """What storage's policy looks at before it has to leave the host pool leaves in the same order as without."""
    left: dict[BackupPolicy, list[list[int]]] = {}
    for backup in BackupPolicy:
        cache = make_stored("slru", backup)
        engine = OffloadEngine(cache, space(per_slab=10))
        rng, left[backup] = random.Random(1), []
        for text in rng.choices(prompts(*"abcdefghijklmnop"), k=150):
            engine.store(text[: rng.randrange(1, 11)])
            back_up(cache)
            left[backup].append([engine.hit(text) for text in prompts(*"abcdefghijklmnop")])

    assert left[BackupPolicy.ON_EVICTION] == left[BackupPolicy.NEVER]


@pytest.mark.parametrize("seed", range(4))
def test_protected_segment_counts_what_can_be_evicted_now(seed: int) -> None:
    """Over random prompts, leases and copies it counts its tails as they are, and never has more than its part."""
    rng = random.Random(seed)
    cache = make("slru", slots=40, host_slabs=3, per_slab=8)
    engine, workers = Engine(cache), Workers(cache)
    held: list[tuple[Grant, str]] = []
    for step in range(250):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 9)))
        try:
            held.append((engine.acquire(text), text))
        except Refusal:
            workers.answer_all()
        if held and rng.randrange(3):
            grant, text = held.pop(rng.randrange(len(held)))
            if not grant.loads:
                engine.commit(grant, text)
            engine.release(grant)
        if step % 3 == 0:
            workers.answer_all()
        assert all(blocks <= most for blocks, most in zip(upper_blocks(cache), (8, 4), strict=True))
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
