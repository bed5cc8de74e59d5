"""The verb set_policy: which namespace is meant, and that what it set is written down before it is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached.config.replica import ReplicaConfig
from kvcached.recovery.generations import Generation, recorded_policy, write_policy_of
from kvcached.recovery.state_file import HostPoolRecord, Ledger, LedgerFile, ReplicaRecord, boot_id, read_ledger
from kvcached.service.state_writer import StatePlace
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.types import WritePolicy
from tests.service.office import SLAB_BYTES, TWO, FakePeer, Office, key_chain
from tests.service.offload_office import OffloadOffice
from tests.service.test_generations import configured

NEVER, THROUGH, BACK = WritePolicy.NEVER, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK


def set_policy(office: Office, target: str, policy: WritePolicy) -> wire.PolicySet:
    return office.expect(wire.PolicySet, wire.SetPolicy(id=office.next_id(), target=target, policy=policy), peer=TWO)


def test_policy_is_set_for_all_replicas_of_a_namespace() -> None:
    """The answer names who shares it and what it was before, and a commit from then on follows it."""
    office = Office("a", "b", host_slabs=2)
    done = set_policy(office, "b", NEVER)
    assert (done.replicas, done.policy, done.before) == (("a", "b"), NEVER, THROUGH)
    assert set_policy(office, "a", NEVER).before == NEVER

    office.enter(FakePeer(1))
    office.store(key_chain(3))
    assert office.workers["a"].transfers == {}


def test_namespace_of_offload_engines_is_named_by_its_digits_or_its_label() -> None:
    """Hex digits as `stats` prints them, and the model's name, mean the same; each namespace has its own policy."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1))
    done = set_policy(office, welcome.namespace.hex()[:16], NEVER)
    assert (done.label, done.replicas, done.before) == ("tiny", (), THROUGH)
    assert set_policy(office, "tiny", BACK).before == NEVER

    assert office.cache.tree_of("a").write_policy is THROUGH


@pytest.mark.parametrize("target", ["nothing", "abc", "ff" * 40])
def test_unknown_target_is_refused_with_what_there_is(target: str) -> None:
    """Who names no namespace is told which there are."""
    office = OffloadOffice()
    office.attach(FakePeer(1))
    request = wire.SetPolicy(id=office.next_id(), target=target, policy=NEVER)
    error = office.expect(wire.ErrorReply, request, peer=TWO)

    assert error.code == ErrorCode.UNKNOWN_REPLICA
    assert "(tiny)" in error.message


def test_ambiguous_target_is_refused() -> None:
    """A name that two namespaces have means neither."""
    office = OffloadOffice()
    office.attach(FakePeer(1))
    office.attach(FakePeer(2), peer=TWO, keyspace=b"other" + bytes(27), instance=b"o" * 16)

    error = office.expect(wire.ErrorReply, wire.SetPolicy(id=office.next_id(), target="tiny", policy=NEVER), peer=TWO)
    assert error.message.startswith("2 namespaces")


def test_policy_is_durable_before_its_answer(tmp_path: Path) -> None:
    """When a change is answered the ledger has it, of replicas and of engines in offload mode."""
    path = tmp_path / "ledger.json"
    record = HostPoolRecord(device=1, inode=2, slabs=4, slab_bytes=SLAB_BYTES, allocated={})
    office = OffloadOffice(state_place=StatePlace(LedgerFile(path), boot_id(), record))
    office.attach(FakePeer(1))
    set_policy(office, "a", NEVER)
    set_policy(office, "tiny", BACK)
    ledger = read_ledger(path)

    assert ledger is not None
    assert [(each.write_policy, each.configured_policy) for each in ledger.replicas] == [(NEVER, THROUGH)]
    assert [(each.write_policy, each.configured_policy) for each in ledger.namespaces] == [(BACK, THROUGH)]


def recorded(namespace: bytes, policy: WritePolicy, configured_then: WritePolicy) -> Ledger:
    record = ReplicaRecord(
        name="a",
        fingerprint="00",
        namespace=namespace.hex(),
        generation=0,
        weights_version="",
        slots=4,
        write_policy=policy,
        configured_policy=configured_then,
    )
    return Ledger(boot=boot_id(), epoch=1, replicas=(record,))


@pytest.fixture
def replica(tmp_path: Path) -> ReplicaConfig:
    return configured(tmp_path)


@pytest.mark.parametrize(
    ("configured_then", "expected"),
    [(THROUGH, NEVER), (BACK, THROUGH)],
    ids=["configuration as it was", "configuration changed"],
)
def test_policy_that_was_set_holds_until_the_configuration_changes(
    replica: ReplicaConfig, configured_then: WritePolicy, expected: WritePolicy
) -> None:
    """The next daemon has what was set, unless somebody has written another policy into the configuration since."""
    generation = Generation(0, "", replica.namespace(0))
    ledger = recorded(generation.namespace, NEVER, configured_then)

    assert write_policy_of(replica, generation, ledger) is expected
    assert recorded_policy(ledger.replicas[0], THROUGH) is expected


def test_policy_of_another_namespace_is_not_taken(replica: ReplicaConfig) -> None:
    """A replica whose model or layout is another one now begins with what is configured."""
    generation = Generation(0, "", replica.namespace(0))

    assert write_policy_of(replica, generation, recorded(b"x" * 32, NEVER, THROUGH)) is THROUGH
    assert write_policy_of(replica, generation, None) is THROUGH
