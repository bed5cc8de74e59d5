"""Leases that were granted after their caller had stopped waiting are given back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached_client import Client, DeadlineExceeded
from kvcached_client.protocol.engine import Acquire, Acquired, Header, Match, Release, Request, encode
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
