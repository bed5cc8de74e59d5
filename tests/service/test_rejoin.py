"""An engine of before a restart comes back: who may, what it gets, and what becomes of it if it does not."""

from __future__ import annotations

import hashlib
import subprocess
from array import array
from typing import Any

import pytest

from kvcached.core.messages import Ticked
from kvcached.core.restart.restore import RestoredCache
from kvcached.core.slots.states import SlotState
from kvcached.process import peer as peers
from kvcached.process.identity import ProcessIdentity, identity_of
from kvcached.process.peer import PeerProcess, UnseenProcess
from kvcached.service.sessions import FoundSession
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.types import ShardIndex
from tests.service.office import EPOCH, LAYOUT, ONE, SLOTS, TWO, FakePeer, Office, key_chain

TOKEN = b"t" * 32
BEFORE = (EPOCH - 1, 5)


class Afterwards(Office):
    """A service whose pool has outlived a daemon; the engine of before is two processes."""

    def __init__(self, *, is_over: bool = False) -> None:
        super().__init__("a")
        self.scheduler = FakePeer(1, identity=ProcessIdentity(1, 10))
        self.shard = FakePeer(2, identity=ProcessIdentity(2, 10))
        session = RestoredCache(self.cache).pool_session("a")
        digest = hashlib.sha256(TOKEN).digest()
        members: list[tuple[Any, ShardIndex | None]] = [(self.scheduler, None), (self.shard, None)]
        self.service.take_in({}, [FoundSession(session, BEFORE, digest, b"", members, is_over)])

    def rejoin(self, process: FakePeer | None = None, **fields: Any) -> wire.Rejoin:
        given: dict[str, Any] = {
            "session": BEFORE[1],
            "daemon_epoch": BEFORE[0],
            "token": TOKEN,
            "layout": "",
            "namespace": b"n" * 32,
            "fence": 0,
        }
        return wire.Rejoin(
            id=self.next_id(),
            version_min=1,
            version_max=1,
            member=self.service.identify(process or FakePeer(1)).member,
            **{**given, **fields},
        )

    def declare(self, request: str = "r", tokens: int = 12, hit: int = 2) -> wire.Declare:
        return wire.Declare(id=self.next_id(), epoch=EPOCH, request=request, tokens=tokens, hit=hit)


@pytest.fixture
def office() -> Afterwards:
    return Afterwards()


def ranges(*slots: int) -> bytes:
    return array("i", [number for slot in slots for number in (slot, 1)]).tobytes()


def test_engine_comes_back_with_its_lease(office: Afterwards) -> None:
    """It declares a lease and goes on with it; what it did not name is free, and its processes are watched on."""
    welcome = office.expect(wire.Welcome, office.rejoin())
    assert (welcome.epoch, welcome.slots) == (EPOCH, SLOTS)
    declared = office.expect(wire.Declared, office.declare(), key_chain(2), ranges(3, 4), ranges(9))
    over = office.expect(wire.DeclareEnded, wire.DeclareOver(id=office.next_id(), epoch=EPOCH))

    assert over.freed == SLOTS - 3
    assert office.watched == [office.scheduler, office.shard]
    match = wire.Match(id=office.next_id(), epoch=EPOCH, tokens=8, full=True)
    assert office.expect(wire.Matched, match, key_chain(2)).device == 2
    office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=declared.lease))
    assert office.count("a", SlotState.FREE) == SLOTS - 2


def test_retries_have_one_effect(office: Afterwards) -> None:
    """Each of the three messages, sent again under its id, gets the same answer."""
    rejoin, declare = office.rejoin(), office.declare()
    over = wire.DeclareOver(id=office.next_id(), epoch=EPOCH)
    frames = (key_chain(2), ranges(3, 4), ranges(9))
    first = [office.ask(rejoin), office.ask(declare, *frames), office.ask(over)]
    assert [office.ask(declare, *frames), office.ask(over)] == first[1:]
    assert office.error(office.rejoin()) is ErrorCode.POOL_BUSY  # on the connection that has the session


