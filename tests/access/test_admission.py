"""What an engine's user may use, at a service without sockets: sessions, memory, and namespaces of others."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from kvcached.process.access import Role
from kvcached.process.identity import ProcessIdentity
from kvcached.service.sessions import FoundSession
from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.errors import ErrorCode, Refused
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.types import SessionId, ShardIndex
from tests.access.grants import grants_of
from tests.service.office import HOST_MEMORY, ONE, TWO, FakePeer, Office
from tests.service.offload_office import BLOCK_BYTES, OTHER_INSTANCE, OffloadOffice

THREE = b"\0\0\0\0\3"
ON_A = grants_of(Role.ENGINE, replicas=["a"], namespaces=[])
ON_TINY = grants_of(Role.ENGINE, replicas=[], namespaces=["tiny"])


@pytest.fixture
def office() -> OffloadOffice:
    return OffloadOffice()


def test_session_is_opened_on_an_allowed_replica_only() -> None:
    """An engine may open a session on the replica that its table names, and on no other one."""
    office = Office("a", "b")
    process = FakePeer(1, grants=ON_A)

    assert office.error(office.hello(process, "b")) is ErrorCode.FORBIDDEN
    office.enter(process, "a")
    assert len(office.cache.managed.sessions) == 1


def test_memory_of_another_replicas_session_is_not_handed_out() -> None:
    """A process that has a session's token gets the pool only if its own user may use the replica."""
    office = Office("a", "b")
    welcome = office.enter(FakePeer(1), "b")

    with pytest.raises(Refused, match="may be an engine on replicas 'a', not 'b'"):
        office.service.join(FakePeer(2, grants=ON_A), SessionId(welcome.session), welcome.token, ShardIndex(0))


def test_session_from_before_a_restart_is_resumed_by_whom_it_may_be() -> None:
    """Who shows the token of a session from before a restart still needs the replica."""
    office = Office("a", "b")
    session = office.cache.open_session("b", 0)
    token = bytes(32)
    earlier = FakePeer(1, identity=ProcessIdentity(1, 1))
    office.service.take_in({}, [FoundSession(session.id, (1, 1), _digest(token), b"", [(earlier, None)])])
    rejoin = wire.Rejoin(
        id=1,
        version_min=1,
        version_max=1,
        member=office.service.identify(FakePeer(1, grants=ON_A)).member,
        daemon_epoch=1,
        session=1,
        token=token,
        namespace=b"n" * 32,
        layout="",
        fence=0,
    )

    assert office.error(rejoin) is ErrorCode.FORBIDDEN


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def test_namespace_is_used_under_an_allowed_label_only(office: OffloadOffice) -> None:
    """An engine in offload mode is refused a label that its table does not name."""
    process = FakePeer(1, grants=ON_TINY)

    assert office.error(office.hello_offload(process, label="other")) is ErrorCode.FORBIDDEN
    office.attach(process)


def test_namespace_of_others_is_not_used_under_an_own_label(office: OffloadOffice) -> None:
    """Who declares the namespace of another model under its own label is refused: the namespace has a label."""
    office.attach(FakePeer(1), label="secret")

    hello = office.hello_offload(FakePeer(2, grants=ON_TINY), instance=OTHER_INSTANCE)
    refused = office.expect(wire.ErrorReply, hello, peer=TWO)
    assert (refused.code, "not 'secret'" in refused.message) == (ErrorCode.FORBIDDEN, True)


def test_blocks_of_others_in_storage_are_not_used_under_an_own_label() -> None:
    """Nor may it declare another namespace whose blocks are the same in storage."""
    office = OffloadOffice(has_canonical_storage=True)
    canonical = CanonicalLayout(fingerprint=bytes(16), parts=2, runs=2)
    office.attach(FakePeer(1), label="secret", canonical=canonical)

    hello = office.hello_offload(
        FakePeer(2, grants=ON_TINY),
        instance=OTHER_INSTANCE,
        shards=1,
        block_bytes=2 * BLOCK_BYTES,
        canonical=canonical,
    )
    refused = office.expect(wire.ErrorReply, hello, peer=TWO)
    assert (refused.code, "not 'secret'" in refused.message) == (ErrorCode.FORBIDDEN, True)


def test_host_memory_is_not_handed_out_for_another_namespace(office: OffloadOffice) -> None:
    """A process that has a session's token gets the host pool only if its own user may use the namespace."""
    welcome = office.attach(FakePeer(1), label="secret")
    arguments = (SessionId(welcome.session), welcome.token, ShardIndex(0))

    with pytest.raises(Refused, match="may be an engine on namespaces 'tiny', not 'secret'"):
        office.service.join(FakePeer(2, grants=ON_TINY), *arguments)
    assert office.service.join(FakePeer(3), *arguments)[1] == (HOST_MEMORY,)


def test_user_without_namespaces_gets_no_memory_of_offload_mode(office: OffloadOffice) -> None:
    """An engine of replicas only gets neither a session in offload mode, whatever its label, nor device memory."""
    assert office.error(office.hello_offload(FakePeer(1, grants=ON_A), label="a")) is ErrorCode.FORBIDDEN
    with pytest.raises(Refused, match="may be an engine on namespaces none"):
        asyncio.run(office.service.claim_pool(ClaimPool(name="a", claim="c", ranks=1, rank_bytes=1, blocks=1), ON_A))


def test_many_processes_of_another_user_leave_namespaces_to_others(office: OffloadOffice) -> None:
    """A user other than the daemon's own has sessions in half of the namespaces at most, with all its processes."""
    grants = grants_of(Role.ENGINE)
    office.attach(FakePeer(1, grants=grants), peer=ONE)

    more = office.hello_offload(FakePeer(2, grants=grants), keyspace=b"l" * 32, instance=OTHER_INSTANCE)
    refused = office.expect(wire.ErrorReply, more, peer=TWO)
    assert (refused.code, "one user may have no more" in refused.message) == (ErrorCode.LIMIT, True)
    office.attach(FakePeer(3), peer=THREE, keyspace=b"l" * 32, instance=b"x" * 16)
