"""A process whose bytes were refused is not read from for a moment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvcached.server import held as held_module
from kvcached.server import pauses
from kvcached.server.connection import Connection
from kvcached.server.pauses import REFUSED_BYTES_MIN
from kvcached.server.rpc import RpcServer
from kvcached.service.pending import Answer
from kvcached_client.errors import ErrorCode, Fault
from kvcached_client.protocol.engine import FRAME_SIZE_BYTES_MAX, ErrorReply, Goodbye, Request
from tests.rpc.raw_peer import PATIENCE_S, RawPeer
from tests.rpc.test_server import Handler, Serving, bye, serve

__all__ = ["serve"]

_MIB = 1 << 20
_TOO_LONG = b"\x02" + (FRAME_SIZE_BYTES_MAX + 1).to_bytes(8, "big")
_ASKS = """
import sys
from pathlib import Path
from kvcached_client.protocol.engine import Bye, encode
from tests.rpc.raw_peer import RawPeer
with RawPeer(Path(sys.argv[1])) as peer:
    print(peer.ask(encode(Bye(id=7))).id)
"""


def served_elsewhere(path: Path) -> bool:
    """Whether a peer in another process gets its answer."""
    return subprocess.run([sys.executable, "-c", _ASKS, path], capture_output=True, check=True).stdout == b"7\n"


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Pauses that end only when the test ends them; set when one begins."""
    begun, changed = threading.Event(), RpcServer._on_pause

    def on_pause(server: RpcServer, owner: int) -> None:
        changed(server, owner)
        begun.set()

    monkeypatch.setattr(pauses, "REFUSED_BYTES_PER_S", 1)
    monkeypatch.setattr(RpcServer, "_on_pause", on_pause)
    return begun


def test_process_of_much_refused_is_paused(serve: Callable[[], Serving], paused: threading.Event) -> None:
    """It gets its error; what its other connections send waits for the end of the pause; other processes are served."""
    serving = serve()
    with RawPeer(serving.path) as faulty, RawPeer(serving.path) as other:
        assert other.ask(bye(1)) == Goodbye(id=1)
        faulty.socket.sendall(_TOO_LONG + bytes(REFUSED_BYTES_MIN))  # no more: what is not read may not fit anywhere
        refusal = faulty.reply()
        assert isinstance(refusal, ErrorReply)
        assert refusal.code == ErrorCode.OVERSIZE
        assert paused.wait(PATIENCE_S)
        other.send(bye(2))
        assert served_elsewhere(serving.path)
        assert 2 not in serving.handler.served
        serving.end_pause(os.getpid())
        assert other.reply() == Goodbye(id=2)


