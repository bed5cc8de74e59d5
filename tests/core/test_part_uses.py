"""A request that uses the beginning of another's prompt says nothing of the rest, which stays old and unimportant."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from itertools import groupby

import pytest

from kvcached.core.cache import Cache
from kvcached.core.eviction.by_priority import POLICIES
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.part_uses import PART_USES_MAX
from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.index.run_tree import resident
from kvcached.core.insight.invariants import check
from kvcached.core.namespaces import PoolSpec
from kvcached.core.slots.states import SlotState
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, keys_of
from tests.core.host_tier import Workers, crowd_out, host_hit, host_of
from tests.core.offload_engine import OffloadEngine, space

#: A block's last use and priority.
_Use = tuple[int, int | None]


def compute(engine: Engine, text: str, priority: int) -> None:
    """A request, whose blocks are computed as far as they are not there."""
    name, tokens = f"{text} at {priority}", len(text) * BLOCK_SIZE
    grant = engine.cache.managed.acquire(
        engine.session, EPOCH, name, keys_of(text), tokens, 0, full=True, priority=priority
    )
    engine.commit(grant, text)
    engine.release(grant)


class DevicePoolUser:
    """Requests to a device pool of 40 slots."""

    def __init__(self, policy: str) -> None:
        spec = PoolSpec("a", b"namespace", BLOCK_SIZE, 40, eviction_policy=policy)
        self.cache = Cache([spec], epoch=EPOCH, session_ttl_ms=TTL_MS)
        self._engine = Engine(self.cache)
        self.hit = self._engine.hit

    def use(self, text: str, priority: int = 0) -> None:
        """A request, whose blocks are computed as far as they are not there."""
        compute(self._engine, text, priority)

    def free(self, count: int) -> None:
        """Evict so many blocks."""
        self.cache.trees[0].evict(count, 0, "test")


class HostPoolUser:
    """Requests of an engine in offload mode to a host pool of 40 slots."""

    def __init__(self, policy: str) -> None:
        self.cache = Cache(
            [], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=10, namespaces_max=1, host_eviction_policy=policy
        )
        self._engine = OffloadEngine(self.cache, space())
        self.hit = self._engine.hit

    def use(self, text: str, priority: int = 0) -> None:
        """A request, whose blocks are stored as far as they are not there."""
        lease = self._engine.acquire(text, priority=priority)
        plan = self._engine.prepare(lease, text)
        if plan.transfer:
            self._engine.commit(plan.transfer)
        self._engine.release(lease)

    def free(self, count: int) -> None:
        """Evict so many blocks."""
        self.cache.trees[0].shed_host("test", count)


User = DevicePoolUser | HostPoolUser
both_pools = pytest.mark.parametrize("make", [DevicePoolUser, HostPoolUser])
#: Others use so many of ten blocks, and then either end or go on with a block of their own.
part = pytest.mark.parametrize("depth", [1, 5, 9])
splits = pytest.mark.parametrize("end", ["", "x"])


def evicted(user: User, *prompts: str) -> list[tuple[int, ...]]:
    """What is left of some prompts, block by block, until nothing is."""
    left = [tuple(user.hit(text) for text in prompts)]
    while any(left[-1]):
        user.free(1)
        left.append(tuple(user.hit(text) for text in prompts))
    assert check(user.cache) == []
    return left


@both_pools
@part
@splits
@pytest.mark.parametrize("policy", POLICIES)
def test_rest_of_a_prompt_is_no_newer_than_its_own_last_use(
    make: Callable[[str], User], depth: int, end: str, policy: str
) -> None:
    """A prompt of which others have used some blocks lately loses the blocks behind these before newer prompts go."""
    user = make(policy)
    old, newer = "a123456789", "b123456789"
    user.use(old)
    user.use(newer)
    user.use(old[:depth] + end)

    left = evicted(user, old, newer)
    assert left[10 - depth] == (depth, 10)
    assert left[-1 - depth] == (depth, 0)


@both_pools
@part
@splits
def test_rest_of_a_prompt_has_no_priority_of_those_that_do_not_use_it(
    make: Callable[[str], User], depth: int, end: str
) -> None:
    """An important request that shares some blocks with an unimportant prompt keeps these, and none behind them."""
    user = make("lru")
    unimportant, ordinary = "a123456789", "b123456789"
    user.use(unimportant, -8)
    user.use(ordinary)
    user.use(unimportant[:depth] + end, 7)
    user.use(unimportant, -8)  # all of it is newer than the ordinary one, which does not help it

    left = evicted(user, unimportant, ordinary)
    assert left[10 - depth] == (depth, 10)
    assert left[-1 - depth] == (depth, 0)


@both_pools
@splits
def test_parts_of_several_lengths_keep_their_own_priorities(make: Callable[[str], User], end: str) -> None:
    """Of blocks that were used by requests of several priorities, those of lower ones go first."""
    user = make("lru")
    text, others = "a123456789", ["b12", "c12", "d12"]
    for other, priority in zip(others, (-5, 0, 5), strict=True):
        user.use(other, priority)
    user.use(text, -8)
    for depth, priority in ((2, 7), (6, 1), (8, -2)):
        user.use(text[:depth] + end, priority)

    shown = [hits for hits, _ in groupby(evicted(user, text, *others)) if all(hit in {0, 3} for hit in hits[1:])]
    steps = [hits for hits in shown if hits[0] in {10, 8, 6, 2, 0}]
    assert steps == [
        (10, 3, 3, 3),
        (8, 3, 3, 3),
        (8, 0, 3, 3),
        (6, 0, 3, 3),
        (6, 0, 0, 3),
        (2, 0, 0, 3),
        (2, 0, 0, 0),
        (0, 0, 0, 0),
    ]


@both_pools
def test_unimportant_continuation_does_not_inherit_a_priority(make: Callable[[str], User]) -> None:
    """Blocks that an unimportant request adds to an important prompt go before ordinary ones; the prompt stays."""
    user = make("lru")
    important, ordinary = "a1234", "b1234"
    user.use(important, 7)
    user.use(ordinary)
    user.use(important + "56789", -8)

    left = evicted(user, important + "56789", ordinary)
    assert [left[at] for at in (5, 10, 15)] == [(5, 5), (5, 0), (0, 0)]


def test_host_copy_has_the_priorities_of_the_parts_on_the_device() -> None:
    """What is copied after an important request has used a part keeps that part, and not the rest, in the host pool."""
    spec = PoolSpec("a", b"namespace", BLOCK_SIZE, 40, host_slots_per_slab=4)
    cache = Cache([spec], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=10)
    engine, workers = Engine(cache), Workers(cache)
    for text, priority in (("a123456789", -8), ("b123456789", 0), ("a12", 7)):
        compute(engine, text, priority)
    workers.answer_all()
    crowd_out(engine)
    left = []
    for _ in range(3):
        left.append((host_hit(engine, "a123456789")[1], host_hit(engine, "b123456789")[1]))
        cache.trees[0].shed_host("test", 7)

    assert left == [(10, 10), (3, 10), (3, 3)]
    assert check(cache) == []


def test_copies_that_also_fill_a_hole_have_their_own_priority() -> None:
    """What continues an important prompt stays unimportant in the host pool when a hole before it is filled at once."""
    spec = PoolSpec("a", b"namespace", BLOCK_SIZE, 40, host_slots_per_slab=4)
    cache = Cache([spec], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=10)
    engine, workers, tree = Engine(cache), Workers(cache), cache.trees[0]
    compute(engine, "a1234", 7)
    workers.answer_all()
    run, _ = tree.match(keys_of("a1234"), 5, HOST)
    corrupt = tree.path_slots(run, 2, 3, HOST)
    tree.punch_host(run, [Piece(2, 3)])
    host_of(cache).move(corrupt, SlotState.CACHED, SlotState.FREE, "test")
    compute(engine, "a1234567", 0)
    workers.answer_all()

    assert [priority or 0 for _, priority in used(resident(run, HOST))] == [7] * 5 + [0] * 3
    assert check(cache) == []


def test_use_of_a_part_is_no_older_than_what_joins_the_prompt_later() -> None:
    """A prompt that goes on is newer in all of its blocks than another's use of the first ones meanwhile."""
    cache = Cache([], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=10, namespaces_max=1)
    engine = OffloadEngine(cache, space())
    lease = engine.acquire("a1234567")
    engine.commit(engine.prepare(lease, "a1234").transfer)
    engine.store("a1")
    segment = resident(lease.run, HOST)
    assert [use.end for use in segment.part_uses] == [2]
    engine.prepare(lease, "a1234567")

    assert [use.last_used for use in segment.part_uses] == [segment.last_used]
    assert check(cache) == []


