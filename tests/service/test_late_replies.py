"""Answers that come later, and what comes after an answer: one reply each, however its subject ends."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NoReturn

import pytest

from kvcached.core.insight.invariants import check
from kvcached.core.messages import Ticked, TransferKind, WorkerDied
from kvcached.core.slots.states import SlotState
from kvcached.service.pending import WAITING_MAX, Answer, Wait
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.types import NO_FENCE, ShardIndex, TransferId, unpack_ranges
from tests.service.office import EPOCH, ONE, SLOTS, TWO, FakePeer, Office, key_chain


@dataclass
class Loading:
    """Replica a has stored four blocks, and a lease on replica b waits for them."""

    office: Office
    process: FakePeer
    acquired: wire.Acquired

    @property
    def transfer(self) -> TransferId:
        """The load under way."""
        (transfer,) = self.office.workers["b"].under_way(TransferKind.LOAD)
        return transfer

    def request(self) -> wire.Load:
        return wire.Load(id=self.office.next_id(), epoch=EPOCH, lease=self.acquired.lease)

    def end(self, error: str = "", corrupt: tuple[int, ...] = ()) -> None:
        self.office.workers["b"].end(self.transfer, error, corrupt)


@pytest.fixture
def loading() -> Loading:
    office = Office("a", "b", host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(4))
    office.workers["a"].end_all()
    process = FakePeer(2)
    office.enter(process, "b", peer=TWO)
    keys = key_chain(4)
    acquired = office.expect(wire.Acquired, office.acquire(keys), keys, peer=TWO)
    return Loading(office, process, acquired)


def error_of(answers: list[Answer]) -> ErrorCode:
    """The code of the only answer."""
    (answer,) = answers
    assert isinstance(answer.header, wire.ErrorReply)
    return answer.header.code


def test_match_tells_device_and_host_blocks_apart() -> None:
    """A prefix that only the host pool holds is matched there."""
    office = Office("a", "b", host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(4))
    office.workers["a"].end_all()
    office.enter(FakePeer(2), "b", peer=TWO)
    match = wire.Match(id=office.next_id(), epoch=EPOCH, tokens=16, full=True)

    for peer, expected in ((ONE, (4, 0)), (TWO, (0, 4))):
        matched = office.expect(wire.Matched, match, key_chain(4), peer=peer)
        assert (matched.device, matched.host) == expected


def test_acquire_names_its_loads(loading: Loading) -> None:
    """The reply says which blocks of the hit are not there yet, and which transfer brings them; it is ordered then."""
    assert (loading.acquired.hit, loading.acquired.ready) == (4, 0)
    assert [ticket.transfer for ticket in loading.acquired.loads] == [loading.transfer]


def test_load_is_answered_when_every_shard_is_through(loading: Loading) -> None:
    """Nothing is said before the last shard has settled; then one reply with the whole hit and no new slots."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)
    _, settled = loading.office.workers["b"].transfers[loading.transfer]
    settled(ShardIndex(1), "", ())
    assert answers == []
    settled(ShardIndex(0), "", ())

    (answer,) = answers
    assert answer == (wire.Loaded(id=answer.header.id, hit=4), (b"",))


