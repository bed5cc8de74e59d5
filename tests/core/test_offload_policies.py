"""Which of the blocks that engines in offload mode offer are copied, by the write policy of their namespace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.transfers.engine_copies import FILTER_BLOCKS_MAX, AdmissionFilter
from kvcached_client.types import WritePolicy
from tests.core.engine import keys_of, refused
from tests.core.offload_engine import OffloadEngine, make_offload, space

NewOffload = Callable[..., Cache]
SELECTIVE = WritePolicy.WRITE_THROUGH_SELECTIVE


def engine_under(make: NewOffload, policy: WritePolicy, **settings: int) -> OffloadEngine:
    """An engine in a namespace with a write policy."""
    cache = make(**settings)
    cache.offload.namespaces.write_policy = policy
    return OffloadEngine(cache)


def test_never_passes_over_every_offer(new_offload: NewOffload) -> None:
    """Under `never` there is nothing to copy, the lease moves on, and nothing of it comes into the index."""
    engine = engine_under(new_offload, WritePolicy.NEVER)
    lease = engine.acquire("abcdef")
    plan = engine.prepare(lease, "abcd")
    assert (plan.transfer, plan.depth, plan.pieces) == (0, 4, [])
    assert engine.prepare(lease, "abcdef", 4).depth == 6
    with refused("out_of_order"):
        engine.prepare(lease, "abcdef", 4)
    engine.release(lease)

    assert (list(engine.cache.trees[0].runs()), engine.states[2]) == ([], 0)
    assert engine.cache.counters["store_declined_blocks"] == 6


def test_session_that_is_read_only_hits_and_stores_nothing(new_offload: NewOffload) -> None:
    """A reader hits what another session has stored; what it offers is passed over, and is no sighting either."""
    cache = new_offload()
    writer, reader = OffloadEngine(cache), OffloadEngine(cache, read_only=True)
    writer.store("abcd")
    lease = reader.acquire("abcdef")
    plan = reader.prepare(lease, "abcdef", 4)

    assert (lease.hit, plan.transfer, plan.depth, plan.pieces) == (4, 0, 6, [])
    assert (writer.hit("abcdef"), cache.counters["store_declined_blocks"]) == (4, 2)
    assert writer.store("abcdef") == [4, 5]


@pytest.mark.parametrize("why", ["read only", "never", "passed over"])
def test_offer_of_no_blocks_stores_no_more_than_others(why: str, new_offload: NewOffload) -> None:
    """A lost copy is asked for again of those only whose blocks are copied, and the lease stays where it is."""
    cache = new_offload()
    OffloadEngine(cache).store("abcd")
    engine = OffloadEngine(cache, read_only=why == "read only")
    lease = engine.acquire("abcdef")
    engine.complete(engine.load(lease).transfer, 1)
    if why == "passed over":
        cache.trees[0].set_write_policy(SELECTIVE)
        assert engine.prepare(lease, "abcdef").depth == 6
    elif why == "never":
        cache.trees[0].set_write_policy(WritePolicy.NEVER)
    plan = engine.core.prepare_store(engine.session, lease.id, lease.reached, b"")

    assert (plan.transfer, plan.depth, plan.pieces) == (0, lease.reached, [])


def test_second_offer_is_copied(new_offload: NewOffload) -> None:
    """Under the selective policy a block is copied when a second request offers it, with those before it."""
    engine = engine_under(new_offload, SELECTIVE)
    assert engine.store("abcd") == []
    lease = engine.acquire("abxy")
    plan = engine.prepare(lease, "abxy")
    assert (plan.pieces, plan.depth) == ([(0, 2)], 4)
    engine.commit(plan.transfer)
    engine.release(lease)

    assert (engine.hit("abcd"), engine.hit("abxy")) == (2, 2)
    engine.store("abcd")
    assert engine.hit("abcd") == 4


def test_offers_of_one_request_are_one_sighting(new_offload: NewOffload) -> None:
    """A request that offers its blocks some at a time sights each once; what comes behind one passed over is passed."""
    engine = engine_under(new_offload, SELECTIVE)
    engine.store("abcdef")  # sighted
    engine.cache.set_write_policy(engine.cache.trees[0], WritePolicy.NEVER)
    lease = engine.acquire("abcdef")
    assert engine.prepare(lease, "ab").depth == 2
    engine.cache.set_write_policy(engine.cache.trees[0], SELECTIVE)
    plan = engine.prepare(lease, "abcdef", 2)
    assert (plan.transfer, plan.depth) == (0, 6)
    engine.release(lease)

    assert engine.store("abcdef") != []
    assert engine.hit("abcdef") == 6


def test_offer_without_room_is_no_sighting_of_what_it_could_not_reach(new_offload: NewOffload) -> None:
    """Where the known part finds no room the rest is not passed over: to offer it again is no second sighting."""
    engine = engine_under(new_offload, SELECTIVE, slabs=1)
    engine.store("abcdef")
    other = OffloadEngine(engine.cache)
    held = other.acquire("uvw")
    other.store("uvw")
    kept = other.prepare(held, "uvw")
    assert kept.transfer
    lease = engine.acquire("abcdefgh")
    plan = engine.prepare(lease, "abcdefgh")
    assert (plan.depth, len(plan.pieces)) == (1, 1)
    again = engine.prepare(lease, "abcdefgh", 1)
    assert (again.transfer, again.depth) == (0, 1)
    other.commit(kept.transfer)
    other.release(held)
    engine.commit(plan.transfer)
    engine.release(lease)

    sightings = engine.core._copies._admission_filter
    root = engine.spec.root
    assert sightings.depth(root, 0, keys_of("abcdefgh")) == 6


def test_write_back_is_write_through_here(new_offload: NewOffload) -> None:
    """The daemon does not see such an engine's device memory: what is offered is copied."""
    engine = engine_under(new_offload, WritePolicy.WRITE_BACK)
    engine.store("abcd")

    assert engine.hit("abcd") == 4


