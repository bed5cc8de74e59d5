"""Daemons that share storage: each has the recorded generations, and what one has cleared, no other one serves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest

from kvcached.core.generations import RANDOM_BITS, Edition
from kvcached.core.messages import Ticked
from kvcached.recovery.generations import Record
from kvcached.shared_record import FOLLOW_INTERVAL_S
from kvcached.storage.backend import Usage
from kvcached.storage.link_state import LinkState
from kvcached_client.protocol import engine as wire
from tests.service.fleet import FakeShelf, Node, recorded
from tests.service.office import root_of
from tests.virtual_time import VirtualTimeLoop

#: Each daemon begins with numbers of its own, later ones with larger ones. Where two end with nearly the same random
#: bits, clears at the same time may get one number (docs/decisions/0073): not here.
LIFE = 1 << 30


class Fleet:
    """Daemons in front of one service."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.loop = loop
        self.shelf = FakeShelf()
        self.nodes: list[Node] = []
        self._lives = 0

    def node(self, *, is_open: bool = True, editions: Mapping[bytes, Edition] | None = None) -> Node:
        """One more daemon; `editions` are those of its ledger."""
        self._lives += 1
        first = (self._lives * LIFE << RANDOM_BITS) + 100 * self._lives

        async def make() -> Node:
            return Node(self.shelf, self.loop, first, editions)

        node = self.loop.run_until_complete(make())
        self.nodes.append(node)
        if is_open:
            node.open()
            self.loop.pass_s(0.1)
        return node

    def pair(self) -> tuple[Node, Node]:
        """Two daemons, each with an engine, in the same generation."""
        pair = self.node(), self.node()
        for node in pair:
            node.engine()
            self.settle()
        assert len(self.generations()) == 1
        return pair

    def settle(self) -> None:
        """Every daemon has followed, and what that changed is recorded and followed."""
        for _ in range(6):
            self.loop.pass_s(FOLLOW_INTERVAL_S)
            self.tick()

    def tick(self) -> None:
        """Clears of replicas end with an event. No time passes for their sessions."""
        for node in self.nodes:
            node.office.service.on_event(Ticked(1))

    def generations(self) -> set[int]:
        return {node.generation() for node in self.nodes}

    def replicas(self) -> set[int]:
        return {node.replica() for node in self.nodes}

    def recorded(self) -> int:
        """The generation of the engines' namespace in the record."""
        return recorded(self.shelf).by_root()[self.nodes[0].engine().namespace].generation

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with closing(VirtualTimeLoop()) as loop, closing(Fleet(loop)) as fleet:
        yield fleet


def test_second_daemon_has_the_generation_of_the_first(fleet: Fleet) -> None:
    """An engine on another machine is of the same generation, so it finds what the first has stored."""
    first = fleet.node()
    first.engine()
    fleet.loop.pass_s(0.1)
    second = fleet.node()

    assert second.generation() == first.generation() == fleet.recorded()


def test_clear_is_answered_when_it_is_recorded(fleet: Fleet) -> None:
    """Not before the service has it, and then whatever happens to the daemon."""
    node = fleet.node()
    node.engine()
    fleet.settle()
    before = node.generation()
    answers = node.clear()
    assert not answers
    fleet.loop.pass_s(0.1)

    (answer,) = answers
    assert isinstance(answer, wire.NamespaceCleared), answer
    assert fleet.recorded() == answer.generation > before


def test_clear_reaches_the_others(fleet: Fleet) -> None:
    """Within the interval at which they look, and the block in their memory is not served any more."""
    first, second = fleet.pair()
    second.office.store_blocks(second.engine(), 3)
    first.clear()
    fleet.loop.pass_s(FOLLOW_INTERVAL_S + 0.1)

    assert (second.generation(), second.office.hit(3)) == (first.generation(), 0)


