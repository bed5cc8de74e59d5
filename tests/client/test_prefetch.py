"""Prefetches whose answer is fetched later, beside other calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kvcached_client import Client, DaemonUnreachable, DeadlineExceeded, ErrorCode, RequestError, prefetch
from kvcached_client.errors import DaemonSilent, request_error
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.protocol.engine import Header, Match, Prefetch, Prefetched, Request, error_reply
from tests.client.fake_daemon import SILENCE, FakeDaemon

Connect = Callable[..., Client]
FETCHED = PrefetchResult(2, 1, is_over=True, reason="fetched")


@pytest.fixture
def wake() -> Iterator[int]:
    descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def fetched(request: Request) -> tuple[Header, list[bytes]]:
    return Prefetched(id=request.id, blocks=2, fetched=1, is_over=True, reason="fetched"), []


def answered_in_place_of_a_match(daemon: FakeDaemon) -> None:
    """The answer to a prefetch comes while a match is waited for, which gets none."""

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Match):
            return fetched(daemon.of(Prefetch)[0])
        return (SILENCE, []) if isinstance(request, Prefetch) else None

    daemon.script = script


def test_other_calls_go_on_beside_a_prefetch(daemon: FakeDaemon, connect: Connect) -> None:
    """While the answer to a prefetch is out, another call is answered."""
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Prefetch) else None
    client = connect()
    pending = client.begin_prefetch(client.chain(range(9)))
    assert client.match(client.chain(range(9))) == 2
    assert not pending.is_over


def test_prefetch_names_its_tenant(daemon: FakeDaemon, connect: Connect) -> None:
    """The daemon is told whose quota the blocks count against, and nothing where nobody is named."""
    daemon.script = lambda request, _: fetched(request) if isinstance(request, Prefetch) else None
    client = connect()
    chain = client.chain(range(9))
    results = [client.prefetch(chain, tenant="free-7"), client.begin_prefetch(chain, tenant="free-8").result()]
    assert [*results, client.prefetch(chain)] == [FETCHED] * 3
    requests = [request for request in daemon.of(Prefetch) if isinstance(request, Prefetch)]
    assert [request.tenant for request in requests] == ["free-7", "free-8", ""]


def test_answer_that_came_during_another_call_is_kept(daemon: FakeDaemon, connect: Connect) -> None:
    """An answer that was read while another one was waited for is there at once."""
    answered_in_place_of_a_match(daemon)
    client = connect(deadline_ms=300)
    pending = client.begin_prefetch(client.chain(range(9)))
    with pytest.raises(DeadlineExceeded):
        client.match(client.chain(range(9)))
    daemon.stop()
    assert pending.is_over
    assert pending.result() == FETCHED


def test_listening_ends_with_the_answer(daemon: FakeDaemon, connect: Connect, wake: int) -> None:
    """Whoever listens hears of the answer, and finds the prefetch over."""
    daemon.script = lambda request, _: fetched(request) if isinstance(request, Prefetch) else None
    client = connect()
    pending = client.begin_prefetch(client.chain(range(9)))
    assert client._channel.listen(wake, client._channel.deadline_ns())
    assert pending.is_over
    assert pending.result() == FETCHED


def test_listening_ends_when_it_is_woken_or_late(daemon: FakeDaemon, connect: Connect, wake: int) -> None:
    """Without a message listening ends at its deadline, or when the descriptor is readable."""
    channel = connect()._channel
    assert not channel.listen(wake, 0)
    os.eventfd_write(wake, 1)
    assert channel.listen(wake, channel.deadline_ns())


@pytest.mark.parametrize("asks", [True, False])
def test_answer_that_never_comes(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """A prefetch is over when its deadline has passed, whether somebody waits for it or for something else."""
    monkeypatch.setattr(prefetch, "_WAY_MS", 1)
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Prefetch) else None
    client = connect(deadline_ms=200)
    pending = client.begin_prefetch(client.chain(range(9)), deadline_ms=0)
    if asks:
        daemon.script = lambda _, __: (SILENCE, [])
        with pytest.raises(DeadlineExceeded):
            client.match(client.chain(range(9)))
        assert pending.is_over
    with pytest.raises(DeadlineExceeded):
        pending.result()


def test_prefetch_of_a_daemon_that_went_away(daemon: FakeDaemon, connect: Connect) -> None:
    """When the daemon goes away, whoever asks for the answer is told so."""
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Prefetch) else None
    client = connect()
    pending = client.begin_prefetch(client.chain(range(9)))
    daemon.stop()
    with pytest.raises(DaemonUnreachable):
        _ = pending.is_over
    pending.abandon()


def test_refused_prefetch_says_so(daemon: FakeDaemon, connect: Connect) -> None:
    """A refusal is an answer: it is raised where the result is asked for."""
    error = request_error(ErrorCode.LIMIT, "no", "stop")
    daemon.script = lambda request, _: (error_reply(request.id, error), []) if isinstance(request, Prefetch) else None
    client = connect()
    pending = client.begin_prefetch(client.chain(range(9)))
    with pytest.raises(RequestError, match="no"):
        pending.result()


def test_request_is_sent_within_the_channels_deadline(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that reads nothing holds up who asks it for a prefetch no longer than for anything else."""
    client = connect(deadline_ms=200)
    channel = client._channel
    deadlines: list[int] = []
    monkeypatch.setattr(channel._connection, "send", lambda *_, **__: False)
    monkeypatch.setattr(channel, "_poll", deadlines.append)
    with pytest.raises(DaemonSilent):
        client.begin_prefetch(client.chain(range(9)), deadline_ms=60_000)
    assert 0 < deadlines[-1] <= channel.deadline_ns()
