"""People clear the namespace of engines in offload mode, and cannot set its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcached.core.slots.states import SlotState
from kvcached.recovery.engine_pools import EnginePools
from kvcached.recovery.generations import EditionRecord
from kvcached.recovery.state_file import HostPoolRecord, LedgerFile, boot_id, read_ledger
from kvcached.service.pending import Answer
from kvcached.service.state_writer import StatePlace
from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.types import WritePolicy
from tests.service.office import EPOCH, ONE, SLAB_BYTES, TWO, FakePeer, key_chain
from tests.service.offload_office import BLOCK_BYTES, OTHER_INSTANCE, OffloadOffice
from tests.service.test_recorder import with_storage

PEOPLE = b"people"


@pytest.fixture
def office() -> OffloadOffice:
    return OffloadOffice()


def clear(office: OffloadOffice, target: str, *, number: int = 0) -> wire.NamespaceCleared:
    request = wire.ClearNamespace(id=number or office.next_id(), target=target)
    (answer,) = office.ask_late(request, peer=PEOPLE)
    assert isinstance(answer.header, wire.NamespaceCleared), answer.header
    return answer.header


def refused(answers: list[Answer]) -> wire.ErrorReply:
    """The one answer, which is an error."""
    (answer,) = answers
    assert isinstance(answer.header, wire.ErrorReply), answer.header
    return answer.header


def test_namespace_that_people_clear_is_cold_for_all_of_its_engines(office: OffloadOffice) -> None:
    """Their sessions live on: heartbeats tell the generation, a hit of before is gone, and stores work again."""
    one = office.attach(FakePeer(1))
    two = office.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE)
    office.store_blocks(one, 3)
    held = office.acquire_blocks(3, peer=TWO)
    done = clear(office, "tiny")
    assert (done.replicas, done.label, done.namespace) == ((), "tiny", one.namespace)
    assert (done.generation, done.blocks, done.weights_version) == (one.generation + 1, 3, "")

    beat = wire.Heartbeat(id=900, session=two.session, token=two.token)
    assert office.expect(wire.Alive, beat, peer=b"any").generation == done.generation
    assert office.error(office.prepare_load(held.lease, 1), peer=TWO) is ErrorCode.HIT_GONE
    assert office.hit(3, peer=TWO) == 0
    office.store_blocks(two, 3, peer=TWO)
    assert office.hit(3) == 3
    assert office.expect(wire.CheckReport, wire.Check(id=office.next_id())).violations == ()


def test_store_under_way_does_not_outlive_the_clear(office: OffloadOffice) -> None:
    """The clear is answered at once; what the copy completes afterwards is found by nobody, and goes with its lease."""
    process = FakePeer(1)
    welcome = office.attach(process)
    plan = office.storing(3)
    assert clear(office, "tiny").blocks == 0
    for shard in range(2):
        office.expect(wire.Settled, office.transfer_done(welcome, plan.transfer, shard))

    assert office.hit(3) == 0
    office.die(process)
    assert office.host_states() == {}


def test_other_namespaces_stay(office: OffloadOffice) -> None:
    """Neither a replica's blocks, nor those of another model, are forgotten with the namespace that is cleared."""
    first = office.attach(FakePeer(1))
    other = office.attach(FakePeer(2), peer=TWO, label="other", keyspace=b"o" * 32, instance=OTHER_INSTANCE)
    office.store_blocks(first, 2)
    office.store_blocks(other, 3, peer=TWO)
    office.enter(FakePeer(3), peer=b"managed")
    office.store(key_chain(2), peer=b"managed")
    done = clear(office, other.namespace.hex()[:8])

    assert (done.label, done.blocks) == ("other", 3)
    assert (office.hit(2), office.hit(3, peer=TWO)) == (2, 0)
    assert office.count("a", SlotState.CACHED) == 2


def test_namespace_of_replicas_is_cleared_by_its_digits(office: OffloadOffice) -> None:
    """A replica's namespace is named as everywhere else: by a replica, or by its first hex digits."""
    before = office.cache.tree_of("a").namespace
    done = clear(office, before.hex()[:12])

    assert (done.replicas, done.label) == (("a",), "")
    assert office.cache.tree_of("a").namespace == done.namespace != before


