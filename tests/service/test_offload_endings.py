"""How sessions of engines in offload mode end, and what is told to nobody any more."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvcached.core.messages import TransferKind
from kvcached.core.restart.restore import RestoredCache
from kvcached.monitoring.timing import Executor
from kvcached.service.sessions import FoundSession, Peer
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.engine import EVERY_SHARD
from kvcached_client.types import ShardIndex
from tests.service.office import EPOCH, ONE, TWO, FakePeer, key_chain
from tests.service.offload_office import INSTANCE, OTHER_INSTANCE, OffloadOffice


@pytest.fixture
def office() -> OffloadOffice:
    return OffloadOffice()


def test_goodbye_ends_a_session_without_copies_at_once(office: OffloadOffice) -> None:
    """Nothing is left of it, though its shard processes live; it has not expired, and nobody watches it any more."""
    scheduler, shard = FakePeer(1), FakePeer(2)
    welcome = office.attach(scheduler)
    office.join(shard, welcome)
    office.store_blocks(welcome, 2)
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))

    assert office.cache.offload.sessions == {}
    assert (office.cache.counters["sessions_ended"], office.cache.counters["sessions_expired"]) == (1, 0)
    assert office.forgotten == [scheduler, shard]
    assert office.error(wire.Clear(id=office.next_id(), epoch=EPOCH)) is ErrorCode.NO_SESSION
    office.attach(scheduler)
    assert office.hit(2) == 2


def test_goodbye_with_copies_under_way_waits_for_the_shards_only(office: OffloadOffice) -> None:
    """What shard processes may still write is set aside until these are dead; the scheduler may live on."""
    scheduler, shard = FakePeer(1), FakePeer(2)
    welcome = office.attach(scheduler)
    office.join(shard, welcome)
    plan = office.storing(2)
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))

    assert office.host_states() == {"free": 6, "quarantined": 2}
    assert office.error(office.transfer_done(welcome, plan.transfer, 0)) is ErrorCode.SESSION_EXPIRED
    assert office.forgotten == [scheduler]
    office.die(shard)
    assert office.host_states() == {"free": 8}


def test_shard_hears_that_its_store_was_called_off(office: OffloadOffice) -> None:
    """A shard that has written slots too late is told which stores, each time it asks; nobody else is told anything."""
    welcome = office.attach(FakePeer(1))
    late, other, plan = office.storing(2), office.storing(1, seed=1), office.storing(1, seed=2)
    office.expect(wire.Settled, office.transfer_done(welcome, late.transfer, EVERY_SHARD))

    def ended(done: wire.TransferDone) -> tuple[int, ...]:
        return office.expect(wire.Settled, done, peer=b"a shard's own").ended

    done = structs.replace(office.transfer_done(welcome, other.transfer, 0), more=(late.transfer, plan.transfer))
    assert [ended(done), ended(done)] == [(late.transfer,), (late.transfer,)]
    assert ended(structs.replace(done, id=office.next_id(), shard=1)) == (late.transfer,)
    assert (office.hit(1, seed=1), office.hit(1, seed=2)) == (1, 1)
    again = office.transfer_done(welcome, late.transfer, 0)
    assert ended(again) == (late.transfer,)
    assert ended(structs.replace(again, id=office.next_id(), error="cut short")) == ()
    assert ended(structs.replace(again, id=office.next_id(), shard=EVERY_SHARD)) == ()
    assert ended(structs.replace(again, id=office.next_id(), kind="load")) == ()


def test_report_of_several_loads_behind_a_goodbye_ends_all_of_them(office: OffloadOffice) -> None:
    """A shard that names its loads in one message too late is refused, and all of them are over all the same."""
    scheduler, shard = FakePeer(1), FakePeer(2)
    welcome = office.attach(scheduler)
    office.join(shard, welcome)
    loads = []
    for seed in (0, 1):
        office.store_blocks(welcome, 2, seed=seed)
        lease = office.acquire_blocks(2, seed=seed, request=f"load-{seed}").lease
        loads.append(office.expect(wire.LoadPrepared, office.prepare_load(lease, 2)).transfer)
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))

    for number in (0, 1):
        done = structs.replace(office.transfer_done(welcome, loads[0], number, kind="load"), more=(loads[1],))
        assert office.error(done) is ErrorCode.SESSION_EXPIRED
    assert (office.cache.offload.transfers, office.cache.offload.sessions) == ([], {})


def test_slots_wait_for_the_last_process(office: OffloadOffice) -> None:
    """A dead scheduler's stores are set aside while a shard process lives, and free when that is dead, too."""
    scheduler, shard = FakePeer(1), FakePeer(2)
    welcome = office.attach(scheduler)
    office.join(shard, welcome)
    office.storing(2)
    office.die(scheduler)

    assert office.host_states() == {"free": 6, "quarantined": 2}
    office.die(shard)
    assert office.host_states() == {"free": 8}
    assert {peer.pid for peer in office.forgotten} == {1, 2}


