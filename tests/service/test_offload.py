"""Engines in offload mode at the service: one answer each, who may say what, and what deaths leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from kvcached.core.insight.invariants import check
from kvcached.service.replica import check_replica
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import JoinedHost
from kvcached_client.types import Verify, pack_ranges
from tests.access.grants import OWN
from tests.service.office import EPOCH, HOST_MEMORY, READ_ONLY_HOST_MEMORY, SLAB_BYTES, TWO, FakePeer, Office, key_chain
from tests.service.offload_office import (
    BLOCK_BYTES,
    INSTANCE,
    OTHER_INSTANCE,
    OffloadOffice,
    indices,
    slots_in,
)

THREE = b"\0\0\0\0\3"
READER = replace(OWN, read_only=True)


@pytest.fixture
def office() -> OffloadOffice:
    return OffloadOffice()


# --- hello ----------------------------------------------------------------------------------------------------------


def test_hello_tells_what_an_engine_needs(office: OffloadOffice) -> None:
    """The welcome names session, epochs, namespace and how often to be heard; the session is there."""
    welcome = office.attach(FakePeer(1))

    assert (welcome.epoch, welcome.daemon_epoch, welcome.generation, welcome.verify) == (EPOCH, EPOCH, 0, Verify.ALWAYS)
    assert (welcome.heartbeat_interval_ms, welcome.session_ttl_ms, len(welcome.namespace)) == (100, 1000, 32)
    assert list(office.cache.offload.sessions) == [welcome.session]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"version": 2}, ErrorCode.UNSUPPORTED_VERSION),
        ({"block_bytes": SLAB_BYTES}, ErrorCode.WRONG_LAYOUT),
    ],
    ids=["version", "block larger than a slab"],
)
def test_hello_refuses_what_does_not_fit(office: OffloadOffice, fields: dict[str, Any], code: ErrorCode) -> None:
    """Another version, and blocks that no slab can hold, are told apart, and open nothing."""
    assert office.error(office.hello_offload(FakePeer(1), **fields)) is code
    assert (office.cache.offload.sessions, office.cache.offload.namespaces.trees) == ({}, [])


def test_hello_refuses_more_blocks_than_slots_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that the pool would hold more than a slot number can tell are refused."""
    office = OffloadOffice()
    monkeypatch.setattr("kvcached.service.offload.admission.SLOTS_MAX", 31)

    assert office.error(office.hello_offload(FakePeer(1))) is ErrorCode.WRONG_LAYOUT
    monkeypatch.setattr("kvcached.service.offload.admission.SLOTS_MAX", 32)
    office.attach(FakePeer(1))


@pytest.mark.parametrize(("cheap", "is_served"), [(1 << 23, True), (0, False)], ids=["small pool", "large pool"])
def test_hello_refuses_blocks_that_cost_the_daemon_more_than_the_pool(
    monkeypatch: pytest.MonkeyPatch, *, cheap: int, is_served: bool
) -> None:
    """Each block costs the daemon memory and time: a pool of many GiB is not divided into blocks of a few bytes."""
    monkeypatch.setattr("kvcached.service.offload.admission._CHEAP_SLOTS", cheap)
    office = OffloadOffice()
    hello = office.hello_offload(FakePeer(1), block_bytes=1024, shards=1)
    if is_served:
        office.expect(wire.WelcomeOffload, hello)
    else:
        refused = office.expect(wire.ErrorReply, hello)
        assert (refused.code, "larger blocks" in refused.fix) == (ErrorCode.WRONG_LAYOUT, True)


def test_hello_needs_a_living_process(office: OffloadOffice) -> None:
    """A member token of a dead process opens nothing."""
    process = FakePeer(1)
    hello = office.hello_offload(process)

    process.dead = True
    assert office.error(hello) is ErrorCode.UNAUTHENTICATED


def test_daemon_without_offload_mode_says_so() -> None:
    """Where the configuration has no such engines, the hello is refused by name."""
    office = Office("a", host_slabs=4)
    hello = OffloadOffice.hello_offload(office, FakePeer(1))  # type: ignore[arg-type]
    refusal = office.expect(wire.ErrorReply, hello)

    assert (refusal.code, "[offload]" in refusal.fix) == (ErrorCode.UNKNOWN_REPLICA, True)