@pytest.mark.parametrize(
    "wrong", [{"token": b"u" * 32}, {"session": 6}, {"daemon_epoch": EPOCH}], ids=["token", "session", "epoch"]
)
def test_only_its_engine_comes_back(office: Afterwards, wrong: dict[str, Any]) -> None:
    """Without the token of the earlier session nobody gets its slots."""
    assert office.error(office.rejoin(FakePeer(9), **wrong)) is ErrorCode.NO_SESSION
    assert office.count("a", SlotState.QUARANTINED) == SLOTS


def test_engine_of_another_layout_is_refused(office: Afterwards) -> None:
    """What it has mapped must be what the pool is."""
    assert office.error(office.rejoin(layout="other")) is ErrorCode.WRONG_LAYOUT
    office.expect(wire.Welcome, office.rejoin(layout=LAYOUT.fingerprint()))


def test_engine_of_a_cleared_namespace_is_refused(office: Afterwards) -> None:
    """What it holds is of another generation: nobody would find it, and it would take room."""
    assert office.error(office.rejoin(namespace=b"o" * 32)) is ErrorCode.STALE_EPOCH
    office.expect(wire.Welcome, office.rejoin())


def test_it_comes_back_once(office: Afterwards) -> None:
    """A second one that knows the token is told that nothing is left."""
    office.expect(wire.Welcome, office.rejoin())
    assert office.error(office.rejoin(FakePeer(3)), peer=TWO) is ErrorCode.NO_SESSION


def declare_all(office: Afterwards, peer: bytes) -> wire.Declared:
    frames = (key_chain(2), ranges(3, 4), ranges(9))
    declared = office.expect(wire.Declared, office.declare(), *frames, peer=peer)
    office.expect(wire.DeclareEnded, wire.DeclareOver(id=office.next_id(), epoch=EPOCH), peer=peer)
    return declared


@pytest.mark.parametrize("how_far", ["rejoin", "declare", "declare_over", "silence"])
def test_answer_that_was_lost_is_asked_for_again(office: Afterwards, how_far: str) -> None:
    """An engine that has not heard of its return returns over another connection; the first one has nothing left."""
    first = office.expect(wire.Welcome, office.rejoin())
    if how_far == "declare":
        office.expect(wire.Declared, office.declare(), key_chain(2), ranges(3, 4), ranges(9))
    elif how_far != "rejoin":
        declare_all(office, ONE)
    if how_far == "silence":
        for office.now_ms in range(0, 3000, 250):
            office.service.on_event(Ticked(office.now_ms))

    again = office.expect(wire.Welcome, office.rejoin(), peer=TWO)
    assert (again.session, again.token != first.token) == (first.session, True)
    assert office.error(office.declare(), key_chain(2), ranges(3, 4), ranges(9)) is ErrorCode.NO_SESSION
    beat = wire.Heartbeat(id=office.next_id(), session=first.session, token=first.token)
    assert office.error(beat) is ErrorCode.NO_SESSION
    declared = declare_all(office, TWO)
    assert (office.count("a", SlotState.LEASED), office.count("a", SlotState.FREE)) == (1, SLOTS - 3)
    office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=declared.lease), peer=TWO)
    assert office.error(office.rejoin()) is ErrorCode.NO_SESSION  # the release shows that it has heard


def test_answers_of_the_first_return_are_not_those_of_the_second(office: Afterwards) -> None:
    """A connection counts its requests anew: what was declared over the one before is no answer to it."""
    rejoin, declare = office.rejoin(), office.declare()
    office.expect(wire.Welcome, rejoin)
    first = office.expect(wire.Declared, declare, key_chain(2), ranges(3, 4), ranges(9))
    office.expect(wire.Welcome, rejoin, peer=TWO)
    assert office.expect(wire.Declared, declare, key_chain(2), ranges(3, 4), ranges(9), peer=TWO).lease > first.lease


def test_only_the_process_that_came_back_comes_back_again(office: Afterwards) -> None:
    """The earlier token alone takes nothing from an engine that is back; its processes are watched, once each."""
    office.expect(wire.Welcome, office.rejoin())
    assert office.error(office.rejoin(office.shard), peer=TWO) is ErrorCode.NO_SESSION
    for number in range(2, 5):
        office.expect(wire.Welcome, office.rejoin(), peer=bytes([number]))
    (group,) = office.service._groups.groups
    assert len([each for each in group.members if each.pid == 1]) == 2  # as it was found, and as it came last