def test_expired_session_is_told_so_everywhere(office: OffloadOffice) -> None:
    """After its TTL the scheduler, its shards and its heartbeat hear the same; who is heard lives on."""
    welcome = office.attach(FakePeer(1))
    other = office.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE)
    office.join(FakePeer(3), welcome)
    plan = office.storing(2)
    office.now_ms = 900
    office.expect(wire.Alive, wire.Heartbeat(id=700, session=other.session, token=other.token), peer=b"any")
    office.let_expire()

    assert office.error(office.acquire(key_chain(1)), key_chain(1)) is ErrorCode.SESSION_EXPIRED
    for shard in (0, EVERY_SHARD):
        assert office.error(office.transfer_done(welcome, plan.transfer, shard)) is ErrorCode.SESSION_EXPIRED
    beat = wire.Heartbeat(id=701, session=welcome.session, token=welcome.token)
    assert office.error(beat, peer=b"any") is ErrorCode.SESSION_EXPIRED
    assert office.host_states() == {"free": 6, "quarantined": 2}
    assert office.hit(2, peer=TWO) == 0


def test_hello_of_the_same_engine_replaces_its_session(office: OffloadOffice) -> None:
    """An engine that lost its connection says hello anew: the session before is over at once."""
    scheduler = FakePeer(1)
    first = office.attach(scheduler)
    office.storing(2)
    second = office.attach(scheduler, peer=TWO)

    assert list(office.cache.offload.sessions) == [second.session]
    assert second.session > first.session
    assert office.host_states() == {"free": 8}
    assert office.forgotten == []  # the same process is in the new session
    assert office.error(office.acquire(key_chain(1)), key_chain(1)) is ErrorCode.NO_SESSION


def test_slots_of_a_replaced_session_wait_for_each_of_its_shards(office: OffloadOffice) -> None:
    """What shards may write for the session before is set aside until each has joined the new one, or is dead."""
    scheduler, shards = FakePeer(1), [FakePeer(2), FakePeer(3)]
    first = office.attach(scheduler)
    for index, process in enumerate(shards):
        office.join(process, first, index)
    office.storing(2)
    second = office.attach(scheduler, peer=TWO)

    assert office.host_states() == {"free": 6, "quarantined": 2}
    office.join(FakePeer(2), second, 0)  # the same process, over another connection
    assert office.host_states() == {"free": 6, "quarantined": 2}
    assert office.forgotten == [shards[0]]
    office.join(shards[1], second, 1)
    assert office.host_states() == {"free": 8}
    assert list(office.cache.offload.sessions) == [second.session]


def test_shard_that_joins_as_another_one_is_not_through(office: OffloadOffice) -> None:
    """Joining the new session says that the work of the same shard is over, of no other."""
    scheduler, process = FakePeer(1), FakePeer(2)
    first = office.attach(scheduler)
    office.join(process, first, 0)
    office.storing(2)
    second = office.attach(scheduler, peer=TWO)
    office.join(process, second, 1)

    assert office.host_states() == {"free": 6, "quarantined": 2}
    office.join(process, second, 0)
    assert office.host_states() == {"free": 8}


def test_scheduler_that_copies_itself_is_not_through_by_its_hello(office: OffloadOffice) -> None:
    """Where the scheduler's connection has joined as a shard, too, only joining anew says that its copies are over."""
    process = FakePeer(1)
    first = office.attach(process)
    office.join(process, first, 0)
    office.storing(2)
    second = office.attach(process, peer=TWO)

    assert office.host_states() == {"free": 6, "quarantined": 2}
    office.join(process, second, 0)
    assert office.host_states() == {"free": 8}
    office.storing(2, peer=TWO)
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()), peer=TWO)
    assert office.host_states() == {"free": 6, "quarantined": 2}
    office.die(process)
    assert office.host_states() == {"free": 8}


def test_engine_with_the_same_name_for_itself_ends_nobody_elses_session(office: OffloadOffice) -> None:
    """An instance is the engine's word; sessions of other processes go on, whoever says hello or joins under it."""
    one, two = office.attach(FakePeer(1)), office.attach(FakePeer(2), peer=TWO)
    office.join(FakePeer(3), one, 0)
    office.join(FakePeer(4), two, 0)
    plan = office.storing(2)

    assert list(office.cache.offload.sessions) == [one.session, two.session]
    for shard in range(2):
        office.expect(wire.Settled, office.transfer_done(one, plan.transfer, shard))
    assert office.hit(2, peer=TWO) == 2