def test_daemon_without_replicas_does_not_list_them() -> None:
    """Whoever names a replica where there is none is told so, and what to do instead; no empty list is shown."""
    with pytest.raises(RequestError) as caught:
        check_replica("x", {})

    told = "this daemon has no replicas, only namespaces of engines in offload mode: name none, which means all of it"
    assert (caught.value.message, caught.value.fix) == ("there is no replica 'x'", told)


def test_connection_has_one_session_of_either_kind(office: OffloadOffice) -> None:
    """A second hello on one connection is refused, whichever kind the sessions are of."""
    process = FakePeer(1)
    office.attach(process)

    assert office.error(office.hello_offload(process, instance=OTHER_INSTANCE)) is ErrorCode.POOL_BUSY
    office.enter(FakePeer(2), peer=TWO)
    assert office.error(office.hello_offload(FakePeer(2)), peer=TWO) is ErrorCode.POOL_BUSY


def test_one_process_leaves_namespaces_to_others(office: OffloadOffice) -> None:
    """A process has sessions in half of the namespaces that there may be, in one of two here; others get the rest."""
    process = FakePeer(1)
    office.attach(process)
    another = office.hello_offload(process, keyspace=b"l" * 32, instance=OTHER_INSTANCE)

    refusal = office.expect(wire.ErrorReply, another, peer=TWO)
    assert (refusal.code, "one process" in refusal.message) == (ErrorCode.LIMIT, True)
    office.attach(process, peer=TWO, instance=OTHER_INSTANCE)  # again in the same namespace
    office.attach(FakePeer(2), peer=THREE, keyspace=b"l" * 32)


def test_hello_again_with_the_same_id_is_the_same_session(office: OffloadOffice) -> None:
    """A retry of a hello gets the welcome that it already got."""
    hello = office.hello_offload(FakePeer(1))

    assert office.ask(hello) == office.ask(hello)
    assert len(office.cache.offload.sessions) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"keyspace": b"K" * 32},
        {"fingerprint": b"F" * 16},
        {"block_size": 8},
        {"block_bytes": BLOCK_BYTES // 2},
        {"shards": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_makes_blocks_differ_makes_another_namespace(office: OffloadOffice, fields: dict[str, Any]) -> None:
    """Engines share blocks only where keyspace, layout and sizes agree; name and label do not matter."""
    first = office.attach(FakePeer(1))
    same = office.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE, label="other", engine="other 2")
    other = office.attach(FakePeer(3), peer=THREE, instance=b"x" * 16, **fields)

    assert first.namespace == same.namespace != other.namespace


# --- shard processes ------------------------------------------------------------------------------------------------


def test_shards_get_the_host_pool(office: OffloadOffice) -> None:
    """Whoever shows the session's token gets the pool's descriptor, and what is needed to find a block in it."""
    welcome = office.attach(FakePeer(1))
    session = office.cache.offload.sessions[welcome.session]  # type: ignore[index]
    joined = office.join(FakePeer(2), welcome, 1)
    _, descriptors = office.service.join(FakePeer(3), session.id, welcome.token, 0)  # type: ignore[arg-type]

    assert (joined.shard, joined.shards, joined.epoch, joined.verify) == (1, 2, EPOCH, Verify.ALWAYS)
    assert (joined.slabs, joined.slab_bytes, joined.block_bytes) == (4, SLAB_BYTES, BLOCK_BYTES)
    assert (joined.namespace, joined.fingerprint) == (welcome.namespace, b"f" * 16)
    assert descriptors == (HOST_MEMORY,)


def test_reader_gets_memory_that_it_cannot_write_and_clears_nothing(office: OffloadOffice) -> None:
    """An engine that asked for it, or whose user may only read, is told so; it gets the read-only descriptor."""
    asked = office.attach(FakePeer(1), read_only=True)
    told = office.attach(FakePeer(2, grants=READER), peer=TWO, instance=OTHER_INSTANCE)
    writer = office.attach(FakePeer(3), peer=THREE, instance=b"x" * 16)
    joined = [
        office.service.join(peer, welcome.session, welcome.token, 0)  # type: ignore[arg-type]
        for peer, welcome in ((FakePeer(4), asked), (FakePeer(5), told), (FakePeer(6, grants=READER), writer))
    ]

    assert [welcome.read_only for welcome in (asked, told, writer)] == [True, True, False]
    assert all(isinstance(answer, JoinedHost) and answer.read_only for answer, _ in joined)
    assert [descriptors for _, descriptors in joined] == [(READ_ONLY_HOST_MEMORY,)] * 3
    refusal = office.expect(wire.ErrorReply, wire.Clear(id=office.next_id(), epoch=EPOCH))
    assert (refusal.code, "read-only" in refusal.message) == (ErrorCode.FORBIDDEN, True)


def test_join_is_refused_to_strangers_and_after_the_end(office: OffloadOffice) -> None:
    """A wrong token, a shard that was not declared, and a session that has expired get no memory."""
    scheduler, shard = FakePeer(1), FakePeer(2)
    welcome = office.attach(scheduler)
    office.join(shard, welcome)
    office.storing(2)

    with pytest.raises(RequestError, match="no_session"):
        office.join(FakePeer(3), welcome, token=bytes(32))
    with pytest.raises(RequestError, match="bad_value"):
        office.join(FakePeer(3), welcome, 2)
    office.die(scheduler)
    with pytest.raises(RequestError, match="session_expired"):
        office.join(FakePeer(3), welcome)
    office.die(shard)
    with pytest.raises(RequestError, match="no_session"):
        office.join(FakePeer(3), welcome)


# --- the verbs ------------------------------------------------------------------------------------------------------


def test_a_block_goes_to_the_host_pool_and_back(office: OffloadOffice) -> None:
    """Acquire, store, commit by every shard, and then a hit, a load, and its end, each with its answer."""
    welcome = office.attach(FakePeer(1))
    held = office.acquire_blocks(3)
    answer = office.ask(office.prepare_store(held.lease), key_chain(3))
    plan, (pieces, slots) = answer.header, answer.frames
    assert isinstance(plan, wire.StorePrepared)

    assert (held.hit, plan.depth, plan.generation, slots_in(pieces), len(slots_in(slots))) == (0, 3, 0, [0, 1, 2], 3)
    for shard in range(2):
        assert office.hit(3) == 0
        office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, shard), peer=b"a shard's own")
    assert office.hit(3) == 3
    again = office.acquire_blocks(3, request="again")
    loading = office.ask(office.prepare_load(again.lease, 2, 1))
    assert isinstance(loading.header, wire.LoadPrepared)
    assert (again.hit, slots_in(loading.frames[0])) == (3, slots_in(slots)[1:])
    for shard in range(2):
        done = office.transfer_done(welcome, loading.header.transfer, shard, kind="load")
        office.expect(wire.Settled, done, indices(), peer=b"a shard's own")
    assert office.cache.counters["loaded_blocks"] == 2
    for lease in (held, again):
        office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=lease.lease))
    assert office.cache.offload.transfers == []


