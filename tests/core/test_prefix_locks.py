"""What a prefetch continues and brings stays in the host pool until its requester has acquired it, and not for ever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import MembersDied, StorageReady, Ticked, TransferKind
from kvcached.core.transfers import prefix_locks
from kvcached.core.transfers.prefetch import PrefetchLimits
from kvcached.core.transfers.prefix_locks import HANDOVER_MS, LOCKED_PERCENT_MAX
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from kvcached.core.transfers.storage_state import Prefetch, PrefetchEnd
from tests.core.engine import EPOCH, TTL_MS, Engine
from tests.core.host_tier import make_tiers
from tests.core.offload_engine import OffloadEngine
from tests.core.storage_world import StorageWorld
from tests.core.test_storage import store

MakeWorld = Callable[..., StorageWorld]
ASKED = "abcdefgh"


@pytest.fixture
def new_world() -> Iterator[MakeWorld]:
    """Makes worlds with engines in offload mode, whose invariants are checked when the test is over."""
    made: list[StorageWorld] = []

    def make(*, slabs: int = 4) -> StorageWorld:
        spec = StorageSpec(BackupPolicy.EVERY, 0, PrefetchLimits())
        cache = Cache([], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=slabs, namespaces_max=2, storage=spec)
        made.append(StorageWorld(cache))
        return made[-1]

    yield make
    for world in made:
        world.check()


def protected(engine: OffloadEngine) -> int:
    """Blocks of its namespace that eviction cannot have."""
    return engine.host.protected


def fill(world: StorageWorld, engine: OffloadEngine, *texts: str) -> None:
    """Other traffic, which goes to storage, too."""
    for text in texts:
        store(world, engine, text)
        world.check()
        world.answer_all()


def returning(world: StorageWorld, engine: OffloadEngine) -> None:
    """A conversation whose end has left a full host pool of 16 slots; storage has all of it."""
    fill(world, engine, ASKED, "ABCDEF", "GHIJKL")
    assert engine.hit(ASKED) == 4


def fetched(world: StorageWorld, engine: OffloadEngine) -> Prefetch:
    """The conversation comes back: a prefetch, to its end."""
    prefetch = world.prefetch(engine.session, ASKED)
    world.check()
    world.answer_all()
    world.check()
    return prefetch


def test_prefetch_does_not_evict_what_it_continues(new_world: MakeWorld) -> None:
    """A prefetch into a full pool evicts others' blocks, not those of its own prefix, however old they are."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    returning(world, engine)

    assert (fetched(world, engine).fetched, engine.hit(ASKED)) == (4, 8)


def test_prefix_survives_what_others_store_during_the_fetch(new_world: MakeWorld) -> None:
    """Between the question to storage and the last block that comes, others' stores do not evict the known prefix."""
    world = new_world()
    engine, other = OffloadEngine(world.cache), OffloadEngine(world.cache)
    returning(world, engine)
    prefetch = world.prefetch(engine.session, ASKED)
    store(world, other, "mnopqrst")
    assert engine.hit(ASKED) == 4
    world.take()
    world.answer(0)
    store(world, other, "uvwxyz")
    world.answer_all()

    assert (prefetch.end, engine.hit(ASKED)) == (PrefetchEnd.FETCHED, 8)


def test_fetched_blocks_survive_until_the_acquire(new_world: MakeWorld) -> None:
    """What has come is kept from others' stores until its requester has a lease on it, and no longer."""
    world = new_world()
    engine, other = OffloadEngine(world.cache), OffloadEngine(world.cache)
    returning(world, engine)
    fetched(world, engine)
    fill(world, other, "mnopqrst", "uvwxyz12")
    assert protected(engine) == 8
    lease = engine.acquire(ASKED)

    assert (lease.hit, len(world.cache.storage.locks)) == (8, 0)
    engine.release(lease)
    assert protected(engine) == 0


def test_prefix_that_is_kept_already_needs_no_room(new_world: MakeWorld) -> None:
    """A prefetch that is asked for again, before its requester has acquired, keeps the prefix, however long it is."""
    world = new_world()
    engine, other = OffloadEngine(world.cache), OffloadEngine(world.cache)
    fill(world, engine, ASKED)
    for _ in range(2):
        world.prefetch(engine.session, ASKED + "ijkl")
        world.check()
        assert protected(engine) == len(ASKED) == 16 * LOCKED_PERCENT_MAX // 100
        world.answer_all()
    fill(world, other, "mnopqrst", "uvwxyz12")

    assert engine.acquire(ASKED + "ijkl").hit == len(ASKED)


