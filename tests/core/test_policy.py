"""Eviction order: by priority, then the least recently used evictable tail, or first one that was never hit again."""

from __future__ import annotations

import random

import pytest

from kvcached.core.eviction.by_priority import POLICIES, ByPriority, make_policy
from kvcached.core.eviction.lru import EvictionPolicy, LeastRecentlyUsed
from kvcached.core.eviction.slru import UPPER_PERCENT, SegmentedLeastRecentlyUsed
from kvcached.core.index.run import Run, Segment
from kvcached.core.slots.ranges import no_ranges

#: Of the pool that policies are told of.
SLOTS = 100


def make_segment(stamp: int, length: int = 1) -> Segment:
    """A tail of some blocks, last used at `stamp`."""
    return Segment(Run(bytes(16 * length), 0, None, 1), None, no_ranges(), length, stamp)


@pytest.mark.parametrize("seed", range(20))
def test_victims_come_in_order_of_last_use(seed: int) -> None:
    """Over random adds, touches, removals and pops, each victim is the oldest evictable tail that is there."""
    rng, policy = random.Random(seed), LeastRecentlyUsed()
    known: list[Segment] = []
    for clock in range(1, 2001):
        segment = rng.choice(known) if known else None
        match rng.randrange(6):
            case 0 | 1:  # a request ends, or an eviction lays a parent bare that was last used some time ago
                fresh = make_segment(clock if rng.randrange(2) else rng.randrange(clock))
                known.append(fresh)
                policy.add(fresh)
            case 2 if segment is not None:
                segment.last_used = clock
                policy.touch(segment)
            case 3 if segment is not None:  # it is pinned or gets a child, and is a tail again later
                segment.resident_children ^= 1
                if not segment.resident_children:
                    policy.add(segment)
            case 4 if segment is not None and rng.randrange(3) == 0:
                policy.remove(segment)
                known.remove(segment)
            case 5:
                tails = [each for each in known if not each.resident_children]
                victim = policy.pop()
                assert (victim is None) == (not tails)
                if victim is not None:
                    assert victim.last_used == min(each.last_used for each in tails)
                    known.remove(victim)


def test_parent_is_filed_by_its_own_last_use() -> None:
    """A segment that becomes a tail late goes between those used before and after it."""
    policy = LeastRecentlyUsed()
    for stamp in (10, 20, 30, 40):
        policy.add(make_segment(stamp))
    assert policy.pop().last_used == 10  # type: ignore[union-attr]
    policy.add(make_segment(35))
    policy.add(make_segment(15))

    order = [policy.pop() for _ in range(5)]

    assert [segment.last_used for segment in order if segment] == [15, 20, 30, 35, 40]


def test_entries_of_segments_that_left_do_not_pile_up() -> None:
    """However many segments come and go without an eviction, what the policy keeps is bounded by those that live."""
    policy = LeastRecentlyUsed()
    policy.add(make_segment(0))
    policy.add(make_segment(1 << 30))
    for stamp in range(1, 5000):
        segment = make_segment(stamp)
        policy.add(segment)
        policy.remove(segment)

    assert len(policy._queue) + len(policy._between) < 200


#: What it is sorted by, what it was moved to another half as, which one it was filed as.
_Order = tuple[int, int, int]


class Naive:
    """Two lists, searched from end to end: what `SegmentedLeastRecentlyUsed` must do."""

    def __init__(self) -> None:
        self.lower: list[Segment] = []
        self.upper: list[Segment] = []
        self.order: dict[Segment, _Order] = {}
        self.moved_down: dict[Segment, tuple[int, _Order]] = {}  #: last use then, and the order since
        self.filed = 0
        self.newest = 0

    def add(self, segment: Segment) -> None:
        used, order = self.moved_down.get(segment, (None, (0, 0, 0)))
        is_moved_down = used == segment.last_used
        is_upper = segment.hit_end >= segment.run.start + segment.length and not is_moved_down
        half = self.upper if is_upper else self.lower
        if segment not in half:
            self.remove(segment)
            self.filed += 1
            self.put(segment, half, order if is_moved_down else (segment.last_used, 0, self.filed))
        while self.size(self.upper) > SLOTS * UPPER_PERCENT // 100:
            oldest = min(self.upper, key=self.order.__getitem__)
            self.take(oldest)
            self.filed += 1
            order = max(self.newest, oldest.last_used), self.filed, 0
            self.moved_down[oldest] = oldest.last_used, order
            self.put(oldest, self.lower, order)

    def put(self, segment: Segment, half: list[Segment], order: _Order) -> None:
        half.append(segment)
        self.order[segment] = order
        if half is self.lower:
            self.newest = max(self.newest, order[0])

    def take(self, segment: Segment) -> None:
        (self.upper if segment in self.upper else self.lower).remove(segment)
        del self.order[segment]

    def size(self, half: list[Segment]) -> int:
        return sum(segment.evictable_tail for segment in half)

    def pop(self) -> Segment | None:
        while self.lower or self.upper:
            victim = min(self.lower or self.upper, key=self.order.__getitem__)
            self.take(victim)
            if not victim.resident_children:
                return victim
        return None

    def touch(self, segment: Segment) -> None:
        if segment in self.order:
            self.take(segment)
            self.add(segment)

    def remove(self, segment: Segment) -> None:
        if segment in self.order:
            self.take(segment)


