"""Every state of a host slot, a transfer and a loading lease times everything that can happen to it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import (
    Event,
    Grant,
    MemberLost,
    MembersDied,
    PoolRestored,
    StartTransfer,
    Ticked,
    TransferKind,
    WorkerDied,
)
from kvcached.core.slots.host_slots import HostPool, SlabAllocator
from kvcached.core.slots.ranges import no_ranges, one_range
from kvcached.core.slots.slots import IllegalTransition
from kvcached.core.slots.states import (
    SLOT_TRANSITIONS,
    STORAGE_TRANSITIONS,
    TRANSFER_TRANSITIONS,
    SlotState,
    StorageState,
    TransferState,
)
from kvcached.core.transfers.transfer import WorkerTransfer
from kvcached_client.types import NO_FENCE, ShardIndex, TransferId
from tests.core.engine import TTL_MS, Engine, healthy, keys_of, refused, snapshot
from tests.core.host_tier import Workers, host_hit, host_of, loads, state_of, stored

MakeTiers = Callable[..., Cache]

# --- host slots -------------------------------------------------------------------------------------------------------

HOST_STATES = (SlotState.ABSENT, SlotState.FREE, SlotState.FILLING, SlotState.CACHED)
#: Those of the whole table that lead from a host state to a host state.
HOST_EDGES = {(source, target) for source, target in SLOT_TRANSITIONS if {source, target} <= set(HOST_STATES)}


def host_pool_with_slot_in(state: SlotState) -> HostPool:
    pool = HostPool(SlabAllocator(1), 4)
    if state is not SlotState.ABSENT:
        pool.grow()
    if state in {SlotState.FILLING, SlotState.CACHED}:
        pool.take(1, SlotState.FILLING, "store")
    if state is SlotState.CACHED:
        pool.move(one_range(0, 1), SlotState.FILLING, SlotState.CACHED, "stored")
    return pool


@pytest.mark.parametrize(("actual", "source", "target"), list(product(HOST_STATES, HOST_STATES, SlotState)))
def test_host_slot_moves_only_along_the_table(actual: SlotState, source: SlotState, target: SlotState) -> None:
    """Every state of a host slot times every edge: legal ones happen, others raise and change nothing."""
    pool = host_pool_with_slot_in(actual)
    before = (bytes(pool._states), list(pool.counts), pool.free_ranges())

    if actual is source and (source, target) in HOST_EDGES and source is not SlotState.FREE:
        pool.move(one_range(0, 1), source, target, "edge")

        assert pool.state_of(0) is target
        assert pool.counts == pool.count_states()
    elif actual is not source or (source, target) not in SLOT_TRANSITIONS:  # slots leave FREE in `take` and slabs only
        with pytest.raises(IllegalTransition):
            pool.move(one_range(0, 1), source, target, "edge")

        assert (bytes(pool._states), list(pool.counts), pool.free_ranges()) == before


def test_host_edges_are_those_of_the_host_tier() -> None:
    """A host slot is lent, filled, cached, freed and given back, or found again; no other edge joins its states."""
    absent, free, filling, cached = HOST_STATES

    edges = {
        (absent, free),
        (absent, cached),  # after a restart
        (free, absent),
        (free, filling),
        (filling, cached),
        (filling, free),
        (cached, free),
    }
    assert edges == HOST_EDGES


# --- transfers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), list(product(TransferState, TransferState)))
def test_transfer_moves_only_along_the_table(
    new_tiers: MakeTiers, source: TransferState, target: TransferState
) -> None:
    """Every state of a transfer times every other: legal edges happen, others raise and change nothing."""
    tree = new_tiers().trees[0]
    none = no_ranges()
    transfer = WorkerTransfer(
        TransferId(1), TransferKind.LOAD, tree, tree.root, [], none, tree.pools[0], none, state=source
    )

    if (source, target) in TRANSFER_TRANSITIONS:
        transfer.enter(target)

        assert transfer.state is target
    else:
        with pytest.raises(RuntimeError, match="cannot go from"):
            transfer.enter(target)
        assert transfer.state is source


@pytest.mark.parametrize(("source", "target"), list(product(StorageState, StorageState)))
def test_storage_moves_only_along_the_table(new_tiers: MakeTiers, source: StorageState, target: StorageState) -> None:
    """Every state of storage times every other: legal edges happen, others raise and change nothing."""
    storage = new_tiers().storage
    storage.state = source

    if (source, target) in STORAGE_TRANSITIONS:
        storage.enter(target)

        assert storage.state is target
    else:
        with pytest.raises(RuntimeError, match="cannot go from"):
            storage.enter(target)
        assert storage.state is source


@dataclass
class Scene:
    """One transfer of two shards under way: a store out of pool "a", or a load into it that may wait for a store."""

    cache: Cache
    workers: Workers
    engine: Engine
    transfer: WorkerTransfer
    order: StartTransfer | None  #: None while it is queued
    store: StartTransfer | None  #: that a queued load waits for
    lease: Grant | None = None


def scene(make: MakeTiers, kind: str) -> Scene:
    cache = make("ab", shards=2)
    workers = Workers(cache)
    if kind == "store":
        engine = Engine(cache)
        engine.store("abcd")
        (order,) = workers.started()
        return Scene(cache, workers, engine, cache.transfers[order.transfer], order, None)
    if kind == "load":
        stored(cache, "abcd", "b")
        engine = Engine(cache)
        grant = engine.acquire("abcd")
        (order,) = loads(workers.take())
        return Scene(cache, workers, engine, cache.transfers[order.transfer], order, None, grant)
    Engine(cache, "b").store("abcd")
    (store,) = workers.started()
    engine = Engine(cache)
    grant = engine.acquire("abcd")
    (queued,) = [each for each in cache.transfers.values() if each.after]
    return Scene(cache, workers, engine, queued, None, store, grant)


def settle(here: Scene, shard: int, error: str = "", corrupt: tuple[int, ...] = ()) -> None:
    here.cache.worker_copies.shard_done(here.transfer.id, ShardIndex(shard), error, corrupt)


def lose_workers(here: Scene) -> None:
    here.cache.handle(WorkerDied("a"))


def end_dependency(here: Scene, error: str = "") -> None:
    if here.store is not None:
        here.workers.answer(here.store, error)


#: What happens to the transfer of a scene, in order.
EVENTS: dict[str, list[Callable[[Scene], None]]] = {
    "first shard done": [lambda here: settle(here, 0)],
    "first shard failed": [lambda here: settle(here, 0, "boom")],
    "all shards done": [lambda here: settle(here, 1), lambda here: settle(here, 0)],
    "one of two shards failed": [lambda here: settle(here, 1, "boom"), lambda here: settle(here, 0)],
    "corrupt on one shard": [lambda here: settle(here, 0, corrupt=(1,)), lambda here: settle(here, 1)],
    "same shard twice": [lambda here: settle(here, 0), lambda here: settle(here, 0)],
    "wrong shard": [lambda here: settle(here, 2, "boom")],
    "workers lost": [lose_workers],
    "workers lost, then its shards fail": [
        lose_workers,
        lambda here: settle(here, 0, "died"),
        lambda here: settle(here, 1, "died"),
    ],
    "session ended": [lambda here: here.cache.handle(MembersDied(here.engine.session))],
    "session expired": [lambda here: here.cache.handle(MemberLost(here.engine.session))],
    "dependency done": [end_dependency],
    "dependency failed": [lambda here: end_dependency(here, "boom")],
}


def happen(here: Scene, event: str) -> None:
    for step in EVENTS[event]:
        step(here)


QUEUED, RUNNING, DONE, FAILED = TransferState
#: State of the transfer afterwards, by event: of a store, of a running load, of a load that waits for a store.
AFTERWARDS: dict[str, tuple[TransferState | None, TransferState | None, TransferState | None]] = {
    "first shard done": (RUNNING, RUNNING, QUEUED),
    "first shard failed": (RUNNING, RUNNING, QUEUED),
    "all shards done": (DONE, DONE, QUEUED),
    "one of two shards failed": (FAILED, FAILED, QUEUED),
    "corrupt on one shard": (FAILED, FAILED, QUEUED),
    "same shard twice": (RUNNING, RUNNING, QUEUED),
    "wrong shard": (RUNNING, RUNNING, QUEUED),
    "workers lost": (RUNNING, RUNNING, QUEUED),
    "workers lost, then its shards fail": (FAILED, FAILED, QUEUED),
    "session ended": (RUNNING, RUNNING, QUEUED),
    "session expired": (RUNNING, RUNNING, QUEUED),
    "dependency done": (None, None, RUNNING),
    "dependency failed": (None, None, FAILED),
}
CASES = [
    (kind, event, state)
    for event, row in AFTERWARDS.items()
    for kind, state in zip(("store", "load", "queued load"), row, strict=True)
    if state is not None
]


@pytest.mark.parametrize(("kind", "event", "expected"), CASES)
def test_every_transfer_times_every_event(new_tiers: MakeTiers, kind: str, event: str, expected: TransferState) -> None:
    """A transfer ends with the last of its shards, once; slots that it writes are FILLING until then, and no longer."""
    here = scene(new_tiers, kind)
    transfer = here.transfer
    happen(here, event)

    assert transfer.state is expected
    assert (transfer.id in here.cache.transfers) == (expected in {QUEUED, RUNNING})
    device, host = state_of(here.cache.pools["a"], transfer.device), state_of(host_of(here.cache), transfer.host)
    if kind == "store":
        assert host == {{RUNNING: "FILLING", DONE: "CACHED", FAILED: "FREE"}[expected]}
        assert device == {"CACHED"}
    else:
        written = {RUNNING: {"FILLING"}, QUEUED: {"FILLING"}, DONE: {"CACHED"}, FAILED: {"FREE"}}[expected]
        if expected is FAILED and "corrupt" in event:  # what came before the bad block has arrived
            written = {"CACHED", "FREE"}
        assert device == written
    assert healthy(here.cache)
    if expected in {DONE, FAILED}:  # whatever else comes about it is late
        before = snapshot(here.cache), dict(here.cache.counters)
        for shard in range(3):
            settle(here, shard, "late", (0,))
        assert (snapshot(here.cache), dict(here.cache.counters)) == before


@pytest.mark.parametrize("kind", ["store", "load", "queued load"])
@pytest.mark.parametrize("event", [event for event in EVENTS if event != "wrong shard"])
def test_nothing_is_left_of_a_transfer_whatever_happened(new_tiers: MakeTiers, kind: str, event: str) -> None:
    """When every shard has answered and everybody has gone, no slot is pinned or FILLING."""
    here = scene(new_tiers, kind)
    happen(here, event)
    here.cache.close_session(here.engine.session)
    here.workers.take()
    for order in list(here.workers.under_way.values()):
        if order.transfer in here.cache.transfers:
            here.workers.answer(order, "end")
        here.workers.under_way.pop(order.transfer, None)
    here.workers.take()
    here.cache.handle(PoolRestored("a"))
    here.workers.answer_all()

    pools = [*here.cache.pools.values(), host_of(here.cache)]
    assert [(pool.protected, pool.counts[SlotState.FILLING]) for pool in pools] == [(0, 0)] * 3
    assert here.cache.transfers == {}


# --- a lease whose hit is loading -------------------------------------------------------------------------------------


def loading_lease(make: MakeTiers) -> Scene:
    return scene(make, "load")


@pytest.mark.parametrize("operation", ["commit", "finish"])
@pytest.mark.parametrize("kind", ["load", "queued load"])
def test_nothing_is_committed_on_a_hit_that_is_loading(new_tiers: MakeTiers, operation: str, kind: str) -> None:
    """A commit or finish is refused by name, changes nothing, and is taken once the load has ended."""
    here = scene(new_tiers, kind)
    engine, cache = here.engine, here.cache
    grant = engine.acquire("abcdef")
    before = snapshot(cache)
    call = getattr(cache.managed, operation)
    arguments = (engine.session, engine.epoch, grant.lease, 4, keys_of("abcdef")[64:], array("i", grant.ranges))

    with refused("still_loading"):
        call(*arguments, NO_FENCE)
    assert snapshot(cache) == before
    here.workers.answer_all()
    assert call(*arguments, NO_FENCE).adopted == 2


def test_loading_lease_can_grow_and_be_asked_for_again(new_tiers: MakeTiers) -> None:
    """Allocate gives exclusive slots as ever; a retry of the acquire names the same slots and the same loads."""
    here = loading_lease(new_tiers)
    engine = here.engine
    grant = engine.acquire("abcdef", request="one")
    more = here.cache.managed.allocate(engine.session, engine.epoch, grant.lease, 2)

    assert engine.acquire("abcdef", request="one") == grant
    assert state_of(here.cache.pools["a"], array("i", more)) == {"LEASED"}
    assert here.cache.managed.load(engine.session, engine.epoch, grant.lease) is None
    here.workers.answer_all()


@pytest.mark.parametrize("fence", [0, 3])
def test_release_of_a_loading_lease_leaves_the_load_alone(new_tiers: MakeTiers, fence: int) -> None:
    """The load goes on and its blocks stay; a fence holds the lease's own slots until it signals, as ever."""
    here = loading_lease(new_tiers)
    grant = here.engine.acquire("abcdef")
    here.engine.release(grant, fence=fence)

    exclusive = array("i", grant.ranges)
    assert state_of(here.cache.pools["a"], exclusive) == {"FENCED" if fence else "FREE"}
    assert state_of(here.cache.pools["a"], here.transfer.device) == {"FILLING"}
    here.workers.answer_all()
    here.engine.signal(fence)
    assert state_of(here.cache.pools["a"], exclusive) == {"FREE"}
    assert here.engine.hit("abcdef") == 4


