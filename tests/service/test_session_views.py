"""What people see of sessions: who holds what, and what dead or silent engines have left."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvcached.core.insight import sessions as views
from kvcached.core.insight.sessions import shown_sessions
from kvcached.core.messages import Ticked
from tests.service.office import TWO, FakePeer, key_chain
from tests.service.offload_office import OffloadOffice


@pytest.fixture
def office() -> OffloadOffice:
    """An engine on the replica with a lease, and one in offload mode with a lease and a store under way."""
    office = OffloadOffice()
    office.enter(FakePeer(1))
    office.ask(office.acquire(key_chain(3)), key_chain(3))
    scheduler, shard = FakePeer(2), FakePeer(3)
    welcome = office.attach(scheduler, peer=TWO)
    office.join(shard, welcome)
    office.storing(5, peer=TWO)
    return office


def test_sessions_of_both_kinds_tell_what_they_hold(office: OffloadOffice) -> None:
    """Each session has its place, its leases and the copies that its engine makes."""
    managed, offload = shown_sessions(office.cache)

    assert (managed.where, managed.is_offload, managed.state) == ("a", False, "active")
    assert (managed.leases, managed.copies, managed.set_aside) == (1, 0, 0)
    assert (offload.where, offload.is_offload, offload.state) == ("tiny", True, "active")
    assert (offload.leases, offload.copies, offload.set_aside) == (1, 1, 0)


def test_expired_sessions_tell_what_their_processes_may_still_write(office: OffloadOffice) -> None:
    """A silent session has no leases any more; its slots are set aside until its processes are dead."""
    for now_ms in range(0, 2000, 400):
        office.service.on_event(Ticked(now_ms))

    managed, offload = shown_sessions(office.cache)
    assert (managed.state, managed.leases, managed.set_aside, managed.heard_ms) == ("expired", 0, 3, 0)
    assert (offload.state, offload.leases, offload.set_aside) == ("expired", 0, 5)


def test_sessions_that_are_shown_are_bounded(office: OffloadOffice) -> None:
    """However many there are, so many are shown."""
    for number in range(10, 10 + views.SESSIONS_SHOWN_MAX):
        office.attach(FakePeer(number), peer=number.to_bytes(8, "big"), instance=number.to_bytes(16, "big"))

    shown = shown_sessions(office.cache)
    assert len(shown) == views.SESSIONS_SHOWN_MAX < len(office.cache.offload.sessions)
    assert all(one.is_offload <= other.is_offload for one, other in pairwise(shown))