def test_clears_of_two_at_once_are_both_recorded(fleet: Fleet) -> None:
    """The one that finds another record begins a generation behind both, and the other one follows."""
    first, second = fleet.pair()
    answers = first.clear() + second.clear()
    fleet.settle()
    cleared = {first.generation(), second.generation()}

    assert cleared == {fleet.recorded()}
    assert fleet.recorded() > LIFE
    assert all(isinstance(each, wire.NamespaceCleared) for each in answers)


def test_daemon_that_starts_before_its_storage_clears_nobody(fleet: Fleet) -> None:
    """A generation that began because none was known gives way, though its number is the larger one."""
    first = fleet.node()
    first.office.store_blocks(first.engine(), 3)
    fleet.settle()
    generation = first.generation()
    late = fleet.node(is_open=False)
    assert late.generation() > generation
    late.open()
    fleet.settle()

    assert (late.generation(), first.generation(), first.office.hit(3)) == (generation, generation, 3)


def test_clear_before_storage_is_open_is_not_lost(fleet: Fleet) -> None:
    """It is an error, because it is not recorded; what the others have stored is gone for all when it is."""
    first = fleet.node()
    first.office.store_blocks(first.engine(), 3)
    fleet.settle()
    late = fleet.node(is_open=False)
    (answer,) = late.clear()
    assert isinstance(answer, wire.ErrorReply)
    cleared = late.generation()
    late.open()
    fleet.settle()

    assert first.generation() == late.generation() >= cleared
    assert first.office.hit(3) == 0


def test_clear_whose_reply_is_lost_is_answered_once_it_is_found_recorded(fleet: Fleet) -> None:
    """The service has written the record, and the connection broke: the next attempt finds it there."""
    node = fleet.node()
    node.engine()
    fleet.settle()
    fleet.shelf.fails_after = 1
    failed = node.clear()
    fleet.loop.pass_s(0.1)
    assert [type(each) for each in failed] == [wire.ErrorReply]
    fleet.settle()
    assert node.recorder.holds(node.recorder.version)
    answers = node.clear()
    fleet.loop.pass_s(0.1)

    assert [type(each) for each in answers] == [wire.NamespaceCleared]
    assert fleet.recorded() == node.generation()


def test_clear_while_the_service_is_away_is_recorded_when_it_is_back(fleet: Fleet) -> None:
    """It was an error, and holds on this machine at once; nobody has to repeat it for the others."""
    first, second = fleet.pair()
    second.office.store_blocks(second.engine(), 3)
    fleet.shelf.is_away = True
    answers = first.clear()
    fleet.loop.pass_s(0.1)
    assert [type(each) for each in answers] == [wire.ErrorReply]
    fleet.shelf.is_away = False
    fleet.settle()

    assert (second.generation(), second.office.hit(3)) == (first.generation(), 0)


def test_lost_record_brings_nothing_back(fleet: Fleet) -> None:
    """The record is gone and blocks may be there: every daemon goes to a generation that never was, the same one."""
    fleet.pair()
    before = fleet.generations()
    fleet.shelf.record = None
    fleet.settle()

    assert len(fleet.generations()) == 1
    assert not fleet.generations() & before
    assert fleet.recorded() in fleet.generations()


def test_record_of_an_emptied_service_goes_on(fleet: Fleet) -> None:
    """A service that lost everything has no block of any generation: the record is written anew, and memory stays."""
    node = fleet.node()
    node.office.store_blocks(node.engine(), 3)
    fleet.settle()
    generation = node.generation()
    fleet.shelf.record, node.link.usage = None, Usage(0, -1, -1)
    fleet.settle()

    assert (fleet.recorded(), node.office.hit(3)) == (generation, 3)


def test_what_another_daemon_has_to_forget_stays_in_the_record(fleet: Fleet) -> None:
    """Each writes the whole record: a daemon that dies leaves what it had to forget to those that open it later."""
    first, second = fleet.pair()
    prefix = b"p" * 16
    first.link.due[prefix] = None
    first.clear()
    fleet.settle()
    first.lose()
    second.clear()
    fleet.settle()
    assert prefix.hex() in recorded(fleet.shelf).forgets
    third = fleet.node()

    assert (prefix in second.link.due, prefix in third.link.due) == (False, True)


