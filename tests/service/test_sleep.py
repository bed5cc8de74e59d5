"""Sleep and wake of device pools: what is refused, in which order memory goes and comes, and what is told of it."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from kvcached.core.messages import WorkerDied
from kvcached.core.slots.states import SlotState
from kvcached.memory.host_pool import MemoryIdentity
from kvcached.recovery.state_file import LedgerFile, ReplicaRecord, boot_id, read_ledger
from kvcached.service.pending import Answer
from kvcached.service.replica import HeldMemory
from kvcached.service.state_writer import StatePlace
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId
from tests.service.office import EPOCH, ONE, TWO, FakePeer, FakeWorkers, Office, key_chain

NAMESPACE = (b"n" * 32).hex()


def sleep(office: Office, target: str = "a", deadline_ms: int = 1000) -> list[Answer]:
    request = wire.Sleep(id=office.next_id(), target=target, deadline_ms=deadline_ms)
    return office.ask_late(request, peer=TWO)


def wake(office: Office, target: str = "a") -> list[Answer]:
    return office.ask_late(wire.Wake(id=office.next_id(), target=target), peer=TWO)


def header(answers: list[Answer]) -> wire.Header:
    (answer,) = answers
    return answer.header


def code(answers: list[Answer]) -> ErrorCode:
    """Of the one answer, which is an error."""
    found = header(answers)
    assert isinstance(found, wire.ErrorReply), found
    return found.code


def refused(answers: list[Answer]) -> str:
    """Why a pool is in use."""
    found = header(answers)
    assert isinstance(found, wire.ErrorReply)
    assert found.code == ErrorCode.POOL_BUSY
    return found.message


def states(office: Office) -> dict[str, str]:
    report = office.expect(wire.StatsReport, wire.Stats(id=office.next_id()), peer=TWO)
    return {pool.replica: pool.state for pool in report.pools}


def leave(office: Office, process: FakePeer) -> None:
    process.dead = True
    office.service.peer_lost(process)


def asleep(*names: str, host_slabs: int = 0) -> Office:
    """An office whose replica a sleeps."""
    office = Office(*names, host_slabs=host_slabs)
    sleep(office)
    office.holders["a"].sleep()
    return office


def test_sleep_is_answered_when_the_memory_is_given_back() -> None:
    """Workers end first, then the memory goes; the answer says how many blocks there were, and how many are lost."""
    office, process = Office(), FakePeer(1)
    office.enter(process)
    office.store(key_chain(3))
    leave(office, process)
    answers, holder = sleep(office), office.holders["a"]

    assert (states(office), len(holder.ended), holder.given, answers) == ({"a": "falling_asleep"}, 1, [], [])
    holder.ended.pop()()
    assert (states(office), len(holder.given), answers) == ({"a": "asleep"}, 1, [])
    holder.given.pop()()
    assert header(answers) == wire.Slept(id=header(answers).id, replicas=("a",), blocks=3, dropped=3)


def test_what_the_host_pool_lacks_is_stored_first() -> None:
    """The store is ordered, and workers end when it has ended; after waking the blocks are hit in the host pool."""
    office, process, keys = Office(host_slabs=2), FakePeer(1), key_chain(3)
    office.enter(process)
    office.store(keys)
    leave(office, process)
    answers = sleep(office)
    assert office.holders["a"].ended == []
    office.workers["a"].end_all()
    office.holders["a"].sleep()
    assert header(answers) == wire.Slept(id=header(answers).id, replicas=("a",), blocks=3, dropped=0)

    wake(office)
    office.holders["a"].made.pop()(HeldMemory(FakeWorkers()))
    office.enter(FakePeer(2))
    match = office.expect(wire.Matched, wire.Match(id=office.next_id(), epoch=EPOCH, tokens=12, full=True), keys)
    assert (match.device, match.host) == (0, 3)


def test_engine_keeps_its_pool_awake() -> None:
    """A pool with a session, active or expired, does not fall asleep; the refusal names session and processes."""
    office, process = Office(), FakePeer(11)
    office.enter(process)
    assert refused(sleep(office)) == "active session 1 holds replica 'a' for processes [11]"
    office.cache.managed.expire(office.cache.managed.sessions[SessionId(1)])
    assert refused(sleep(office)) == "expired session 1 holds replica 'a' for processes [11]"
    leave(office, process)
    assert sleep(office) == []


def test_all_replicas_of_a_namespace_sleep_or_none() -> None:
    """A namespace means all its replicas: one that is in use keeps the others awake; its answer waits for all."""
    office, process = Office("a", "b"), FakePeer(1)
    office.enter(process, "b")
    assert code(sleep(office, NAMESPACE)) == ErrorCode.POOL_BUSY
    assert states(office) == {"a": "awake", "b": "awake"}
    leave(office, process)
    answers = sleep(office, NAMESPACE)
    office.holders["a"].sleep()
    assert answers == []
    office.holders["b"].sleep()
    assert header(answers) == wire.Slept(id=header(answers).id, replicas=("a", "b"), blocks=0, dropped=0)
    answers = wake(office, NAMESPACE)
    office.holders["a"].made.pop()(HeldMemory(FakeWorkers()))
    assert answers == []
    office.holders["b"].made.pop()(HeldMemory(FakeWorkers()))
    assert header(answers) == wire.Woken(id=header(answers).id, replicas=("a", "b"))


def test_nobody_gets_a_session_until_the_pool_is_awake() -> None:
    """From the request for sleep to the end of the wake a hello is refused with a code of its own."""
    office = Office()
    answers = sleep(office)
    holder = office.holders["a"]
    hellos = [office.error(office.hello(FakePeer(1)))]
    holder.sleep()
    hellos.append(office.error(office.hello(FakePeer(1))))
    wake(office)
    hellos.append(office.error(office.hello(FakePeer(1))))
    workers = FakeWorkers()
    holder.made.pop()(HeldMemory(workers))

    assert hellos == [ErrorCode.ASLEEP] * 3
    assert len(answers) == 1
    office.enter(FakePeer(1))
    keys = key_chain(2)
    office.store(keys)
    assert office.count("a", SlotState.CACHED) == 2


def test_sleep_and_wake_may_be_repeated() -> None:
    """A repeated request waits with the first one, or is answered at once where the pool is so already."""
    office = Office()
    assert header(wake(office)) == wire.Woken(id=office._request, replicas=("a",))
    first, second = sleep(office), sleep(office)
    office.holders["a"].sleep()
    assert [len(first), len(second), len(sleep(office))] == [1, 1, 1]
    first, second = wake(office), wake(office)
    (made,) = office.holders["a"].made
    made(HeldMemory(FakeWorkers()))
    assert [len(first), len(second), len(wake(office))] == [1, 1, 1]


def test_sleep_and_wake_do_not_cross() -> None:
    """A pool that falls asleep is not woken, and one that wakes is not sent to sleep."""
    office = Office()
    sleep(office)
    assert code(wake(office)) == ErrorCode.REQUEST_CONFLICT
    office.holders["a"].sleep()
    wake(office)
    assert code(sleep(office)) == ErrorCode.ASLEEP


def test_pool_that_is_woken_before_its_memory_is_gone_makes_it_afterwards() -> None:
    """The holder does one thing after the other; who asked for the sleep is told that somebody has woken the pool."""
    office = Office()
    answers = sleep(office)
    holder = office.holders["a"]
    holder.ended.pop()()
    woken = wake(office)
    holder.given.pop()()
    assert code(answers) == ErrorCode.REQUEST_CONFLICT
    holder.made.pop()(HeldMemory(FakeWorkers()))
    assert isinstance(header(woken), wire.Woken)


def test_failed_wake_leaves_the_pool_asleep() -> None:
    """The reason is the answer; the next wake tries again."""
    office = asleep()
    answers = wake(office)
    error = request_error(ErrorCode.ASLEEP, "replica 'a' stays asleep: no memory", "free some")
    office.holders["a"].made.pop()(error)
    assert code(answers) == ErrorCode.ASLEEP
    assert "no memory" in header(answers).message  # type: ignore[attr-defined]
    assert states(office) == {"a": "asleep"}
    answers = wake(office)
    office.holders["a"].made.pop()(HeldMemory(FakeWorkers()))
    assert isinstance(header(answers), wire.Woken)


def stats(office: Office) -> wire.PoolStats:
    return office.expect(wire.StatsReport, wire.Stats(id=office.next_id())).pools[0]


def test_lost_memory_is_replaced_once_nobody_has_a_session() -> None:
    """The engine on it goes on until it ends, no other gets in; then the pool is made anew without being asked."""
    office, process = Office(host_slabs=2), FakePeer(1)
    office.enter(process)
    keys = key_chain(3)
    office.store(keys)
    office.workers["a"].end_all()
    office.service.on_memory_gone("a")
    office.service.on_memory_gone("a")  # said again by workers that fail again
    holder = office.holders["a"]
    assert (states(office), holder.ended, stats(office).degraded) == ({"a": "falling_asleep"}, [], True)
    leave(office, process)
    holder.sleep()
    assert (states(office), len(holder.made)) == ({"a": "waking"}, 1)
    assert stats(office).trouble
    holder.made.pop()(HeldMemory(FakeWorkers()))
    assert (states(office), stats(office).trouble) == ({"a": "awake"}, "")
    office.enter(FakePeer(2))
    match = office.expect(
        wire.Matched, wire.Match(id=office.next_id(), epoch=EPOCH, tokens=12, full=True), key_chain(3)
    )
    assert (match.device, match.host) == (0, 3)


def test_wake_of_lost_memory_that_fails_goes_on_by_itself() -> None:
    """Somebody wakes the pool while its lost memory is given back: it is tried until it succeeds."""
    office = Office()
    office.service.on_memory_gone("a")
    holder = office.holders["a"]
    holder.ended.pop()()
    answers = wake(office)
    holder.given.pop()()
    holder.made.pop()(request_error(ErrorCode.ASLEEP, "replica 'a' stays asleep: no memory", "free some"))
    assert (states(office), len(holder.made), answers) == ({"a": "waking"}, 1, [])
    holder.made.pop()(HeldMemory(FakeWorkers()))
    assert states(office) == {"a": "awake"}
    assert isinstance(header(answers), wire.Woken)


def test_pool_that_waits_for_its_device_refuses_engines() -> None:
    """A start has found the device lost: hello says that the pool is waking, until the device has made its memory."""
    office = Office()
    office.service.wait_for_device("a")
    assert office.error(office.hello(FakePeer(1))) == ErrorCode.ASLEEP
    office.holders["a"].made.pop()(HeldMemory(FakeWorkers()))
    office.enter(FakePeer(2))


def test_workers_that_died_are_no_news_to_the_next_ones() -> None:
    """A pool whose workers were lost falls asleep at its deadline, and is healthy when it wakes."""
    office = Office()
    office.service.on_event(WorkerDied("a"))
    sleep(office, deadline_ms=0)
    office.holders["a"].sleep()
    wake(office)
    office.holders["a"].made.pop()(HeldMemory(FakeWorkers()))
    assert office.cache.pools["a"].copies


def test_new_workers_have_the_present_generation() -> None:
    """A namespace that is cleared while its pool sleeps, and while it wakes, has its new generation in all workers."""
    office = asleep()
    clear = wire.ClearNamespace(id=office.next_id(), target="a")
    assert isinstance(header(office.ask_late(clear)), wire.NamespaceCleared)
    wake(office)
    clear = wire.ClearNamespace(id=office.next_id(), target="a")
    assert isinstance(header(office.ask_late(clear)), wire.NamespaceCleared)
    workers = FakeWorkers()
    office.holders["a"].made.pop()(HeldMemory(workers))
    assert (office.holders["a"].generations, workers.generation) == ([1], 2)


def test_offload_namespaces_have_nothing_that_sleeps() -> None:
    """An unknown target is refused, and so is what has no device pool here."""
    office = Office()
    assert code(sleep(office, "b")) == ErrorCode.UNKNOWN_REPLICA
    assert code(wake(office, "b")) == ErrorCode.UNKNOWN_REPLICA


def test_daemon_that_ends_answers_who_waits() -> None:
    """Sleeps and wakes under way end with a refusal."""
    office = Office("a", "b")
    first = sleep(office, "a")
    sleep(office, "b")
    office.holders["b"].sleep()
    second = wake(office, "b")
    office.service.close()
    assert [code(first), code(second)] == [ErrorCode.DRAINING] * 2


def test_ledger_says_asleep_before_the_memory_goes_and_awake_when_it_is_there(tmp_path: Path) -> None:
    """What the next daemon would read, at each step; the identity of the new memory stands there, too."""
    ledger = LedgerFile(tmp_path / "ledger")
    office = Office(state_place=StatePlace(ledger, boot_id(), None))

    def record() -> ReplicaRecord:
        found = read_ledger(tmp_path / "ledger")
        assert found is not None
        return found.replicas[0]

    sleep(office)
    office.service.carry_out()
    holder = office.holders["a"]
    holder.ended.pop()()
    assert (record().asleep, len(holder.given)) == (True, 1)
    holder.given.pop()()
    wake(office)
    assert record().asleep
    holder.made.pop()(HeldMemory(FakeWorkers(), (MemoryIdentity(1, 2), MemoryIdentity(1, 3))))
    assert (record().asleep, record().memory) == (False, (MemoryIdentity(1, 2), MemoryIdentity(1, 3)))


async def checked(office: Office) -> wire.HealthReport:
    """The answer to a health request."""
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    office.service.submit(ONE, wire.Health(id=office.next_id()), [], answered.set_result)
    report = (await answered).header
    assert isinstance(report, wire.HealthReport)
    return report


def test_sleeping_pool_is_no_illness() -> None:
    """The health check asks nothing of its workers, and says that it sleeps."""
    office = asleep("a", "b")
    report = asyncio.run(checked(office))
    details = {part.part: part.detail for part in report.parts}
    assert report.ok
    assert office.workers["a"].probes == []
    assert (details["a/acquire"], details["mode"]) == ("skipped: the pool is asleep", "a: asleep")
    assert "b/release" in details


def test_health_check_under_way_delays_the_sleep() -> None:
    """Its session is nobody's to end: the pool falls asleep when the workers have answered."""
    office = Office()
    office.workers["a"].answers = False

    async def check() -> list[Answer]:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        office.service.submit(ONE, wire.Health(id=office.next_id()), [], answered.set_result)
        await asyncio.sleep(0)  # the check begins in a task of its own
        await asyncio.sleep(0)
        (probe,) = office.workers["a"].pending
        slept = sleep(office)
        assert (office.holders["a"].ended, slept) == ([], [])
        probe.set_result(None)
        await answered
        office.holders["a"].sleep()
        return slept

    assert isinstance(header(asyncio.run(check())), wire.Slept)


@pytest.mark.parametrize("blocks", [0, 3])
def test_slots_are_all_free_when_the_pool_wakes(blocks: int) -> None:
    """A pool wakes with nothing in it, and its engine gets every slot."""
    office, process = Office(), FakePeer(1)
    office.enter(process)
    if blocks:
        office.store(key_chain(blocks))
    leave(office, process)
    sleep(office)
    office.holders["a"].sleep()
    wake(office)
    office.holders["a"].made.pop()(HeldMemory(FakeWorkers()))
    office.enter(FakePeer(2))
    grant = office.ask(wire.Acquire(id=office.next_id(), epoch=EPOCH, request="r", tokens=64, full=True), key_chain(16))
    assert sum(array("i", grant.frames[1])[1::2]) == office.cache.pools["a"].slots
