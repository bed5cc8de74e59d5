"""Requests that come again long after they were answered."""

from __future__ import annotations

from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId
from tests.service.office import EPOCH, FakePeer, key_chain
from tests.service.offload_office import OffloadOffice

#: More than an office keeps.
MANY = 40


def use_leases(office: OffloadOffice) -> None:
    """Let an engine acquire and release, so often that the answers to earlier releases are forgotten."""
    for number in range(MANY):
        held = office.acquire_blocks(2, seed=9, request=f"other {number}")
        office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=held.lease))


def test_preparation_that_comes_again_late_is_the_same_one() -> None:
    """Many requests later, and though its lease is released, it gets its copy again, and no second one."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1))
    held = office.acquire_blocks(4)
    store = office.prepare_store(held.lease)
    first = office.ask(store, key_chain(4))
    office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=held.lease))
    use_leases(office)

    assert office.ask(store, key_chain(4)) == first

    assert isinstance(first.header, wire.StorePrepared)
    office.expect(wire.Settled, office.transfer_done(welcome, first.header.transfer, wire.EVERY_SHARD))
    assert "filling" not in office.host_states()


def test_kept_preparations_are_bounded() -> None:
    """As many are kept as of other answers."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1))
    held = office.acquire_blocks(4)
    for _ in range(MANY):
        assert office.error(office.prepare_load(held.lease, 2)) is ErrorCode.BAD_VALUE
    use_leases(office)

    group = office.service._groups.of_session(SessionId(welcome.session))
    assert group is not None
    assert len(group.answers) == 2 * 16