def test_nothing_is_declared_without_a_session(office: Afterwards) -> None:
    """A connection that has not rejoined declares nothing."""
    frames = (key_chain(2), ranges(3, 4), ranges(9))
    assert office.error(office.declare(), *frames) is ErrorCode.NO_SESSION
    assert office.error(wire.DeclareOver(id=office.next_id(), epoch=EPOCH)) is ErrorCode.NO_SESSION


def test_another_engine_waits(office: Afterwards) -> None:
    """While processes of before live, another engine gets the pool neither before nor after they are back."""
    stranger = FakePeer(7)
    assert office.error(office.hello(stranger), peer=TWO) is ErrorCode.POOL_BUSY
    office.expect(wire.Welcome, office.rejoin())
    assert office.error(office.hello(stranger), peer=TWO) is ErrorCode.POOL_BUSY


def test_pool_is_free_when_the_engine_of_before_is_dead(office: Afterwards) -> None:
    """With the last of its processes all that was set aside is free, and another engine gets it."""
    for process, left in ((office.scheduler, SLOTS), (office.shard, 0)):
        process.dead = True
        office.service.peer_lost(process)
        assert office.count("a", SlotState.QUARANTINED) == left
    office.enter(FakePeer(7), peer=TWO)


def test_death_of_a_shard_ends_a_session_that_came_back(office: Afterwards) -> None:
    """The processes of before are members of the session: one that dies ends it."""
    office.expect(wire.Welcome, office.rejoin())
    office.expect(wire.Declared, office.declare(), key_chain(2), ranges(3, 4), ranges(9))
    office.shard.dead = True
    office.service.peer_lost(office.shard)

    assert office.error(office.declare("s"), key_chain(2), ranges(3, 4), b"") is ErrorCode.SESSION_EXPIRED
    assert office.count("a", SlotState.QUARANTINED) == SLOTS - 2


def test_engine_of_one_process_may_say_hello_instead(office: Afterwards) -> None:
    """Its only process gives everything up by a plain hello: it gets an empty session, and host copies are hits."""
    office.shard.dead = True
    office.service.peer_lost(office.shard)
    office.enter(FakePeer(1), peer=ONE)
    assert office.count("a", SlotState.FREE) == SLOTS


@pytest.mark.parametrize("when", ["before the takeover", "after the takeover"])
def test_session_that_has_lost_a_member_does_not_go_on(when: str) -> None:
    """A shard process that dies before the scheduler is back ends the session: the shard's work is never done."""
    office = Afterwards(is_over=when == "before the takeover")
    if when == "after the takeover":
        office.shard.dead = True
        office.service.peer_lost(office.shard)

    assert office.error(office.rejoin()) is ErrorCode.NO_SESSION
    assert office.count("a", SlotState.QUARANTINED) == SLOTS


def test_engine_that_dies_while_it_is_found_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its identity can no longer be read, but its death is told: its slots are free. Nobody can watch an unseen one."""
    process = subprocess.Popen(["/bin/sleep", "60"])

    def identity_after_its_death(pid: int) -> ProcessIdentity | None:
        process.kill()
        process.wait()
        return identity_of(pid)

    written = identity_of(process.pid)
    assert written is not None
    monkeypatch.setattr(peers, "identity_of", identity_after_its_death)
    found, office, sessions = PeerProcess.found(written), Office("a", "b"), []
    for replica, peer in (("a", found), ("b", UnseenProcess())):
        members: list[tuple[Any, ShardIndex | None]] = [(peer, None)]
        session = RestoredCache(office.cache).pool_session(replica)
        sessions.append(FoundSession(session, BEFORE, b"d" * 32, b"", members))
    office.service.take_in({}, sessions)

    assert found is not None
    assert (found.identity, found.is_dead()) == (None, True)
    assert [id(peer) for peer in office.watched] == [id(found)]
    office.service.peer_lost(found)
    assert (office.count("a", SlotState.FREE), office.count("b", SlotState.FREE)) == (SLOTS, 0)
    found.close()