def lock_or_unlock(segment: Segment, rng: random.Random, *policies: SegmentedLeastRecentlyUsed | Naive) -> None:
    """More or less of a segment can be evicted than before, or none."""
    if rng.randrange(2):
        segment.resident_children ^= 1
    else:
        segment.protected = rng.randrange(segment.length)
    if segment.queued or segment.evictable_tail:
        for each in policies:
            each.add(segment)


def look(rng: random.Random, policy: SegmentedLeastRecentlyUsed, naive: Naive) -> None:
    """The next victims are looked at and filed again, some of them without a part that they have lost."""
    asked = range(rng.randrange(1, 6))
    seen = [policy.pop() for _ in asked]
    assert seen == [naive.pop() for _ in asked]
    for victim in filter(None, reversed(seen)):
        victim.length -= rng.randrange(victim.evictable_tail) * rng.randrange(2)
        policy.add(victim)
        naive.add(victim)


@pytest.mark.parametrize("seed", range(20))
def test_segmented_victims_are_those_of_a_naive_implementation(seed: int) -> None:
    """Over random adds, hits, uses, locks, trims, looks and pops, each victim is the one that two searched lists name.

    Blocks are counted as they can be evicted now, not as they could be when their tail was filed.
    """
    rng, policy, naive = random.Random(seed), SegmentedLeastRecentlyUsed(SLOTS), Naive()
    known: list[Segment] = []
    for clock in range(1, 1501):
        segment = rng.choice(known) if known else None
        match rng.randrange(9):
            case 0 | 1:
                fresh = make_segment(clock if rng.randrange(2) else rng.randrange(clock), rng.randrange(1, 9))
                fresh.hit_end = rng.choice((0, 0, fresh.length))
                known.append(fresh)
                policy.add(fresh)
                naive.add(fresh)
            case 2 if segment is not None:
                segment.last_used = clock
                segment.hit_end = max(segment.hit_end, rng.choice((0, segment.length)))
                policy.touch(segment)
                naive.touch(segment)
            case 3 if segment is not None:
                lock_or_unlock(segment, rng, policy, naive)
            case 4 if segment is not None and rng.randrange(3) == 0:
                policy.remove(segment)
                naive.remove(segment)
                known.remove(segment)
            case 5:
                look(rng, policy, naive)
            case 6 | 7:
                victim = policy.pop()
                assert victim is naive.pop()
                if victim is not None:
                    known.remove(victim)
        assert policy._blocks == [naive.size(naive.lower), naive.size(naive.upper)]


def test_tail_that_was_hit_outlives_a_scan() -> None:
    """Tails that nobody has hit go first, however new they are."""
    policy = SegmentedLeastRecentlyUsed(SLOTS)
    hit = make_segment(1)
    hit.hit_end = 1
    for segment in (*map(make_segment, range(2, 12)), hit):
        policy.add(segment)

    assert [policy.pop() for _ in range(11)][-1] is hit


def test_tails_that_were_hit_do_not_fill_everything() -> None:
    """Of ever more tails that were hit once, the oldest ones go before a new one that was not."""
    policy = SegmentedLeastRecentlyUsed(SLOTS)
    for stamp in range(1, 101):
        segment = make_segment(stamp)
        segment.hit_end = 1
        policy.add(segment)
    policy.add(make_segment(101))
    order = [policy.pop() for _ in range(101)]

    stamps = [segment.last_used for segment in order if segment is not None]
    assert stamps.index(101) == 100 - UPPER_PERCENT


def test_segmented_entries_that_are_outdated_do_not_pile_up() -> None:
    """However often tails are used without an eviction, what is kept is bounded by the tails that there are."""
    policy = SegmentedLeastRecentlyUsed(SLOTS)
    segments = [make_segment(stamp) for stamp in range(50)]
    for segment in segments:
        policy.add(segment)
    for clock in range(50, 5000):
        segments[clock % 50].last_used = clock
        policy.touch(segments[clock % 50])

    assert sum(map(len, policy._heaps)) < 200


