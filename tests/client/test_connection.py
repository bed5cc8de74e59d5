"""The client's end of the RPC socket: whole messages, whatever the kernel takes and gives at a time."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from kvcached_client import DaemonUnreachable
from kvcached_client.protocol.zmtp import GREETING, ROUTER, Message, Reader, encode_message
from kvcached_client.transport.connection import Connection

_PATIENCE_MS = 20_000
_MESSAGES_MAX = 100


class Ends(NamedTuple):
    """A connection, and the daemon's end of it."""

    client: Connection
    daemon: socket.socket

    def shake_hands(self) -> None:
        """Let the client know that it was accepted."""
        self.daemon.sendall(GREETING + ROUTER.ready)
        assert self.receive() == []
        assert self.client.is_ready

    def receive(self) -> list[Message]:
        """What the client receives once something has arrived."""
        poller = select.poll()
        poller.register(self.client.fileno(), self.client.events)
        assert poller.poll(_PATIENCE_MS)
        return self.client.receive()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """Both ends, before the handshake."""
    path = str(tmp_path / "rpc.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = Connection(path, deadline_ms=_PATIENCE_MS)
        accepted, _ = listener.accept()
        with closing(client), accepted:
            yield Ends(client, accepted)


def _read_all(daemon: socket.socket, reader: Reader, count: int) -> list[list[bytes]]:
    """So many messages of a client."""
    messages: list[list[bytes]] = []
    while len(messages) < count:
        messages += [each.parts for each in reader.read(daemon.recv(1 << 20), _MESSAGES_MAX)]
        while reader.has_more:
            messages += [each.parts for each in reader.read(b"", _MESSAGES_MAX)]
    return messages


def test_message_that_the_socket_does_not_take_at_once_arrives_whole(ends: Ends) -> None:
    """The rest of a large message is kept; no other message is taken before it has left."""
    ends.shake_hands()
    large, reader = [b"header", bytes(3 << 20)], Reader()
    assert ends.client.send(large)
    assert ends.client.events & select.POLLOUT
    assert not ends.client.send([b"next"])

    ends.daemon.settimeout(_PATIENCE_MS / 1000)
    came: list[list[bytes]] = []
    while not came:
        came += [each.parts for each in reader.read(ends.daemon.recv(1 << 20), _MESSAGES_MAX)]
        ends.client.flush()
    assert came == [large]
    assert ends.client.events == select.POLLIN
    assert ends.client.send([b"next"])
    assert _read_all(ends.daemon, reader, 1) == [[b"next"]]


def test_nothing_is_sent_before_the_daemon_has_accepted(ends: Ends) -> None:
    """A request waits for the daemon's part of the handshake."""
    assert not ends.client.send([b"early"])
    ends.shake_hands()
    assert ends.client.send([b"now"])


def test_messages_that_arrive_together_come_out_one_by_one(ends: Ends) -> None:
    """Hundreds of replies, more than one receive takes, are received at one look, in their order."""
    ends.shake_hands()
    replies = [[b"%d" % number, bytes(500)] for number in range(300)]
    ends.daemon.sendall(b"".join(map(encode_message, replies)))

    assert [message.parts for message in ends.receive()] == replies


def test_replies_from_before_the_end_are_not_lost(ends: Ends) -> None:
    """What the daemon has sent before it closes is received, and then that it has closed."""
    ends.shake_hands()
    ends.daemon.sendall(encode_message([b"last"]))
    ends.daemon.close()

    assert [message.parts for message in ends.receive()] == [[b"last"]]
    assert ends.receive() == []
    assert ends.client.is_over
    assert not ends.client.send([b"too late"])


def test_sending_to_a_daemon_that_is_gone_is_the_end(ends: Ends) -> None:
    """A message for nobody is not taken."""
    ends.shake_hands()
    ends.daemon.close()
    assert not ends.client.send([b"too late"])
    assert ends.client.is_over


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n", GREETING + b"\x04\x06\x05HELLO"])
def test_other_protocols_are_the_end(ends: Ends, data: bytes) -> None:
    """Whoever listens and is no daemon is not listened to."""
    ends.daemon.sendall(data)
    assert ends.receive() == []
    assert ends.client.is_over


def test_nobody_listens(tmp_path: Path) -> None:
    """Without a listener there is no connection."""
    with pytest.raises(DaemonUnreachable, match="no socket"):
        Connection(str(tmp_path / "rpc.sock"), deadline_ms=_PATIENCE_MS)


def test_full_listener_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """A listener that accepts nobody is unreachable after the deadline, and says who listens."""
    path = str(tmp_path / "rpc.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with pytest.raises(DaemonUnreachable, match="accepted no request for 50 ms"):
            Connection(path, deadline_ms=50)


def test_router_of_libzmq_is_understood(tmp_path: Path) -> None:
    """Client and libzmq's ROUTER speak the same protocol: the handshake, messages of both lengths, both ways."""
    path = str(tmp_path / "rpc.sock")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{path}")
        with closing(Connection(path, deadline_ms=_PATIENCE_MS)) as client:
            poller = select.poll()
            poller.register(client.fileno(), select.POLLIN)
            while not client.is_ready:
                assert poller.poll(_PATIENCE_MS)
                assert client.receive() == []
            assert client.send([b"header", bytes(1000)])
            assert router.poll(_PATIENCE_MS)
            peer, *parts = router.recv_multipart()
            assert parts == [b"header", bytes(1000)]
            router.send_multipart([peer, b"reply", bytes(100_000)])
            messages: list[Message] = []
            while not messages:
                assert poller.poll(_PATIENCE_MS)
                messages += client.receive()
            assert messages[0].parts == [b"reply", bytes(100_000)]