@pytest.mark.parametrize(
    ("error", "corrupt", "hit"), [("disk on fire", (), 0), ("", (2,), 2), ("", (0, 3), 0)], ids=["error", "tail", "all"]
)
def test_load_that_failed_is_answered_with_what_arrived(
    loading: Loading, error: str, corrupt: tuple[int, ...], hit: int
) -> None:
    """The hit is cut where the first block is missing, and slots are named for the blocks behind it."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)
    loading.end(error, corrupt)

    ((header, (ranges,)),) = answers
    assert isinstance(header, wire.Loaded)
    assert (header.hit, sum(count for _, count in unpack_ranges(ranges))) == (hit, 4 - hit)
    assert check(loading.office.cache) == []


def test_load_is_answered_at_once_where_nothing_loads(loading: Loading) -> None:
    """After the end of the loads the answer is immediate."""
    loading.end()

    assert loading.office.expect(wire.Loaded, loading.request(), peer=TWO).hit == 4


def test_retry_of_an_answered_load_gets_the_same_answer_and_no_more_slots(loading: Loading) -> None:
    """Asking again, with the same id or another, names the same slots."""
    request = loading.request()
    first = loading.office.ask_late(request, peer=TWO)
    loading.end("lost")
    leased = loading.office.count("b", SlotState.LEASED)
    again = loading.office.ask_late(request, peer=TWO)
    other = loading.office.ask_late(loading.request(), peer=TWO)

    assert first == again
    assert other[0].frames == first[0].frames
    assert loading.office.count("b", SlotState.LEASED) == leased == 4


def test_retry_of_an_acquire_whose_load_has_failed_gets_the_same_answer(loading: Loading) -> None:
    """The same id, the same answer, though the hit is shorter by now: slots for what is missing are named by `load`."""
    keys = key_chain(4)
    request = wire.Acquire(id=loading.acquired.id, epoch=EPOCH, request="r", tokens=len(keys) // 4, full=True)
    loading.end("lost")
    again = loading.office.expect(wire.Acquired, request, keys, peer=TWO)
    (answer,) = loading.office.ask_late(loading.request(), peer=TWO)

    assert again == loading.acquired
    assert isinstance(answer.header, wire.Loaded)
    assert (answer.header.hit, sum(count for _, count in unpack_ranges(answer.frames[0]))) == (0, 4)


def test_every_message_of_a_repeated_load_is_answered(loading: Loading) -> None:
    """A retry that comes while the first one waits is answered with it, each once."""
    request = loading.request()
    first, again = loading.office.ask_late(request, peer=TWO), loading.office.ask_late(request, peer=TWO)
    assert (first, again) == ([], [])
    loading.end()

    assert len(first) == 1
    assert first == again


def test_load_ends_with_the_goodbye_of_its_session(loading: Loading) -> None:
    """A bye is answered, and before it the load that waits, with an error."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)
    loading.office.expect(wire.Goodbye, wire.Bye(id=loading.office.next_id()), peer=TWO)

    assert error_of(answers) is ErrorCode.NO_SESSION
    loading.end()
    assert len(answers) == 1


def test_load_ends_with_the_death_of_its_process(loading: Loading) -> None:
    """When the engine is dead its question is answered and forgotten, whoever reads the answer."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)
    loading.process.dead = True
    loading.office.service.peer_lost(loading.process)
    loading.end()

    assert error_of(answers) is ErrorCode.NO_SESSION


def test_load_ends_with_the_expiry_of_its_session(loading: Loading) -> None:
    """A session that went silent is told so, though its processes may live."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)
    for now_ms in (1, 450, 900, 1300):
        loading.office.service.on_event(Ticked(now_ms))

    assert error_of(answers) is ErrorCode.SESSION_EXPIRED


def test_load_ends_with_its_worker(loading: Loading) -> None:
    """A worker's death fails the load and nothing else: who waits for it is told of a shorter hit."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)
    loading.office.service.on_event(WorkerDied("b"))
    assert answers == []
    loading.end("the worker is dead")

    assert isinstance(answers[0][0], wire.Loaded)
    assert answers[0][0].hit == 0
    assert check(loading.office.cache) == []


@pytest.mark.parametrize("one_way", [False, True])
def test_load_ends_with_its_lease(loading: Loading, one_way: bool) -> None:
    """A release, one-way or not, answers the load that still waits for that lease."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)
    release = wire.Release(id=loading.office.next_id(), epoch=EPOCH, lease=loading.acquired.lease, reply=not one_way)
    loading.office.ask_late(release, peer=TWO)

    assert error_of(answers) is ErrorCode.ALREADY_RELEASED


def test_load_of_another_lease_waits_on(loading: Loading) -> None:
    """The end of one lease says nothing about another."""
    office, keys = loading.office, key_chain(4)
    other = office.expect(wire.Acquired, office.acquire(keys, "other"), keys, peer=TWO)
    answers = office.ask_late(loading.request(), peer=TWO)
    office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=other.lease), peer=TWO)

    assert answers == []
    loading.end()
    assert len(answers) == 1


def test_load_of_a_foreign_lease_is_refused_at_once(loading: Loading) -> None:
    """A refusal does not wait."""
    assert loading.office.error(loading.request()) is ErrorCode.FOREIGN_LEASE


def test_commit_on_loading_blocks_is_refused(loading: Loading) -> None:
    """What was computed on blocks that are not there yet does not get into the index."""
    request = wire.Commit(id=loading.office.next_id(), epoch=EPOCH, lease=loading.acquired.lease, start=4)

    assert loading.office.error(request, key_chain(5)[64:], b"", peer=TWO) is ErrorCode.STILL_LOADING


