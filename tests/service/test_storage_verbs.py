"""Prefetches that are waited for as their stop policies say, and what people do with storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from kvcached.core.messages import (
    FetchSettled,
    QueryStorage,
    StartBackup,
    StartFetch,
    StorageAnswered,
    StorageEvent,
    StorageLost,
    StorageReady,
)
from kvcached.service.pending import WAITING_MAX, Answer, Wait
from kvcached.service.storage_verbs import RECORD_LATE_MS, StorageService
from kvcached.storage.backend import UNKNOWN_USAGE, LocalDisk, Usage
from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import AskedRequest, Done
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.sessions import StopPolicy
from tests.service.office import ONE, TWO, FakePeer, key_chain
from tests.service.offload_office import OTHER_INSTANCE, OffloadOffice

BLOCKS = 6


@dataclass
class FakeStorageLink:
    """A storage process that answers when a test says so."""

    state: LinkState = LinkState.READY
    why: str = ""
    write_refusal: str = ""
    trouble: str = ""
    usage: Usage = UNKNOWN_USAGE
    restarts: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    due: dict[bytes, None] = field(default_factory=dict)
    orders: list[QueryStorage | StartFetch | StartBackup] = field(default_factory=list)
    forgets: list[Callable[[Done], None]] = field(default_factory=list)
    asked: list[tuple[AskedRequest, Callable[[Done], None]]] = field(default_factory=list)

    def carry_out(self, effect: QueryStorage | StartFetch | StartBackup) -> None:
        self.orders.append(effect)

    def forget_all(self, tell: Callable[[Done], None]) -> bool:
        if self.state is LinkState.READY:
            self.forgets.append(tell)
        return self.state is LinkState.READY

    def forget(self, prefix: bytes, tell: Callable[[Done], None]) -> None:
        self.forgets.append(tell)

    def ask(self, request: Callable[[int], AskedRequest], tell: Callable[[Done], None]) -> bool:
        self.asked.append((request(len(self.asked) + 1), tell))
        return True

    def attach(self) -> None:
        self.state = LinkState.STARTING

    async def detach(self, deadline_s: float) -> None:
        self.state = LinkState.DETACHED


class StorageOffice(OffloadOffice):
    """A service with storage, which waits 200 ms and 1000 us for each token, and an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.link = FakeStorageLink()
        self.service.storage.storage = StorageService(self.link, "disk", "never", 200, 1000)
        self.service.on_event(StorageReady())
        self.welcome = self.attach(FakePeer(1))

    def prefetch(
        self, stop: StopPolicy = "wait_complete", *, deadline_ms: int = 60_000, seed: int = 0, peer: bytes = ONE
    ) -> list[Answer]:
        """The answers to a request for `BLOCKS` blocks; the list grows when they come."""
        answers: list[Answer] = []
        request = wire.Prefetch(id=self.next_id(), tokens=4 * BLOCKS, full=True, stop=stop, deadline_ms=deadline_ms)
        self.service.submit(peer, request, [key_chain(BLOCKS, seed)], answers.append)
        return answers

    def asked(self) -> QueryStorage:
        """The one question to storage that is not answered."""
        (query,) = (order for order in self.link.orders if isinstance(order, QueryStorage))
        return query

    def tell(self, event: StorageEvent) -> None:
        self.service.on_event(event)

    def bring(self, found: int = BLOCKS) -> None:
        """Storage says what it has, and that comes."""
        self.tell(StorageAnswered(self.asked().query, found, 0))
        for order in self.link.orders:
            if isinstance(order, StartFetch):
                self.tell(FetchSettled(order.transfer, found, 1))

    def control(self, action: str) -> list[Answer]:
        return self.ask_late(wire.StorageControl(id=self.next_id(), action=action))  # type: ignore[arg-type]


def told(answers: list[Answer]) -> tuple[int, int, bool, str]:
    """What the one answer says."""
    (answer,) = answers
    reply = answer.header
    assert isinstance(reply, wire.Prefetched), reply
    return reply.blocks, reply.fetched, reply.is_over, reply.reason


