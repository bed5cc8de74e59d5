"""Clear and set_weights of replicas: one effect however often they are asked for, written down before they are told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvcached.core.messages import TransferKind, WorkerDied
from kvcached.core.slots.states import SlotState
from kvcached.recovery.state_file import HostPoolRecord, LedgerFile, ReplicaRecord, boot_id, read_ledger
from kvcached.service.pending import Answer
from kvcached.service.state_writer import StatePlace
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from tests.service.office import EPOCH, ONE, SLAB_BYTES, TWO, FakePeer, Office, key_chain, root_of


def clear(office: Office, replica: str = "a", *, number: int = 0, peer: bytes = TWO) -> list[Answer]:
    return office.ask_late(wire.ClearNamespace(id=number or office.next_id(), target=replica), peer=peer)


def set_weights(office: Office, version: str, replica: str = "a", *, number: int = 0) -> list[Answer]:
    request = wire.SetWeights(id=number or office.next_id(), target=replica, version=version)
    return office.ask_late(request, peer=TWO)


def cleared(answers: list[Answer]) -> tuple[int, str, int]:
    """Generation, weights version and blocks of the one answer, whose namespace is what they make."""
    (answer,) = answers
    reply = answer.header
    assert isinstance(reply, wire.NamespaceCleared), reply
    assert reply.namespace == root_of(reply.generation, reply.weights_version)
    return reply.generation, reply.weights_version, reply.blocks


def code(answers: list[Answer]) -> ErrorCode:
    """Of the one answer, which is an error."""
    (answer,) = answers
    assert isinstance(answer.header, wire.ErrorReply)
    return answer.header.code


def busy(names: str = "a") -> Office:
    """An office with a store under way in replica a."""
    office = Office(*names, host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    return office


def test_clear_of_an_idle_replica_is_answered_at_once() -> None:
    """All replicas of the namespace get a new generation, in what engines and workers are told from then on."""
    office = Office("a", "b")
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    assert cleared(clear(office)) == (1, "", 3)

    report = office.expect(wire.Description, wire.Describe(id=office.next_id()))
    assert {(each.generation, each.namespace) for each in report.replicas} == {(1, root_of(1, "").hex())}
    assert [workers.generation for workers in office.workers.values()] == [1, 1]
    welcome = office.enter(FakePeer(2), "b", peer=TWO)
    assert (welcome.generation, welcome.namespace) == (1, root_of(1, ""))


def test_engine_of_a_cleared_replica_is_told_and_comes_back() -> None:
    """Its session is over; at its next hello it has its slots back, and finds nothing of before."""
    office = Office()
    process = FakePeer(1)
    welcome = office.enter(process)
    keys = key_chain(3)
    office.store(keys)
    office.expect(wire.Acquired, office.acquire(key_chain(5, seed=1)), key_chain(5, seed=1))
    clear(office)

    heartbeat = wire.Heartbeat(id=office.next_id(), session=welcome.session, token=welcome.token)
    assert office.error(heartbeat) == ErrorCode.SESSION_EXPIRED
    refused = office.ask(heartbeat).header
    assert isinstance(refused, wire.ErrorReply)
    assert refused.message == f"session {welcome.session} is over: the namespace was cleared"
    assert office.error(office.acquire(keys), keys) == ErrorCode.SESSION_EXPIRED
    assert office.count("a", SlotState.QUARANTINED) == 5
    office.enter(process)
    assert office.count("a", SlotState.QUARANTINED) == 0
    match = wire.Match(id=office.next_id(), epoch=EPOCH, tokens=12, full=True)
    assert office.expect(wire.Matched, match, keys).device == 0


def test_hello_is_refused_until_copies_have_ended() -> None:
    """While a store of before runs, an engine is told to try again; the clear's answer comes with the store's end."""
    office = busy("ab")
    (store,) = office.workers["a"].under_way(TransferKind.STORE)
    answers = clear(office)

    assert answers == []
    assert office.error(office.hello(FakePeer(2), "b"), peer=TWO) == ErrorCode.CLEARING
    office.workers["a"].end(store)
    assert cleared(answers) == (1, "", 3)
    office.enter(FakePeer(2), "b", peer=TWO)


def test_late_store_of_the_old_generation_changes_nothing() -> None:
    """A worker that says a second time that it has stored something of before is not heard."""
    office = busy()
    (store,) = office.workers["a"].under_way(TransferKind.STORE)
    late = office.workers["a"].transfers[store]
    clear(office)
    office.workers["a"].end(store)
    office.workers["a"].transfers[store] = late
    office.workers["a"].end(store)

    check = office.expect(wire.CheckReport, wire.Check(id=office.next_id()))
    assert check.violations == ()
    assert office.expect(wire.StatsReport, wire.Stats(id=office.next_id())).runs == 0


def test_retry_of_a_clear_has_one_effect() -> None:
    """The same id again on the same connection gets the same answer, before and after the first one has come."""
    office = busy()
    first, again = clear(office, number=70), clear(office, number=70)
    office.workers["a"].end_all()

    assert cleared(first) == cleared(again) == cleared(clear(office, number=70)) == (1, "", 3)
    assert cleared(clear(office, number=70, peer=ONE)) == (2, "", 0)
    assert cleared(clear(office)) == (3, "", 0)


def test_clears_that_meet_are_one() -> None:
    """Who asks while a clear is under way, for any replica of the namespace, waits for that one."""
    office = busy("ab")
    answers = [clear(office, "a"), clear(office, "b"), clear(office, "b", peer=ONE)]
    office.workers["a"].end_all()

    assert [cleared(each) for each in answers] == [(1, "", 3)] * 3


def test_set_weights_is_idempotent_by_version() -> None:
    """A version that the replica has is answered without an effect; another one clears again."""
    office = Office()
    assert cleared(set_weights(office, "step 1")) == (1, "step 1", 0)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    assert cleared(set_weights(office, "step 1")) == (1, "step 1", 0)
    office.expect(wire.Acquired, office.acquire(key_chain(3)), key_chain(3))
    assert cleared(set_weights(office, "step 2")) == (2, "step 2", 3)
    assert cleared(clear(office)) == (3, "step 2", 0)


@pytest.mark.parametrize("version", ["v\x1b[2J", "v\n", "\x00", "\u202e"])
def test_set_weights_of_a_version_that_cannot_be_printed_is_refused(version: str) -> None:
    """A version that could drive the terminal of who looks at it is refused, and nothing is cleared."""
    office = Office()

    assert code(set_weights(office, version)) is ErrorCode.BAD_VALUE
    assert cleared(clear(office)) == (1, "", 0)


def test_set_weights_during_a_clear_is_told_to_try_again() -> None:
    """Only a clear with the same weights can stand for it."""
    office = busy()
    first, same, other = set_weights(office, "step 1"), set_weights(office, "step 1"), set_weights(office, "step 2")
    joined = clear(office)
    assert code(other) == ErrorCode.CLEARING
    office.workers["a"].end_all()

    assert cleared(first) == cleared(same) == cleared(joined) == (1, "step 1", 3)
    assert cleared(set_weights(office, "step 2")) == (2, "step 2", 0)


def test_unknown_replica_cannot_be_cleared() -> None:
    """A name that no replica has is an error of the caller."""
    office = Office()

    assert code(clear(office, "x")) == code(set_weights(office, "step 1", "x")) == ErrorCode.UNKNOWN_REPLICA


@pytest.mark.parametrize("weights", ["", "step 1"])
def test_new_generation_is_written_down_before_it_is_told(tmp_path: Path, weights: str) -> None:
    """When the answer goes out the ledger has generation, namespace and weights, and the slabs under their root."""
    host = HostPoolRecord(device=1, inode=2, slabs=2, slab_bytes=SLAB_BYTES, allocated={})
    path = tmp_path / "ledger.json"
    office = Office("a", "b", host_slabs=2, state_place=StatePlace(LedgerFile(path), boot_id(), host))
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    records: list[tuple[ReplicaRecord, ...]] = []
    allocated: list[dict[str, tuple[int, ...]]] = []

    def respond(_: Answer) -> None:
        ledger = read_ledger(path)
        assert ledger is not None
        assert ledger.host is not None
        records.append(ledger.replicas)
        allocated.append(ledger.host.allocated)

    request: wire.Request = wire.ClearNamespace(id=7, target="a")
    if weights:
        request = wire.SetWeights(id=7, target="a", version=weights)
    office.service.submit(TWO, request, [], respond)
    assert records == []
    office.workers["a"].end_all()

    root = root_of(1, weights).hex()
    (written,) = records
    assert [(each.generation, each.namespace, each.weights_version) for each in written] == [(1, root, weights)] * 2
    assert [set(each) for each in allocated] == [{root}]


def test_workers_lost_meanwhile_do_not_lose_the_answer() -> None:
    """A clear whose copies end because their workers died is answered all the same."""
    office = busy()
    answers = clear(office)
    (store,) = office.workers["a"].under_way(TransferKind.STORE)
    office.service.on_event(WorkerDied("a"))
    office.workers["a"].end(store, "worker died")

    assert cleared(answers)[:2] == (1, "")


def test_health_is_well_during_a_clear() -> None:
    """A replica that is being cleared is busy, not ill."""
    office = busy()
    clear(office)

    async def ask() -> wire.Header:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        office.service.submit(ONE, wire.Health(id=1), [], answered.set_result)
        return (await answered).header

    report = asyncio.run(ask())
    assert isinstance(report, wire.HealthReport)
    assert report.ok
    assert report.parts[0].detail == "skipped: the namespace is being cleared"
