"""Leases, loads and stores of engines in offload mode: who may touch which host slot, and until when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvcached.core import offload
from kvcached.core import session as core_session
from kvcached.core.cache import Cache
from kvcached.core.messages import TransferKind
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.engine_copies import EVERY_SHARD
from kvcached_client.errors import ErrorCode
from kvcached_client.types import LeaseId, SessionId, TransferId
from tests.core.engine import keys_of, refused
from tests.core.offload_engine import OffloadEngine, space
from tests.core.tier_world import slots_of

MakeOffload = Callable[..., Cache]


@pytest.fixture
def cache(new_offload: MakeOffload) -> Cache:
    """Four slabs of four blocks."""
    return new_offload()


@pytest.fixture
def engine(cache: Cache) -> OffloadEngine:
    """A session of two shards."""
    return OffloadEngine(cache)


# --- stores ---------------------------------------------------------------------------------------------------------


def test_stored_blocks_are_hit_by_every_engine_of_the_namespace(cache: Cache, engine: OffloadEngine) -> None:
    """What all shards have written is found by the same engine and by others that declared the same namespace."""
    engine.store("abcd")
    other, stranger = OffloadEngine(cache), OffloadEngine(cache, space("n"))

    assert (engine.hit("abcdx"), other.hit("abxx"), stranger.hit("abcd")) == (4, 2, 0)
    assert cache.counters["stored_blocks"] == 4


def test_store_is_found_only_when_every_shard_has_written_it(cache: Cache, engine: OffloadEngine) -> None:
    """Blocks that one shard has not written yet are neither matched nor loaded, and what follows them is not either."""
    lease = engine.acquire("abcd")
    first = engine.prepare(lease, "ab")
    second = engine.prepare(lease, "abcd")
    engine.commit(second.transfer)
    cache.offload.transfer_done(engine.session, TransferKind.STORE, first.transfer, 0, "")

    assert (engine.hit("abcd"), engine.acquire("abcd").hit) == (0, 0)
    cache.offload.transfer_done(engine.session, TransferKind.STORE, first.transfer, 1, "")
    assert engine.hit("abcd") == 4


def test_store_is_written_where_nobody_else_is(cache: Cache, engine: OffloadEngine) -> None:
    """Slots of a store under way are FILLING, and no other store gets them however little room there is."""
    lease = engine.acquire("abcdefgh")
    plan = engine.prepare(lease, "abcdefgh")
    other = OffloadEngine(cache)
    more = other.prepare(other.acquire("ABCDEFGHIJKLMNOP"), "ABCDEFGHIJKLMNOP")

    assert engine.states == (0, 16, 0, 0)
    assert set(slots_of(plan.slots)).isdisjoint(slots_of(more.slots))
    assert (more.depth, cache.counters["store_refused_blocks"]) == (8, 8)


def test_blocks_that_others_hold_or_write_are_not_copied_again(cache: Cache, engine: OffloadEngine) -> None:
    """A store of what lies there, or is being written, asks for nothing; the lease reaches over it."""
    first, second = engine.acquire("abcd"), OffloadEngine(cache)
    engine.prepare(first, "abcd")
    lease = second.acquire("abcdef")
    again = second.prepare(lease, "abcd")
    behind = second.prepare(lease, "abcdef")

    assert (again.transfer, again.depth, again.pieces) == (0, 4, [])
    assert (behind.depth, behind.pieces) == (6, [(4, 6)])


def test_a_failed_shard_fails_the_store(cache: Cache, engine: OffloadEngine) -> None:
    """One shard's error is enough: nothing of it is found, and its slots are free once the others are through, too."""
    plan = engine.prepare(engine.acquire("abcd"), "abcd")
    cache.offload.transfer_done(engine.session, TransferKind.STORE, plan.transfer, 0, "no memory")

    assert engine.states == (0, 4, 0, 0)  # the other one may be writing
    cache.offload.transfer_done(engine.session, TransferKind.STORE, plan.transfer, 1, "")
    assert (engine.states, engine.hit("abcd")) == ((4, 0, 0, 0), 0)
    assert cache.counters["store_failed_blocks"] == 4