def test_acquire_during_the_fetch_ends_the_wait(new_world: MakeWorld) -> None:
    """A requester that does not wait holds its hit by its lease; what comes later is locked for nobody."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    returning(world, engine)
    world.prefetch(engine.session, ASKED)
    engine.release(engine.acquire(ASKED))
    world.check()
    assert protected(engine) == 4
    world.answer_all()

    assert (protected(engine), engine.hit(ASKED)) == (0, 8)


def test_lock_is_held_for_the_last_of_two_requesters(new_world: MakeWorld) -> None:
    """Two engines that share a prefetch both find its blocks, whoever acquires first."""
    world = new_world()
    one, two = OffloadEngine(world.cache), OffloadEngine(world.cache)
    returning(world, one)
    assert world.prefetch(one.session, ASKED) is world.prefetch(two.session, ASKED)
    world.answer_all()
    one.release(one.acquire(ASKED))
    fill(world, one, "mnopqrst", "uvwxyz12")
    assert protected(one) == 8

    two.release(two.acquire(ASKED))
    assert protected(two) == 0


@pytest.mark.parametrize("during", [True, False], ids=["during the fetch", "after it"])
def test_lock_ends_with_its_session(new_world: MakeWorld, during: bool) -> None:
    """An engine that dies before it acquires leaves nothing locked."""
    world = new_world()
    engine, other = OffloadEngine(world.cache), OffloadEngine(world.cache)
    returning(world, engine)
    world.prefetch(engine.session, ASKED)
    if not during:
        world.answer_all()
    world.cache.handle(MembersDied(engine.session))
    world.check()
    world.answer_all()

    assert (protected(other), len(world.cache.storage.locks)) == (0, 0)


def test_lock_ends_by_time(new_world: MakeWorld) -> None:
    """A requester that never acquires keeps others from the room for a bounded time."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    returning(world, engine)
    fetched(world, engine)

    def tick(now_ms: int) -> None:
        world.cache.offload.heartbeat(engine.session, now_ms)
        world.cache.handle(Ticked(now_ms))
        world.check()

    tick(HANDOVER_MS - 1)
    assert protected(engine) == 8
    tick(HANDOVER_MS)
    assert protected(engine) == 0


@pytest.mark.parametrize("during", [True, False], ids=["during the fetch", "after it"])
def test_lock_ends_when_the_namespace_is_cleared(new_world: MakeWorld, during: bool) -> None:
    """A clear leaves nothing of a prefetched prompt: its old tree goes as soon as storage is through with it."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    returning(world, engine)
    world.prefetch(engine.session, ASKED)
    if not during:
        world.answer_all()
    engine.core.clear(engine.session)
    world.check()
    world.answer_all()

    assert (engine.core.namespaces.retired, len(world.cache.storage.locks)) == ([], 0)


def test_lost_storage_hands_the_prefix_over(new_world: MakeWorld) -> None:
    """Storage that dies during a fetch costs what had not come; the prefix is there at the acquire."""
    world = new_world()
    engine, other = OffloadEngine(world.cache), OffloadEngine(world.cache)
    returning(world, engine)
    prefetch = world.prefetch(engine.session, ASKED)
    world.take()
    world.answer(0)
    world.lose()
    world.cache.handle(StorageReady())
    fill(world, other, "mnopqrst", "uvwxyz12")

    assert (prefetch.end, engine.acquire(ASKED).hit) == (PrefetchEnd.UNAVAILABLE, 4)


def test_part_of_a_pool_is_never_locked(new_world: MakeWorld) -> None:
    """However many prompts are prefetched and not acquired, stores find the other half of the pool."""
    world = new_world(slabs=8)
    engine, other = OffloadEngine(world.cache), OffloadEngine(world.cache)
    texts = ["abcdefgh", "ABCDEFGH", "ijklmnop", "IJKLMNOP", "12345678"]
    fill(world, engine, *texts)
    for text in texts:
        world.prefetch(engine.session, text + "#")
        world.check()
    assert 0 < protected(engine) <= 32 * LOCKED_PERCENT_MAX // 100
    world.answer_all()
    fill(world, other, "qrstuvwxyzQRSTUV")

    assert other.hit("qrstuvwxyzQRSTUV") == 16


def test_locks_that_nobody_uses_are_bounded(new_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prefetches that are over and not acquired the latest are locked, and no more than so many."""
    monkeypatch.setattr(prefix_locks, "HANDED_OVER_MAX", 2)
    world = new_world(slabs=8)
    engine = OffloadEngine(world.cache)
    texts = ["abcd", "ABCD", "1234"]
    for text in texts:
        fill(world, engine, text)
        world.prefetch(engine.session, text + "#")
        world.answer_all()
        world.check()

    assert [lock.depth for _, lock in world.cache.storage.locks.all()] == [4, 4]
    assert protected(engine) == 8


