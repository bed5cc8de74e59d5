"""The storage tier, one decision at a time: what is written, what is fetched, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import (
    PrefetchOver,
    QueryStorage,
    StartBackup,
    StartFetch,
    StorageAnswered,
    StorageEmptied,
    StorageReady,
    StorageSuspended,
    Ticked,
)
from kvcached.core.slots.ranges import slot_count
from kvcached.core.slots.states import PrefetchState, SlotState
from kvcached.core.transfers import prefetch as prefetches
from kvcached.core.transfers.engine_copies import StorePlan
from kvcached.core.transfers.prefetch import FETCH_BLOCKS_MAX, FETCHES_PER_CHAIN, PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from kvcached.core.transfers.storage_state import PrefetchEnd
from kvcached_client.types import MissReason
from tests.core.engine import EPOCH, TTL_MS, Engine, healthy, keys_of
from tests.core.host_tier import make_tiers
from tests.core.offload_engine import OffloadEngine
from tests.core.storage_world import StorageWorld
from tests.core.tier_world import keys_in, slots_of

LONG = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def new_world() -> Iterator[Callable[..., StorageWorld]]:
    """Makes worlds with engines in offload mode, and checks each of them when the test is over."""
    made: list[StorageWorld] = []

    def make(
        *, backup: BackupPolicy = BackupPolicy.EVERY, slabs: int = 4, watermark: int = 0, **limits: int
    ) -> StorageWorld:
        spec = StorageSpec(backup, watermark, PrefetchLimits(**limits))
        cache = Cache([], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=slabs, namespaces_max=2, storage=spec)
        made.append(StorageWorld(cache))
        return made[-1]

    yield make
    for world in made:
        world.check()


def storing(engine: OffloadEngine, text: str) -> StorePlan:
    """An engine has computed a prompt, and is storing what the host pool lacks of it."""
    lease = engine.acquire(text)
    plan = engine.prepare(lease, text)
    engine.release(lease)
    return plan


def stored(world: StorageWorld, engine: OffloadEngine, plan: StorePlan, text: str) -> None:
    """Its shards have carried out a store."""
    keys = b"".join(keys_of(text)[16 * piece.start : 16 * piece.end] for piece in plan.pieces)
    tree = next(copy.tree for copy in engine.core.transfers if copy.id == plan.transfer)
    world.wrote(tree, plan.generation, keys, slots_of(plan.slots))
    engine.commit(plan.transfer)


def store(world: StorageWorld, engine: OffloadEngine, text: str) -> None:
    """Compute a prompt, whose blocks are in the host pool then."""
    plan = storing(engine, text)
    if plan.transfer:
        world.take()
        stored(world, engine, plan, text)


def forget(engine: OffloadEngine) -> None:
    """The host pool loses all that nobody holds."""
    engine.core.namespaces.by_root[engine.spec.root].tree.shed_host("test")


def shelved(world: StorageWorld, *texts: str) -> OffloadEngine:
    """An engine whose prompts are in storage and nowhere else."""
    engine = OffloadEngine(world.cache)
    for text in texts:
        store(world, engine, text)
    world.answer_all()
    forget(engine)
    return engine


def test_every_host_copy_is_written_once(new_world: Callable[..., StorageWorld]) -> None:
    """With `every`, a block goes to storage when its host copy is complete, and never again."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    store(world, engine, "abc")
    store(world, engine, "abcd")
    world.answer_all()
    store(world, engine, "abx")
    (order,) = [effect for effect in world.take() if isinstance(effect, StartBackup)]
    world.answer_all()

    assert len(world.held) == 5
    assert [slot_count(span.host) for span in order.spans] == [1]
    assert world.cache.counters["backed_up_blocks"] == 5


