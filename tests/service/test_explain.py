"""What the daemon tells of a prompt that missed, over the protocol."""

from __future__ import annotations

import pytest

from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.types import MissReason
from tests.service.office import TWO, FakePeer, Office, key_chain
from tests.service.offload_office import OffloadOffice

REPLICA = (b"n" * 8).hex()


def ask(office: Office, keys: bytes, **fields: object) -> list[wire.Explanation]:
    """The explanations of a prompt whose last token is in its last block."""
    request = wire.Explain(id=office.next_id(), tokens=len(keys) // 4, **fields)  # type: ignore[arg-type]
    return list(office.expect(wire.Explained, request, keys, peer=b"cli").explanations)


@pytest.fixture
def office() -> OffloadOffice:
    """A replica that holds four blocks, and an offload namespace that holds three of them under the same keys."""
    office = OffloadOffice()
    office.enter(FakePeer(1))
    office.store(key_chain(4))
    welcome = office.attach(FakePeer(2), peer=TWO)
    office.store_blocks(welcome, 3, peer=TWO)
    return office


def test_every_replica_and_namespace_answers(office: OffloadOffice) -> None:
    """One entry for each, with its hit, and the key and the fate of the block behind it."""
    keys = key_chain(5)
    replica, space = ask(office, keys, full=True)

    assert replica == wire.Explanation(
        namespace=REPLICA,
        replica="a",
        label="",
        generation=0,
        block_size=4,
        device=4,
        host=0,
        hit=4,
        key=keys[64:],
        reason=MissReason.NEVER_STORED,
        others=0,
    )
    assert (space.replica, space.label, space.device, space.host, space.hit) == ("", "tiny", 0, 3, 3)
    assert (space.key, space.reason) == (keys[48:64], MissReason.NEVER_STORED)


def test_the_last_token_is_left_to_compute_unless_full(office: OffloadOffice) -> None:
    """As for `match`: a prompt that is cached to its end hits one block less."""
    assert [each.reason for each in ask(office, key_chain(3))] == [MissReason.LAST_TOKEN] * 2
    full = ask(office, key_chain(3), full=True)
    assert [(each.reason, each.hit, each.key) for each in full] == [(MissReason.HIT, 3, b"")] * 2


def test_one_replica_or_namespace_can_be_asked(office: OffloadOffice) -> None:
    """By the replica's name, or by the first digits of the namespace; what begins otherwise is left out."""
    space = ask(office, b"")[1].namespace

    assert [each.replica for each in ask(office, b"", replica="a")] == ["a"]
    assert [each.namespace for each in ask(office, b"", namespace=space)] == [space]
    assert [each.namespace for each in ask(office, b"", namespace=space[:5])] == [space]
    assert [each.replica for each in ask(office, b"", namespace="6e" * 32)] == ["a"]
    assert ask(office, b"", namespace="f" * 16) == []
    request = wire.Explain(id=office.next_id(), tokens=0, replica="z")
    assert office.error(request, b"", peer=b"cli") is ErrorCode.UNKNOWN_REPLICA


def test_a_clear_is_told_with_the_new_generation(office: OffloadOffice) -> None:
    """After a clear the entry names the generation that it is about."""
    office.expect(wire.Cleared, wire.Clear(id=office.next_id(), epoch=100), peer=TWO)
    space = ask(office, key_chain(3))[1]

    assert (space.generation, space.hit, space.reason) == (1, 0, MissReason.CLEARED)


def test_describe_tells_what_keys_and_engines_need(office: OffloadOffice) -> None:
    """The root of a replica's keys, and what engines in offload mode are offered; nothing without such a mode."""
    described = office.expect(wire.Description, wire.Describe(id=office.next_id()), peer=b"cli")

    assert described.replicas[0].namespace == "6e" * 32
    assert described.offload is not None
    assert (described.offload.slabs, described.offload.namespaces_max) == (4, 2)
    plain = Office()
    assert plain.expect(wire.Description, wire.Describe(id=plain.next_id())).offload is None
