"""Heartbeats: they come, they stop, and they notice."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvcached_client import Client, ErrorCode
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import Alive, Header, Heartbeat, Request, error_reply
from kvcached_client.transport import heartbeat as heartbeat_module
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.heartbeat import Heartbeat as HeartbeatThread
from tests.client.descriptors import no_descriptor_left
from tests.client.fake_daemon import TOKEN, FakeDaemon

Connect = Callable[..., Client]
WAIT_S = 20


def beats(daemon: FakeDaemon, count: int) -> threading.Event:
    """An event that is set when so many further heartbeats have come."""
    came, start = threading.Event(), len(daemon.heartbeats)

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Heartbeat) and len(daemon.heartbeats) >= start + count:
            came.set()
        return None

    daemon.script = script
    return came


def test_heartbeats_name_the_session(daemon: FakeDaemon, connect: Connect) -> None:
    """They come by themselves, with the session's token, at the interval that the daemon asked for."""
    daemon.heartbeat_interval_ms = 20
    came = beats(daemon, 2)
    client = connect(heartbeat=True)
    assert came.wait(WAIT_S)
    assert {(beat.session, beat.token) for beat in daemon.heartbeats} == {(3, b"t" * 32)}
    assert client.is_alive


def test_heartbeats_begin_when_a_descriptor_is_free(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a process that has no descriptor left goes on trying, and sends heartbeats once there is one."""
    tried = threading.Event()
    monkeypatch.setattr(heartbeat_module._log, "debug", lambda *_: tried.set())
    grant = SessionGrant(id=3, token=TOKEN, run_dir=str(daemon.run_dir))
    with no_descriptor_left():
        thread = HeartbeatThread(f"{daemon.run_dir}/rpc.sock", grant, epoch=1, generation=None, interval_ms=20)
        thread.start()
        assert tried.wait(WAIT_S)
    assert daemon.heartbeat_came.wait(WAIT_S)
    thread.close()


def test_heartbeats_stop_with_the_client(daemon: FakeDaemon, connect: Connect) -> None:
    """A closed client leaves no thread behind."""
    daemon.heartbeat_interval_ms = 60_000
    client = connect(heartbeat=True)
    assert "kvcached-heartbeat" in {thread.name for thread in threading.enumerate()}
    client.close()
    assert "kvcached-heartbeat" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("kind", ["epoch", "generation", "expired"])
def test_heartbeat_notices_that_the_session_is_over(daemon: FakeDaemon, connect: Connect, kind: str) -> None:
    """A new epoch, a new generation or an expired session ends the client's life."""
    daemon.heartbeat_interval_ms = 20
    client = connect(heartbeat=True)
    third = threading.Event()
    count = 0

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        nonlocal count
        if not isinstance(request, Heartbeat):
            return None
        count += 1
        if count == 3:  # the reply to the first one was read before the second was sent
            third.set()
        if kind == "expired":
            return error_reply(request.id, request_error(ErrorCode.SESSION_EXPIRED, "over", "attach again")), []
        changed = {"epoch": 1, "generation": 1, kind: 2}
        return Alive(id=request.id, **changed), []

    daemon.script = script
    assert third.wait(WAIT_S)
    assert not client.is_alive


def test_signalled_fence_is_said_at_once_and_again(daemon: FakeDaemon, connect: Connect) -> None:
    """The highest fence goes out without waiting for the interval, and stays in later heartbeats."""
    daemon.heartbeat_interval_ms = 60_000
    client = connect(heartbeat=True)
    came = beats(daemon, 2)
    client.signal_fence(9)  # type: ignore[arg-type]
    client.signal_fence(4)  # type: ignore[arg-type]
    assert came.wait(WAIT_S)
    assert [(beat.fence, beat.reply) for beat in daemon.heartbeats] == [(9, False), (9, False)]
