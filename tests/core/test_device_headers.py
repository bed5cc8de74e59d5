"""Blocks of a device pool that outlives its daemon: which headers name them, and which the next daemon finds again."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import BlocksCached, BlocksUncached, MembersDied, StartTransfer, TransferKind
from kvcached.core.restart.rejoin import Rejoin
from kvcached.core.restart.restore import RestoredCache
from kvcached.core.slots.ranges import Ranges, cut, pairs
from kvcached.core.slots.states import SlotState
from kvcached_client.types import FenceSequence, SessionId
from tests.core.device_headers import DeviceHeaders
from tests.core.engine import BLOCK_SIZE, EPOCH, Engine, keys_of, make_cache, refused, states
from tests.core.host_tier import Workers, crowd_out, host_of, loading, make_tiers, stored
from tests.core.test_survival import headers_of

WORDS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5)


@pytest.fixture
def headers(cache: Cache) -> DeviceHeaders:
    return DeviceHeaders(cache)


def slots_of(ranges: Ranges[int] | bytes) -> list[int]:
    packed = array("i", ranges) if isinstance(ranges, bytes) else ranges
    return [slot for first, count in pairs(packed) for slot in range(first, first + count)]


def next_cache(headers: DeviceHeaders) -> Cache:
    """The next daemon's cache, which has found the headers of pool `a`."""
    cache = make_cache(headers.cache.pools["a"].slots)
    RestoredCache(cache).device_pool("a", headers.found("a"))
    assert check(cache) == []
    return cache


class Returning:
    """The engine of a pool of 16 slots whose daemon was killed, and is about to declare what it holds."""

    def __init__(self, headers: DeviceHeaders, fence: int = 0) -> None:
        self.cache = make_cache()
        revival = RestoredCache(self.cache)
        revival.device_pool("a", headers.found("a"))
        self.session: SessionId = revival.pool_session("a")
        self.headers = DeviceHeaders(self.cache)
        self.headers.pools["a"].update(headers.pools["a"])
        self.core = Rejoin(self.cache)
        self.core.resume(self.session, 0, FenceSequence(fence))

    def declare(self, text: str, held: Ranges[int], own: Ranges[int]) -> int:
        keys = keys_of(text)
        return self.core.declare(self.session, EPOCH, text, len(text) * BLOCK_SIZE, len(text), keys, held, own)

    def hit(self, text: str) -> int:
        return self.cache.managed.match(self.session, EPOCH, keys_of(text), len(text) * BLOCK_SIZE, full=True)[0]


# --- which headers there are ------------------------------------------------------------------------------------------


def test_header_appears_when_the_fence_has_signalled(cache: Cache, headers: DeviceHeaders) -> None:
    """Blocks that are committed before they are written get their headers when their bytes are known to be there."""
    engine = Engine(cache)
    grant = engine.acquire("abc")
    engine.commit(grant, "abc", fence=3)
    assert cache.header_changes == []
    engine.signal(2)
    assert cache.header_changes == []
    engine.signal(3)

    (change,) = cache.header_changes
    assert change == BlocksCached("a", 0, b"", keys_of("abc"), array("i", grant.ranges))
    headers.look()


def test_headers_of_written_blocks_appear_at_once(cache: Cache, headers: DeviceHeaders) -> None:
    """A commit of blocks that are written gives headers to those that were not cached already, each with its parent."""
    engine = Engine(cache)
    engine.store("ab")
    first, second = engine.acquire("abcd"), engine.acquire("abcx")
    engine.commit(first, "abcd")
    headers.look()
    engine.commit(second, "abcx")

    (change,) = cache.header_changes
    assert isinstance(change, BlocksCached)
    assert (change.depth, change.parent, change.keys) == (3, keys_of("abc")[-16:], keys_of("abcx")[-16:])
    headers.look()


def test_header_is_gone_before_its_slot_is_granted(cache: Cache, headers: DeviceHeaders) -> None:
    """What eviction frees is told before the answer that grants it."""
    engine = Engine(cache)
    engine.store("abcdefgh")
    headers.look()
    grant = engine.acquire("klmnopqrst")

    gone = [slot for change in cache.header_changes for slot in slots_of(change.slots)]
    assert all(isinstance(change, BlocksUncached) for change in cache.header_changes)
    granted = set(slots_of(grant.ranges))
    assert granted & set(headers.pools["a"]) <= set(gone)
    headers.look()


