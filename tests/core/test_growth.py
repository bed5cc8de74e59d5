"""What a step costs does not grow with all that there is, so that no size makes the daemon stand still."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from time import process_time_ns

import pytest

from kvcached.core.cache import Cache
from kvcached.core.eviction import by_tenant
from kvcached.core.index.run import Run, Segment
from kvcached.core.lease import OffloadLease
from kvcached.core.messages import TransferKind
from kvcached.core.slots.host_slots import HostQuota, QuotaRule
from kvcached.core.slots.ranges import FreeRanges, no_ranges, one_range
from kvcached_client.types import FenceSequence
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, make_cache
from tests.core.line_count import count_lines
from tests.core.offload_engine import OffloadEngine, space

TIMES = 8  #: the larger of two sizes has so many times as much of what must not matter
SAME = 1.3  #: costs that differ by no more are the same: a walk through it all would be `TIMES` as many
LINEAR = 20  #: times as long, at most, where twice as much takes twice as long: `TIMES` squared is 64
ANY = sys.maxsize


def ratio(work_on: Callable[[int], Callable[[], object]], size: int) -> float:
    """How many times as long work takes on `TIMES` the size; of each, the fastest of five."""
    best = [1 << 62, 1 << 62]
    for _ in range(5):
        for place, count in enumerate((size, TIMES * size)):
            work = work_on(count)
            began_ns = process_time_ns()
            work()
            best[place] = min(best[place], process_time_ns() - began_ns)
    return best[1] / best[0]


def new_offload(*, slots: int, quota: HostQuota | None = None, slabs: int = 2) -> OffloadEngine:
    cache = Cache([], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=slabs, namespaces_max=1, host_quota=quota)
    return OffloadEngine(cache, space(per_slab=slots, shards=1))


def block_keys(first: int, count: int, salt: int = 0) -> bytes:
    return b"".join((salt << 64 | index).to_bytes(16) for index in range(first, first + count))


def lease_on(engine: OffloadEngine, keys: bytes, request: str, tenant: str = "") -> OffloadLease:
    tokens = len(keys) // 16 * BLOCK_SIZE
    return engine.core.acquire(engine.session, request, keys, tokens, full=True, tenant=tenant)


def store_on(engine: OffloadEngine, lease: OffloadLease, keys: bytes, *, commit: bool = True) -> None:
    plan = engine.core.prepare_store(engine.session, lease.id, lease.depth, keys)
    if commit:
        engine.core.transfer_done(engine.session, TransferKind.STORE, plan.transfer, 0)


def test_scattered_free_slots_are_taken_in_linear_time() -> None:
    """A grant of slots that are free one by one takes as long as it has slots, however many ranges there are."""

    def work_on(count: int) -> Callable[[], object]:
        free = FreeRanges(2 * count, empty=True)
        for number in range(count):
            free.give(2 * number, 1)
        return lambda: free.take(count)

    assert ratio(work_on, 4_000) < LINEAR


def test_block_at_the_end_of_a_long_chain_is_stored_like_the_first() -> None:
    """Requests that store in turn, one block each, pay for one block, though no two of theirs lie side by side."""

    def lines(depth: int) -> int:
        engine = new_offload(slots=2 * depth)
        leases = [lease_on(engine, b"", name) for name in "ab"]

        def step(at: int) -> None:
            for salt, lease in enumerate(leases):
                store_on(engine, lease, block_keys(at, 1, salt))

        for at in range(depth):
            step(at)
        assert len(next(iter(engine.core.namespaces.by_root[engine.spec.root].tree.runs())).keys) == 16 * depth
        return count_lines(lambda: step(depth), most=ANY)

    assert lines(TIMES * 100) <= SAME * lines(100)


def test_blocks_at_the_end_of_a_chain_are_read_from_there() -> None:
    """What a commit says of its blocks costs nothing for the ranges in front of them."""

    def lines(count: int) -> int:
        cache = make_cache(slots=2 * count)
        engine, tree = Engine(cache), cache.trees[0]
        grant = engine.acquire("a", reserve=2 * count - 1)
        slots = array("i", [number for slot in range(0, 2 * count, 2) for number in (slot, 1)])
        cache.managed.commit(engine.session, EPOCH, grant.lease, 0, block_keys(0, count), slots, FenceSequence(0))
        run = next(iter(tree.runs()))
        assert tree.path_slots(run, count - 2, count, 0) == array("i", (2 * count - 4, 1, 2 * count - 2, 1))
        return count_lines(lambda: tree.cached_blocks(run, count - 1, count, cache.pools["a"]), most=ANY)

    assert lines(TIMES * 100) <= SAME * lines(100)


def test_hit_before_a_block_that_is_being_written_is_found_at_once() -> None:
    """A long prompt whose last block is still being stored is matched without a look at each of its blocks."""

    def lines(depth: int) -> int:
        engine = new_offload(slots=depth)
        lease = lease_on(engine, b"", "a")
        store_on(engine, lease, block_keys(0, depth))
        store_on(engine, lease, block_keys(depth, 1), commit=False)
        chain = block_keys(0, depth + 1)

        def match() -> None:
            tokens = (depth + 1) * BLOCK_SIZE
            assert engine.core.match(engine.session, chain, tokens, full=True) == depth

        return count_lines(match, most=ANY)

    assert lines(TIMES * 1000) <= 2 * lines(1000)  # a bisection takes some steps more


def test_store_that_brings_the_next_block_is_found_among_many() -> None:
    """An acquire finds out which store under way goes on behind its hit without a look at each of them."""

    def lines(stores: int) -> int:
        engine = new_offload(slots=2 * stores)
        reader = OffloadEngine(engine.cache, engine.spec)
        for salt in range(stores):
            store_on(engine, lease_on(engine, b"", f"request {salt}"), block_keys(0, 2, salt), commit=False)
        chain = block_keys(0, 2, stores - 1)

        def acquire() -> None:
            assert lease_on(reader, chain, "a").filling == 2

        return count_lines(acquire, most=ANY)

    assert lines(TIMES * 20) <= SAME * lines(20)


def test_eviction_does_not_ask_each_tenant_that_keeps_its_floor() -> None:
    """A store that evicts pays for what it evicts, however many tenants have nothing to give and have rules."""

    def lines(tenants: int) -> int:
        rules = tuple(QuotaRule(f"kept {number}", floor_percent=1) for number in range(tenants))
        engine = new_offload(slots=500, quota=HostQuota(tenants=rules))
        for number in range(tenants):
            lease = lease_on(engine, b"", f"request {number}", f"kept {number}")
            store_on(engine, lease, block_keys(0, 4, number))
            engine.release(lease)

        def store(salt: int) -> None:
            lease = lease_on(engine, b"", f"another {salt}", "other")
            store_on(engine, lease, block_keys(0, 4, salt))
            engine.release(lease)

        for salt in range(1000, 1300):
            store(salt)
        return count_lines(lambda: store(2000), most=ANY)

    assert lines(TIMES * 10) <= SAME * lines(10)


def test_rules_of_few_tenants_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that clients make up cost no more memory than the limit, and each has the bounds of its rule."""
    engine = new_offload(slots=50, quota=HostQuota(tenants=(QuotaRule("a*", cap_percent=10), QuotaRule("b", 20, 50))))
    tenants = engine.core.namespaces.by_root[engine.spec.root].tree.tenants
    assert tenants is not None
    monkeypatch.setattr(by_tenant, "RULES_KNOWN_MAX", 2)

    for _ in range(2):
        assert [tenants.bounds(name) for name in ("a1", "b", "c", "a2", "")] == [
            (0, 10), (20, 50), (0, 100), (0, 10), (0, 100),
        ]  # fmt: skip
        assert len(tenants._known_rules) <= 2


