"""What is written beside the slots of device pools is written before anybody is told of it."""

from __future__ import annotations

import asyncio

import pytest

from kvcached.core.messages import StartTransfer, TransferKind
from kvcached.service.pending import Answer
from kvcached.service.replica import Settled
from kvcached_client.protocol import engine as wire
from tests.service.office import EPOCH, ONE, SLOTS, TWO, FakePeer, FakeWorkers, Office, key_chain


class Watching:
    """Looks at an office's cache whenever somebody is told something: nothing may be left to be written then.

    Attributes:
        looks: how often it was looked.
    """

    def __init__(self, office: Office) -> None:
        self.office = office
        self.looks = 0

    def look(self) -> None:
        self.looks += 1
        assert self.office.cache.header_changes == []

    def ask(self, request: wire.Request, *frames: bytes, peer: bytes = ONE) -> list[Answer]:
        """The answers so far; the list grows when later ones come."""
        answers: list[Answer] = []

        def respond(answer: Answer) -> None:
            self.look()
            answers.append(answer)

        self.office.service.submit(peer, request, list(frames), respond)
        return answers


def test_reply_that_grants_comes_after_the_headers() -> None:
    """Slots that an acquire has evicted hold no block when its answer names them."""
    office = Office()
    office.enter(FakePeer(1))
    office.store(key_chain(SLOTS))
    watching, keys = Watching(office), key_chain(4, seed=2)
    (answer,) = watching.ask(office.acquire(keys), keys)

    assert isinstance(answer.header, wire.Acquired)
    assert (watching.looks, office.cache.counters["evicted_blocks"] >= 4) == (1, True)


def test_late_reply_that_grants_comes_after_the_headers() -> None:
    """So do those that an answer to `load` has evicted, after a load that failed for two leases."""
    office = Office("a", "b", host_slabs=4)
    office.enter(FakePeer(1))
    office.store(key_chain(4))
    office.workers["a"].end_all()
    office.enter(FakePeer(2), "b", peer=TWO)
    office.store(key_chain(SLOTS - 4, seed=2), peer=TWO)
    office.workers["b"].end_all()
    watching, keys = Watching(office), key_chain(4)
    leases = [office.expect(wire.Acquired, office.acquire(keys, name), keys, peer=TWO).lease for name in "xy"]
    waiting = [watching.ask(wire.Load(id=office.next_id(), epoch=EPOCH, lease=each), peer=TWO) for each in leases]
    (load,) = office.workers["b"].under_way(TransferKind.LOAD)
    evicted = office.cache.counters["evicted_blocks"]
    office.workers["b"].end(load, "no luck")

    assert [isinstance(answers[0].header, wire.Loaded) for answers in waiting] == [True, True]
    assert (watching.looks, office.cache.counters["evicted_blocks"] - evicted >= 4) == (2, True)


def test_orders_come_after_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is told to write a slot when no header names it any more."""
    office = Office("a", "b", host_slabs=4)
    watching, start = Watching(office), FakeWorkers.start

    def watched(self: FakeWorkers, transfer: StartTransfer, settled: Settled) -> None:
        watching.look()
        start(self, transfer, settled)

    office.enter(FakePeer(1))
    office.store(key_chain(4))
    office.workers["a"].end_all()
    office.enter(FakePeer(2), "b", peer=TWO)
    office.store(key_chain(SLOTS, seed=2), peer=TWO)
    office.workers["b"].end_all()
    monkeypatch.setattr(FakeWorkers, "start", watched)
    keys = key_chain(4)
    assert office.expect(wire.Acquired, office.acquire(keys), keys, peer=TWO).loads

    assert watching.looks == 1


def test_health_check_writes_after_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A health check that takes slots of cached blocks has workers write them when no header names them any more."""
    office = Office()
    watching, probe = Watching(office), FakeWorkers.probe

    def watched(self: FakeWorkers, first: int, second: int) -> asyncio.Future[None]:
        watching.look()
        return probe(self, first, second)

    monkeypatch.setattr(FakeWorkers, "probe", watched)
    office.enter(FakePeer(1))
    office.store(key_chain(SLOTS))

    async def check() -> wire.Header:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        office.service.submit(b"cli", wire.Health(id=1), [], answered.set_result)
        return (await answered).header

    header = asyncio.run(check())
    assert isinstance(header, wire.HealthReport)
    assert (header.ok, watching.looks) == (True, 1)
