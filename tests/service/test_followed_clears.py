"""Two daemons take turns at one storage: what one has cleared meanwhile, the other clears before it asks storage."""

from __future__ import annotations

import pytest

from kvcached.core.generations import Edition
from kvcached.core.messages import StorageLost, StorageReady
from kvcached.recovery.generations import EditionRecord
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId
from tests.service.office import FakePeer, Office, key_chain, root_of
from tests.service.offload_office import OffloadOffice
from tests.service.test_clears import busy, clear, cleared
from tests.service.test_recorder import FakeWriter, with_storage

LATER = 1 << 40


class Engines:
    """An office with three blocks of an engine in offload mode in memory, and its generation in the record."""

    def __init__(self) -> None:
        self.office = OffloadOffice()
        self.welcome = self.office.attach(FakePeer(1))
        self.office.store_blocks(self.welcome, 3)
        self.writer = with_storage(self.office)

    @property
    def root(self) -> bytes:
        return self.welcome.namespace

    def generation(self) -> int:
        """As the engine is told it."""
        beat = wire.Heartbeat(id=self.office.next_id(), session=self.welcome.session, token=self.welcome.token)
        return self.office.expect(wire.Alive, beat).generation

    def clear_without_storage(self) -> int:
        """A clear that cannot be recorded. Returns the generation."""
        self.office.service.on_event(StorageLost())
        (answer,) = self.office.ask_late(wire.ClearNamespace(id=self.office.next_id(), target="tiny"), peer=b"people")
        assert isinstance(answer.header, wire.ErrorReply), answer.header
        return self.generation()


def recorded(writer: FakeWriter) -> dict[str, EditionRecord]:
    return {each.namespace: each for each in writer.records[-1].editions}


def test_engines_have_the_generation_that_another_daemon_began() -> None:
    """Their blocks in memory, from before its clear, are gone; what it has stored since is in their generation."""
    engines = Engines()
    engines.office.service.on_event(StorageLost())
    engines.office.service.clears.follow({engines.root: Edition(LATER)})

    assert (engines.generation(), engines.office.hit(3)) == (LATER, 0)
    engines.office.service.on_event(StorageReady())
    assert recorded(engines.writer)[engines.root.hex()].generation == LATER


@pytest.mark.parametrize("change", [0, -1], ids=["the same", "an earlier one"])
def test_what_no_other_daemon_has_cleared_stays(change: int) -> None:
    """A record with the generation that is known, or with an earlier one, clears nothing."""
    engines = Engines()
    generation = engines.generation()
    engines.office.service.clears.follow({engines.root: Edition(generation + change)})

    assert (engines.generation(), engines.office.hit(3)) == (generation, 3)


def test_clear_of_both_daemons_begins_a_generation_of_neither() -> None:
    """What the other one has stored may be older than the clear here, which could not be recorded."""
    engines = Engines()
    ours = engines.clear_without_storage()
    engines.office.service.clears.follow({engines.root: Edition(LATER)})

    assert engines.generation() > LATER > ours


def test_namespaces_of_the_other_daemon_stay_in_the_record() -> None:
    """This one writes the whole record: it would bring back what was cleared in namespaces that only the other has."""
    engines = Engines()
    other = b"o" * 32
    engines.office.service.clears.follow({other: Edition(LATER)})
    engines.office.service.on_event(StorageReady())

    assert recorded(engines.writer)[other.hex()].generation == LATER


def generation_of(office: Office) -> tuple[int, str]:
    """Of replica `a`, with its weights, which its namespace and its workers tell as well."""
    (info,) = (
        each
        for each in office.expect(wire.Description, wire.Describe(id=office.next_id())).replicas
        if each.name == "a"
    )
    assert info.namespace == root_of(info.generation, info.weights_version).hex()
    assert office.workers["a"].generation == info.generation
    return info.generation, info.weights_version


def of_replicas(generation: int, weights: str = "") -> dict[bytes, Edition]:
    return {root_of(generation, weights): Edition(generation, weights)}


def test_replicas_have_the_generation_and_weights_that_another_daemon_has_set() -> None:
    """As after a clear of their own: the pool is empty, sessions are over."""
    office = Office("a", "b")
    clear(office)
    with_storage(office)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.service.clears.follow(of_replicas(LATER, "step 9"))
    office.service.on_event(StorageReady())

    assert generation_of(office) == (LATER, "step 9")
    assert office.cache.managed.sessions[SessionId(1)].state != "active"


def test_replicas_stay_where_the_other_daemon_has_cleared_nothing() -> None:
    """Editions of other namespaces and earlier ones of theirs change nothing."""
    office = Office("a")
    clear(office)
    with_storage(office)
    office.service.clears.follow({b"x" * 32: Edition(LATER), **of_replicas(0)})
    office.service.on_event(StorageReady())

    assert generation_of(office) == (1, "")


def test_clear_under_way_ends_in_a_generation_of_neither_daemon() -> None:
    """It is answered with that generation, which is later than the recorded one."""
    office = busy()
    writer = with_storage(office)
    answers = clear(office)
    office.service.clears.follow(of_replicas(LATER))
    assert not answers
    office.workers["a"].end_all()
    office.service.on_event(StorageReady())
    while writer.under_way:
        writer.end()

    generation, _, _ = cleared(answers)
    assert generation > LATER
    assert generation_of(office) == (generation, "")