@pytest.mark.parametrize("backup", [BackupPolicy.EVERY, BackupPolicy.SECOND_SIGHTING])
def test_emptied_storage_is_filled_again(new_world: Callable[..., StorageWorld], backup: BackupPolicy) -> None:
    """When storage has lost its blocks, as after its device was replaced, those that are hit are written again."""
    world = new_world(backup=backup)
    engine = OffloadEngine(world.cache)
    for text in ("abcd", "abcd", "abxy", "abxy"):
        store(world, engine, text)
        engine.release(engine.acquire(text))
        world.answer_all()
    before = set(world.held)
    world.lose()
    world.held.clear()
    world.cache.handle(StorageEmptied())
    world.cache.handle(StorageReady())
    world.answer_all()
    assert not world.held
    engine.release(engine.acquire("abcd"))
    world.answer_all()
    assert len(world.held) == 4
    engine.release(engine.acquire("abxy"))
    world.answer_all()

    assert (len(before), world.held) == (6, before)


def test_blocks_that_storage_missed_are_written_when_they_are_hit(new_world: Callable[..., StorageWorld]) -> None:
    """With `every`, blocks that were stored while there was no storage are written when a request hits them."""
    world = new_world()
    world.cache.handle(StorageSuspended())
    engine = OffloadEngine(world.cache)
    store(world, engine, "abcd")
    world.cache.handle(StorageReady())
    world.answer_all()
    assert not world.held
    engine.release(engine.acquire("abcd"))
    world.answer_all()

    assert len(world.held) == 4


def test_second_sighting_is_what_a_later_request_hits(new_world: Callable[..., StorageWorld]) -> None:
    """With `second_sighting`, only blocks that a later request has hit are written."""
    world = new_world(backup=BackupPolicy.SECOND_SIGHTING)
    engine = OffloadEngine(world.cache)
    store(world, engine, "abcd")
    world.answer_all()
    assert not world.held

    store(world, engine, "abxy")
    world.answer_all()
    assert len(world.held) == 2


def test_on_eviction_writes_the_next_victims(new_world: Callable[..., StorageWorld]) -> None:
    """With `on_eviction`, nothing is written while there is room, and then what will have to go first."""
    world = new_world(backup=BackupPolicy.ON_EVICTION, slabs=2, watermark=40)
    engine = OffloadEngine(world.cache)
    store(world, engine, "ab")
    world.answer_all()
    assert not world.held

    store(world, engine, "pqrst")
    world.answer_all()
    assert len(world.held) == 7
    store(world, engine, "uvwxyz12")
    world.answer_all()

    assert engine.hit("ab") == 0
    world.prefetch(engine.session, "ab")
    world.answer_all()
    assert engine.hit("ab") == 2


def test_never_writes_nothing(new_world: Callable[..., StorageWorld]) -> None:
    """With `never`, storage is read and not written."""
    world = new_world(backup=BackupPolicy.NEVER)
    engine = OffloadEngine(world.cache)
    store(world, engine, "abc")
    world.answer_all()

    assert not world.held


def test_what_the_host_pool_lost_comes_back(new_world: Callable[..., StorageWorld]) -> None:
    """Blocks that left the host pool come back from storage, in order, and are not written there again."""
    world = new_world()
    engine = shelved(world, "abcdef")
    fetched = world.prefetch(engine.session, "abcdefgh")
    world.answer_all()

    assert (fetched.state, fetched.end, fetched.fetched) == (PrefetchState.OVER, PrefetchEnd.FETCHED, 6)
    assert engine.hit("abcdefgh") == 6
    assert world.cache.counters["backed_up_blocks"] == 6


def test_only_hits_are_reserved(new_world: Callable[..., StorageWorld]) -> None:
    """A question reserves nothing, and an answer only slots for what storage has."""
    world = new_world()
    engine = shelved(world, "ab")
    world.prefetch(engine.session, LONG)
    world.take()
    assert engine.states[1] == 0
    world.answer(0)
    world.take()
    assert engine.states[1] == 2
    world.answer_all()

    assert engine.hit(LONG) == 2


def test_too_few_hits_are_not_fetched(new_world: Callable[..., StorageWorld]) -> None:
    """Below the threshold a prefetch ends after the question, and nothing was reserved."""
    world = new_world(threshold_blocks=3)
    engine = shelved(world, "ab")
    asked = world.prefetch(engine.session, "abcdef")
    world.answer_all()

    assert asked.end is PrefetchEnd.BELOW_THRESHOLD
    assert engine.states[1] == 0