def test_processes_without_visible_pids_are_never_taken_for_one(office: OffloadOffice) -> None:
    """Where the daemon sees no pids, a hello under the same instance leaves the session before to its own end."""
    office.attach(FakePeer(0))
    office.storing(2)
    office.attach(FakePeer(0), peer=TWO)

    assert len(office.cache.offload.sessions) == 2
    assert office.host_states() == {"free": 6, "filling": 2}


def test_death_of_a_process_of_a_replaced_session_is_seen(office: OffloadOffice) -> None:
    """A shard that never joins the new session frees the slots of the old one by its death."""
    scheduler, shard = FakePeer(1), FakePeer(2)
    first = office.attach(scheduler)
    office.join(shard, first)
    office.storing(2)
    second = office.attach(scheduler, peer=TWO)
    office.die(shard)

    assert office.host_states() == {"free": 8}
    assert list(office.cache.offload.sessions) == [second.session]
    office.die(scheduler)
    assert office.cache.offload.sessions == {}


def test_connection_of_a_replaced_session_belongs_to_nobody(office: OffloadOffice) -> None:
    """After the session is over, its connection may say hello anew."""
    scheduler = FakePeer(1)
    office.attach(scheduler)
    office.attach(scheduler, peer=TWO)
    office.attach(scheduler, peer=ONE)

    assert len(office.cache.offload.sessions) == 1


def test_session_of_several_engines_is_over_when_each_is_through(office: OffloadOffice) -> None:
    """After a restart: schedulers leave by a hello, shards by joining, each for its own engine, in one process too."""
    first = office.attach(FakePeer(1))
    one, other, shards = FakePeer(1), FakePeer(2), [FakePeer(3), FakePeer(3)]
    session = RestoredCache(office.cache).offload_session((0, 0), first.namespace)
    members: list[tuple[Peer, ShardIndex | None]] = [(one, None), (other, None), *((s, ShardIndex(0)) for s in shards)]
    engine_of: dict[Peer, bytes] = dict(zip((one, other, *shards), [INSTANCE, OTHER_INSTANCE] * 2, strict=True))
    office.service.take_in({}, [FoundSession(session, (0, 0), b"", b"", members, engine_of=engine_of)])

    def left(process: FakePeer, scheduler: FakePeer, instance: bytes, peer: bytes) -> list[Peer]:
        """Who is left when an engine has a session again, and its shard has joined that."""
        office.join(process, office.attach(scheduler, peer=peer, instance=instance))
        return [each for group in office.service._groups.groups if group.session == session for each in group.members]

    assert left(FakePeer(3), FakePeer(1), INSTANCE, TWO) == [other, shards[1]]
    assert left(FakePeer(4), FakePeer(2), OTHER_INSTANCE, b"\0\0\0\0\3") == [shards[1]]
    assert session in office.cache.offload.sessions
    assert left(FakePeer(3), FakePeer(2), OTHER_INSTANCE, b"\0\0\0\0\4") == []
    assert session not in office.cache.offload.sessions


def test_session_goes_on_without_a_shard_that_has_left(office: OffloadOffice) -> None:
    """Its death ends nothing then. Copies for it are refused until it joins again, and what it left behind is over."""
    shards = FakePeer(2), FakePeer(3)
    welcome = office.attach(FakePeer(1))
    for number, shard in enumerate(shards):
        office.join(shard, welcome, number)
    plan = office.storing(2)
    office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, 1))
    office.service.leave(shards[0])
    office.die(shards[0])

    assert (office.forgotten, office.host_states()) == ([shards[0]], {"free": 8})
    assert office.service.copy_times.count(Executor.ENGINE, TransferKind.STORE) == 0
    held = office.acquire_blocks(2, request="again")
    assert office.error(office.prepare_store(held.lease), key_chain(2)) is ErrorCode.OUT_OF_ORDER
    office.join(FakePeer(4), welcome, 0)
    office.store_blocks(welcome, 2)
    assert office.hit(2) == 2


def test_shard_that_another_process_is_as_well_has_not_left(office: OffloadOffice) -> None:
    """One that has joined again closes its first connection: its copies go on."""
    welcome, first = office.attach(FakePeer(1)), FakePeer(2)
    office.join(first, welcome, 0)
    office.join(FakePeer(2), welcome, 0)
    office.service.leave(first)
    office.store_blocks(welcome, 2)
    assert office.hit(2) == 2


def test_last_shard_that_leaves_ends_a_session(office: OffloadOffice) -> None:
    """After the goodbye, what a store was to write is set aside for the shards that have not left, and then free."""
    shards = FakePeer(2), FakePeer(3)
    welcome = office.attach(FakePeer(1))
    for number, shard in enumerate(shards):
        office.join(shard, welcome, number)
    office.storing(2)
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))
    office.service.leave(shards[0])
    assert office.host_states() == {"free": 6, "quarantined": 2}
    office.service.leave(shards[1])
    assert office.host_states() == {"free": 8}
    assert office.cache.offload.sessions == {}
