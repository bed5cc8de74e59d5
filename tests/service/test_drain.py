"""Pause, drain and stop: what is refused meanwhile, what goes on, and when who asked for it is answered."""

from __future__ import annotations

import asyncio

import pytest

from kvcached.core.messages import TransferKind
from kvcached.core.slots.states import DAEMON_TRANSITIONS, DaemonState
from kvcached.service.admin.verbs import Left
from kvcached.service.admission import DrainState
from kvcached.service.pending import WAITING_MAX, Answer, Wait
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.fields import RESERVE_REQUEST_PREFIX
from tests.service.office import EPOCH, ONE, TWO, FakePeer, Office, key_chain
from tests.service.offload_office import OffloadOffice, indices


def pause(office: Office, replica: str = "", deadline_ms: int = 700) -> list[Answer]:
    return office.ask_late(wire.Pause(id=office.next_id(), replica=replica, deadline_ms=deadline_ms))


def resume(office: Office, replica: str = "") -> str:
    return office.expect(wire.Resumed, wire.Resume(id=office.next_id(), replica=replica)).state


def drain(office: Office, deadline_ms: int = 700) -> list[Answer]:
    return office.ask_late(wire.Drain(id=office.next_id(), deadline_ms=deadline_ms))


def paused(answers: list[Answer]) -> tuple[int, bool]:
    """What the one answer says."""
    (answer,) = answers
    assert isinstance(answer.header, wire.Paused), answer
    return answer.header.under_way, answer.header.holds


def drained(answers: list[Answer]) -> tuple[int, int, int, bool]:
    """What the one answer says."""
    (answer,) = answers
    assert isinstance(answer.header, wire.Drained), answer
    return answer.header.leases, answer.header.copies, answer.header.requests, answer.header.holds


def release(office: Office, lease: int, *, peer: bytes = ONE) -> None:
    office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=lease), peer=peer)


def state(office: Office) -> str:
    return office.expect(wire.StatsReport, wire.Stats(id=office.next_id())).state


# --- pause ----------------------------------------------------------------------------------------------------------


def test_pause_is_answered_when_no_copy_is_under_way() -> None:
    """The copies of that moment go on, none are started after them, and the last one's end brings the answer."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    (store,) = office.workers["a"].under_way(TransferKind.STORE)
    answers = pause(office)
    office.store(key_chain(3, seed=1))
    assert (answers, list(office.workers["a"].transfers)) == ([], [store])
    office.workers["a"].end(store)

    assert paused(answers) == (0, True)
    assert office.workers["a"].transfers == {}
    assert [timer.cancelled for timer in office.timers] == [True]
    assert resume(office) == "serving"
    assert len(office.workers["a"].transfers) == 1


def test_pause_past_its_deadline_says_what_is_under_way() -> None:
    """At the deadline the answer counts the copies; the pause holds, and is answered only once."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    answers = pause(office, deadline_ms=250)
    (timer,) = office.timers
    assert timer.delay_s == 0.25
    timer.ring()

    assert paused(answers) == (1, True)
    office.workers["a"].end_all()
    assert len(answers) == 1
    office.store(key_chain(3, seed=1))
    assert office.workers["a"].transfers == {}


def test_pause_with_no_deadline_is_answered_at_once() -> None:
    """A deadline of zero asks how many copies are under way, and pauses."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))

    assert paused(pause(office, deadline_ms=0)) == (1, True)
    assert office.timers == []


def test_pause_is_idempotent_and_counts_one_replica() -> None:
    """Pausing again says the same; copies of other replicas are nobody's business who asks for one."""
    office = Office("a", "b", host_slabs=2)
    office.enter(FakePeer(1), "b")
    office.store(key_chain(3))
    assert paused(pause(office, "a")) == (0, True)
    assert paused(pause(office, "a")) == (0, True)
    report = office.expect(wire.StatsReport, wire.Stats(id=office.next_id()))

    assert [(pool.replica, pool.paused) for pool in report.pools] == [("a", True), ("b", False)]
    assert pause(office) == []


def test_resume_answers_who_waits_for_a_pause() -> None:
    """Where somebody ends the pause first, the answer says that it does not hold."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    answers = pause(office)
    resume(office)

    assert paused(answers) == (1, False)


@pytest.mark.parametrize("request_type", [wire.Pause, wire.Resume], ids=lambda each: str(each.__struct_config__.tag))
def test_unknown_replica_is_refused(request_type: type[wire.Pause | wire.Resume]) -> None:
    """A name that no replica has is an error of the caller."""
    office = Office()

    assert office.error(request_type(id=1, replica="x")) == ErrorCode.UNKNOWN_REPLICA


def test_offload_engine_is_told_to_compute_while_paused() -> None:
    """Loads are refused as paused, stores find no room, and copies under way are awaited."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1))
    office.store_blocks(welcome, 3)
    held = office.acquire_blocks(3)
    under_way = office.expect(wire.LoadPrepared, office.prepare_load(held.lease, 3))
    answers = pause(office)

    assert office.error(office.prepare_load(held.lease, 3)) == ErrorCode.PAUSED
    assert office.storing(2, seed=1).transfer == 0
    assert answers == []
    for shard in range(2):
        office.ask(office.transfer_done(welcome, under_way.transfer, shard, kind="load"), indices())
    assert paused(answers) == (0, True)
    assert office.expect(wire.StatsReport, wire.Stats(id=office.next_id())).offload_paused