def test_block_that_is_not_there_after_all_ends_the_hit(new_world: Callable[..., StorageWorld]) -> None:
    """Where a block does not come, those before it are kept, and those behind it are given back."""
    world = new_world()
    engine = shelved(world, "abcdef")
    fetched = world.prefetch(engine.session, "abcdef")
    world.take()
    world.answer(0)
    world.take()
    world.answer(0, good=2)
    world.answer_all()

    assert (fetched.end, fetched.fetched) == (PrefetchEnd.FAILED, 2)
    assert engine.hit("abcdef") == 2
    assert engine.states[1] == 0


def test_batches_may_come_in_any_order(new_world: Callable[..., StorageWorld]) -> None:
    """Several copies of one chain are under way at once; what comes early waits for what lies before it."""
    world = new_world(slabs=64)
    text = (LONG * 10)[: FETCH_BLOCKS_MAX * (FETCHES_PER_CHAIN + 1)]
    engine = shelved(world, text)
    world.prefetch(engine.session, text)
    world.take()
    world.answer(0)
    world.take()
    assert len(world.under_way) == FETCHES_PER_CHAIN
    world.answer(FETCHES_PER_CHAIN - 1)
    assert engine.hit(text) == 0
    world.answer(0)
    assert engine.hit(text) == FETCH_BLOCKS_MAX
    world.check()
    world.answer_all()

    assert engine.hit(text) == len(text)


def test_stopping_keeps_what_was_begun(new_world: Callable[..., StorageWorld]) -> None:
    """Whoever stops waiting frees no slot that storage still writes: what was begun comes, and no more is begun."""
    world = new_world(slabs=64)
    text = (LONG * 10)[: FETCH_BLOCKS_MAX * (FETCHES_PER_CHAIN + 1)]
    engine = shelved(world, text)
    fetched = world.prefetch(engine.session, text)
    world.take()
    world.answer(0)
    world.take()
    world.cache.storage.prefetches.stop(fetched)
    assert fetched.state is PrefetchState.FETCHING
    world.check()
    world.answer_all()

    assert fetched.end is PrefetchEnd.STOPPED
    assert engine.hit(text) == FETCH_BLOCKS_MAX * FETCHES_PER_CHAIN


def test_two_requests_share_a_prefetch(new_world: Callable[..., StorageWorld]) -> None:
    """A prompt that is on its way already is not fetched twice."""
    world = new_world()
    engine = shelved(world, "abc")
    first = world.prefetch(engine.session, "abc")
    second = world.prefetch(OffloadEngine(world.cache).session, "abc")
    effects = world.take()
    world.answer_all()

    assert first is second
    assert sum(isinstance(effect, QueryStorage) for effect in effects) == 1


