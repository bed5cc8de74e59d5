"""The index: runs split only where chains diverge, residency is a prefix, tails go first."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from kvcached.core.cache import Cache
from kvcached.core.slots.ranges import cut
from kvcached.core.slots.states import SlotState
from kvcached_client.types import FenceSequence
from tests.core.engine import EPOCH, Engine, keys_of, refused, states


def run_texts(cache: Cache) -> list[tuple[int, int]]:
    """(start, end) of every run, sorted."""
    return sorted((run.start, run.end) for run in cache.trees[0].runs())


def test_prompt_is_one_run_however_long(cache: Cache) -> None:
    """Blocks without divergence make one node."""
    Engine(cache).store("abcdefgh")

    assert run_texts(cache) == [(0, 8)]


def test_divergence_splits_a_run_once(cache: Cache) -> None:
    """Two continuations of one beginning make three runs; the beginning is stored once."""
    engine = Engine(cache)
    engine.store("abcd")
    engine.store("abXY")

    assert run_texts(cache) == [(0, 2), (2, 4), (2, 4)]
    assert states(cache)[SlotState.CACHED] == 6
    assert (engine.hit("abcd"), engine.hit("abXY"), engine.hit("abcX")) == (4, 4, 3)


def test_longer_prompt_extends_a_childless_run(cache: Cache) -> None:
    """A continuation of a run without children makes that run longer, not a second one."""
    engine = Engine(cache)
    engine.store("abc")
    engine.store("abcdef")

    assert run_texts(cache) == [(0, 6)]
    assert engine.hit("abcdef") == 6


def test_match_splits_nothing_and_touches_nothing(cache: Cache) -> None:
    """A partial match leaves the tree, the pins and the recency as they were."""
    engine = Engine(cache)
    engine.store("abcdef")
    clock = cache.pools["a"].clock

    assert engine.hit("abc") == 3
    assert run_texts(cache) == [(0, 6)]
    assert cache.pools["a"].clock == clock


def test_partial_lease_splits_nothing(cache: Cache) -> None:
    """A lease inside a run pins its beginning only; the rest stays evictable, in the same run."""
    engine = Engine(cache)
    engine.store("abcdef")
    grant = engine.acquire("abc")

    assert (grant.hit, run_texts(cache), cache.pools["a"].evictable) == (3, [(0, 6)], 3)


def test_split_keeps_every_pin_at_its_depth(cache: Cache) -> None:
    """Leases above and below a later cut stay pinned where they were, and can both be released."""
    engine = Engine(cache)
    engine.store("abcdef")
    shallow, deep = engine.acquire("ab"), engine.acquire("abcdef")
    engine.store("abcX")

    assert run_texts(cache) == [(0, 3), (3, 4), (3, 6)]
    assert cache.pools["a"].evictable == 1
    engine.release(deep)
    assert cache.pools["a"].evictable == 5
    engine.release(shallow)
    assert cache.pools["a"].evictable == 7


def test_lease_outlives_the_run_that_it_was_taken_in(cache: Cache) -> None:
    """A shallow lease finds its blocks after a split, and after the deep part has been evicted."""
    engine = Engine(cache)
    engine.store("abcdef")
    lease = engine.acquire("ab")
    engine.store("abcX")
    filler = engine.acquire("0123456789ABCD")  # 14 of 16 slots: everything unpinned must go

    assert run_texts(cache) == [(0, 2)]
    engine.release(filler)
    engine.release(lease)
    assert states(cache)[SlotState.CACHED] == 2


def test_eviction_trims_tails_block_by_block(cache: Cache) -> None:
    """No more goes than is needed, from the end of the chain, so that the beginning still hits."""
    engine = Engine(cache)
    engine.store("abcdefghijkl")
    engine.acquire("012345")  # 6 slots, 4 are free

    assert engine.hit("abcdefghijkl") == 10


def test_eviction_takes_the_least_recently_used_first(cache: Cache) -> None:
    """A chain that was used again outlives one that was not, though it is older."""
    engine = Engine(cache)
    engine.store("abcdef")
    engine.store("ABCDEF")
    engine.release(engine.acquire("abcdef"))
    engine.acquire("01234567")  # 8 slots, 4 are free

    assert (engine.hit("abcdef"), engine.hit("ABCDEF")) == (6, 2)


def test_parent_is_never_older_than_its_child(cache: Cache) -> None:
    """When a continuation goes, what it continued counts as used as late as it was."""
    engine = Engine(cache)
    engine.store("ab")
    engine.store("ABCD")
    engine.store("abcd")  # uses "ab" last
    engine.store("abXY")
    engine.acquire("0123456789")  # 16 - 4 - 6 = 6 free, 4 more: ABCD goes before any of a…
    assert (engine.hit("ABCD"), engine.hit("abcd"), engine.hit("abXY")) == (0, 4, 4)


def test_shared_beginning_goes_last(cache: Cache) -> None:
    """A run with resident continuations is never evicted before them."""
    engine = Engine(cache)
    engine.store("abcd")
    engine.store("abXY")
    engine.acquire("0123456789ABC")  # 13 slots, 10 are free

    assert states(cache)[SlotState.CACHED] == 3
    assert max(engine.hit("abcd"), engine.hit("abXY")) == 3


def test_pools_share_a_tree_and_nothing_else(new_cache: Callable[..., Cache]) -> None:
    """What one replica computed is in the tree, but the other replica's pool does not hold it."""
    cache = new_cache(names="ab")
    one, other = Engine(cache, "a"), Engine(cache, "b")
    one.store("abcd")

    assert (one.hit("abcd"), other.hit("abcd")) == (4, 0)
    other.store("abX")
    assert (one.hit("abX"), other.hit("abX"), other.hit("abcd")) == (2, 3, 2)
    assert len(cache.trees) == 1