def test_namespace_without_a_session_is_cleared(office: OffloadOffice) -> None:
    """What engines that are gone have stored is forgotten, too, and its write policy stays."""
    process = FakePeer(1)
    welcome = office.attach(process)
    office.store_blocks(welcome, 3)
    request = wire.SetPolicy(id=office.next_id(), target="tiny", policy=WritePolicy.WRITE_BACK)
    office.expect(wire.PolicySet, request, peer=PEOPLE)
    office.die(process)
    done = clear(office, "tiny")

    assert done.blocks == 3
    again = office.attach(FakePeer(2))
    assert (again.generation, office.hit(3)) == (done.generation, 0)
    (space,) = office.cache.offload.namespaces.by_root.values()
    assert space.tree.write_policy is WritePolicy.WRITE_BACK


def test_retry_clears_once(office: OffloadOffice) -> None:
    """The same id again on one connection gets the same answer, whatever was stored since; another id clears again."""
    welcome = office.attach(FakePeer(1))
    office.store_blocks(welcome, 3)
    first = clear(office, "tiny", number=70)
    office.store_blocks(welcome, 2)

    assert clear(office, "tiny", number=70) == first
    assert office.hit(2) == 2
    assert clear(office, "tiny", number=71).blocks == 2


@pytest.mark.parametrize("target", ["nothing", "abc"])
def test_unknown_target_is_refused_with_what_there_is(office: OffloadOffice, target: str) -> None:
    """Who names no namespace is told which there are, by `clear` and by `set_weights`; nothing is cleared."""
    welcome = office.attach(FakePeer(1))
    office.store_blocks(welcome, 3)
    for request in (
        wire.ClearNamespace(id=office.next_id(), target=target),
        wire.SetWeights(id=office.next_id(), target=target, version="step 1"),
    ):
        error = refused(office.ask_late(request, peer=PEOPLE))
        assert error.code == ErrorCode.UNKNOWN_REPLICA
        assert "(tiny)" in error.message
    assert office.hit(3) == 3


def test_ambiguous_target_is_refused(office: OffloadOffice) -> None:
    """A label that two namespaces have means neither."""
    office.attach(FakePeer(1))
    office.attach(FakePeer(2), peer=TWO, keyspace=b"o" * 32, instance=OTHER_INSTANCE)

    error = refused(office.ask_late(wire.ClearNamespace(id=office.next_id(), target="tiny"), peer=PEOPLE))
    assert (error.code, error.message[:12]) == (ErrorCode.UNKNOWN_REPLICA, "2 namespaces")


def test_weights_of_engines_are_not_set_but_cleared(office: OffloadOffice) -> None:
    """Such engines name their weights themselves: the refusal says so and names `clear`, and nothing is forgotten."""
    welcome = office.attach(FakePeer(1))
    office.store_blocks(welcome, 3)
    request = wire.SetWeights(id=office.next_id(), target="tiny", version="step 1")
    error = refused(office.ask_late(request, peer=PEOPLE))

    assert error.code == ErrorCode.BAD_VALUE
    assert "'tiny'" in error.message
    assert "kvcached clear" in error.fix
    assert (office.hit(3), office.cache.generations.editions[welcome.namespace].generation) == (3, welcome.generation)


def test_clear_is_answered_when_the_record_is_written(office: OffloadOffice) -> None:
    """As an engine's own: the answer waits for the device, and is an error where that fails."""
    welcome = office.attach(FakePeer(1))
    writer = with_storage(office)
    answers = office.ask_late(wire.ClearNamespace(id=7, target="tiny"), peer=PEOPLE)
    assert answers == []
    writer.end()
    (done,) = (answer.header for answer in answers)
    assert isinstance(done, wire.NamespaceCleared)
    assert writer.records[-1].editions == (
        EditionRecord(namespace=welcome.namespace.hex(), generation=done.generation),
    )

    answers = office.ask_late(wire.ClearNamespace(id=8, target="tiny"), peer=PEOPLE)
    writer.end("no space left")
    assert refused(answers).code == ErrorCode.INTERNAL