def test_policy_outlives_a_clear(new_offload: NewOffload) -> None:
    """A cleared namespace keeps its policy, and what was sighted before counts no more."""
    engine = engine_under(new_offload, SELECTIVE)
    engine.store("abcd")
    engine.core.clear(engine.session)
    engine.store("abcd")
    assert engine.hit("abcd") == 0
    engine.store("abcd")
    assert engine.hit("abcd") == 4


def test_sightings_are_of_one_namespace(new_offload: NewOffload) -> None:
    """Two models whose engines use the same keys do not sight each other's blocks."""
    cache = new_offload()
    cache.offload.namespaces.write_policy = SELECTIVE
    OffloadEngine(cache, space("m")).store("abcd")
    other = OffloadEngine(cache, space("n"))
    other.store("abcd")

    assert other.hit("abcd") == 0


def test_acquire_of_a_request_in_use_is_a_conflict(new_offload: NewOffload) -> None:
    """A request whose blocks were passed over is in use: the same acquire again would not know where it is."""
    engine = engine_under(new_offload, WritePolicy.NEVER)
    lease = engine.acquire("abcd", request="r")
    engine.prepare(lease, "abcd")
    with refused("request_conflict"):
        engine.acquire("abcd", request="r")


@pytest.mark.parametrize("policy", WritePolicy)
def test_empty_offer_changes_nothing(policy: WritePolicy) -> None:
    """An offer of no blocks is answered as before under every policy."""
    engine = engine_under(make_offload, policy)
    lease = engine.acquire("abcd")
    plan = engine.prepare(lease, "")

    assert (plan.transfer, plan.depth, lease.passed, check(engine.cache)) == (0, 0, 0, [])


# --- the table --------------------------------------------------------------------------------------------------------


def test_deepest_known_block_says_how_deep_a_chain_is_known() -> None:
    """A block that was forgotten, for another took its place, is known again by one behind it."""
    sightings = AdmissionFilter(places=1)
    assert sightings.depth(b"n" * 32, 0, keys_of("abcd")) == 0
    sightings.note(b"n" * 32, 0, keys_of("abcd"))

    assert sightings.depth(b"n" * 32, 0, keys_of("abcdef")) == 4
    sightings.note(b"n" * 32, 0, keys_of("x"))
    assert sightings.depth(b"n" * 32, 0, keys_of("abcdef")) == 0


def test_table_does_not_grow() -> None:
    """However many blocks are noted, memory is that of the table, and none before the first."""
    sightings = AdmissionFilter()
    assert sightings._marks is None
    for number in range(200):
        sightings.note(bytes([number]) * 32, number, keys_of("abcdefgh"))

    assert sightings._marks is not None
    assert sightings._marks.nbytes == 8 * FILTER_BLOCKS_MAX