@pytest.mark.parametrize("count", [1000, 16_000])
def test_segmented_operations_look_at_few_tails(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A use of one among n tails compares O(log n) entries: 16 times as many tails cost a few steps more."""
    policy = SegmentedLeastRecentlyUsed(SLOTS)
    segments = [make_segment(stamp) for stamp in range(count)]
    for segment in segments:
        policy.add(segment)
    checked = 0

    def counted(self: SegmentedLeastRecentlyUsed, entry: tuple[int, int, int, Segment]) -> bool:
        nonlocal checked
        checked += 1
        return is_current(self, entry)

    is_current = SegmentedLeastRecentlyUsed._is_current
    monkeypatch.setattr(SegmentedLeastRecentlyUsed, "_is_current", counted)
    for clock in range(count, 4 * count):
        segments[clock % count].last_used = clock
        policy.touch(segments[clock % count])

    assert checked <= 3 * 3 * count  # sweeps, spread over the uses


# --- priorities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_lowest_priority_goes_first(name: str, seed: int) -> None:
    """Over random adds, uses with changing priorities, locks, removals and pops, each victim has the lowest one.

    In `lru` it was used least recently of those, and no priority keeps a place of a tail that was filed under another.
    """
    rng, policy = random.Random(seed), make_policy(name, SLOTS)
    known: list[Segment] = []
    for clock in range(1, 1001):
        segment = rng.choice(known) if known else None
        match rng.randrange(6):
            case 0 | 1:  # a request ends, or an eviction lays a parent bare that was last used some time ago
                fresh = make_segment(clock if rng.randrange(2) else rng.randrange(clock))
                fresh.priority = rng.choice((None, -3, 0, 2))
                known.append(fresh)
                policy.add(fresh)
            case 2 if segment is not None:
                segment.last_used, segment.priority = clock, max(segment.priority or 0, rng.randrange(4))
                policy.touch(segment)
            case 3 if segment is not None and rng.randrange(2):
                policy.remove(segment)
                known.remove(segment)
            case 4 if segment is not None:
                segment.resident_children ^= 1
                if segment.queued or not segment.resident_children:
                    policy.add(segment)
            case 5:
                tails = [each for each in known if not each.resident_children]
                victim = policy.pop()
                assert (victim is None) == (not tails)
                if victim is not None:
                    lowest = min(each.priority or 0 for each in tails)
                    assert (victim.priority or 0) == lowest
                    known.remove(victim)
                    if name == "lru":
                        assert victim.last_used == min(
                            each.last_used for each in tails if (each.priority or 0) == lowest
                        )
        assert_filed_once(policy)


def assert_filed_once(policy: EvictionPolicy) -> None:
    """What an order of `lru` keeps is filed, and under the priority of that order."""
    assert isinstance(policy, ByPriority)
    for priority, order in policy._policies.items():
        if isinstance(order, LeastRecentlyUsed):
            kept = [*order._queue, *order._waiting]
            assert all(segment.queued and segment.filed_priority == priority for segment in kept)
            assert len(kept) == len(set(kept))


@pytest.mark.parametrize("name", POLICIES)
def test_place_that_a_tail_has_left_does_not_count(name: str) -> None:
    """A tail that waited between others until its priority rose is one of its new priority, and the newest there."""
    policy = make_policy(name, SLOTS)
    low, moved = [make_segment(stamp) for stamp in (1, 10)], make_segment(5)
    for segment in (*low, moved):
        policy.add(segment)
    moved.priority, moved.last_used = 7, 11
    policy.touch(moved)
    high = [make_segment(stamp) for stamp in (12, 13)]
    for segment in high:
        segment.priority = 7
        policy.add(segment)
    moved.protected = 1
    assert [policy.pop(), policy.pop()] == low  # and between these two, the place that was left
    moved.last_used = 14
    policy.touch(moved)
    moved.protected = 0
    policy.add(moved)

    assert [policy.pop() for _ in range(3)] == [*high, moved]


@pytest.mark.parametrize("name", POLICIES)
def test_priority_that_rose_while_a_tail_was_none_counts(name: str) -> None:
    """A tail that is filed is moved when it is added with another priority."""
    policy = make_policy(name, SLOTS)
    low, risen = make_segment(5), make_segment(1)
    policy.add(low)
    policy.add(risen)
    risen.priority = 3
    policy.add(risen)

    assert [policy.pop(), policy.pop(), policy.pop()] == [low, risen, None]


@pytest.mark.parametrize("name", POLICIES)
def test_cleared_policy_has_no_victims(name: str) -> None:
    """After a clear nothing is filed, and what was can be filed again."""
    policy = make_policy(name, SLOTS)
    segment = make_segment(1)
    segment.priority = 2
    policy.add(segment)
    policy.clear()
    assert policy.pop() is None
    policy.add(segment)
    assert policy.pop() is segment