def test_suspect_block_has_no_header(cache: Cache, headers: DeviceHeaders) -> None:
    """Blocks of a fence that never signalled get no header, and what was built on them loses its own."""
    engine = Engine(cache)
    grant = engine.acquire("ab")
    engine.commit(grant, "ab", fence=5)
    more = engine.acquire("abc")
    engine.commit(more, "abc")
    headers.look()
    assert len(headers.pools["a"]) == 1
    cache.handle(MembersDied(engine.session))

    headers.look()
    assert headers.pools["a"] == {}


def test_loaded_blocks_get_headers_when_the_load_has_ended() -> None:
    """A slot that a load writes has no header before every shard is through with it; what it held before has gone."""
    cache = make_tiers()
    headers = DeviceHeaders(cache)
    engine = stored(cache, "abcd")
    crowd_out(engine)
    headers.look()
    workers = Workers(cache)
    _, (order,) = loading(engine, workers, "abcd")
    headers.look()
    written = {slot for span in order.spans for slot in slots_of(span.device)}
    assert not written & headers.pools["a"].keys()
    workers.answer(order)

    headers.look()
    assert written <= headers.pools["a"].keys()


def test_invalidation_comes_before_the_load_that_writes(new_tiers: object) -> None:
    """When a load is ordered into evicted slots, that they hold no block any more has been told already."""
    cache = make_tiers(host_slabs=4)
    headers = DeviceHeaders(cache)
    engine = stored(cache, "abcd")
    for text in ("efgh", "ijkl", "mnop", "qrst"):
        engine.store(text)
        Workers(cache).answer_all()
    headers.write()
    engine.acquire("abcd")
    orders = [each for each in cache.effects if isinstance(each, StartTransfer) and each.kind is TransferKind.LOAD]

    assert orders
    headers.look()


def test_cleared_namespace_has_no_headers(cache: Cache, headers: DeviceHeaders) -> None:
    """After a clear no header is left of what was cached."""
    Engine(cache).store("abc")
    headers.look()
    cache.clearings.begin(cache.tree_of("a"), b"other")
    cache.settle()

    headers.look()
    assert headers.pools["a"] == {}


# --- what the next daemon finds ---------------------------------------------------------------------------------------


def test_blocks_are_hit_again(cache: Cache, headers: DeviceHeaders) -> None:
    """After a restart without a living engine every block is a hit, and all other slots are free."""
    engine = Engine(cache)
    for text in ("abcd", "abx", "abcdef"):
        engine.store(text)
    successor = next_cache(headers)

    assert [Engine(successor).hit(text) for text in ("abcdef", "abx", "b")] == [6, 3, 0]
    assert states(successor) == (9, 0, 7, 0, 0)


def test_slots_stay_where_they_are(cache: Cache, headers: DeviceHeaders) -> None:
    """A hit names the slots in which the blocks lay before the restart: nothing was copied."""
    engine = Engine(cache)
    engine.store("abcd")
    before = engine.acquire("abcd").hit_ranges
    successor = next_cache(headers)

    again = Engine(successor).acquire("abcd")
    assert (again.hit, again.hit_ranges, again.loads) == (4, before, ())


def test_leased_slots_are_not_found(cache: Cache, headers: DeviceHeaders) -> None:
    """What a lease had not committed is no block, and is free where nobody lives."""
    engine = Engine(cache)
    grant = engine.acquire("abcd")
    engine.cache.managed.commit(
        engine.session, EPOCH, grant.lease, 0, keys_of("ab"), cut(array("i", grant.ranges), 2)[0], FenceSequence(0)
    )
    successor = next_cache(headers)

    assert (Engine(successor).hit("abcd"), states(successor)) == (2, (14, 0, 2, 0, 0))


def test_block_behind_a_gap_is_not_found(cache: Cache, headers: DeviceHeaders) -> None:
    """A block whose fence had signalled is not found where one before it waited for its own."""
    engine = Engine(cache)
    grant = engine.acquire("ab")
    engine.commit(grant, "ab", fence=5)
    engine.commit(engine.acquire("abc"), "abc")
    successor = next_cache(headers)

    assert (Engine(successor).hit("abc"), states(successor)) == (0, (16, 0, 0, 0, 0))