def test_acquire_may_announce_its_load(office: OffloadOffice) -> None:
    """One request locks a hit and names its slots; a release may call that load off."""
    welcome = office.attach(FakePeer(1))
    first = office.acquire_blocks(3)
    plan = office.expect(wire.StorePrepared, office.prepare_store(first.lease), key_chain(3))
    for shard in range(2):
        office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, shard))
    request = wire.Acquire(id=office.next_id(), epoch=EPOCH, request="again", tokens=12, full=True, load_from=1)
    answer = office.ask(request, key_chain(3))
    held, (slots,) = answer.header, answer.frames
    assert isinstance(held, wire.Held)
    assert (held.hit, held.generation, len(slots_in(slots))) == (3, plan.generation, 2)
    assert [copy.id for copy in office.cache.offload.transfers] == [held.transfer]
    release = wire.Release(id=office.next_id(), epoch=EPOCH, lease=held.lease, call_off=held.transfer)
    office.expect(wire.Released, release)
    assert office.cache.offload.transfers == []
    assert office.cache.counters["load_called_off_blocks"] == 2


def test_offers_of_several_leases_are_served_one_by_one(office: OffloadOffice) -> None:
    """Each offer has its own copy, or refusal, which counts; a retry has one effect; what is released is over."""
    welcome = office.attach(FakePeer(1))
    one, two = (office.acquire_blocks(2, seed=seed, request=f"r{seed}") for seed in (1, 2))
    offers = (
        wire.StoreOffer(one.lease, 0, 2),
        wire.StoreOffer(999, 0, 1),
        wire.StoreOffer(two.lease, 1, 1),
        wire.StoreOffer(two.lease, 0, 2),
    )
    keys = key_chain(2, 1) + key_chain(1, 3) + key_chain(1, 4) + key_chain(2, 2)
    request = wire.PrepareStores(id=office.next_id(), epoch=EPOCH, offers=offers, releases=(one.lease, 998))
    answer = office.ask(request, keys)
    assert isinstance(answer.header, wire.StoresPrepared)
    assert office.ask(request, keys) == answer
    first, unknown, disordered, last = answer.header.outcomes
    assert (first.depth, first.pieces, last.depth, last.pieces) == (2, 1, 2, 1)
    assert (unknown.refusal, disordered.refusal) == (ErrorCode.UNKNOWN_LEASE, ErrorCode.OUT_OF_ORDER)
    counted = [office.cache.counters[f"errors_{each.refusal}"] for each in (unknown, disordered)]
    assert counted == [1, 1]
    assert (slots_in(answer.frames[0]), len(slots_in(answer.frames[1]))) == ([0, 1, 0, 1], 4)
    done = [
        structs.replace(office.transfer_done(welcome, first.transfer, shard), more=(last.transfer,))
        for shard in range(2)
    ]
    for each in done:
        assert (office.hit(2, seed=1), office.hit(2, seed=2)) == (0, 0)
        office.expect(wire.Settled, each)
    assert (office.hit(2, seed=1), office.hit(2, seed=2)) == (2, 2)
    assert list(office.cache.offload.sessions[welcome.session].leases) == [two.lease]  # type: ignore[index]


