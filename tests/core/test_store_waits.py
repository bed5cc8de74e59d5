"""A prefetch in offload mode waits for blocks that another session is storing, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import (
    MemberLost,
    MembersDied,
    PrefetchOver,
    QueryStorage,
    StorageLost,
    StorageSuspended,
    Ticked,
    TransferKind,
)
from kvcached.core.slots.states import PrefetchState, SlotState
from kvcached.core.transfers import prefetch as prefetches
from kvcached.core.transfers.engine_copies import EVERY_SHARD, StorePlan
from kvcached.core.transfers.prefetch import WAIT_MS_MAX, PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from kvcached.core.transfers.storage_state import Prefetch, PrefetchEnd
from tests.core.engine import EPOCH, TTL_MS, healthy
from tests.core.offload_engine import OffloadEngine
from tests.core.storage_world import StorageWorld
from tests.core.test_storage import shelved, store, stored, storing

ASKED = "abcdef"


class Pair:
    """Two engines in one namespace: the host pool has "ab", and the first is storing "cdef"."""

    def __init__(self, world: StorageWorld) -> None:
        self.world = world
        self.writer, self.reader = OffloadEngine(world.cache), OffloadEngine(world.cache)
        store(world, self.writer, "ab")
        world.answer_all()
        self.plan = self.storing(ASKED)

    def storing(self, text: str) -> StorePlan:
        """A store of the first engine, of all that a prompt lacks."""
        return storing(self.writer, text)

    def stored(self, plan: StorePlan, text: str = ASKED, *errors: str) -> None:
        """Its shards are through with it."""
        if errors:
            self.writer.commit(plan.transfer, *errors)
        else:
            stored(self.world, self.writer, plan, text)

    def wait(self, text: str = ASKED) -> Prefetch:
        """The second engine waits."""
        prefetch = self.world.prefetch(self.reader.session, text)
        self.world.take()
        assert prefetch.state is PrefetchState.WAITING
        return prefetch


@pytest.fixture
def new_pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, with storage unless a test says otherwise, and checks each when the test is over."""
    made: list[StorageWorld] = []

    def make(*, has_storage: bool = True, slabs: int = 4) -> Pair:
        spec = StorageSpec(BackupPolicy.EVERY, 0, PrefetchLimits())
        cache = Cache([], epoch=EPOCH, session_ttl_ms=TTL_MS, host_slabs=slabs, namespaces_max=2, storage=spec)
        made.append(StorageWorld(cache))
        if not has_storage:
            cache.handle(StorageLost())
        return Pair(made[-1])

    yield make
    for world in made:
        world.take()
        world.check()
        assert not world.cache.storage.prefetches.waiting


@pytest.fixture
def pair(new_pair: Callable[..., Pair]) -> Pair:
    """Without storage."""
    return new_pair(has_storage=False)


def ended(prefetch: Prefetch) -> tuple[PrefetchEnd, int, int]:
    """How it has ended, with how many blocks, of which so many from storage."""
    assert prefetch.state is PrefetchState.OVER
    return prefetch.end, prefetch.inserted, prefetch.fetched


def test_acquire_tells_what_another_session_is_storing(pair: Pair) -> None:
    """A lease's hit are blocks that are complete; how many behind it another engine is storing is said beside it."""
    lease = pair.reader.acquire(ASKED)
    own = pair.writer.acquire(ASKED)
    whole = pair.reader.acquire("ab")

    assert [(each.hit, each.filling) for each in (lease, own, whole)] == [(2, 4), (2, 0), (2, 0)]
    pair.stored(pair.plan)
    later = pair.reader.acquire(ASKED)
    assert (later.hit, later.filling) == (6, 0)


def test_prefetch_waits_for_a_store_of_another_session(pair: Pair) -> None:
    """Without storage: it waits as long as the store takes, is over with it, and the next acquire hits all blocks."""
    waiting = pair.wait()
    pair.writer.core.transfer_done(pair.writer.session, TransferKind.STORE, pair.plan.transfer, 0)
    assert PrefetchOver(waiting.id) not in pair.world.take()
    pair.stored(pair.plan)
    effects = pair.world.take()

    assert PrefetchOver(waiting.id) in effects
    assert ended(waiting) == (PrefetchEnd.STORED, 6, 0)
    assert pair.reader.acquire(ASKED).hit == 6


@pytest.mark.parametrize("ending", ["failed", "called off", "expired", "dead"])
def test_store_that_fails_ends_the_wait(pair: Pair, ending: str) -> None:
    """However a store comes to nothing, the wait is over with what is really there, and the acquire hits as much."""
    waiting = pair.wait()
    writer = pair.writer
    if ending == "failed":
        pair.stored(pair.plan, ASKED, "no memory")
    elif ending == "called off":
        writer.core.transfer_done(writer.session, TransferKind.STORE, pair.plan.transfer, EVERY_SHARD, "not made")
    else:
        pair.world.cache.handle(MemberLost(writer.session) if ending == "expired" else MembersDied(writer.session))
    pair.world.take()

    assert ended(waiting) == (PrefetchEnd.FAILED, 2, 0)
    assert pair.reader.acquire(ASKED).hit == 2