def test_oldest_block_is_evicted_first_again(cache: Cache, headers: DeviceHeaders) -> None:
    """Eviction after a restart goes by the age of the headers."""
    engine = Engine(cache)
    for text in ("abcd", "efgh", "ijkl"):
        engine.store(text)
    successor = next_cache(headers)
    later = Engine(successor)
    later.acquire("uvwxyz")

    assert [later.hit(text) for text in ("abcd", "efgh", "ijkl")] == [2, 4, 4]


@given(WORDS, WORDS, st.randoms())
def test_device_and_host_blocks_form_one_tree(on_device: list[str], on_host: list[str], chance: object) -> None:
    """Whatever the pools hold of which prompts, all of it is found, and every invariant holds."""
    cache = make_tiers(slots=64, host_slabs=8)
    headers = DeviceHeaders(cache)
    engine, workers = Engine(cache), Workers(cache)
    for text in on_host:
        engine.store(text)
        workers.answer_all()
    engine.release(engine.acquire("", reserve=64))
    cache.pools["a"].paused = True
    for text in on_device:
        engine.store(text)
    before = {text: sum(_match(engine, text)) for text in (*on_device, *on_host)}
    successor = make_tiers(slots=64, host_slabs=8)
    revival = RestoredCache(successor)
    revival.replica("a", sorted(host_of(cache).slabs), headers_of(cache.trees[0]))
    used = revival.device_pool("a", headers.found("a"))

    assert check(successor) == []
    assert set(slots_of(used)) == headers.pools["a"].keys()
    later = Engine(successor)
    assert {text: sum(_match(later, text)) for text in before} == before
    later.release(later.acquire("", reserve=64))
    assert (successor.pools["a"].free, check(successor)) == (64, [])


def _match(engine: Engine, text: str) -> tuple[int, int]:
    return engine.cache.managed.match(engine.session, engine.epoch, keys_of(text), len(text) * BLOCK_SIZE, full=True)


def test_found_blocks_are_stored_when_they_were_not() -> None:
    """Under write-through a found block without a host copy gets one."""
    cache = make_tiers()
    headers = DeviceHeaders(cache)
    Engine(cache).store("abcd")
    successor = make_tiers()
    RestoredCache(successor).device_pool("a", headers.found("a"))
    workers = Workers(successor)
    workers.answer_all()

    assert successor.counters["stored_blocks"] == 4


# --- engines that live ------------------------------------------------------------------------------------------------


def test_engine_hits_what_no_lease_held(cache: Cache, headers: DeviceHeaders) -> None:
    """An engine that comes back finds the blocks that none of its leases held, and goes on with those that one did."""
    engine = Engine(cache)
    engine.store("abcd")
    grant = engine.acquire("abxy")
    returning = Returning(headers)
    assert states(returning.cache) == (0, 0, 4, 0, 12)
    held, own = array("i", grant.hit_ranges), array("i", grant.ranges)
    returning.declare("ab", held, own)
    assert returning.core.over(returning.session, EPOCH) == 10

    assert (returning.hit("abcd"), states(returning.cache)) == (4, (10, 2, 4, 0, 0))
    returning.headers.look()
    assert check(returning.cache) == []


def test_commit_without_an_answer_is_undone(cache: Cache, headers: DeviceHeaders) -> None:
    """A block in a slot that its engine calls its own is found no more, nor what comes behind it: it may be written."""
    engine = Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd")
    returning = Returning(headers)
    slots = array("i", grant.ranges)
    held, own = cut(slots, 2)
    returning.declare("ab", held, cut(own, 1)[0])

    assert returning.hit("abcd") == 2
    assert states(returning.cache) == (0, 1, 2, 0, 13)
    assert slots_of(own)[0] not in returning.headers.pools["a"] or returning.cache.header_changes
    returning.headers.look()
    assert len(returning.headers.pools["a"]) == 2
    returning.core.over(returning.session, EPOCH)
    assert (states(returning.cache), check(returning.cache)) == ((13, 1, 2, 0, 0), [])