def test_offers_whose_keys_are_not_as_many_are_refused(office: OffloadOffice) -> None:
    """A message whose keys belong to no offer, or lack, changes nothing."""
    office.attach(FakePeer(1))
    held = office.acquire_blocks(2)
    offers = (wire.StoreOffer(held.lease, 0, 2),)
    request = wire.PrepareStores(id=office.next_id(), epoch=EPOCH, offers=offers, releases=(held.lease,))
    assert office.error(request, key_chain(3)) is ErrorCode.BAD_FRAMES
    office.expect(wire.StorePrepared, office.prepare_store(held.lease), key_chain(2))


def test_corrupt_blocks_are_told_by_their_place_in_the_load(office: OffloadOffice) -> None:
    """A shard names damaged blocks counted from the load's first; they are not found again."""
    welcome = office.attach(FakePeer(1))
    office.store_blocks(welcome, 4)
    held = office.acquire_blocks(4)
    plan = office.expect(wire.LoadPrepared, office.prepare_load(held.lease, 3, 1))
    office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, 0, kind="load"), indices())
    office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, 1, kind="load"), indices(1))

    assert office.hit(4) == 2


def test_cleared_namespace_is_cold_for_everybody(office: OffloadOffice) -> None:
    """Clear answers with the new generation, which heartbeats tell the others."""
    one = office.attach(FakePeer(1))
    two = office.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE)
    office.store_blocks(one, 3)
    held = office.acquire_blocks(3, peer=TWO)
    cleared = office.expect(wire.Cleared, wire.Clear(id=office.next_id(), epoch=EPOCH))
    beat = wire.Heartbeat(id=900, session=two.session, token=two.token)

    assert (cleared.generation, cleared.blocks, office.hit(3, peer=TWO)) == (1, 3, 0)
    assert office.expect(wire.Alive, beat, peer=b"any").generation == 1
    assert office.error(office.prepare_load(held.lease, 1), peer=TWO) is ErrorCode.HIT_GONE


def test_what_offload_mode_does_not_have_is_refused(office: OffloadOffice) -> None:
    """There are no slots to reserve, and a release commits nothing."""
    office.attach(FakePeer(1))
    held = office.acquire_blocks(2)
    reserving = wire.Acquire(id=office.next_id(), epoch=EPOCH, request="s", tokens=8, reserve=1, full=True)
    release = wire.Release(id=office.next_id(), epoch=EPOCH, lease=held.lease)

    assert office.error(reserving, key_chain(2)) is ErrorCode.BAD_VALUE
    assert office.error(release, key_chain(2), bytes(16)) is ErrorCode.BAD_FRAMES