def test_what_was_forgotten_leaves_the_record(fleet: Fleet) -> None:
    """The daemon that had to forget it writes the record without it, and no other one brings it back."""
    first, second = fleet.pair()
    first.link.due[b"p" * 16] = None
    first.clear()
    fleet.settle()
    first.link.due.clear()
    first.recorder.keep()
    fleet.settle()
    second.clear()
    fleet.settle()

    assert b"p".hex() * 16 not in recorded(fleet.shelf).forgets


def test_nothing_is_written_where_nothing_has_changed(fleet: Fleet) -> None:
    """Daemons that start, look and end leave the record as it is."""
    fleet.node().engine()
    fleet.settle()
    written = len(fleet.shelf.history)
    for _ in range(3):
        fleet.node()
    fleet.settle()

    assert len(fleet.shelf.history) == written


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"not a record", "JSON"),
        (b'{"format": 2}', "format"),
        (b'{"format": 1, "layout": "canonical"}', r"same \[storage\] layout"),
    ],
    ids=["damaged", "of a later daemon", "of another layout"],
)
def test_record_that_cannot_be_followed_is_left_alone(fleet: Fleet, content: bytes, why: str) -> None:
    """Storage is not used, with the reason, and the record stays for those that understand it."""
    fleet.shelf.record = before = fleet.shelf.record_of(content)
    node = fleet.node()
    node.engine()
    fleet.settle()

    assert node.link.state is not LinkState.READY
    assert fleet.shelf.record == before
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(node.link.refusals[0])


@pytest.mark.parametrize("passes", [False, True])
def test_storage_is_begun_anew_only_by_a_deletion(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, *, passes: bool
) -> None:
    """Where the record was put right meanwhile, storage works with its blocks: the answer is not that they went."""
    fleet.shelf.record = fleet.shelf.record_of(b"not a record")
    node = fleet.node()
    if passes:
        fleet.shelf.record = None

    async def started(_: float) -> bool:
        await asyncio.sleep(1)
        return node.link.state is LinkState.READY

    monkeypatch.setattr(node.link, "started", started, raising=False)
    monkeypatch.setattr(node.link, "attach", node.open, raising=False)
    first, second = node.shared.begin_anew(), node.shared.begin_anew()
    assert first is not None
    assert second is not None

    async def both() -> list[bool]:
        return list(await asyncio.gather(first, second))

    assert fleet.loop.run_until_complete(both()) == [not passes] * 2
    assert node.link.state is LinkState.READY


@pytest.mark.parametrize("writes", [False, True])
def test_record_that_becomes_another_keys_ends_storage(fleet: Fleet, *, writes: bool) -> None:
    """A daemon cannot follow the clears in it, so it uses storage no more, whether it only looks or has to write."""
    first, second = fleet.pair()
    second.office.store_blocks(second.engine(), 3)
    fleet.loop.pass_s(1)  # the second one does not look at once
    first.clear()
    fleet.loop.pass_s(0.1)
    fleet.shelf.is_foreign = True
    answers = second.clear() if writes else []
    fleet.loop.pass_s(1 if writes else FOLLOW_INTERVAL_S + 1)
    fleet.tick()

    assert second.link.state is not LinkState.READY
    assert "cannot be followed: it is not encrypted with this key" in second.link.refusals[0]
    assert not any(isinstance(answer, wire.NamespaceCleared) for answer in answers)


def test_record_of_another_key_is_not_taken_for_none(fleet: Fleet) -> None:
    """A daemon that knows no record, and has none to write, sees that there is one that it cannot follow."""
    node = fleet.node()
    fleet.settle()
    fleet.shelf.record = None
    fleet.shelf.is_away = True  # so that it does not write another one
    fleet.settle()
    fleet.shelf.is_away, fleet.shelf.is_foreign = False, True
    node.shared._version = b""
    fleet.loop.pass_s(2 * FOLLOW_INTERVAL_S)

    assert node.link.state is not LinkState.READY
    assert "not encrypted with this key" in node.link.refusals[0]