@pytest.fixture
def office() -> StorageOffice:
    """With an engine that has nothing in the host pool."""
    return StorageOffice()


def test_best_effort_is_answered_at_once(office: StorageOffice) -> None:
    """Nobody waits, and what was begun comes all the same."""
    assert told(office.prefetch("best_effort")) == (0, 0, False, "waiting")
    assert office.timers == []
    office.bring()

    assert office.hit(BLOCKS) == BLOCKS


def test_tenant_of_a_prefetch_is_whom_its_blocks_are_for(office: StorageOffice) -> None:
    """The core is told whose quota the blocks count against."""
    request = wire.Prefetch(id=office.next_id(), tokens=4 * BLOCKS, full=True, tenant="free-7")
    office.service.submit(ONE, request, [key_chain(BLOCKS, 0)], lambda _: None)
    assert [each.tenant for each in office.cache.storage.prefetches.under_way.values()] == ["free-7"]


def test_wait_complete_is_answered_when_all_has_come(office: StorageOffice) -> None:
    """The answer comes with the last block, and says how many there were."""
    answers = office.prefetch("wait_complete")
    assert answers == []
    office.bring(4)

    assert told(answers) == (4, 4, True, "fetched")
    assert [(timer.delay_s, timer.cancelled) for timer in office.timers] == [(60.0, True)]


@pytest.mark.parametrize(
    ("stop", "deadline_ms", "waits_s"),
    [("timeout", 60_000, 0.224), ("timeout", 100, 0.1), ("wait_complete", 100, 0.1)],
)
def test_deadline_is_answered_with_what_there_is(
    office: StorageOffice, stop: StopPolicy, deadline_ms: int, waits_s: float
) -> None:
    """A timeout grows with the prompt, a deadline holds beside it; what has been begun by then comes."""
    answers = office.prefetch(stop, deadline_ms=deadline_ms)
    (timer,) = office.timers
    assert timer.delay_s == waits_s
    office.tell(StorageAnswered(office.asked().query, BLOCKS, 0))
    timer.ring()
    assert told(answers) == (0, 0, False, "waiting")
    (fetch,) = (order for order in office.link.orders if isinstance(order, StartFetch))
    office.tell(FetchSettled(fetch.transfer, BLOCKS, 1))

    assert office.hit(BLOCKS) == BLOCKS
    assert len(answers) == 1


def test_prefetch_goes_on_while_somebody_waits(office: StorageOffice) -> None:
    """Two engines wait for one prefetch: that the time of one is up is no end of it for the other."""
    office.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE)
    impatient = office.prefetch(deadline_ms=100)
    patient = office.prefetch(peer=TWO)
    office.timers[0].ring()
    assert told(impatient) == (0, 0, False, "waiting")
    office.bring()

    assert told(patient) == (BLOCKS, BLOCKS, True, "fetched")


def test_session_that_ends_waits_no_more(office: StorageOffice) -> None:
    """With an engine's session its waiting ends, and with the last one's the prefetch; another's goes on."""
    office.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE)
    leaving, staying = office.prefetch(), office.prefetch(peer=TWO, seed=1)
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))
    assert told(leaving) == (0, 0, False, "waiting")
    assert staying == []
    first = next(order for order in office.link.orders if isinstance(order, QueryStorage))
    office.tell(StorageAnswered(first.query, BLOCKS, 0))

    assert not [order for order in office.link.orders if isinstance(order, StartFetch)]