def test_what_device_pools_do_not_have_is_refused() -> None:
    """An engine on a device pool announces no loads: asking for one gets no lease, calling one off loses none."""
    managed = Office("a")
    managed.enter(FakePeer(1))
    keys = key_chain(2)
    loading = msgspec.structs.replace(managed.acquire(keys), load_from=0)
    assert managed.error(loading, keys) is ErrorCode.BAD_VALUE
    lease = managed.expect(wire.Acquired, managed.acquire(keys), keys).lease
    release = wire.Release(id=managed.next_id(), epoch=EPOCH, lease=lease, call_off=1)
    assert managed.error(release) is ErrorCode.BAD_VALUE
    managed.expect(wire.Released, wire.Release(id=managed.next_id(), epoch=EPOCH, lease=lease))


REQUESTS: dict[str, tuple[Callable[[int, int], wire.Request], list[bytes]]] = {
    "match": (lambda number, epoch: wire.Match(id=number, epoch=epoch, tokens=4), [key_chain(1)]),
    "acquire": (lambda number, epoch: wire.Acquire(id=number, epoch=epoch, request="r", tokens=4), [key_chain(1)]),
    "release": (lambda number, epoch: wire.Release(id=number, epoch=epoch, lease=1), []),
    "prepare_load": (lambda number, epoch: wire.PrepareLoad(id=number, epoch=epoch, lease=1, start=0, blocks=1), []),
    "prepare_store": (
        lambda number, epoch: wire.PrepareStore(id=number, epoch=epoch, lease=1, start=0),
        [key_chain(1)],
    ),
    "prepare_stores": (
        lambda number, epoch: wire.PrepareStores(id=number, epoch=epoch, offers=(wire.StoreOffer(1, 0, 1),)),
        [key_chain(1)],
    ),
    "clear": (lambda number, epoch: wire.Clear(id=number, epoch=epoch), []),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_another_epoch_are_stale(office: OffloadOffice, name: str) -> None:
    """Whoever speaks of a host pool that is gone is told so."""
    office.attach(FakePeer(1))
    make, frames = REQUESTS[name]

    assert office.error(make(office.next_id(), EPOCH - 1), *frames) is ErrorCode.STALE_EPOCH


@pytest.mark.parametrize("name", ["prepare_load", "prepare_store", "prepare_stores", "clear"])
def test_verbs_of_offload_mode_need_its_session(office: OffloadOffice, name: str) -> None:
    """Without a session, and with one on a device pool, there is nothing to load, store or clear."""
    make, frames = REQUESTS[name]

    assert office.error(make(office.next_id(), EPOCH), *frames) is ErrorCode.NO_SESSION
    office.enter(FakePeer(1))
    assert office.error(make(office.next_id(), EPOCH), *frames) is ErrorCode.NO_SESSION


def test_verbs_of_device_pools_need_their_session(office: OffloadOffice) -> None:
    """An engine in offload mode has no slots to allocate, commit, load into or wait for."""
    office.attach(FakePeer(1))
    commit = wire.Commit(id=office.next_id(), epoch=EPOCH, lease=1, start=0)

    assert office.error(wire.Allocate(id=office.next_id(), epoch=EPOCH, lease=1, blocks=1)) is ErrorCode.NO_SESSION
    assert office.error(commit, key_chain(1), pack_ranges([(0, 1)])) is ErrorCode.NO_SESSION
    for late in (
        wire.Load(id=office.next_id(), epoch=EPOCH, lease=1),
        wire.WaitForSlots(id=office.next_id(), epoch=EPOCH, blocks=1),
    ):
        assert office.error(late) is ErrorCode.NO_SESSION


def test_shards_speak_for_their_own_session_only(office: OffloadOffice) -> None:
    """A copy of another session is not ended with one's own token, nor with a token that is none."""
    one = office.attach(FakePeer(1))
    two = office.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE)
    plan = office.storing(2)
    for shard in range(2):
        office.expect(wire.Settled, office.transfer_done(two, plan.transfer, shard))
    forged = wire.TransferDone(
        id=office.next_id(), session=one.session, token=two.token, kind="store", transfer=plan.transfer, shard=0
    )

    assert office.error(forged) is ErrorCode.NO_SESSION
    assert (office.hit(2), office.host_states()) == (0, {"free": 6, "filling": 2})


def test_report_of_the_other_kind_is_refused(office: OffloadOffice) -> None:
    """A report about a load with the number of a store ends nothing, and says which kind the copy is."""
    welcome = office.attach(FakePeer(1))
    plan = office.storing(2)
    done = office.ask(office.transfer_done(welcome, plan.transfer, 0, kind="load"), indices()).header

    assert isinstance(done, wire.ErrorReply)
    assert (done.code, done.message) == (
        ErrorCode.BAD_VALUE,
        f"transfer {plan.transfer} is a store, and a load is reported as done",
    )
    assert office.host_states() == {"free": 6, "filling": 2}