def test_many_locks_of_one_run_are_taken_back_in_linear_time() -> None:
    """Requests that end deepest first do not look through those that remain."""

    def work_on(count: int) -> Callable[[], object]:
        cache = make_cache(slots=count)
        engine, tree = Engine(cache), cache.trees[0]
        grant = engine.acquire("a", reserve=count - 1)
        keys, slots = block_keys(0, count), one_range(0, count)
        cache.managed.commit(engine.session, EPOCH, grant.lease, 0, keys, slots, FenceSequence(0))
        run = next(iter(tree.runs()))
        for depth in range(1, count + 1):
            tree.lock(run, depth, 0)
        engine.release(grant)

        def unlock() -> None:
            for depth in range(count, 0, -1):
                tree.unlock(run, depth, 0)

        return unlock

    assert ratio(work_on, 1_000) < LINEAR


def test_order_of_locks_does_not_outgrow_them() -> None:
    """Requests that come and go under one that stays leave nothing behind."""
    segment = Segment(Run(b"", 0, None, 1), None, no_ranges(), 0, 0)
    for depth in (*range(1, 50), 1000, 1001):
        segment.lock(depth)
    assert segment.unlock(1001)
    for depth in range(100, 999):
        assert not segment.lock(depth)
        assert not segment.unlock(depth)
        assert len(segment.lock_order or ()) <= 200


def test_fence_costs_nothing_for_later_ones() -> None:
    """A fence that signals gives back what it held, without a look at what all later ones hold."""

    def lines(fences: int) -> int:
        cache = make_cache(slots=fences)
        engine = Engine(cache)
        grant = engine.acquire("", reserve=fences)
        for at in range(fences):
            slot, fence = one_range(array("i", grant.ranges)[0] + at, 1), FenceSequence(at + 1)
            cache.managed.commit(engine.session, EPOCH, grant.lease, at, block_keys(at, 1), slot, fence)
        return count_lines(lambda: engine.signal(1), most=ANY)

    assert lines(TIMES * 20) <= SAME * lines(20)