def test_a_shard_counts_once(cache: Cache, engine: OffloadEngine) -> None:
    """A shard that says twice that it has written a store does not stand for another one."""
    plan = engine.prepare(engine.acquire("ab"), "ab")
    for _ in range(3):
        cache.offload.transfer_done(engine.session, TransferKind.STORE, plan.transfer, 1, "")

    assert engine.hit("ab") == 0
    cache.offload.transfer_done(engine.session, TransferKind.STORE, plan.transfer, 0, "")
    assert engine.hit("ab") == 2


def test_second_word_of_a_shard_changes_nothing(cache: Cache, engine: OffloadEngine) -> None:
    """A shard that is through with a store cannot make it fail while another shard writes."""
    lease = engine.acquire("ab")
    store = engine.prepare(lease, "ab").transfer
    for error in ("", "a retry that gives up"):
        assert engine.core.transfer_done(engine.session, TransferKind.STORE, store, 0, error) == TransferState.RUNNING
    engine.core.transfer_done(engine.session, TransferKind.STORE, store, 1, "")

    assert engine.hit("ab") == 2


@pytest.mark.parametrize("why", ["", "preempted"])
def test_store_that_is_called_off_is_not_found(cache: Cache, engine: OffloadEngine, why: str) -> None:
    """Where the scheduler speaks for every shard, nothing was written, whether it says why or not."""
    plan = engine.prepare(engine.acquire("ab"), "ab")
    cache.offload.transfer_done(engine.session, TransferKind.STORE, plan.transfer, EVERY_SHARD, why)

    assert (engine.hit("ab"), engine.states) == (0, (4, 0, 0, 0))


def test_words_about_a_copy_that_is_over_change_nothing(cache: Cache, engine: OffloadEngine) -> None:
    """Late and repeated acknowledgements are answered and ignored, whatever they say."""
    plan = engine.prepare(engine.acquire("ab"), "ab")
    engine.commit(plan.transfer)
    for shard in (0, 1, EVERY_SHARD):
        cache.offload.transfer_done(engine.session, TransferKind.STORE, plan.transfer, shard, "too late")
        cache.offload.transfer_done(engine.session, TransferKind.STORE, TransferId(999), shard, "never was", (0,))

    assert engine.hit("ab") == 2
    assert cache.counters["corrupt_blocks"] == 0


def test_store_continues_where_the_lease_is(engine: OffloadEngine) -> None:
    """Blocks are offered in the order of the chain, each once: a store that starts elsewhere is refused."""
    lease = engine.acquire("abcd")
    engine.prepare(lease, "ab")

    for start in (0, 1, 3):
        with refused("out_of_order"):
            engine.prepare(lease, "abcd", start)
    assert engine.prepare(lease, "abcd", 2).pieces == [(2, 4)]


def test_store_without_blocks_is_an_ordinary_answer(engine: OffloadEngine) -> None:
    """Offering nothing asks for nothing and leaves nothing."""
    lease = engine.acquire("ab")
    plan = engine.prepare(lease, "")

    assert (plan.transfer, plan.depth, plan.pieces, list(plan.slots)) == (0, 0, [], [])


def test_store_takes_as_much_as_there_is_room_for(cache: Cache, engine: OffloadEngine) -> None:
    """Where the pool is full, the first blocks are taken; the others may be offered again when there is room."""
    held = OffloadEngine(cache)
    plan = held.prepare(held.acquire("ABCDEFGHIJKLM"), "ABCDEFGHIJKLM")
    lease = engine.acquire("abcdef")
    short = engine.prepare(lease, "abcdef")

    assert (short.pieces, short.depth, lease.depth) == ([(0, 3)], 3, 3)
    held.commit(plan.transfer, "failed")
    rest = engine.prepare(lease, "abcdef")
    assert (rest.pieces, rest.depth) == ([(3, 6)], 6)


def test_room_is_made_by_evicting_what_no_lease_holds(cache: Cache, engine: OffloadEngine) -> None:
    """A store evicts the tails that were used longest ago, and never what a lease or a copy holds."""
    engine.store("abcdefgh")
    engine.store("ABCD")
    held = engine.acquire("ABCD")
    plan = engine.prepare(engine.acquire("0123456789"), "0123456789")

    assert plan.depth == 10
    assert (engine.hit("abcdefgh"), engine.hit("ABCD"), held.hit) == (2, 4, 4)
    assert cache.counters["host_evicted_blocks"] == 6