@pytest.mark.parametrize("end", ["expiry", "member lost", "death", "goodbye", "worker death"])
def test_end_of_a_session_while_it_loads(new_tiers: MakeTiers, end: str) -> None:
    """The lease is gone and nobody is told of its load, which ends by itself; its blocks are a hit afterwards."""
    here = loading_lease(new_tiers)
    cache, session = here.cache, here.engine.session
    if end == "expiry":
        for now_ms in (1, TTL_MS // 2, TTL_MS, TTL_MS + 1):
            cache.handle(Ticked(now_ms))
    elif end == "goodbye":
        cache.close_session(session)
    else:
        happened: dict[str, Event] = {
            "member lost": MemberLost(session),
            "death": MembersDied(session),
            "worker death": WorkerDied("a"),
        }
        cache.handle(happened[end])
    here.workers.take()
    assert here.order is not None
    assert here.transfer.id in cache.transfers
    here.workers.under_way[here.order.transfer] = here.order
    here.workers.answer(here.order, "died" if end == "worker death" else "")

    if end != "worker death":  # which ends no session: its lease is told
        assert here.workers.take() == []
    assert cache.pools["a"].counts[SlotState.CACHED] == (0 if end == "worker death" else 4)
    cache.handle(MembersDied(session))
    cache.handle(PoolRestored("a"))
    assert sum(host_hit(Engine(cache), "abcd")) == 4