def test_own_slots_reach_over_what_was_set_aside(cache: Cache, headers: DeviceHeaders) -> None:
    """A lease's slots are one range, though a block was found in the first ones and none in the others."""
    engine = Engine(cache)
    grant = engine.acquire("ab", reserve=4)
    engine.commit(grant, "ab")
    assert array("i", grant.ranges) == array("i", [0, 6])
    returning = Returning(headers)
    returning.declare("", array("i"), array("i", grant.ranges))

    assert (states(returning.cache), check(returning.cache)) == ((0, 6, 0, 0, 10), [])


def test_pin_does_not_keep_an_engine_from_its_slots(cache: Cache, headers: DeviceHeaders) -> None:
    """A pin of a block that its engine may be writing ends before that block."""
    engine = Engine(cache)
    grant = engine.acquire("abcd")
    engine.commit(grant, "abcd")
    returning = Returning(headers)
    tree, pool = returning.cache.tree_of("a"), returning.cache.pools["a"]
    assert returning.cache.pins.pin(tree, pool, keys_of("abcd"), 1000).device.depth == 4
    returning.declare("", array("i"), array("i", grant.ranges))

    assert (returning.hit("abcd"), pool.protected, check(returning.cache)) == (0, 0, [])


def test_slot_that_another_lease_holds_is_not_an_own_one(cache: Cache, headers: DeviceHeaders) -> None:
    """An engine that declares one slot as read by one lease and written by another is refused."""
    engine = Engine(cache)
    grant = engine.acquire("ab")
    engine.commit(grant, "ab")
    returning = Returning(headers)
    returning.declare("ab", array("i", grant.ranges), array("i"))

    with refused("unknown_slot"):
        returning.declare("", array("i"), array("i", grant.ranges))
    assert (returning.hit("ab"), check(returning.cache)) == (2, [])


@pytest.mark.parametrize("own", [[-1, 1], [15, 2], [0, 1 << 30], [3, -1], [3, 0]])
def test_slots_that_are_not_there_are_refused(headers: DeviceHeaders, own: list[int]) -> None:
    """Numbers that are no slots are refused without looking for them."""
    with refused("unknown_slot"):
        Returning(headers).declare("", array("i"), array("i", own))


def test_nothing_is_evicted_before_all_is_declared(cache: Cache, headers: DeviceHeaders) -> None:
    """Blocks that the engine may declare stay until it has, and until the fence of before has signalled."""
    Engine(cache).store("abcd")
    returning = Returning(headers, fence=7)
    pool = returning.cache.pools["a"]
    assert (pool.evictable, pool.copies) == (0, False)
    returning.core.over(returning.session, EPOCH)
    assert pool.evictable == 0
    with refused("no_capacity"):
        returning.cache.managed.acquire(returning.session, EPOCH, "r", keys_of("x"), 4, 0, full=True)
    returning.cache.managed.heartbeat(returning.session, FenceSequence(7), 0)

    assert (pool.evictable, pool.copies, states(returning.cache)) == (4, True, (12, 0, 4, 0, 0))


@pytest.mark.parametrize("is_back", [True, False])
def test_pool_is_evictable_when_its_engine_is_dead(cache: Cache, headers: DeviceHeaders, *, is_back: bool) -> None:
    """When the engine of before dies, before or after it came back, its slots are free, and blocks stay, evictable."""
    Engine(cache).store("abcd")
    if is_back:
        returning = Returning(headers)
        successor, session = returning.cache, returning.session
    else:
        successor = make_cache()
        revival = RestoredCache(successor)
        revival.device_pool("a", headers.found("a"))
        session = revival.pool_session("a")
    successor.handle(MembersDied(session))

    assert (states(successor), successor.pools["a"].evictable) == ((12, 0, 4, 0, 0), 4)
    assert (Engine(successor).hit("abcd"), check(successor)) == (4, [])


def test_clear_ends_the_wait_for_the_engine(cache: Cache, headers: DeviceHeaders) -> None:
    """A cleared pool waits for no declaration: its blocks are gone, and what comes then can be evicted."""
    Engine(cache).store("abcd")
    returning = Returning(headers)
    pool = returning.cache.pools["a"]
    returning.cache.clearings.begin(returning.cache.tree_of("a"), b"other")
    returning.cache.settle()

    assert (pool.frozen, pool.counts[SlotState.CACHED]) == (False, 0)
    returning.headers.look()
