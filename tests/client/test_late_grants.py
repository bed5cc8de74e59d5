"""Leases that were granted after their caller had stopped waiting are given back."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

import pytest

from kvcached_client import Client, DeadlineExceeded
from kvcached_client.protocol.engine import Acquire, Acquired, Header, Hello, Match, Release, Request, encode
from kvcached_client.transport.channel import Channel
from tests.client.fake_daemon import SILENCE, FakeDaemon

Connect = Callable[..., Client]


def test_late_grant_is_given_back(daemon: FakeDaemon, connect: Connect) -> None:
    """Slots granted after the caller stopped waiting are released before its next request."""
    client = connect(deadline_ms=250)
    held_back: list[int] = []

    def script(request: Request, frames: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Acquire):
            held_back.append(request.id)
            return SILENCE, []
        if isinstance(request, Match) and held_back:
            return Acquired(id=held_back.pop(), lease=7, hit=0, ready=0), [b"", b""]
        return None

    daemon.script = script
    chain = client.chain(range(8))
    with pytest.raises(DeadlineExceeded):
        client.acquire("a", chain)
    with pytest.raises(DeadlineExceeded):
        client.match(chain)
    assert daemon.of(Release) == []
    assert client.match(chain) == 2
    (release,) = daemon.of(Release)
    assert isinstance(release, Release)
    assert (release.lease, release.reply) == (7, False)


@pytest.mark.parametrize("tokens", [8, 12])
def test_late_grant_is_given_back_before_the_next_call(daemon: FakeDaemon, connect: Connect, tokens: int) -> None:
    """Once its answer has arrived, the next call gives a late lease back first, so that its name is free."""
    client, go_on = connect(deadline_ms=250), threading.Event()

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if not isinstance(request, Acquire) or go_on.is_set():
            return None
        assert go_on.wait(20)
        return Acquired(id=request.id, lease=6, hit=0, ready=0), [b"", b""]

    daemon.script = script
    with pytest.raises(DeadlineExceeded):
        client.acquire("a", client.chain(range(8)))
    go_on.set()
    assert select.select([client._channel.descriptors()[0]], [], [], 20)[0]
    with client.acquire("a", client.chain(range(tokens))) as lease:
        assert lease.id == 7
    assert [type(request) for request, _ in daemon.requests] == [Hello, Acquire, Release, Acquire, Release]
    assert [request.lease for request in daemon.of(Release) if isinstance(request, Release)] == [6, 7]


def test_late_grants_cost_a_call_nothing_while_there_are_none(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only while an abandoned acquire has no answer does a call look once more for what has arrived."""
    client = connect()
    channel, looks = client._channel, []

    def poll(deadline_ns: int, wake: int | None = None) -> dict[int, int]:
        looks.append(deadline_ns)
        return Channel._poll(channel, deadline_ns, wake)

    monkeypatch.setattr(channel, "_poll", poll)
    client.match(client.chain(range(8)))
    usual = len(looks)
    acquire = Acquire(id=channel.next_id(), epoch=1, request="r", tokens=8)
    channel._calls.send(acquire, (b"k" * 16,), deadline_ns=0)
    channel._calls.expire(1)
    client.match(client.chain(range(8)))
    assert len(looks) == 2 * usual + 1


def test_late_grant_is_given_back_although_its_name_is_asked_for_again(daemon: FakeDaemon, connect: Connect) -> None:
    """When the repetition of an acquire is refused, the late lease of the first one does not stay behind."""
    client = connect(deadline_ms=250)
    first: list[int] = []

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Acquire):
            first.append(request.id)
            # The second acquire is answered with the first one's grant, and never itself.
            return (SILENCE, []) if len(first) == 1 else (Acquired(id=first[0], lease=7, hit=0, ready=0), [b"", b""])
        return None

    daemon.script = script
    for tokens in (8, 12):
        with pytest.raises(DeadlineExceeded):
            client.acquire("a", client.chain(range(tokens)))
    assert client.match(client.chain(range(8))) == 2
    assert [request.lease for request in daemon.of(Release) if isinstance(request, Release)] == [7]


def test_late_grant_is_given_back_as_soon_as_the_daemon_takes_it(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that cannot be sent at once is sent with the next request instead."""
    client = connect()
    session = client._channel._calls
    acquire = Acquire(id=session.next_id(), epoch=1, request="r", tokens=8)
    session.send(acquire, (b"k" * 16,), deadline_ns=0)
    session.expire(1)
    session.receive([encode(Acquired(id=acquire.id, lease=7, hit=0, ready=0)), b"", b""])
    with monkeypatch.context() as patch:
        patch.setattr(client._channel, "post", lambda request: False)
        assert client.match(client.chain(range(8))) == 2
    assert daemon.of(Release) == []
    for _ in range(2):
        assert client.match(client.chain(range(8))) == 2
    assert len(daemon.of(Release)) == 1