def test_blocks_that_are_being_stored_are_no_hit_of_a_prefetch(new_world: Callable[..., StorageWorld]) -> None:
    """A prefetch begins where the hit ends, not behind what others store: should they fail, storage is asked."""
    world = new_world(backup=BackupPolicy.NEVER)
    writer, reader = OffloadEngine(world.cache), OffloadEngine(world.cache)
    store(world, writer, "ab")
    plan = writer.prepare(writer.acquire("abcdef"), "abcdef")
    asked = world.prefetch(reader.session, "abcdef")
    writer.commit(plan.transfer, "failed")
    effects = world.take()
    world.answer_all()

    assert [len(each.keys) // 16 for each in effects if isinstance(each, QueryStorage)] == [4]
    assert (asked.end, asked.inserted, reader.hit("abcdef")) == (PrefetchEnd.NOTHING, 2, 2)


def test_blocks_that_were_stored_meanwhile_are_given_back(new_world: Callable[..., StorageWorld]) -> None:
    """Where an engine has stored the same blocks during a fetch, its copies stay, and the others' slots are free."""
    world = new_world()
    engine = shelved(world, "abc")
    fetched = world.prefetch(engine.session, "abc")
    world.take()
    world.answer(0)
    world.take()
    store(world, engine, "ab")
    world.answer_all()

    assert fetched.fetched == 1
    assert engine.hit("abc") == 3
    assert engine.states[1:3] == (0, 3)


def test_prefix_that_has_gone_takes_the_fetched_along(new_world: Callable[..., StorageWorld]) -> None:
    """Blocks whose prefix has left the index during their fetch are not put into it."""
    world = new_world()
    engine = shelved(world, "abcd")
    store(world, engine, "ab")
    world.answer_all()
    fetched = world.prefetch(engine.session, "abcd")
    world.take()
    world.answer(0)
    world.take()
    load = engine.load(engine.acquire("ab"))
    engine.complete(load.transfer, 0)  # a lock keeps a prefix from eviction; a bad block leaves the index all the same
    for lease in list(engine.core.sessions[engine.session].leases):
        engine.release(lease)
    world.answer_all()

    assert fetched.fetched == 0
    engine.release(engine.acquire("abcd"))  # whose prefix was locked
    assert engine.states[1:3] == (0, 0)


def test_lost_storage_gives_everything_back(new_world: Callable[..., StorageWorld]) -> None:
    """When the storage process is dead, prefetches are over, their slots free, and what it read is pinned no more."""
    world = new_world()
    engine = shelved(world, "abc")
    store(world, engine, "xy")
    fetched = world.prefetch(engine.session, "abc")
    world.take()
    world.answer(next(at for at, asked in enumerate(world.under_way) if isinstance(asked, QueryStorage)))
    effects = world.take()
    world.lose()
    forget(engine)

    assert any(isinstance(effect, StartFetch) for effect in effects)
    assert fetched.end is PrefetchEnd.UNAVAILABLE
    assert engine.states[1:3] == (0, 0)
    assert world.prefetch(engine.session, "abc").end is PrefetchEnd.UNAVAILABLE


def test_suspended_storage_is_not_asked(new_world: Callable[..., StorageWorld]) -> None:
    """While storage fails, nothing is begun; afterwards it is used again."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    world.cache.handle(StorageSuspended())
    store(world, engine, "abc")
    assert not [effect for effect in world.take() if isinstance(effect, StartBackup)]
    assert world.prefetch(engine.session, "xyz").end is PrefetchEnd.UNAVAILABLE
    world.cache.handle(StorageReady())
    store(world, engine, "abcd")
    world.answer_all()

    assert len(world.held) == 4


def test_suspended_storage_keeps_what_it_writes(new_world: Callable[..., StorageWorld]) -> None:
    """Slots that a slow storage may still write are nobody else's, however long it takes, and come back in the end."""
    world = new_world()
    engine = shelved(world, "abc")
    fetched = world.prefetch(engine.session, "abc")
    world.take()
    world.answer(0)
    world.take()
    world.cache.handle(StorageSuspended())
    assert engine.states[1] == 3
    world.answer_all()

    assert fetched.state is PrefetchState.OVER
    assert engine.hit("abc") == 3


@pytest.mark.parametrize("end", ["answered", "lost"])
@pytest.mark.parametrize("is_suspended", [False, True], ids=["in use", "suspended"])
def test_host_copy_is_held_until_its_write_ends(
    new_world: Callable[..., StorageWorld], end: str, *, is_suspended: bool
) -> None:
    """A block that storage is reading is not evicted, whatever becomes of storage, until it has answered or is dead."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    store(world, engine, "abc")
    assert [effect for effect in world.take() if isinstance(effect, StartBackup)]
    if is_suspended:
        world.cache.handle(StorageSuspended())
    forget(engine)
    assert engine.hit("abc") == 3

    if end == "answered":
        world.answer(0)
    else:
        world.lose()
    forget(engine)
    assert engine.hit("abc") == 0


def test_failed_writes_are_tried_again_and_given_up(new_world: Callable[..., StorageWorld]) -> None:
    """A block that could not be written is written later, and after some tries counted as failed."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    store(world, engine, "abc")
    world.take()
    world.answer(0, good=1)
    assert not [effect for effect in world.take() if isinstance(effect, StartBackup)]
    world.cache.handle(Ticked(1000))
    world.take()
    world.answer(0, good=0)
    world.cache.handle(Ticked(60_000))
    world.take()
    world.answer(0, good=0)
    world.cache.handle(Ticked(600_000))
    world.answer_all()

    assert len(world.held) == 1
    assert world.cache.counters["backup_failed_blocks"] == 2


def test_cleared_namespace_gets_nothing_of_before(new_world: Callable[..., StorageWorld]) -> None:
    """A fetch that is under way when its namespace is cleared brings nothing into the new generation."""
    world = new_world()
    engine = shelved(world, "abc")
    fetched = world.prefetch(engine.session, "abc")
    world.take()
    world.answer(0)
    world.take()
    engine.core.clear(engine.session)
    world.answer_all()

    assert fetched.end is PrefetchEnd.CLEARED
    assert engine.hit("abc") == 0
    assert world.prefetch(engine.session, "abc").state is PrefetchState.ASKING
    world.answer_all()
    assert engine.hit("abc") == 0
    assert not world.cache.offload.namespaces.retired


def test_bytes_of_a_second_are_limited(new_world: Callable[..., StorageWorld]) -> None:
    """Prefetches beyond the rate are refused with that reason until time has passed."""
    world = new_world(bytes_per_s=100, slab_bytes=400)
    engine = OffloadEngine(world.cache)
    store(world, engine, "abc")
    store(world, engine, "xyz")
    world.answer_all()
    forget(engine)
    world.prefetch(engine.session, "abc")
    world.answer_all()
    refused = world.prefetch(engine.session, "xyz")
    world.answer_all()
    assert refused.end is PrefetchEnd.RATE_LIMITED
    for now_ms in range(0, 3000, 500):
        engine.core.heartbeat(engine.session, now_ms)
        world.cache.handle(Ticked(now_ms))
    late = world.prefetch(engine.session, "xyz")
    world.answer_all()

    assert late.end is PrefetchEnd.FETCHED


@pytest.mark.parametrize("end", [PrefetchEnd.NO_ROOM, PrefetchEnd.STOPPED, PrefetchEnd.FAILED, PrefetchEnd.CLEARED])
def test_bytes_that_are_not_fetched_are_free_for_others(
    new_world: Callable[..., StorageWorld], monkeypatch: pytest.MonkeyPatch, end: PrefetchEnd
) -> None:
    """However a prefetch ends, only blocks that storage was asked for count: the next prefetch is not refused."""
    monkeypatch.setattr(prefetches, "FETCH_BLOCKS_MAX", 1)
    monkeypatch.setattr(prefetches, "FETCHES_PER_CHAIN", 1)
    world = new_world(bytes_per_s=200, slab_bytes=400)  # two blocks a second
    engine = shelved(world, "abcdef", "xyz")
    if end is PrefetchEnd.NO_ROOM:  # for more than one block
        engine.acquire("klmnopqrstuvwxyz")
        assert engine.prepare(engine.acquire("0123456789ABCDE"), "0123456789ABCDE").depth == 15
    fetched = world.prefetch(engine.session, "abcdef")
    world.take()
    world.answer(0)  # the question
    if end is PrefetchEnd.STOPPED:
        world.cache.storage.prefetches.stop(fetched)
    elif end is PrefetchEnd.CLEARED:
        engine.core.clear(engine.session)
    world.take()
    world.answer(0, good=0 if end is PrefetchEnd.FAILED else None)
    world.answer_all()
    assert (fetched.state, fetched.end) == (PrefetchState.OVER, end)
    generation = engine.core.namespaces.by_root[engine.spec.root].generation
    world.held |= {(engine.spec.root, generation, key) for key in keys_in(keys_of("xyz"))}
    again = world.prefetch(engine.session, "xyz")
    world.answer_all()

    assert again.end is (PrefetchEnd.NO_ROOM if end is PrefetchEnd.NO_ROOM else PrefetchEnd.FETCHED)


def test_blocks_that_are_computed_sooner_are_not_fetched(new_world: Callable[..., StorageWorld]) -> None:
    """Where fetches have taken longer than the engine says it computes, they are not made."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    for text in ("abcd", "efgh"):
        store(world, engine, text)
    world.answer_all()
    forget(engine)
    world.prefetch(engine.session, "abcd")
    world.take()
    (query,) = [asked for asked in world.under_way if isinstance(asked, QueryStorage)]
    world.answer(0)
    world.take()
    world.now_us += 1_000_000  # a second for four blocks
    world.answer_all()
    fast = world.prefetch(engine.session, "efgh", rate=1000.0)
    world.answer_all()
    slow = world.prefetch(engine.session, "efgh", rate=1.0)
    world.answer_all()

    assert query.query
    assert fast.end is PrefetchEnd.RECOMPUTE
    assert slow.end is PrefetchEnd.FETCHED


def test_pause_stops_storage_too(new_world: Callable[..., StorageWorld]) -> None:
    """While copies are paused none to or from storage is begun, and those under way are counted."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    store(world, engine, "abc")
    world.take()
    assert world.cache.copies_under_way() == 1
    world.cache.pause()
    world.answer_all()
    assert world.cache.copies_under_way() == 0
    assert world.prefetch(engine.session, "xyz").end is PrefetchEnd.UNAVAILABLE
    world.cache.resume()

    assert len(world.held) == 3


def test_prefetch_that_asks_begins_nothing_while_paused(new_world: Callable[..., StorageWorld]) -> None:
    """Neither what storage answers during a pause nor what comes in it makes a prefetch begin more copies."""
    world = new_world(slabs=80)
    texts = "ab", LONG * 6
    engine = shelved(world, *texts)
    asking, fetching = (world.prefetch(engine.session, text) for text in texts)
    world.take()
    world.answer(1)
    world.take()
    world.cache.pause()
    world.answer_all()
    world.cache.resume()

    assert (asking.end, asking.fetched) == (PrefetchEnd.UNAVAILABLE, 0)
    assert (fetching.end, fetching.fetched) == (PrefetchEnd.STOPPED, FETCHES_PER_CHAIN * FETCH_BLOCKS_MAX)


def test_late_words_of_storage_change_nothing(new_world: Callable[..., StorageWorld]) -> None:
    """An answer to a question that is over, or never was, is not listened to."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    store(world, engine, "abc")
    world.answer_all()
    world.cache.handle(StorageAnswered(99, 5, 0))

    assert [effect for effect in world.take() if isinstance(effect, PrefetchOver)] == []


def test_device_pools_are_filled_from_storage() -> None:
    """For engines on device pools, what comes from storage is a host hit behind what the device has."""
    cache = make_tiers("a", slots=8, host_slabs=2, slots_per_slab=8, storage=StorageSpec(BackupPolicy.EVERY))
    world = StorageWorld(cache)
    engine = Engine(cache)
    engine.store("abcdef")
    world.answer_all()
    assert len(world.held) == 6
    tree = cache.tree_of("a")
    engine.release(engine.acquire("uvwxy12", reserve=1))  # everything else leaves the device
    tree.shed_host("test", reason=MissReason.EVICTED)
    engine.store("ab")
    world.answer_all()
    fetched = world.prefetch(engine.session, "abcdefgh", epoch=engine.epoch)
    world.answer_all()
    world.check()
    grant = engine.acquire("abcdefgh")

    assert fetched.fetched == 4
    assert grant.hit == 6
    world.answer_all()
    assert healthy(cache)


def test_path_that_left_the_index_is_not_tried_again(new_world: Callable[..., StorageWorld]) -> None:
    """What could not be written, and has left memory since, is passed over, whatever its place in the index is now."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    for text in ("abc", "abd"):
        store(world, engine, text)
        fail_backups(world)
    engine.core.namespaces.by_root[engine.spec.root].tree.shed_host("test", 2)
    for text in ("abef", "abeg"):
        store(world, engine, text)
        fail_backups(world)
    world.cache.handle(Ticked(10_000))
    world.answer_all()

    assert len(world.held) == 5


def test_bad_block_is_nobodys_while_storage_reads_it(new_world: Callable[..., StorageWorld]) -> None:
    """The slot of a block that an engine finds bad while it is written to storage is free when that is over."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    store(world, engine, "ab")
    world.take()
    lease = engine.acquire("ab")
    engine.complete(engine.load(lease).transfer, 1)
    engine.release(lease)

    assert (engine.hit("ab"), engine.host.counts[SlotState.QUARANTINED]) == (1, 1)
    world.answer_all()
    assert (engine.hit("ab"), engine.host.counts[SlotState.QUARANTINED]) == (1, 0)


def fail_backups(world: StorageWorld) -> None:
    """Storage can write nothing of what it was given."""
    world.take()
    while world.under_way:
        world.answer(0, good=0)
