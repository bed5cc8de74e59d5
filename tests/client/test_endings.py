"""How a session ends: closed, dropped, or never quite opened; and what is left of its leases then."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from kvcached_client import (
    Client,
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvGroup,
    Layout,
    Lease,
    Refused,
    RequestError,
    Stale,
)
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import Bye, Commit, Header, Hello, Release, Request, error_reply
from kvcached_client.types import FenceSequence
from tests.client.fake_daemon import SILENCE, FakeDaemon

Connect = Callable[..., Client]
Answer = tuple[Header, list[bytes]] | None
WAIT_S = 20


def fences(daemon: FakeDaemon) -> list[int]:
    """The fences of the commits and releases that came."""
    return [request.fence for request, _ in daemon.requests if isinstance(request, Commit | Release)]


def use(client: Client, lease: Lease) -> list[Callable[[], object]]:
    """Every call that speaks to the daemon."""
    chain = client.chain(range(8))
    return [
        lambda: client.match(chain),
        lambda: client.acquire("other", chain),
        lambda: client.signal_fence(FenceSequence(5)),
        lambda: lease.allocate(80),
        lambda: lease.commit(8),
        lambda: lease.finish(8),
    ]


def test_calls_after_close_are_misses_where_failures_are(daemon: FakeDaemon, connect: Connect) -> None:
    """An engine that goes on after its client is closed sees an empty cache, and no exception."""
    client = connect(failures="miss")
    lease = client.acquire("held", client.chain(range(8)))
    client.close()
    sent = len(daemon.requests)
    for call in use(client, lease):
        call()
    lease.release()
    assert client.match(client.chain(range(8))) == 0
    assert not client.acquire("other", client.chain(range(8))).granted
    assert client.failure_count == 8
    assert len(daemon.requests) == sent


def test_calls_after_close_raise_a_transport_error(connect: Connect) -> None:
    """A closed client says that it is closed."""
    client = connect()
    lease = client.acquire("held", client.chain(range(8)))
    client.close()
    for call in [*use(client, lease), client.stats]:
        with pytest.raises(DaemonUnreachable, match="closed"):
            call()


@pytest.mark.parametrize("failures", ["raise", "miss"])
def test_lease_that_outlives_its_client_is_released_silently(
    daemon: FakeDaemon, connect: Connect, failures: str
) -> None:
    """The session's end gave the lease back, so leaving its context says nothing and raises nothing."""
    client = connect(failures=failures)
    with client.acquire("held", client.chain(range(8))):
        client.close()
    assert daemon.of(Release) == []
    assert client.failure_count == 0


@pytest.mark.parametrize("number", [1 << 63, 1 << 64])
def test_numbers_that_no_message_carries_are_misses_and_do_no_harm(
    daemon: FakeDaemon, connect: Connect, number: int
) -> None:
    """A name that is no text and a fence out of range reach neither the engine as exceptions nor later calls."""
    client = connect(failures="miss", heartbeat=True)
    chain = client.chain(range(8))
    assert not client.acquire("\ud800", chain).granted
    client.signal_fence(FenceSequence(number))
    client.signal_fence(FenceSequence(4))
    assert daemon.heartbeat_came.wait(WAIT_S)
    assert [beat.fence for beat in daemon.heartbeats] == [4]
    lease = client.acquire("a", chain)
    lease.commit(8, fence=FenceSequence(number))
    lease.commit(4)
    lease.finish(8)
    assert [(type(request), len(frames)) for request, frames in daemon.requests[-2:]] == [(Commit, 2), (Release, 2)]
    assert fences(daemon) == [0, 0]
    assert client.failure_count == 3