def test_service_that_is_away_is_followed_when_it_is_back(fleet: Fleet) -> None:
    """What others have cleared meanwhile is cleared at the first look."""
    first, second = fleet.pair()
    second.office.store_blocks(second.engine(), 3)
    fleet.shelf.is_away = True
    fleet.settle()
    assert second.office.hit(3) == 3
    assert second.shared.age_ms() > 4 * FOLLOW_INTERVAL_S * 1000
    fleet.shelf.is_away = False
    first.clear()
    fleet.settle()

    assert second.office.hit(3) == 0
    assert len(fleet.generations()) == 1
    assert 0 <= second.shared.age_ms() <= FOLLOW_INTERVAL_S * 1000


@pytest.mark.parametrize("misses", [False, True], ids=["a clear that it knew", "a clear that it missed"])
def test_restart_with_a_ledger_clears_nobody(fleet: Fleet, *, misses: bool) -> None:
    """Its generation was recorded before: it goes on in it, or in the one that another daemon has recorded since."""
    first, second = fleet.pair()
    if misses:
        second.lose()
    first.clear()
    fleet.settle()
    editions = dict(second.office.cache.generations.editions)
    fleet.nodes.remove(second)
    second.close()
    first.office.store_blocks(first.engine(), 3)
    generation = first.generation()
    third = fleet.node(editions={second.engine().namespace: editions[second.engine().namespace]})
    fleet.settle()

    assert (third.generation(), first.generation(), first.office.hit(3)) == (generation, generation, 3)


def test_device_memory_of_a_forgotten_namespace_is_told_of_a_clear(fleet: Fleet) -> None:
    """What is kept for the next engine is of before another machine's clear, though nothing else here has its name."""
    first, second = fleet.pair()
    root = first.engine().namespace
    told: list[bool] = []
    second.office.service.clears._cleared = lambda is_cleared: told.append(is_cleared(root))
    second.office.cache.offload.namespaces.by_root.pop(root)
    first.clear()
    fleet.settle()

    assert told == [True]


def test_editions_that_nobody_has_leave_every_record(fleet: Fleet) -> None:
    """Each clear of a replica leaves the root of before: daemons without that replica do not bring it back."""
    first, second = fleet.pair()
    for node in (first, second) * 6:
        node.clear("a")
        fleet.settle()

    assert len(recorded(fleet.shelf).editions) <= 3


def test_prefix_that_one_daemon_has_forgotten_is_not_put_back(fleet: Fleet) -> None:
    """Another one that has still to forget it does not write it again: the two would write for ever."""
    first, second = fleet.pair()
    prefix = b"p" * 16
    for node in (first, second):
        node.link.due[prefix] = None
    first.clear()
    fleet.settle()
    assert prefix.hex() in recorded(fleet.shelf).forgets
    del first.link.due[prefix]
    first.recorder.keep()
    fleet.settle()
    written = len(fleet.shelf.history)
    fleet.settle()

    assert prefix.hex() not in recorded(fleet.shelf).forgets
    assert len(fleet.shelf.history) == written


def test_backend_that_turns_out_not_to_be_shared_records_nothing(fleet: Fleet) -> None:
    """Until it is open, a clear is an error; then it is answered at once, for there is no record."""
    node = fleet.node(is_open=False)
    node.link.is_shared = False
    (before,) = node.clear()
    node.open()
    (after,) = node.clear()

    assert (type(before), type(after)) == (wire.ErrorReply, wire.NamespaceCleared)
    assert fleet.shelf.record is None