def test_retries_have_one_effect(office: OffloadOffice) -> None:
    """The same id gets the same answer: one copy, one clearing, one refusal."""
    welcome = office.attach(FakePeer(1))
    held = office.acquire_blocks(2)
    prepare = office.prepare_store(held.lease)
    first, again = office.ask(prepare, key_chain(2)), office.ask(prepare, key_chain(2))
    assert isinstance(first.header, wire.StorePrepared)

    assert first == again
    for shard in (0, 0, 1, 1):
        office.expect(wire.Settled, office.transfer_done(welcome, first.header.transfer, shard))
    second = office.acquire_blocks(2, request="second")
    load = office.prepare_load(second.lease, 2)
    assert office.ask(load) == office.ask(load)
    assert len(office.cache.offload.transfers) == 1
    clear = wire.Clear(id=office.next_id(), epoch=EPOCH)
    assert office.ask(clear) == office.ask(clear)
    refused = office.prepare_load(second.lease, 2)
    assert office.ask(refused) == office.ask(refused)
    release = wire.Release(id=office.next_id(), epoch=EPOCH, lease=second.lease)
    assert office.ask(release) == office.ask(release)
    assert check(office.cache) == []


# --- what is told ---------------------------------------------------------------------------------------------------


def test_stats_tell_of_namespaces_and_copies(office: OffloadOffice) -> None:
    """Each namespace with its label, sessions, leases and slots, beside those of replicas; copies under way count."""
    welcome = office.attach(FakePeer(1), instance=INSTANCE)
    office.store_blocks(welcome, 2)
    office.storing(3, seed=1)
    report = office.expect(wire.StatsReport, wire.Stats(id=office.next_id()))
    replica, offload = report.hosts

    assert (replica.replicas, replica.label, replica.sessions) == (("a",), "", 0)
    assert (offload.replicas, offload.label, offload.generation) == ((), "tiny", 0)
    assert (offload.sessions, offload.leases, offload.slabs, report.sessions) == (1, 2, 1, 1)
    assert {name: count for name, count in offload.states.items() if count} == {
        "free": 3,
        "cached": 2,
        "filling": 3,
        "absent": 24,
    }
    assert report.transfers["running_stores"] == 1
    assert offload.namespace == welcome.namespace[:8].hex()


def test_retired_trees_are_told_of_without_a_name(office: OffloadOffice) -> None:
    """What a cleared namespace still holds for copies under way is counted, and is nobody's."""
    office.attach(FakePeer(1))
    office.storing(2)
    office.expect(wire.Cleared, wire.Clear(id=office.next_id(), epoch=EPOCH))
    report = office.expect(wire.StatsReport, wire.Stats(id=office.next_id()))

    assert [(host.namespace, host.label, host.sessions) for host in report.hosts[2:]] == [("0" * 16, "", 0)]
    assert [host.generation for host in report.hosts] == [0, 1, 0]


def test_tree_and_inspect_show_offload_engines(office: OffloadOffice) -> None:
    """A block of the host pool is shown with its place, the requests that hold it, and the copies of engines."""
    welcome = office.attach(FakePeer(1))
    office.store_blocks(welcome, 3)
    held = office.acquire_blocks(3, request="reader")
    plan = office.expect(wire.LoadPrepared, office.prepare_load(held.lease, 2))
    shown = office.expect(wire.InspectReport, wire.Inspect(id=office.next_id(), key=key_chain(2)[16:]))
    tree, (frame,) = office.ask(wire.Tree(id=office.next_id(), levels=4, children=4))
    assert isinstance(tree, wire.TreeReport)
    nodes = wire.unpack_tree_nodes(frame)

    assert (shown.found, shown.depth, shown.places[0].tier, shown.places[0].state) == (True, 1, "host", "cached")
    assert "reader" in shown.leases
    assert shown.transfers == (f"load {plan.transfer} by an engine in offload mode",)
    assert (tree.blocks, [node.tiers for node in nodes if node.level]) == (3, [{"host": 3}])
    assert welcome.namespace in [node.key for node in nodes]
    assert office.expect(wire.CheckReport, wire.Check(id=office.next_id())).ok
