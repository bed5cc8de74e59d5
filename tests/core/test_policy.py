"""Eviction order: the least recently used evictable tail, whatever happened to the others."""

from __future__ import annotations

import random

import pytest

from kvcached.core.policy import LeastRecentlyUsed
from kvcached.core.ranges import no_ranges
from kvcached.core.run import Run, Segment


def make_segment(stamp: int) -> Segment:
    """A tail of one block, last used at `stamp`."""
    return Segment(Run(bytes(16), 0, None, 1), None, no_ranges(), 1, stamp)


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