# --- drain ----------------------------------------------------------------------------------------------------------


def test_drain_refuses_new_work_and_lets_the_rest_go_on() -> None:
    """No hello, no new lease; a retry gets its lease, and commits, heartbeats and releases go on. Then the answer."""
    office = Office("a", "b")
    welcome = office.enter(FakePeer(1))
    keys = key_chain(2)
    held, (_, ranges) = office.ask(office.acquire(keys), keys)
    assert isinstance(held, wire.Acquired)
    answers = drain(office)

    assert state(office) == "draining"
    assert office.error(office.hello(FakePeer(2), "b"), peer=TWO) == ErrorCode.DRAINING
    assert office.error(office.acquire(keys, "another"), keys) == ErrorCode.DRAINING
    assert office.expect(wire.Acquired, office.acquire(keys), keys).lease == held.lease
    office.expect(wire.Alive, wire.Heartbeat(id=office.next_id(), session=welcome.session, token=welcome.token))
    commit = wire.Commit(id=office.next_id(), epoch=EPOCH, lease=held.lease, start=0)
    assert office.expect(wire.Committed, commit, keys, ranges).adopted == 2
    assert answers == []
    release(office, held.lease)
    assert drained(answers) == (0, 0, 0, True)
    assert resume(office) == "serving"
    assert office.expect(wire.Acquired, office.acquire(keys, "another"), keys).hit == 2


def test_drain_of_offload_engines() -> None:
    """They get no sessions and no leases either; their copies go on, and are awaited after their leases."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1))
    held = office.acquire_blocks(3)
    plan = office.expect(wire.StorePrepared, office.prepare_store(held.lease), key_chain(3))
    answers = drain(office)

    assert office.error(office.hello_offload(FakePeer(2)), peer=TWO) == ErrorCode.DRAINING
    assert office.error(office.acquire(key_chain(1), "s"), key_chain(1)) == ErrorCode.DRAINING
    release(office, held.lease)
    assert answers == []
    for shard in range(2):
        office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, shard), peer=bytes([shard]))
    assert drained(answers) == (0, 0, 0, True)


def test_drain_waits_for_the_stores_of_what_was_committed() -> None:
    """What the last request committed is copied to the host pool before the daemon counts as empty."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    keys = key_chain(3)
    held, (_, ranges) = office.ask(office.acquire(keys), keys)
    assert isinstance(held, wire.Acquired)
    answers = drain(office)
    finish = wire.Release(id=office.next_id(), epoch=EPOCH, lease=held.lease, start=0)
    office.expect(wire.Released, finish, keys, ranges)

    assert answers == []
    office.workers["a"].end_all()
    assert drained(answers) == (0, 0, 0, True)