def test_new_generation_is_in_the_ledger_before_it_is_told(tmp_path: Path) -> None:
    """A daemon that is killed right after the answer has a successor that knows it."""
    path = tmp_path / "ledger.json"
    host = HostPoolRecord(device=1, inode=2, slabs=4, slab_bytes=SLAB_BYTES, allocated={})
    office = OffloadOffice(state_place=StatePlace(LedgerFile(path), boot_id(), host))
    welcome = office.attach(FakePeer(1))
    office.store_blocks(welcome, 3)
    written: list[int] = []

    def respond(_: Answer) -> None:
        ledger = read_ledger(path)
        assert ledger is not None
        written.extend(each.generation for each in ledger.namespaces)

    office.service.submit(PEOPLE, wire.ClearNamespace(id=7, target="tiny"), [], respond)
    assert written == [welcome.generation + 1]


def test_lease_of_before_stores_nothing(office: OffloadOffice) -> None:
    """A request that goes on after the clear stores no block behind a prefix that is gone."""
    welcome = office.attach(FakePeer(1))
    held = office.acquire_blocks(3)
    clear(office, "tiny")
    plan = office.expect(wire.StorePrepared, office.prepare_store(held.lease), key_chain(3), peer=ONE)

    assert (plan.transfer, plan.depth) == (0, 3)
    release = wire.Release(id=office.next_id(), epoch=EPOCH, lease=held.lease)
    office.expect(wire.Released, release)
    office.store_blocks(welcome, 3)
    assert office.hit(3) == 3


@pytest.mark.parametrize("by_people", [True, False])
def test_clear_of_one_tells_of_all_that_share_its_blocks_in_storage(
    monkeypatch: pytest.MonkeyPatch, *, by_people: bool
) -> None:
    """Memory of the daemon that engines of a namespace left is dropped for each namespace that is cleared."""
    told: list[Callable[[bytes], bool]] = []
    monkeypatch.setattr(EnginePools, "cleared", lambda _, is_cleared: told.append(is_cleared))
    office = OffloadOffice(has_canonical_storage=True)
    canonical = CanonicalLayout(fingerprint=bytes(16), parts=2, runs=2)
    one = office.attach(FakePeer(1), canonical=canonical)
    two = office.attach(
        FakePeer(2),
        peer=TWO,
        instance=OTHER_INSTANCE,
        shards=1,
        block_bytes=2 * BLOCK_BYTES,
        label="one shard",
        canonical=canonical,
    )

    if by_people:
        clear(office, "tiny")
    else:
        office.expect(wire.Cleared, wire.Clear(id=office.next_id(), epoch=EPOCH))
    (is_cleared,) = told
    assert is_cleared(one.namespace)
    assert is_cleared(two.namespace)
    beat = wire.Heartbeat(id=900, session=two.session, token=two.token)
    assert office.expect(wire.Alive, beat, peer=b"any").generation > two.generation


@pytest.mark.parametrize("canonical", [CanonicalLayout(fingerprint=bytes(16), parts=2, runs=2), None])
def test_clear_of_namespaces_that_share_blocks_tells_of_forgotten_ones(
    monkeypatch: pytest.MonkeyPatch, canonical: CanonicalLayout | None
) -> None:
    """Memory that engines of a forgotten namespace left is dropped where it may be of the group that is cleared."""
    told: list[Callable[[bytes], bool]] = []
    monkeypatch.setattr(EnginePools, "cleared", lambda _, is_cleared: told.append(is_cleared))
    office, process = OffloadOffice(has_canonical_storage=True), FakePeer(2)
    office.attach(FakePeer(1), canonical=canonical)
    shape = {"shards": 1, "block_bytes": 2 * BLOCK_BYTES, "label": "one shard", "canonical": canonical}
    two = office.attach(process, peer=TWO, instance=OTHER_INSTANCE, **shape)
    office.die(process)
    other = office.attach(FakePeer(3), peer=b"three", instance=b"3" * 16, label="other", keyspace=b"o" * 32)
    assert two.namespace not in office.cache.offload.namespaces.by_root

    clear(office, "tiny")
    (is_cleared,) = told
    assert (is_cleared(two.namespace), is_cleared(other.namespace)) == (canonical is not None, False)