def test_wait_goes_on_with_the_next_store(pair: Pair) -> None:
    """Blocks that several stores bring are waited for one store after the other; the first that fails ends the wait."""
    second = pair.storing("abcdefgh")
    waiting = pair.wait("abcdefgh")
    pair.stored(pair.plan)
    pair.world.take()
    assert (waiting.state, waiting.inserted) == (PrefetchState.WAITING, 6)
    pair.stored(second, "abcdefgh")
    pair.world.take()

    assert ended(waiting) == (PrefetchEnd.STORED, 8, 0)


def test_stores_may_end_in_any_order(pair: Pair) -> None:
    """A store behind the one that is waited for may end first: the wait is over when the hit cannot grow."""
    second = pair.storing("abcdefgh")
    waiting = pair.wait("abcdefgh")
    pair.stored(second, "abcdefgh")
    pair.world.take()
    assert waiting.state is PrefetchState.WAITING
    pair.stored(pair.plan, ASKED, "no memory")
    pair.world.take()

    assert ended(waiting) == (PrefetchEnd.FAILED, 2, 0)


def test_nobody_waits_for_their_own_store(pair: Pair) -> None:
    """A session's own stores are not waited for, neither by a prefetch of its own nor by joining another's."""
    waiting = pair.wait()
    own = pair.world.prefetch(pair.writer.session, ASKED)

    assert own is not waiting
    assert ended(own)[0] is PrefetchEnd.UNAVAILABLE
    pair.stored(pair.plan)


def test_waiting_holds_no_slots(pair: Pair) -> None:
    """A waiter takes no slot of the host pool, so that it keeps nobody else from storing."""
    before = pair.reader.states
    pair.wait()

    assert pair.reader.states == before
    pair.stored(pair.plan)


def test_what_was_waited_for_stays_until_it_is_acquired(pair: Pair) -> None:
    """Between the end of the store and the acquire of who waited for it, others' stores evict nothing of it."""
    waiting = pair.wait()
    pair.stored(pair.plan)
    pair.world.take()
    other = OffloadEngine(pair.world.cache)
    for text in ("mnopqrst", "uvwxyz12"):
        store(pair.world, other, text)

    assert ended(waiting)[0] is PrefetchEnd.STORED
    assert pair.reader.acquire(ASKED).hit == 6


@pytest.mark.parametrize("is_joined", [True, False], ids=["two requests", "one request"])
def test_request_stops_waiting(pair: Pair, is_joined: bool) -> None:
    """When nobody waits any longer, the wait is over; the store goes on."""
    waiting = pair.wait()
    third = OffloadEngine(pair.world.cache)
    assert pair.world.prefetch(third.session, ASKED) is waiting or not is_joined
    pair.world.cache.storage.prefetches.stop(waiting)

    assert ended(waiting) == (PrefetchEnd.STOPPED, 2, 0)
    pair.stored(pair.plan)
    assert pair.reader.hit(ASKED) == 6


def test_clear_ends_the_wait_at_once(pair: Pair) -> None:
    """What is stored for a generation that is over is of no use: nobody waits for it."""
    waiting = pair.wait()
    third = OffloadEngine(pair.world.cache)
    third.core.clear(third.session)
    pair.world.take()

    assert ended(waiting)[0] is PrefetchEnd.CLEARED
    assert pair.reader.states[1] == 0
    pair.writer.commit(pair.plan.transfer)


def test_so_many_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are limited: one more is refused, and computes."""
    monkeypatch.setattr(prefetches, "PREFETCHES_MAX", 1)
    pair.wait()
    refused = pair.world.prefetch(pair.reader.session, "abcde")

    assert ended(refused) == (PrefetchEnd.TOO_MANY, 2, 0)
    pair.stored(pair.plan)


def test_waits_leave_storage_to_others(new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait for stores, as many others ask storage, and one more of those is refused."""
    monkeypatch.setattr(prefetches, "PREFETCHES_MAX", 1)
    pair = new_pair()
    pair.wait()
    asking = pair.world.prefetch(pair.reader.session, "xyz")
    refused = pair.world.prefetch(pair.reader.session, "uvw")
    pair.stored(pair.plan)
    pair.world.answer_all()

    assert (ended(asking)[0], ended(refused)[0]) == (PrefetchEnd.NOTHING, PrefetchEnd.TOO_MANY)


