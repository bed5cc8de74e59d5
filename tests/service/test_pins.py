"""The verbs pin and unpin, and priorities of requests, from a request to what they keep."""

from __future__ import annotations

import pytest

from kvcached.core.messages import Ticked
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from tests.service.office import EPOCH, TWO, FakePeer, Office, key_chain
from tests.service.offload_office import OffloadOffice


def pin(office: Office, target: str, keys: bytes, ttl_ms: int = 1000) -> wire.Pinned:
    request = wire.Pin(id=office.next_id(), target=target, ttl_ms=ttl_ms)
    return office.expect(wire.Pinned, request, keys, peer=TWO)


def pinned(office: Office) -> tuple[list[int], list[int]]:
    """What stats tell of each pool and of each namespace."""
    stats = office.expect(wire.StatsReport, wire.Stats(id=office.next_id()), peer=TWO)
    return [each.pinned for each in stats.pools], [each.pinned for each in stats.hosts]


def test_pin_of_a_replica_holds_device_and_host_blocks() -> None:
    """The answer and the stats say how many blocks stay; after its time none does."""
    office = Office("a", host_slabs=2)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.workers["a"].end_all()
    assert pin(office, "a", key_chain(3)) == wire.Pinned(id=office._request, device=3, host=3)
    assert pinned(office) == ([3], [3])

    office.service.on_event(Ticked(1000))
    assert pinned(office) == ([0], [0])


def test_pin_lasts_from_when_it_is_asked_for() -> None:
    """However long ago the last tick was: a machine that slept, or a daemon that was stopped, costs no pin its time."""
    office = Office("a")
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.now_ms = 60_000
    pin(office, "a", key_chain(2), ttl_ms=1000)

    pinned_at = []
    for now_ms in (60_001, 60_999, 61_000):
        office.service.on_event(Ticked(now_ms))
        pinned_at.append(pinned(office)[0])
    assert pinned_at == [[2], [2], [0]]


def test_unpin_says_whether_there_was_a_pin() -> None:
    """The second time there is none any more."""
    office = Office("a")
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    pin(office, "a", key_chain(2))
    request = [wire.Unpin(id=office.next_id(), target="a") for _ in range(2)]

    answers = [office.expect(wire.Unpinned, each, key_chain(2), peer=TWO).was_pinned for each in request]
    assert answers == [True, False]


def test_namespace_of_offload_engines_is_pinned_by_its_label() -> None:
    """Host copies of engines in offload mode stay, too."""
    office = OffloadOffice()
    office.attach(FakePeer(1))
    assert pin(office, "tiny", key_chain(3)).host == 0  # nothing is stored yet
    assert pinned(office) == ([0], [0, 0])


@pytest.mark.parametrize(
    ("target", "keys", "code"),
    [
        ("x", key_chain(2), ErrorCode.UNKNOWN_REPLICA),
        ("a", b"", ErrorCode.BAD_VALUE),
        ("6e6e6e6e", key_chain(2), ErrorCode.BAD_VALUE),
        ("a", key_chain(5), ErrorCode.LIMIT),
    ],
    ids=["no such target", "no keys", "no host pool", "over the quota"],
)
def test_pin_is_refused_by_its_reason(target: str, keys: bytes, code: ErrorCode) -> None:
    """Each refusal has its own code."""
    office = Office("a")
    office.enter(FakePeer(1))
    office.store(key_chain(5))

    assert office.error(wire.Pin(id=office.next_id(), target=target, ttl_ms=1), keys, peer=TWO) == code


def test_priority_of_a_request_reaches_its_lease() -> None:
    """What the engine says in its acquire is what eviction goes by, on device pools and in offload mode."""
    office = OffloadOffice()
    office.enter(FakePeer(1))
    keys = key_chain(2)
    asked = wire.Acquire(id=office.next_id(), epoch=EPOCH, request="r", tokens=8, full=True, priority=5)
    office.expect(wire.Acquired, asked, keys)
    office.attach(FakePeer(2), peer=TWO)
    asked = wire.Acquire(id=office.next_id(), epoch=EPOCH, request="r", tokens=8, full=True, priority=-3)
    office.expect(wire.Held, asked, keys, peer=TWO)

    leases = [lease for each in office.cache.managed.sessions.values() for lease in each.leases.values()]
    offload = [lease for each in office.cache.offload.sessions.values() for lease in each.leases.values()]
    assert ([each.priority for each in leases], [each.priority for each in offload]) == ([5], [-3])