def test_drain_past_its_deadline_says_what_is_left() -> None:
    """Leases, copies and requests that wait are counted; the draining goes on."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.expect(wire.Acquired, office.acquire(key_chain(4, seed=9)), key_chain(4, seed=9))
    waiting = office.ask_late(wire.WaitForSlots(id=office.next_id(), epoch=EPOCH, blocks=16))
    answers = drain(office)
    office.timers[-1].ring()

    assert drained(answers) == (1, 1, 1, True)
    assert waiting == []
    assert state(office) == "draining"


def test_drain_is_over_with_the_death_of_the_last_engine() -> None:
    """A lease that nobody can give back any more holds nothing up."""
    office = Office()
    process = FakePeer(1)
    office.enter(process)
    office.expect(wire.Acquired, office.acquire(key_chain(2)), key_chain(2))
    answers = drain(office)
    process.dead = True
    office.service.peer_lost(process)

    assert drained(answers) == (0, 0, 0, True)


def test_health_is_well_while_paused_and_draining() -> None:
    """The check works in both, says so in a part of its own, and leaves nothing behind."""
    office = Office("a", "b")
    pause(office, "b")
    drain(office)

    async def ask() -> wire.Header:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        office.service.submit(ONE, wire.Health(id=1), [], answered.set_result)
        return (await answered).header

    report = asyncio.run(ask())
    assert isinstance(report, wire.HealthReport)
    assert report.ok
    assert [part.detail for part in report.parts if part.part == "mode"] == ["draining; paused: b"]


def test_people_who_wait_are_bounded() -> None:
    """One more than may wait is refused, though what it asked for holds."""
    office = Office()
    office.enter(FakePeer(1))
    office.expect(wire.Acquired, office.acquire(key_chain(2)), key_chain(2))
    for _ in range(WAITING_MAX[Wait.OPERATOR]):
        assert drain(office) == []

    (answer,) = drain(office)
    assert isinstance(answer.header, wire.ErrorReply)
    assert answer.header.code is ErrorCode.LIMIT
    assert state(office) == "draining"


# --- stop -----------------------------------------------------------------------------------------------------------


def stop(office: Office, deadline_ms: int = 900) -> list[Left]:
    """The daemon is to end; what is told when it can."""
    told: list[Left] = []
    office.service.stop(deadline_ms, told.append)
    return told


def test_idle_daemon_may_end_at_once() -> None:
    """Sessions without leases keep nothing up."""
    office = Office()
    office.enter(FakePeer(1))

    assert stop(office) == [Left(0, 0, 0)]


def test_reserves_keep_nothing_up() -> None:
    """Slots that an engine holds for later are its own until its end, and nobody waits for their release."""
    office = Office()
    office.enter(FakePeer(1))
    office.expect(wire.Acquired, office.acquire(key_chain(2), f"{RESERVE_REQUEST_PREFIX}session 1"), key_chain(2))

    assert drained(drain(office)) == (0, 0, 0, True)
    assert stop(office) == [Left(0, 0, 0)]


def test_closing_answers_health_checks() -> None:
    """A check that waits for a hung worker when the daemon ends is answered before its sockets close."""
    office = Office()
    office.workers["a"].answers = False

    async def ask() -> list[Answer]:
        answers = office.ask_late(wire.Health(id=1))
        await asyncio.sleep(0)
        stop(office)
        office.service.close()
        await asyncio.sleep(0)
        return answers

    (answer,) = asyncio.run(ask())
    assert isinstance(answer.header, wire.ErrorReply)
    assert answer.header.code is ErrorCode.DRAINING


def test_stop_waits_for_leases_and_cannot_be_resumed() -> None:
    """New work is refused, nothing ends the stop, and the last release lets the daemon end."""
    office = Office()
    office.enter(FakePeer(1))
    held = office.expect(wire.Acquired, office.acquire(key_chain(2)), key_chain(2))
    told = stop(office)

    assert resume(office) == "stopping"
    assert office.error(office.acquire(key_chain(2), "another"), key_chain(2)) == ErrorCode.DRAINING
    assert told == []
    release(office, held.lease)
    assert told == [Left(0, 0, 0)]


def test_stop_is_no_request_too_many() -> None:
    """As many drains as may wait keep nobody from ending the daemon."""
    office = Office()
    office.enter(FakePeer(1))
    held = office.expect(wire.Acquired, office.acquire(key_chain(2)), key_chain(2))
    for _ in range(WAITING_MAX[Wait.OPERATOR]):
        assert drain(office) == []
    told = stop(office)
    release(office, held.lease)

    assert told == [Left(0, 0, 0)]


def test_stop_ends_at_its_deadline() -> None:
    """Then whoever is still there is counted, and every request that waits is answered before the sockets close."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.expect(wire.Acquired, office.acquire(key_chain(4, seed=9)), key_chain(4, seed=9))
    waiting = office.ask_late(wire.WaitForSlots(id=office.next_id(), epoch=EPOCH, blocks=16))
    clear = office.ask_late(wire.ClearNamespace(id=office.next_id(), target="a"), peer=TWO)
    drains, pauses = drain(office), pause(office)
    told = stop(office)
    (timer,) = [timer for timer in office.timers if timer.delay_s == 0.9]
    timer.ring()
    assert [left.copies for left in told] == [1]
    office.service.close()

    for answers, code in ((waiting, ErrorCode.SESSION_EXPIRED), (clear, ErrorCode.DRAINING)):
        (answer,) = answers
        assert isinstance(answer.header, wire.ErrorReply)
        assert answer.header.code is code
    assert (drained(drains), paused(pauses)) == ((0, 1, 0, True), (1, True))


def test_closing_answers_engines_that_wait() -> None:
    """A scheduler that waits for room when the daemon ends is told so."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.expect(wire.Acquired, office.acquire(key_chain(4, seed=9)), key_chain(4, seed=9))
    waiting = office.ask_late(wire.WaitForSlots(id=office.next_id(), epoch=EPOCH, blocks=16))
    stop(office)
    office.service.close()

    (answer,) = waiting
    assert isinstance(answer.header, wire.ErrorReply)
    assert answer.header.code is ErrorCode.DRAINING


@pytest.mark.parametrize("source", DaemonState)
@pytest.mark.parametrize("target", DaemonState)
def test_states_of_the_daemon_follow_the_table(source: DaemonState, target: DaemonState) -> None:
    """An edge that is not in the table is not taken."""
    drain_state = DrainState()
    drain_state.state = source

    assert drain_state.enter(target) == ((source, target) in DAEMON_TRANSITIONS)
    assert drain_state.state is (target if (source, target) in DAEMON_TRANSITIONS else source)
    assert drain_state.takes_work == (drain_state.state is DaemonState.SERVING)
