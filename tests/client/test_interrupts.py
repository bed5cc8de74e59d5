"""Exceptions of signal handlers, as of Ctrl-C, in the middle of calls: what they leave behind, and what is told."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

import kvcached_client
from kvcached_client import (
    Client,
    DaemonUnreachable,
    ErrorCode,
    OffloadClient,
    OffloadLayout,
    Refused,
    new_instance,
)
from kvcached_client.aio import AsyncClient
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import Release, error_reply
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_aio import is_readable, run
from tests.client.test_offload import Script

Connect = Callable[..., Client]

WAIT_S = 20
#: A socket that was made right before an exception may be nobody's.
_NOT_CLOSED = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
_SDK = str(Path(kvcached_client.__file__).parent)


def interrupted(call: Callable[[], object], number: int) -> bool:
    """Make a call, and raise as the handler of a signal does, at the place with this number; False if it has fewer.

    Such places are the beginnings of functions, and behind calls of functions in C, whose results are lost then. Those
    in Python's own modules are left out: an interrupted `threading.Condition` stays locked.
    """
    left = itertools.count(1 - number)

    def profile(frame: FrameType, event: str, _: object) -> None:
        is_place = event in {"call", "c_return"} and frame.f_code.co_filename.startswith(_SDK)
        if is_place and not next(left):
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def interrupt_reading(client: Client | AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come while the client's next reply is being read."""

    def interrupt(_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(client._channel, "_take", interrupt)


def have_all_ended(daemon: FakeDaemon) -> bool:
    """Whether, soon, every session has ended that was opened."""
    end_s = time.monotonic() + WAIT_S
    while daemon.in_session and time.monotonic() < end_s:
        daemon.bye_came.clear()
        daemon.bye_came.wait(0.05)
    return not daemon.in_session


def connect_offload(daemon: FakeDaemon) -> OffloadClient:
    """A client in offload mode."""
    daemon.script = Script()
    return OffloadClient.connect(
        daemon.run_dir,
        engine="test",
        instance=new_instance(),
        keyspace=bytes(32),
        label="m",
        layout=OffloadLayout(16, shards=1, block_bytes=64, fingerprint=bytes(16)),
    )


@pytest.fixture
def no_beats_left() -> Iterator[None]:
    """No thread of a heartbeat outlives the test, though its client may."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kvcached-heartbeat":
            thread.join(WAIT_S)
            assert not thread.is_alive()


@_NOT_CLOSED
@pytest.mark.usefixtures("no_beats_left")
@pytest.mark.parametrize("kind", ["device pool", "offload"])
def test_interrupted_connect_leaves_no_session(daemon: FakeDaemon, kind: str) -> None:
    """Wherever an exception of a signal handler ends a connect, a session that the daemon may have opened ends."""
    clients: list[Client | OffloadClient] = []

    def connect() -> None:
        clients.append(Client.connect(daemon.run_dir) if kind == "device pool" else connect_offload(daemon))

    number = 1
    while interrupted(connect, number):
        number += 1
        for client in clients:
            client.close()
    assert number > 200
    clients[-1].close()
    assert have_all_ended(daemon)


@_NOT_CLOSED
@pytest.mark.usefixtures("no_beats_left")
@pytest.mark.parametrize("verb", ["match", "close"])
def test_interrupted_session_can_be_closed(daemon: FakeDaemon, verb: str) -> None:
    """Wherever an exception of a signal handler ends a call, `close` ends the session, and a close that it ends has."""
    is_interrupted, number = True, 0
    while is_interrupted:
        number += 1
        client = Client.connect(daemon.run_dir)
        call = partial(client.match, client.chain(range(8))) if verb == "match" else client.close
        is_interrupted = interrupted(call, number)
        client.close()
    assert number > 50
    assert have_all_ended(daemon)


def test_interrupted_session_says_why_until_it_is_closed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal in the middle of a reading, each call says so, and none that the daemon is gone."""
    client = connect()
    chain = client.chain(range(8))
    interrupt_reading(client, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        client.match(chain)
    assert not client.is_alive
    for call in (lambda: client.match(chain), lambda: client.acquire("a", chain), client.stats) * 2:
        with pytest.raises(DaemonUnreachable, match=r"a signal interrupted .* close this client and connect again"):
            call()
    client.close()
    with pytest.raises(DaemonUnreachable, match="is closed"):
        client.match(chain)


def test_interrupted_async_client_says_goodbye(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of an event loop ends its session, too, when it is closed after an interrupted reading."""

    async def work(client: AsyncClient) -> None:
        client._channel.post(Release(id=client._channel.next_id(), epoch=client.epoch, lease=7))
        interrupt_reading(client, monkeypatch)
        assert is_readable(client)
        with pytest.raises(KeyboardInterrupt):
            client._channel.is_connected()

    run(daemon, work)
    assert have_all_ended(daemon)


def test_interrupt_leaves_a_with_statement_as_it_is(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the end of a lease nor that of its client hides it; what the release failed for is logged."""
    client = connect()

    def serve() -> None:
        with client, client.acquire("a", client.chain(range(8))) as lease:
            interrupt_reading(client, monkeypatch)
            lease.commit(8)

    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        serve()
    assert "lease 7 was not released: a signal interrupted" in caplog.text


def test_failed_release_does_not_hide_an_exception_of_a_task(daemon: FakeDaemon) -> None:
    """What leaves ``async with`` is raised, though the daemon has refused the release; without it the refusal is."""
    refusal = request_error(ErrorCode.UNKNOWN_LEASE, "no", "stop")
    daemon.script = lambda request, _: (error_reply(request.id, refusal), []) if isinstance(request, Release) else None

    async def work(client: AsyncClient) -> None:
        with pytest.raises(ZeroDivisionError):
            async with await client.acquire("a", client.chain(range(8))):
                raise ZeroDivisionError
        with pytest.raises(Refused):
            async with await client.acquire("b", client.chain(range(8))):
                pass

    run(daemon, work)