def test_lost_copies_of_a_lease_are_asked_for_again(cache: Cache, engine: OffloadEngine) -> None:
    """A store that failed leaves a hole; the next store of its chain fills it, and then all of it is found."""
    lease = engine.acquire("abcdef")
    first = engine.prepare(lease, "ab")
    second = engine.prepare(lease, "abcd")
    engine.commit(first.transfer, "failed")
    engine.commit(second.transfer)
    third = engine.prepare(lease, "abcdef")

    assert (engine.hit("abcdef"), third.pieces) == (0, [(0, 2), (4, 6)])
    engine.commit(third.transfer)
    assert engine.hit("abcdef") == 6


def test_hole_above_a_whole_run_is_asked_for(cache: Cache, engine: OffloadEngine) -> None:
    """A missing block is copied again though a run behind it, which other chains share, is there as a whole."""
    engine.store("abcx")
    engine.store("abcdef")
    held = engine.acquire("abcdef")
    load = engine.load(engine.acquire("ab"))
    engine.complete(load.transfer, 1)
    lease = engine.acquire("abcdef")
    plan = engine.prepare(lease, "abcdef")

    assert (held.hit, lease.hit, plan.pieces) == (6, 1, [(1, 2)])
    engine.commit(plan.transfer)
    assert engine.hit("abcdef") == 6


# --- leases ---------------------------------------------------------------------------------------------------------


def test_hit_leaves_one_token_to_compute(engine: OffloadEngine) -> None:
    """A prompt that is stored whole is hit up to its last block, unless the engine wants that, too."""
    engine.store("abcd")

    assert (engine.acquire("abcd", full=False).hit, engine.acquire("abcd").hit) == (3, 4)


def test_acquire_again_gives_the_same_lease(engine: OffloadEngine) -> None:
    """A retry under the same request id gets the same lease; another prompt, or a lease in use, is a conflict."""
    lease = engine.acquire("abcd", request="r")

    assert engine.acquire("abcd", request="r") is lease
    with refused("request_conflict"):
        engine.acquire("abce", request="r")
    engine.prepare(lease, "ab")
    with refused("request_conflict"):
        engine.acquire("abcd", request="r")


def test_leases_are_used_by_their_session_only(cache: Cache, engine: OffloadEngine) -> None:
    """A lease of another session, one that was released, and one that never was are told apart."""
    engine.store("ab")
    lease, other = engine.acquire("ab"), OffloadEngine(cache)

    for call in (other.release, other.load, lambda lease: other.prepare(lease, "abcd")):
        with refused("foreign_lease"):
            call(lease)
    engine.release(lease)
    with refused("already_released"):
        engine.release(lease)
    with refused("unknown_lease"):
        engine.release(LeaseId(99))