def test_so_many_wait(office: StorageOffice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a prefetch is begun and answered at once."""
    monkeypatch.setitem(WAITING_MAX, Wait.PREFETCH, 1)
    first = office.prefetch()

    assert told(office.prefetch(seed=1)) == (0, 0, False, "waiting")
    assert first == []


def test_dead_storage_answers_everybody(office: StorageOffice) -> None:
    """Whoever waits when the storage process dies is told that there is none, and so is who comes then."""
    answers = office.prefetch()
    office.tell(StorageLost())

    assert told(answers) == (0, 0, True, "unavailable")
    assert told(office.prefetch()) == (0, 0, True, "unavailable")


def test_end_of_the_daemon_answers_everybody(office: StorageOffice) -> None:
    """A daemon that ends lets nobody wait."""
    answers = office.prefetch()
    office.service.close()

    assert told(answers) == (0, 0, False, "waiting")


def test_prefetch_needs_a_session(office: StorageOffice) -> None:
    """A connection without a session gets nothing fetched."""
    (answer,) = office.prefetch(peer=TWO)

    assert isinstance(answer.header, wire.ErrorReply)
    assert answer.header.code == ErrorCode.NO_SESSION
    assert office.link.orders == []


def report(answers: list[Answer]) -> wire.StorageReport:
    """The one answer."""
    (answer,) = answers
    assert isinstance(answer.header, wire.StorageReport), answer
    return answer.header


def test_status_says_what_the_backend_told_last(office: StorageOffice) -> None:
    """Name, state, use, counters and the last failure."""
    office.link.usage = Usage(3, 300, 1000, LocalDisk(2, 200, 800, 7))
    office.link.counters, office.link.due = {"fetched_blocks": 2}, {b"p": None}
    office.link.state, office.link.why, office.link.restarts = LinkState.WAITING, "it died", 4
    seen = report(office.control("status"))

    assert (seen.backend, seen.state, seen.why, seen.backup) == ("disk", "waiting", "it died", "never")
    assert (seen.restarts, seen.blocks, seen.size_bytes, seen.capacity_bytes) == (4, 3, 300, 1000)
    assert seen.counters == {"fetched_blocks": 2, "forgets_due": 1}
    assert seen.local_disk == wire.LocalDisk(blocks=2, size_bytes=200, capacity_bytes=800, read_blocks=7)


def test_storage_that_takes_no_blocks_is_not_ready(office: StorageOffice) -> None:
    """Storage that works and can write nothing says so, with the reason, to people and to the health check."""
    assert office.service.storage.health()[0].ok
    office.link.write_refusal = "full: File too large"

    seen = report(office.control("status"))
    assert (seen.state, seen.why) == ("read_only", "full: File too large")
    (part,) = office.service.storage.health()
    assert not part.ok
    assert "File too large" in part.detail
    office.link.state, office.link.why = LinkState.WAITING, "it died"
    assert report(office.control("status")).state == "waiting"


def test_clear_is_answered_when_all_is_forgotten(office: StorageOffice) -> None:
    """The answer waits for storage; where there is nobody to forget anything it is an error."""
    answers = office.control("clear")
    assert answers == []
    (tell,) = office.link.forgets
    tell(Done(sequence=1))
    assert report(answers).state == "ready"
    office.link.state = LinkState.DETACHED
    (refused,) = office.control("clear")

    assert isinstance(refused.header, wire.ErrorReply)
    assert refused.header.code == ErrorCode.BAD_VALUE


def test_clear_that_fails_is_an_error(office: StorageOffice) -> None:
    """Nobody believes that blocks are forgotten which are not: the answer says why."""
    answers = office.control("clear")
    (tell,) = office.link.forgets
    tell(Done(sequence=1, failed=True, error="TimeoutError: the index is still being made"))
    (refused,) = answers

    assert isinstance(refused.header, wire.ErrorReply)
    assert "the index is still being made" in refused.header.message


@pytest.mark.parametrize(("is_replaced", "state"), [(True, "ready"), (False, "ready"), (False, "waiting")])
def test_clear_of_what_cannot_be_followed_deletes_all_the_same(
    office: StorageOffice, *, is_replaced: bool, state: str
) -> None:
    """The trouble may pass by itself, and nothing was deleted: then it is deleted before the answer."""
    office.link.state = LinkState.WAITING

    async def begin() -> bool:
        office.link.state = LinkState(state)
        return is_replaced

    async def clear() -> list[Answer]:
        answers: list[Answer] = []
        request = wire.StorageControl(id=office.next_id(), action="clear")
        office.service.submit(ONE, request, [], answers.append)
        for _ in range(4):
            await asyncio.sleep(0)
        return answers

    known = office.service.storage.storage
    assert known is not None
    office.service.storage.storage = replace(known, begin_anew=begin)
    answers = asyncio.run(clear())

    if state == "waiting":
        assert isinstance(answers[0].header, wire.ErrorReply)
        return
    assert (len(office.link.forgets), len(answers)) == (int(not is_replaced), int(is_replaced))
    for tell in office.link.forgets:
        tell(Done(sequence=1))
    assert report(answers).state == "ready"


def test_detach_is_answered_when_the_process_is_dead(office: StorageOffice) -> None:
    """The answer tells the state after it; attach starts it again."""

    async def detach() -> list[Answer]:
        answers: list[Answer] = []
        is_over = asyncio.Event()

        def respond(answer: Answer) -> None:
            answers.append(answer)
            is_over.set()

        office.service.submit(ONE, wire.StorageControl(id=office.next_id(), action="detach"), [], respond)
        assert answers == []
        await is_over.wait()
        return answers

    assert report(asyncio.run(detach())).state == "detached"
    assert report(office.control("attach")).state == "starting"


@pytest.mark.parametrize("action", ["clear", "detach"])
def test_end_of_the_daemon_answers_who_waits_for_storage(
    office: StorageOffice, monkeypatch: pytest.MonkeyPatch, action: Literal["clear", "detach"]
) -> None:
    """A daemon that ends while its storage process clears, or ends, replies to who asked for that, once."""

    async def never(_: float) -> None:
        await asyncio.Event().wait()

    async def ask() -> list[Answer]:
        answers: list[Answer] = []
        office.service.submit(ONE, wire.StorageControl(id=1, action=action), [], answers.append)
        await asyncio.sleep(0)
        office.service.close()
        return answers

    monkeypatch.setattr(office.link, "detach", never)
    (answer,) = asyncio.run(ask())
    assert isinstance(answer.header, wire.ErrorReply)
    assert answer.header.code is ErrorCode.DRAINING


def test_without_storage_there_is_nothing_to_do() -> None:
    """The status says so, a prefetch is over at once, anything else is refused."""
    office = StorageOffice()
    office.service.storage.storage = None
    office.tell(StorageLost())

    assert report(office.control("status")).backend == ""
    assert told(office.prefetch()) == (0, 0, True, "unavailable")
    (refused,) = office.control("attach")
    assert isinstance(refused.header, wire.ErrorReply)


def test_health_names_storage_that_does_not_work(office: StorageOffice) -> None:
    """A suspended storage is a part that fails; one that somebody has taken off is none."""
    office.link.state, office.link.why = LinkState.SUSPENDED, "no answer"
    (part,) = office.service.storage.health()
    assert (part.part, part.ok) == ("storage", False)
    assert "no answer" in part.detail
    office.link.state, office.link.trouble = LinkState.READY, "the local disk is left out: EIO"
    (part,) = office.service.storage.health()
    assert (part.part, part.ok) == ("storage", False)
    assert part.detail == "it works, but the local disk is left out: EIO"
    assert report(office.control("status")).why == "the local disk is left out: EIO"
    office.link.state = LinkState.DETACHED

    assert office.service.storage.health() == []


def test_health_names_a_record_that_is_not_followed(office: StorageOffice) -> None:
    """Storage may work and its record not: what other machines clear is then served from memory here."""
    age_ms = 0
    known = office.service.storage.storage
    assert known is not None
    office.service.storage.storage = replace(known, record_age_ms=lambda: age_ms)
    for age_ms, is_well in ((RECORD_LATE_MS, True), (RECORD_LATE_MS + 1, False), (-1, True)):
        (part,) = office.service.storage.health()
        assert part.ok == is_well, age_ms
        assert ("for 30 s is not cleared here" in part.detail) != is_well
        assert report(office.control("status")).record_age_ms == age_ms