@pytest.mark.parametrize("leave", [MembersDied, MemberLost])
def test_wait_ends_with_the_last_session_that_asked(pair: Pair, leave: type[MembersDied | MemberLost]) -> None:
    """Nobody is left who wants the blocks of a store: the wait is over, though the store goes on."""
    waiting, third = pair.wait(), OffloadEngine(pair.world.cache)
    assert pair.world.prefetch(third.session, ASKED) is waiting
    for session, state in ((pair.reader.session, PrefetchState.WAITING), (third.session, PrefetchState.OVER)):
        pair.world.cache.handle(leave(session))
        pair.world.take()
        assert waiting.state is state

    assert ended(waiting) == (PrefetchEnd.STOPPED, 2, 0)
    pair.stored(pair.plan)


def test_wait_for_an_engine_that_hangs_ends(pair: Pair) -> None:
    """A store that does not end is waited for a minute, also by who has not asked for an answer."""
    waiting = pair.wait()
    for now_ms in range(0, WAIT_MS_MAX + 1, TTL_MS // 4):
        assert waiting.state is PrefetchState.WAITING
        for engine in (pair.writer, pair.reader):
            engine.core.heartbeat(engine.session, now_ms)
        pair.world.cache.handle(Ticked(now_ms))
        pair.world.take()

    assert ended(waiting) == (PrefetchEnd.FAILED, 2, 0)
    pair.stored(pair.plan)
    assert pair.reader.hit(ASKED) == 6


def test_storage_is_asked_for_what_comes_behind_the_store(new_pair: Callable[..., Pair]) -> None:
    """With storage, the wait comes first, and then storage is asked for the blocks behind all that is there."""
    pair = new_pair()
    pair.stored(pair.plan)
    store(pair.world, pair.writer, "abcdefgh")
    pair.world.answer_all()
    pair.writer.core.namespaces.by_root[pair.writer.spec.root].tree.shed_host("test")
    store(pair.world, pair.writer, "ab")
    again = pair.storing("abcd")
    waiting = pair.wait("abcdefgh")
    pair.stored(again, "abcd")
    asked = [len(each.keys) // 16 for each in pair.world.take() if isinstance(each, QueryStorage)]
    pair.world.answer_all()

    assert asked == [4]
    assert ended(waiting) == (PrefetchEnd.FETCHED, 8, 4)
    assert pair.reader.hit("abcdefgh") == 8


def test_store_that_fails_is_asked_of_storage(new_pair: Callable[..., Pair]) -> None:
    """With storage, blocks whose store failed are looked for there."""
    pair = new_pair()
    waiting = pair.wait()
    pair.stored(pair.plan, ASKED, "no memory")
    asked = [len(each.keys) // 16 for each in pair.world.take() if isinstance(each, QueryStorage)]
    pair.world.answer_all()

    assert asked == [4]
    assert ended(waiting) == (PrefetchEnd.NOTHING, 2, 0)


@pytest.mark.parametrize("trouble", [StorageLost(), StorageSuspended()], ids=["lost", "suspended"])
def test_wait_outlives_storage(new_pair: Callable[..., Pair], trouble: StorageLost | StorageSuspended) -> None:
    """Storage that fails while somebody waits for a store changes nothing about the wait."""
    pair = new_pair()
    waiting = pair.wait()
    pair.world.cache.handle(trouble)
    pair.world.take()
    assert waiting.state is PrefetchState.WAITING
    pair.stored(pair.plan)
    pair.world.take()

    assert ended(waiting) == (PrefetchEnd.STORED, 6, 0)


def test_nobody_waits_during_a_pause(pair: Pair) -> None:
    """While copies are paused nothing can be loaded: a prefetch is over at once."""
    pair.world.cache.pause()
    refused = pair.world.prefetch(pair.reader.session, ASKED)

    assert ended(refused)[0] is PrefetchEnd.UNAVAILABLE
    pair.world.cache.resume()
    pair.stored(pair.plan)


def test_end_of_the_waiting_session_leaves_nothing(pair: Pair) -> None:
    """A waiter that dies leaves no lock, and the store goes on."""
    pair.wait()
    pair.world.cache.handle(MembersDied(pair.reader.session))
    pair.stored(pair.plan)
    pair.world.take()

    assert len(pair.world.cache.storage.locks) == 0
    assert pair.writer.host.protected == 0
    assert healthy(pair.world.cache)
    assert pair.writer.states[SlotState.CACHED] == 6


def test_blocks_only_in_storage_are_not_waited_for(new_pair: Callable[..., Pair]) -> None:
    """A fetch by another session is joined as ever; its slots are in no index, so nobody waits for them as a store."""
    pair = new_pair()
    pair.stored(pair.plan)
    engine = shelved(pair.world, "mnop")
    first = pair.world.prefetch(engine.session, "mnop")
    assert pair.world.prefetch(pair.reader.session, "mnop") is first
    pair.world.answer_all()

    assert ended(first) == (PrefetchEnd.FETCHED, 4, 4)