def test_leases_and_copies_of_a_session_are_bounded(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that never releases, or whose shards never answer, is refused at its limit."""
    monkeypatch.setattr(core_session, "LEASES_PER_SESSION_MAX", 2)
    monkeypatch.setattr(offload, "TRANSFERS_PER_SESSION_MAX", 1)
    engine.store("a")
    lease, second = engine.acquire("ab"), engine.acquire("ac")
    engine.load(lease)

    for call in (lambda: engine.acquire("ad"), lambda: engine.load(second), lambda: engine.prepare(second, "ac")):
        with refused("limit"):
            call()


# --- loads ----------------------------------------------------------------------------------------------------------


def test_load_names_the_slots_of_its_blocks(engine: OffloadEngine) -> None:
    """A load of a part of the hit gets these blocks' slots, in their order."""
    slots = engine.store("abcd")
    load = engine.load(engine.acquire("abcd"), 1, 2)

    assert slots_of(load.slots) == slots[1:3]


def test_acquire_announces_the_load_that_it_is_asked_for(cache: Cache, engine: OffloadEngine) -> None:
    """The load has the hit's blocks from a depth on, and a retry gets the same one as long as it is under way."""
    slots, keys = engine.store("abcd"), keys_of("abcd")
    ask = partial(cache.offload.acquire, engine.session, "r", keys, 16, full=True, load_from=1)
    lease = ask()
    load = cache.offload.announced_load(engine.session, lease)

    assert load is not None
    assert (slots_of(load.slots), load.generation) == (slots[1:], lease.generation)
    assert ask() is lease
    with refused(ErrorCode.REQUEST_CONFLICT):
        cache.offload.acquire(engine.session, "r", keys, 16, full=True)
    engine.complete(load.transfer)
    assert cache.offload.announced_load(engine.session, ask()) is None
    assert cache.counters["loaded_blocks"] == 3


@pytest.mark.parametrize(("prompt", "load_from"), [("xy", 0), ("abcd", 4), ("abcd", 5), ("abcd", None)])
def test_acquire_announces_no_load_of_no_blocks(
    cache: Cache, engine: OffloadEngine, prompt: str, load_from: int | None
) -> None:
    """Without a hit behind `load_from`, or without `load_from`, there is nothing to load, and a lease all the same."""
    engine.store("abcd")
    lease = cache.offload.acquire(engine.session, "r", keys_of(prompt), 16, full=True, load_from=load_from)

    assert cache.offload.announced_load(engine.session, lease) is None
    assert cache.offload.transfers == []


def test_slots_of_a_load_are_read_undisturbed_after_the_release(cache: Cache, engine: OffloadEngine) -> None:
    """Until every shard is through with a load, nothing of its path is evicted, though the lease is gone."""
    engine.store("abcd")
    lease = engine.acquire("abcd")
    load = engine.load(lease, 2, 1)
    engine.release(lease)
    cache.offload.transfer_done(engine.session, TransferKind.LOAD, load.transfer, 0, "", ())
    other = OffloadEngine(cache)
    crowd = other.acquire("0123456789ABCDEF")

    assert other.prepare(crowd, "0123456789ABCDEF").depth == 13
    assert engine.hit("abcd") == 3
    cache.offload.transfer_done(engine.session, TransferKind.LOAD, load.transfer, 1, "", ())
    assert (other.prepare(crowd, "0123456789ABCDEF").depth, engine.hit("abcd")) == (16, 0)


@pytest.mark.parametrize(("start", "blocks"), [(0, 0), (0, 5), (3, 2), (4, 1)])
def test_load_stays_within_the_hit(engine: OffloadEngine, start: int, blocks: int) -> None:
    """No blocks, or some beyond the hit, are refused."""
    engine.store("abcd")

    with refused("bad_value"):
        engine.load(engine.acquire("abcdef"), start, blocks)


def test_corrupt_blocks_are_not_matched_again(cache: Cache, engine: OffloadEngine) -> None:
    """What one shard found damaged leaves the index with what hangs on it, and can be stored anew."""
    engine.store("abcd")
    lease = engine.acquire("abcd")
    load = engine.load(lease, 1, 3)
    engine.complete(load.transfer, 1)

    assert engine.hit("abcd") == 2
    assert [cache.counters[name] for name in ("corrupt_blocks", "loaded_blocks", "load_failed_blocks")] == [1, 1, 2]
    engine.release(lease)
    assert engine.states == (2, 0, 2, 0)
    engine.store("abcd")
    assert engine.hit("abcd") == 4


def test_corrupt_block_stays_while_somebody_reads_it(cache: Cache, engine: OffloadEngine) -> None:
    """A damaged block's slot is free when the last load that reads it is over, not before."""
    other = OffloadEngine(cache)
    engine.store("ab")
    mine, theirs = engine.load(engine.acquire("ab")), other.load(other.acquire("ab"))
    engine.complete(mine.transfer, 1)

    assert engine.states == (2, 0, 2, 0)
    other.complete(theirs.transfer)
    assert engine.states == (3, 0, 1, 0)
    assert engine.hit("ab") == 1


def test_load_of_what_proved_corrupt_meanwhile_is_refused(engine: OffloadEngine) -> None:
    """A lease whose blocks were dropped, or are being written anew, cannot load them."""
    engine.store("ab")
    lease, other = engine.acquire("ab"), engine.acquire("ab")
    engine.complete(engine.load(other).transfer, 1)

    with refused("hit_gone"):
        engine.load(lease)
    plan = engine.prepare(engine.acquire("ab"), "ab")
    with refused("hit_gone"):
        engine.load(lease)
    engine.commit(plan.transfer)
    assert slots_of(engine.load(lease).slots)[1] == slots_of(plan.slots)[0]


def test_indices_outside_a_load_are_ignored(cache: Cache, engine: OffloadEngine) -> None:
    """A shard that calls blocks corrupt which the load does not have harms nobody."""
    engine.store("abcd")
    engine.complete(engine.load(engine.acquire("abcd"), 1, 2).transfer, 2, -1, 1 << 30)

    assert (engine.hit("abcd"), cache.counters["corrupt_blocks"]) == (4, 0)


def test_failed_load_keeps_the_blocks(cache: Cache, engine: OffloadEngine) -> None:
    """A copy that fails for other reasons than the bytes says nothing about them; called off, it is no failure."""
    engine.store("ab")
    engine.complete(engine.load(engine.acquire("ab")).transfer, error="no time")
    cache.offload.transfer_done(
        engine.session, TransferKind.LOAD, engine.load(engine.acquire("ab")).transfer, EVERY_SHARD, "", ()
    )

    assert engine.hit("ab") == 2
    assert [cache.counters[name] for name in ("load_failed_blocks", "load_called_off_blocks")] == [2, 2]


@pytest.mark.parametrize("shard", [2, 63])
def test_shards_that_do_not_exist_are_refused(cache: Cache, engine: OffloadEngine, shard: int) -> None:
    """Nobody speaks for a shard that the engine did not declare."""
    plan = engine.prepare(engine.acquire("ab"), "ab")

    with refused("bad_value"):
        cache.offload.transfer_done(engine.session, TransferKind.STORE, plan.transfer, shard, "")
    assert engine.states == (2, 2, 0, 0)


def test_report_of_the_other_kind_ends_nothing(cache: Cache, engine: OffloadEngine) -> None:
    """Who says that a store is done with a load's number is mistaken about what it copies: the load goes on."""
    engine.store("ab")
    load = engine.load(engine.acquire("ab"))

    with refused("bad_value"):
        cache.offload.transfer_done(engine.session, TransferKind.STORE, load.transfer, 0)
    assert [copy.waiting for copy in cache.offload.transfers] == [{0, 1}]


def test_a_store_has_no_bad_blocks(cache: Cache, engine: OffloadEngine) -> None:
    """Only a load finds blocks that differ from what was stored; a store that names some stays in flight."""
    store = engine.prepare(engine.acquire("cd"), "cd")

    with refused("bad_value"):
        cache.offload.transfer_done(engine.session, TransferKind.STORE, store.transfer, 0, "", (0,))
    assert (engine.hit("cd"), len(cache.offload.transfers)) == (0, 1)


# --- the end of sessions --------------------------------------------------------------------------------------------


def test_ids_are_never_used_twice(cache: Cache, engine: OffloadEngine) -> None:
    """Sessions, leases and copies of later engines have other ids than those of earlier ones."""
    first = engine.prepare(engine.acquire("ab"), "ab")
    cache.close_session(engine.session)
    other = OffloadEngine(cache)
    lease = other.acquire("ab")
    second = other.prepare(lease, "ab")

    assert (other.session > engine.session, lease.id > 1, second.transfer > first.transfer) == (True, True, True)
    with refused("no_session"):
        cache.offload.transfer_done(SessionId(engine.session), TransferKind.STORE, second.transfer, 0, "")


def test_match_changes_nothing(cache: Cache, engine: OffloadEngine) -> None:
    """A match pins nothing, and refuses keys beyond the prompt as an acquire does."""
    engine.store("ab")

    assert (engine.hit("ab"), engine.host.protected) == (2, 0)
    with refused("bad_value"):
        cache.offload.match(engine.session, keys_of("abc"), 8, full=True)
    assert engine.host.counts[SlotState.CACHED] == 2