def test_process_that_loses_its_largest_message_is_paused(
    serve: Callable[[], Serving], paused: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are dropped for their size together count as refused."""
    monkeypatch.setattr(pauses, "REFUSED_BYTES_MIN", _MIB)
    monkeypatch.setattr(held_module, "HELD_BYTES_MAX", 2 * _MIB)
    serving = serve()
    with RawPeer(serving.path) as large, RawPeer(serving.path) as other:
        large.socket.sendall(b"\x03" + (3 * _MIB).to_bytes(8, "big") + bytes(2 * _MIB + 1))
        assert large.receive() is None
        assert paused.wait(PATIENCE_S)
        other.send(bye(1))
        assert served_elsewhere(serving.path)
        assert 1 not in serving.handler.served
        serving.end_pause(os.getpid())
        assert other.reply() == Goodbye(id=1)


def test_pause_ends_by_itself_and_loses_nothing(serve: Callable[[], Serving]) -> None:
    """The rest of the refused message is skipped behind the pause, and the message after it is served."""
    serving = serve()
    with RawPeer(serving.path) as peer:
        peer.socket.sendall(_TOO_LONG + bytes(FRAME_SIZE_BYTES_MAX + 1))
        peer.send(bye(3))
        assert isinstance(peer.reply(), ErrorReply)
        assert peer.reply() == Goodbye(id=3)


@pytest.mark.usefixtures("paused")
def test_small_mistake_is_not_paused_for(serve: Callable[[], Serving]) -> None:
    """A message that is refused for less than what one pause is for costs its process no time."""
    serving = serve()
    with RawPeer(serving.path) as peer:
        assert isinstance(peer.ask(b"\xc1"), ErrorReply)
        assert isinstance(peer.ask(bye(4), bytes(REFUSED_BYTES_MIN // 2)), ErrorReply)
        assert peer.ask(bye(5)) == Goodbye(id=5)


def test_process_of_many_refused_requests_is_paused(serve: Callable[[], Serving], paused: threading.Event) -> None:
    """Small messages that are no requests are answered, and so many of them pause their process and nobody else."""
    serving = serve()
    with RawPeer(serving.path) as faulty, RawPeer(serving.path) as other:
        assert other.ask(bye(1)) == Goodbye(id=1)
        count = REFUSED_BYTES_MIN // pauses.REFUSED_REQUEST_BYTES
        for _ in range(count):
            assert isinstance(faulty.ask(b"\xc1"), ErrorReply)
        assert paused.wait(PATIENCE_S)
        other.send(bye(2))
        assert served_elsewhere(serving.path)
        assert 2 not in serving.handler.served
        serving.end_pause(os.getpid())
        assert other.reply() == Goodbye(id=2)


@pytest.mark.parametrize("fault", list(Fault))
def test_refusals_by_the_service_count_where_they_are_the_peers_fault(
    fault: Fault, serve: Callable[[], Serving], paused: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the handler refuses for the request's sake counts; a full pool and a drain are no reason for a pause."""

    def refuse(_: Handler, __: bytes, request: Request, ___: list[bytes], respond: Callable[[Answer], None]) -> None:
        error = ErrorReply(id=request.id, code=ErrorCode.LIMIT, fault=fault, message="", fix="")
        respond(Answer(error))

    monkeypatch.setattr(Handler, "submit", refuse)
    serving = serve()
    with RawPeer(serving.path) as peer:
        for number in range(REFUSED_BYTES_MIN // pauses.REFUSED_REQUEST_BYTES):
            assert isinstance(peer.ask(bye(number)), ErrorReply)
        assert paused.is_set() is (fault in {Fault.CALLER, Fault.EPOCH})


@pytest.mark.usefixtures("paused")
def test_client_of_a_forgotten_prompt_is_not_paused(
    serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the daemon has forgotten a prompt, its client learns by this refusal alone, however often."""

    def forget(_: Handler, __: bytes, request: Request, ___: list[bytes], respond: Callable[[Answer], None]) -> None:
        code = ErrorCode.UNKNOWN_PREFIX
        respond(Answer(ErrorReply(id=request.id, code=code, fault=Fault.CALLER, message="", fix="")))

    monkeypatch.setattr(Handler, "submit", forget)
    with RawPeer(serve().path) as peer:
        for number in range(2 * REFUSED_BYTES_MIN // pauses.REFUSED_REQUEST_BYTES):
            assert isinstance(peer.ask(bye(number)), ErrorReply)


def test_refusals_of_a_process_count_over_its_connections(
    serve: Callable[[], Serving], paused: threading.Event
) -> None:
    """A process that closes its connection before it has sent too much goes on counting with the next one."""
    serving = serve()
    for _ in range(REFUSED_BYTES_MIN // pauses.REFUSED_REQUEST_BYTES):
        assert not paused.is_set()
        with RawPeer(serving.path) as peer:
            assert isinstance(peer.ask(b"\xc1"), ErrorReply)
    assert paused.wait(PATIENCE_S)


def test_process_whose_connection_is_cut_off_is_paused(serve: Callable[[], Serving], paused: threading.Event) -> None:
    """What is no ZMTP costs its process a pause: the next connection would cost the daemon a handshake."""
    serving = serve()
    with RawPeer(serving.path) as other, RawPeer(serving.path) as faulty:
        assert other.ask(bye(1)) == Goodbye(id=1)
        faulty.socket.sendall(b"\xff" * 64)
        assert faulty.receive() is None
        assert paused.wait(PATIENCE_S)
        other.send(bye(2))
        assert served_elsewhere(serving.path)
        assert 2 not in serving.handler.served
        serving.end_pause(os.getpid())
        assert other.reply() == Goodbye(id=2)


def test_processes_whose_refusals_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more processes than that, those whose last refusal is longest ago begin anew."""
    monkeypatch.setattr(pauses, "OWNERS_MAX", 2)
    remembered = pauses.Pauses(lambda _: None)
    for owner in (1, 2, 1, 3):
        remembered.refuse(cast("Connection", SimpleNamespace(owner=owner)), 5)

    assert dict(remembered._refused) == {1: 10, 3: 5}