def test_waiting_requests_of_a_session_are_bounded(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a request is refused; those that wait are answered all the same."""
    monkeypatch.setitem(WAITING_MAX, Wait.LOAD, 2)
    waiting = [loading.office.ask_late(loading.request(), peer=TWO) for _ in range(2)]

    assert loading.office.error(loading.request(), peer=TWO) is ErrorCode.LIMIT
    loading.end()
    assert [len(answers) for answers in waiting] == [1, 1]


@pytest.mark.interpreted
def test_internal_error_is_a_late_answer_too(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that shows when a load has ended is one typed reply, and the event goes its way."""
    answers = loading.office.ask_late(loading.request(), peer=TWO)

    def explode(*_: object) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(loading.office.cache.managed, "load", explode)
    loading.end()

    assert error_of(answers) is ErrorCode.INTERNAL
    assert loading.office.cache.transfers == {}


def test_load_that_cannot_start_is_told_to_the_progress_pages() -> None:
    """A load that waits for a store that fails is abandoned on its replica, and answered."""
    office, keys = Office("a", "b", host_slabs=2), key_chain(4)
    office.enter(FakePeer(1))
    office.enter(FakePeer(2), "b", peer=TWO)
    office.store(keys)
    acquired = office.expect(wire.Acquired, office.acquire(keys), keys, peer=TWO)
    (store,) = office.workers["a"].under_way(TransferKind.STORE)
    answers = office.ask_late(wire.Load(id=office.next_id(), epoch=EPOCH, lease=acquired.lease), peer=TWO)

    assert [order.transfer for order in office.workers["a"].hurried] == [store]
    assert office.workers["b"].transfers == {}
    office.workers["a"].end(store, "no room")
    assert [load.transfer for load in office.workers["b"].abandoned] == [acquired.loads[0].transfer]
    assert [answer.header for answer in answers] == [wire.Loaded(id=answers[0].header.id, hit=0)]


# --- waiting for slots ----------------------------------------------------------------------------------------------


@dataclass
class Full:
    """Every slot of replica a holds a committed block, whose copies to the host pool are under way."""

    office: Office
    process: FakePeer

    def request(self, blocks: int = SLOTS) -> wire.WaitForSlots:
        return wire.WaitForSlots(id=self.office.next_id(), epoch=EPOCH, blocks=blocks)


@pytest.fixture
def full() -> Full:
    office, process = Office(host_slabs=4), FakePeer(1)
    office.enter(process)
    for seed in (1, 2):
        office.store(key_chain(SLOTS // 2, seed))
    return Full(office, process)


def test_shortage_under_copies_is_pending_and_can_be_waited_out(full: Full) -> None:
    """While copies hold every slot an acquire is told to wait; the wait is answered when enough of them have ended."""
    keys = key_chain(6, seed=3)
    assert full.office.error(full.office.acquire(keys), keys) is ErrorCode.CAPACITY_PENDING
    answers = full.office.ask_late(full.request(6))
    first, second = full.office.workers["a"].under_way(TransferKind.STORE)
    assert answers == []
    assert {order.transfer for order in full.office.workers["a"].hurried} == {first, second}
    full.office.workers["a"].end(second)

    assert [answer.header for answer in answers] == [wire.SlotsAvailable(id=answers[0].header.id, available=8)]
    full.office.expect(wire.Acquired, full.office.acquire(keys), keys)


def test_wait_for_slots_ends_with_as_many_as_it_asked_for(full: Full) -> None:
    """The end of a copy that does not make enough room answers nothing; the end of the last one answers anyway."""
    answers = full.office.ask_late(full.request(9))
    first, second = full.office.workers["a"].under_way(TransferKind.STORE)
    full.office.workers["a"].end(first)
    assert answers == []
    full.office.workers["a"].end(second, "failed")

    assert [answer.header for answer in answers] == [wire.SlotsAvailable(id=answers[0].header.id, available=SLOTS)]


def test_wait_for_slots_is_answered_at_once_where_no_copy_could_help(full: Full) -> None:
    """Without copies under way the answer is what there is, be it too little."""
    full.office.workers["a"].end_all()
    keys = key_chain(10, seed=4)
    full.office.expect(wire.Acquired, full.office.acquire(keys), keys)

    assert full.office.expect(wire.SlotsAvailable, full.request(7)).available == 6


def test_wait_for_slots_ends_with_its_session(full: Full) -> None:
    """Goodbye answers who waits for room, once."""
    answers = full.office.ask_late(full.request())
    full.office.expect(wire.Goodbye, wire.Bye(id=full.office.next_id()))
    full.office.workers["a"].end_all()

    assert error_of(answers) is ErrorCode.NO_SESSION


def test_wait_for_slots_ends_with_the_death_of_its_process(full: Full) -> None:
    """A dead engine's question does not stay behind."""
    answers = full.office.ask_late(full.request())
    full.process.dead = True
    full.office.service.peer_lost(full.process)

    assert error_of(answers) is ErrorCode.NO_SESSION


def test_wait_for_slots_is_answered_though_its_worker_dies(full: Full) -> None:
    """The copies that held the slots have failed, and so the slots are there for who waits."""
    answers = full.office.ask_late(full.request())
    full.office.service.on_event(WorkerDied("a"))
    full.office.workers["a"].end_all()

    assert isinstance(answers[0][0], wire.SlotsAvailable)


# --- what comes after an answer --------------------------------------------------------------------------------------


def test_reply_goes_out_before_the_core_settles() -> None:
    """A commit is answered first, and its copy to the host pool ordered then."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    header, (_, ranges) = office.ask(office.acquire(key_chain(4)), key_chain(4))
    assert isinstance(header, wire.Acquired)
    ordered: list[int] = []
    finish = wire.Release(id=office.next_id(), epoch=EPOCH, lease=header.lease)

    def respond(_: Answer) -> None:
        ordered.append(len(office.workers["a"].transfers))

    office.service.submit(ONE, finish, [key_chain(4), ranges], respond)

    assert ordered == [0]
    assert len(office.workers["a"].under_way(TransferKind.STORE)) == 1


def test_one_way_request_is_settled_too() -> None:
    """A release that wants no reply has its blocks stored all the same."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    header, (_, ranges) = office.ask(office.acquire(key_chain(4)), key_chain(4))
    assert isinstance(header, wire.Acquired)
    finish = wire.Release(id=office.next_id(), epoch=EPOCH, lease=header.lease, reply=False)
    office.service.submit(ONE, finish, [key_chain(4), ranges], lambda _: None)

    assert len(office.workers["a"].under_way(TransferKind.STORE)) == 1


def test_health_check_stores_nothing() -> None:
    """What a check commits is not worth a copy."""
    office = Office(host_slabs=2)
    session = office.cache.open_session("a", 0, counted=False)
    keys = key_chain(2)
    grant = office.cache.managed.acquire(session.id, EPOCH, "health", keys, 8, 0, full=False)
    office.cache.managed.finish(session.id, EPOCH, grant.lease, 0, keys, array("i", grant.ranges), NO_FENCE)
    office.service.on_event(Ticked(1))

    assert office.workers["a"].transfers == {}


@pytest.mark.interpreted
def test_bug_while_settling_is_counted_and_answers_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is out by then: the error is the daemon's own."""
    office = Office()
    office.enter(FakePeer(1))

    def explode() -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(office.cache, "settle", explode)
    office.expect(wire.Acquired, office.acquire(key_chain(1)), key_chain(1))

    assert office.cache.counters["errors_internal"] == 1


@pytest.mark.interpreted
def test_bug_at_the_end_of_a_transfer_does_not_reach_the_worker(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reports for a shard is never raised at."""

    def explode(*_: object) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(loading.office.cache.worker_copies, "shard_done", explode)
    loading.end()

    assert loading.office.cache.counters["errors_internal"] == 2  # one a shard


def test_replica_serves_on_while_its_workers_are_restarted() -> None:
    """Hello is granted and blocks on the device are hit as before, though there is no worker."""
    office = Office(host_slabs=2)
    first = office.enter(FakePeer(1))
    office.store(key_chain(4))
    office.workers["a"].end_all()
    office.service.on_event(WorkerDied("a"))
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))
    second = office.enter(FakePeer(2), peer=TWO)

    assert second.epoch == first.epoch
    match = wire.Match(id=office.next_id(), epoch=second.epoch, tokens=16, full=True)
    assert office.expect(wire.Matched, match, key_chain(4), peer=TWO).device == 4