def test_bad_block_leaves_a_locked_prefix(new_world: MakeWorld) -> None:
    """A lock is against eviction: a block that proves bad is dropped with what follows, when the lock ends."""
    world = new_world()
    engine = OffloadEngine(world.cache)
    returning(world, engine)
    fetched(world, engine)
    lease = OffloadEngine(world.cache).acquire(ASKED)
    reader = next(each for each in world.cache.offload.sessions.values() if lease.id in each.leases).id
    load = world.cache.offload.prepare_load(reader, lease.id, 0, 8)
    for shard in range(2):
        world.cache.offload.transfer_done(reader, TransferKind.LOAD, load.transfer, shard, "", (2,))
    world.check()

    assert engine.hit(ASKED) == 2
    engine.release(engine.acquire(ASKED))
    world.cache.offload.release(reader, lease.id)
    world.check()
    assert (protected(engine), len(world.cache.storage.locks)) == (0, 0)


def test_engine_on_a_device_pool_finds_what_it_prefetched() -> None:
    """The same for a replica: the prefix in the host pool stays until its engine acquires it."""
    storage = StorageSpec(BackupPolicy.EVERY, 0, PrefetchLimits())
    world = StorageWorld(make_tiers("aX", slots=8, host_slabs=2, slots_per_slab=8, quota=8, storage=storage))
    engine = Engine(world.cache)
    for text in ("abcdef", "ABCD", "EFGH"):
        engine.store(text)
        world.answer_all()
    prefetch = world.prefetch(engine.session, "abcdef", epoch=engine.epoch)
    world.answer_all()
    world.check()
    for text in ("IJKL", "MNOP"):
        engine.store(text)
        world.answer_all()
        world.check()
    assert prefetch.inserted == 6
    grant = engine.acquire("abcdef")

    assert (grant.hit, len(world.cache.storage.locks)) == (6, 0)
    world.answer_all()
    engine.release(grant)
    world.check()


class Replay:
    """Conversations that grow, more of them than the host pool holds; each turn asks storage first.

    Attributes:
        useful: prefetches that had something to fetch; `worse` of them left the request with less than before.
    """

    def __init__(self, seed: int, at_once: int) -> None:
        spec = StorageSpec(BackupPolicy.EVERY, 0, PrefetchLimits())
        self.world = StorageWorld(
            Cache([], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=50, namespaces_max=2, storage=spec)
        )
        self.engine = OffloadEngine(self.world.cache)
        self.random, self.at_once = random.Random(seed), at_once
        self.chats = [""] * 20
        self.symbols = deque(chr(at) for at in range(0x4E00, 0x9000))
        self.useful = self.worse = self.hit = self.asked = 0

    def turn(self) -> None:
        """Some conversations go on together: prefetches that end in any order, and then a request for each."""
        asked: list[tuple[int, int, Prefetch]] = []
        for at in self.random.sample(range(len(self.chats)), self.at_once):
            self.chats[at] = (self.chats[at] if len(self.chats[at]) < 30 else "") + self._new()
            before = self.engine.hit(self.chats[at])
            asked.append((at, before, self.world.prefetch(self.engine.session, self.chats[at])))
        while self.world.take() or self.world.under_way:
            if self.world.under_way:
                self.world.answer(self.random.randrange(len(self.world.under_way)))
        for at, before, prefetch in asked:
            lease = self.engine.acquire(self.chats[at])
            self.useful += prefetch.found > before
            self.worse += lease.hit < before
            self.hit, self.asked = self.hit + lease.hit, self.asked + len(self.chats[at]) - 3
            self.engine.release(lease)
            store(self.world, self.engine, self.chats[at])

    def _new(self) -> str:
        return "".join(self.symbols.popleft() for _ in range(3))


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_prefetch_leaves_a_request_with_less_than_before(at_once: int) -> None:
    """Over many turns of conversations no prefetch shortens a hit, and nearly all that storage has is hit."""
    replay = Replay(1, at_once)
    for _ in range(240 // at_once):
        replay.turn()
    replay.world.answer_all()
    replay.world.check()

    assert replay.useful >= 20
    assert replay.worse == 0
    assert replay.hit >= 0.99 * replay.asked
    assert protected(replay.engine) == 0