def test_slab_with_an_old_prompt_is_emptied_although_its_first_block_is_in_use() -> None:
    """Where slabs are wanted, blocks count as recent as they were used, not as recent as the first of their prompt."""
    user = HostPoolUser("lru")
    user.use("a1234567")
    user.use("b1234567")
    user.use("a")
    user.cache.trees[0].evict_slabs(1, "test")

    assert (user.hit("a1234567"), user.hit("b1234567")) == (4, 8)


# --- one segment ------------------------------------------------------------------------------------------------------


def used(segment: Segment) -> list[_Use]:
    """What a segment says of each of its blocks."""
    blocks: list[_Use] = [(segment.last_used, segment.priority)] * segment.length
    for use in segment.part_uses:
        for at in range(use.end - segment.run.start):
            blocks[at] = max(segment.last_used, use.last_used), use.priority
    return blocks


def use_each(blocks: list[_Use], count: int, stamp: int, priority: int) -> None:
    """The first blocks are used."""
    for at, (_, known) in enumerate(blocks[:count]):
        blocks[at] = stamp, priority if known is None else max(known, priority)


@pytest.mark.parametrize("depths", [PART_USES_MAX, 30])
@pytest.mark.parametrize("seed", range(10))
def test_segment_remembers_each_block_s_last_use_and_priority(seed: int, depths: int) -> None:
    """Over random uses, cuts and splits it says of each block what a list of all blocks does.

    If requests end at more depths than it remembers, it takes some blocks for newer or more important, none for less.
    """
    rng = random.Random(seed)
    run = Run(bytes(KEY_SIZE * 30), 5, None, 1)
    segment = Segment(run, None, array("i", [0, 30]), 30, 1)
    segment.use(run.end, 1, 0)
    blocks: list[_Use] = [(1, 0)] * 30
    ends = sorted(rng.sample(range(6, 35), min(depths, 29)))
    for stamp in range(2, 200):
        end, priority = rng.choice([*ends, 35]), rng.randrange(-3, 4)
        if rng.randrange(40) == 0 and len(blocks) > 12:
            offset = rng.randrange(1, 4)
            front = segment.split(Run(bytes(run.keys[: KEY_SIZE * offset]), run.start, None, 1), offset)
            assert_remembered(used(front), blocks[:offset], is_exact=depths <= PART_USES_MAX)
            del blocks[:offset], run.keys[: KEY_SIZE * offset]
            run.start += offset
        elif rng.randrange(40) == 0 and len(blocks) > 12:
            segment.length -= 2
            segment.end_part_uses()
            del blocks[-2:]
        elif end > run.start:
            segment.use(end, stamp, priority)
            use_each(blocks, end - run.start, stamp, priority)
        assert len(segment.part_uses) <= PART_USES_MAX
        assert_remembered(used(segment), blocks, is_exact=depths <= PART_USES_MAX)


def assert_remembered(found: list[_Use], right: list[_Use], *, is_exact: bool) -> None:
    """Each block is as recent and as important as it should be, or more."""
    assert len(found) == len(right)
    if is_exact:
        assert found == right
    for (stamp, priority), (right_stamp, right_priority) in zip(found, right, strict=True):
        assert stamp >= right_stamp
        assert (priority or 0) >= (right_priority or 0)