class Truth:
    """What must never be served again: generations that a recorded clear has ended."""

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self.waiting: list[tuple[list[wire.Header], set[int]]] = []

    def cleared(self, answers: list[wire.Header], alive: set[int]) -> None:
        """A clear has begun, of all generations that were there."""
        self.waiting.append((answers, alive))

    def look(self) -> None:
        """Clears that were answered without an error have ended what was there when they began."""
        for answers, alive in self.waiting:
            for answer in answers:
                if isinstance(answer, wire.NamespaceCleared):
                    self.dead |= alive - {answer.generation}
        self.waiting = [each for each in self.waiting if not each[0]]


class Turmoil:
    """What happens to a fleet, by a seed."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.chance = fleet, random.Random(seed)
        self.truth, self.of_replica = Truth(), Truth()
        for _ in range(3):
            self._start()

    def step(self) -> None:
        """Something happens to a daemon or to the service, and some time passes."""
        node, shelf = self.chance.choice(self.fleet.nodes), self.fleet.shelf
        match self.chance.randrange(9):
            case 0 | 1:
                self.truth.cleared(node.clear(), self.fleet.generations() | _recorded(self.fleet, of_replica=False))
            case 2:
                shelf.is_away = self.chance.random() < 0.5
            case 3:
                shelf.fails_after = 1
            case 4 if self.chance.random() < 0.3:
                shelf.record = None
            case 5:
                node.lose()
                if self.chance.random() < 0.7:
                    node.open()
            case 6:
                self._restart(node)
            case 7:
                self.of_replica.cleared(node.clear("a"), self.fleet.replicas() | _recorded(self.fleet, of_replica=True))
        self.fleet.loop.pass_s(self.chance.choice([0.0, 0.005, 0.02, 1.0, FOLLOW_INTERVAL_S]))
        self.fleet.tick()
        self._look()

    def end(self) -> None:
        """All is well again, for long enough."""
        self.fleet.shelf.is_away, self.fleet.shelf.fails_after = False, 0
        for node in self.fleet.nodes:
            if node.link.state is not LinkState.READY:
                node.lose()
                node.open()
        self.fleet.settle()
        self._look()

    def _look(self) -> None:
        self.truth.look()
        self.of_replica.look()

    def _start(self, editions: Mapping[bytes, Edition] | None = None) -> None:
        self.fleet.node(is_open=self.chance.random() < 0.7, editions=editions).engine()

    def _restart(self, node: Node) -> None:
        """With what the ledger of the daemon before says of the engines' namespace, or without it."""
        root, known = node.engine().namespace, node.office.cache.generations.editions
        editions = {root: known[root]} if self.chance.random() < 0.5 else None
        node.lose()
        self.fleet.loop.pass_s(0.1)
        self.fleet.nodes.remove(node)
        node.close()
        self._start(editions)


@pytest.mark.parametrize("seed", range(60))
def test_daemons_agree_and_nothing_cleared_comes_back(fleet: Fleet, seed: int) -> None:
    """Whatever is cleared, restarted, away or lost in whatever order: all end in one generation, and no cleared one."""
    turmoil = Turmoil(fleet, seed)
    for _ in range(40):
        turmoil.step()
    turmoil.end()

    (generation,), (of_replica,) = fleet.generations(), fleet.replicas()
    assert generation == fleet.recorded()
    assert generation not in turmoil.truth.dead
    assert of_replica not in turmoil.of_replica.dead


def _recorded(fleet: Fleet, *, of_replica: bool) -> set[int]:
    """The generations in the record, of the replica or of the engines."""
    record = Record() if fleet.shelf.record is None else recorded(fleet.shelf)
    return {
        edition.generation for root, edition in record.by_root().items() if (root == root_of(*edition)) == of_replica
    }


def test_shelf_refuses_what_was_overtaken() -> None:
    """The stand-in for a service compares: otherwise these tests prove nothing."""
    shelf = FakeShelf()
    first = shelf.write_record(b"1", b"", timeout_s=1)

    assert first
    assert shelf.write_record(b"2", b"", timeout_s=1) is None
    assert shelf.write_record(b"2", first, timeout_s=1)