def test_request_that_could_not_be_sent_is_not_sent_later(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what left this process is settled by sending it again; an unanswered request before it still is."""
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(range(8)))
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Commit) else None
    with pytest.raises(DeadlineExceeded):
        lease.commit(4)
    daemon.script = None
    with monkeypatch.context() as patch:
        patch.setattr(client._channel, "_send", _unreachable)
        with pytest.raises(DaemonUnreachable):
            lease.release()
    assert daemon.of(Release) == []
    lease.commit(8)
    first, again, second = daemon.of(Commit)
    assert first == again
    assert isinstance(second, Commit)
    assert second.start == 1


def _unreachable(*_: object) -> None:
    raise DaemonUnreachable("taken by nobody")


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (ErrorCode.ALREADY_RELEASED, Refused),
        (ErrorCode.UNKNOWN_LEASE, Refused),
        (ErrorCode.FOREIGN_LEASE, Refused),
        (ErrorCode.NO_SESSION, Stale),
    ],
)
@pytest.mark.parametrize("verb", ["commit", "release"])
def test_lease_that_the_daemon_does_not_know_is_not_held(
    daemon: FakeDaemon, connect: Connect, code: ErrorCode, raised: type[RequestError], verb: str
) -> None:
    """The caller hears it once; releasing again has nothing to say."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    daemon.script = lambda request, _: (
        (error_reply(request.id, request_error(code, "no", "stop")), [])
        if isinstance(request, Commit | Release)
        else None
    )
    with pytest.raises(raised):
        lease.commit(8) if verb == "commit" else lease.release()
    sent = len(daemon.requests)
    lease.release()
    assert len(daemon.requests) == sent


@pytest.mark.parametrize("computed_tokens", [8, 3], ids=["with blocks", "without"])
def test_release_waits_for_the_highest_fence_of_the_lease(
    daemon: FakeDaemon, connect: Connect, computed_tokens: int
) -> None:
    """Slots that queued work writes are not given back under a lower fence, nor under none after an exception."""
    client = connect()
    chain = client.chain(range(8))
    lease = client.acquire("a", chain)
    lease.commit(computed_tokens, fence=FenceSequence(9))
    lease.release(fence=FenceSequence(4))
    assert fences(daemon)[-1] == 9
    lease = client.acquire("b", chain)
    lease.commit(computed_tokens, fence=FenceSequence(11))
    lease.finish(8, fence=FenceSequence(10))
    assert fences(daemon)[-1] == 11
    lease = client.acquire("c", chain)
    lease.commit(computed_tokens, fence=FenceSequence(12))
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError
    assert fences(daemon)[-1] == 12
    client.acquire("d", chain).release()
    assert fences(daemon)[-1] == 0


@pytest.mark.parametrize("kind", ["deadline", "layout"])
def test_connect_that_fails_after_its_hello_says_bye(daemon: FakeDaemon, connect: Connect, kind: str) -> None:
    """A session that the daemon may have opened ends, so that the pool is free for the next attempt."""
    said_bye = threading.Event()

    def script(request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, Bye):
            said_bye.set()
        return (SILENCE, []) if isinstance(request, Hello) and kind == "deadline" else None

    daemon.script = script
    if kind == "deadline":
        with pytest.raises(DeadlineExceeded):
            connect(deadline_ms=250)
    else:
        group = KvGroup(layers=1, kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16")
        with pytest.raises(Refused):
            connect(layout=Layout(block_size=4, shards=1, groups=(group,)))
    assert said_bye.wait(WAIT_S)


def test_refused_connect_says_why_and_what_to_do(daemon: FakeDaemon, connect: Connect) -> None:
    """The text of the exception has the daemon's reason and its advice."""
    busy = request_error(ErrorCode.POOL_BUSY, "session 3 holds replica 'default' for processes [42]", "say bye in it")
    daemon.script = lambda request, _: (error_reply(request.id, busy), []) if isinstance(request, Hello) else None
    with pytest.raises(Refused) as caught:
        connect()
    assert str(caught.value) == "pool_busy: session 3 holds replica 'default' for processes [42] (say bye in it)"


def test_close_says_bye_after_a_stale_answer(daemon: FakeDaemon, connect: Connect) -> None:
    """A session whose epoch is over is still said goodbye to: until then the process can open no other."""
    client = connect()
    stale = request_error(ErrorCode.STALE_EPOCH, "old", "attach again")
    daemon.script = lambda request, _: None if isinstance(request, Bye) else (error_reply(request.id, stale), [])
    with pytest.raises(Stale):
        client.match(client.chain(range(8)))
    client.close()
    assert len(daemon.of(Bye)) == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropped_client_stops_its_heartbeats(daemon: FakeDaemon) -> None:
    """A client that nobody holds any more does not keep its session alive, and says no goodbye in the engine's name."""
    before = set(threading.enumerate())
    client = Client.connect(daemon.run_dir, deadline_ms=2000)
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "kvcached-heartbeat"
    del client
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert daemon.of(Bye) == []