def test_second_pool_attaches_to_the_runs_that_are_there(new_cache: Callable[..., Cache]) -> None:
    """Two replicas that store the same prompt make one run with two residencies."""
    cache = new_cache(names="ab")
    Engine(cache, "a").store("abcd")
    Engine(cache, "b").store("abcd")

    assert run_texts(cache) == [(0, 4)]
    assert states(cache, "a") == states(cache, "b")


def test_keys_stay_while_any_pool_holds_them(new_cache: Callable[..., Cache]) -> None:
    """Eviction from one pool leaves the other's residency, and the run, alone."""
    cache = new_cache(names="ab")
    one, other = Engine(cache, "a"), Engine(cache, "b")
    one.store("abcd")
    other.store("abcdef")
    one.acquire("0123456789ABCDEF")

    assert (one.hit("abcdef"), other.hit("abcdef"), run_texts(cache)) == (0, 6, [(0, 6)])


def test_duplicate_commit_keeps_the_first_copy(cache: Cache) -> None:
    """The second commit of a key leaves the first in place; its slot stays the lease's own until release."""
    engine = Engine(cache)
    first, second = engine.acquire("ab"), engine.acquire("abc")
    engine.commit(first, "ab")
    done = engine.commit(second, "abc")

    assert (done.adopted, done.duplicates, done.depth) == (1, 2, 3)
    assert states(cache)[:3] == (11, 2, 3)
    engine.release(second)
    engine.release(first)
    assert states(cache)[:3] == (13, 0, 3)


def test_duplicate_slot_cannot_be_committed_again(cache: Cache) -> None:
    """A slot that holds one block's bytes is refused under another key."""
    engine = Engine(cache)
    first, second = engine.acquire("a"), engine.acquire("ab")
    engine.commit(first, "a")
    engine.commit(second, "a")
    again = cut(array("i", second.ranges), 1)[0]

    with refused("unknown_slot"):
        cache.managed.commit(engine.session, EPOCH, second.lease, 1, keys_of("ab")[16:], again, FenceSequence(0))


def test_drop_takes_everything_below(cache: Cache) -> None:
    """Discarding a run frees its slots."""
    engine = Engine(cache)
    engine.store("abcd")
    cache.managed.discard("a", keys_of("abcd"))

    assert states(cache)[SlotState.FREE] == 16
    assert run_texts(cache) == []
