"""CURVE of both ends: with each other and with ZeroMQ's own sockets, cut, changed, repeated, and with wrong keys."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvcached_client.protocol.curve import CurveClient, CurveReader, CurveServer, KeyPair, NotLetIn, new_pair, pair_of
from kvcached_client.protocol.engine import FRAME_SIZE_BYTES_MAX
from kvcached_client.protocol.greeting import greeting
from kvcached_client.protocol.key_files import key_of
from kvcached_client.protocol.zmtp import COMMAND, FRAMES_PER_TURN_MAX, GREETING, Message, frame
from tests.rpc.curve_peer import zeromq

SERVER, CLIENT = new_pair(), new_pair()
MESSAGES_MAX = 1 << 20
LARGE = random.Random(1).randbytes(300_000)


def server(*known: KeyPair) -> CurveServer:
    return CurveServer(SERVER, {pair.public for pair in known or (CLIENT,)}.__contains__)


def said(reader: CurveReader) -> bytes:
    commands = b"".join(reader.commands)
    reader.commands.clear()
    return commands


def shake_hands(client: CurveClient, daemon: CurveServer) -> None:
    """Pass on what both say until neither says anything."""
    to_daemon, to_client = client.hello, daemon.greeting
    while to_daemon or to_client:
        daemon.read(to_daemon, MESSAGES_MAX)
        client.read(to_client, MESSAGES_MAX)
        to_daemon, to_client = said(client), said(daemon)


@pytest.fixture
def pair() -> tuple[CurveClient, CurveServer]:
    """Two ends that know each other."""
    client, daemon = CurveClient(CLIENT, SERVER.public), server()
    shake_hands(client, daemon)
    assert client.is_ready
    assert daemon.is_ready
    return client, daemon


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """For ZeroMQ's own sockets."""
    with zmq.Context() as made:
        yield made


def until(connection: socket.socket, reader: CurveReader, reached: Callable[[], bool]) -> list[Message]:
    """Read, and answer, until something is so; what has come meanwhile."""
    messages: list[Message] = []
    while not reached():
        messages += reader.read(connection.recv(65_536), MESSAGES_MAX)
        assert reader.violation is None
        connection.sendall(said(reader))
        if messages:
            break
    return messages


def test_zeromqs_own_client_talks_to_the_daemons_end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """A plain DEALER with CURVE shakes hands, sends a message of several parts, and understands the answer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        zeromq(context, zmq.DEALER, CLIENT, SERVER.public) as dealer,
    ):
        dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            daemon = server()
            connection.sendall(daemon.greeting)
            dealer.send_multipart([b"question", LARGE, b""])
            (message,) = until(connection, daemon, lambda: False)
            connection.sendall(daemon.seal([b"answer", LARGE]))
            assert message.parts == [b"question", LARGE, b""]
            assert dealer.recv_multipart() == [b"answer", LARGE]


def test_clients_end_talks_to_zeromqs_own_server(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """The SDK's end shakes hands with a plain ROUTER with CURVE, is understood, and understands."""
    with zeromq(context, zmq.ROUTER, SERVER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            client = CurveClient(CLIENT, SERVER.public)
            connection.sendall(client.hello)
            until(connection, client, lambda: client.is_ready)
            connection.sendall(client.seal([b"question", LARGE]))
            peer, *parts = router.recv_multipart()
            router.send_multipart([peer, b"answer"])
            assert parts == [b"question", LARGE]
            assert until(connection, client, lambda: False) == [Message([b"answer"])]


def test_public_key_is_what_zeromq_makes_of_the_secret() -> None:
    """A pair of a secret key is ZeroMQ's, too."""
    public, secret = (key_of(text.decode()) for text in zmq.curve_keypair())

    assert pair_of(secret) == KeyPair(secret, public)


def test_messages_arrive_however_the_stream_is_cut() -> None:
    """One byte at a time, or all at once, both handshake and messages come out the same."""
    for step in (1, 7, 1 << 20):
        client, daemon = CurveClient(CLIENT, SERVER.public), server()
        messages: list[Message] = []

        def feed(data: bytes, step: int = step, daemon: CurveServer = daemon, into: list[Message] = messages) -> None:
            for at in range(0, len(data), step):
                into += daemon.read(data[at : at + step], 1)
                while daemon.has_more:
                    into += daemon.read(b"", 1)

        feed(client.hello)
        client.read(daemon.greeting + said(daemon), MESSAGES_MAX)
        feed(said(client))
        client.read(said(daemon), MESSAGES_MAX)
        feed(client.seal([b"a", LARGE[:400]]) + client.seal([b"b"]))
        assert messages == [Message([b"a", LARGE[:400]]), Message([b"b"])]
        assert daemon.held_bytes == 0


def test_key_that_is_not_known_is_told_so_and_proves_nothing() -> None:
    """An unknown client is refused at its INITIATE with ZeroMQ's 400, and its end says that it is not let in."""
    client, daemon = CurveClient(new_pair(), SERVER.public), server()

    shake_hands(client, daemon)

    assert isinstance(daemon.violation, NotLetIn)
    assert isinstance(client.violation, NotLetIn)
    assert not daemon.is_ready


def test_client_of_another_servers_key_hears_nothing() -> None:
    """Who does not know the daemon's key gets no answer to its HELLO."""
    client, daemon = CurveClient(CLIENT, new_pair().public), server()

    shake_hands(client, daemon)

    assert daemon.violation is not None
    assert not isinstance(daemon.violation, NotLetIn)
    assert said(daemon) == b""


def test_client_does_not_take_another_for_the_daemon() -> None:
    """A server with another key cannot make a WELCOME that the client opens."""
    client, other = CurveClient(CLIENT, SERVER.public), CurveServer(new_pair(), lambda _: True)
    other._keys = KeyPair(other._keys.secret, SERVER.public)  # it claims to be the daemon

    shake_hands(client, other)

    assert other.violation is not None
    assert not client.is_ready


@pytest.mark.parametrize("first", [GREETING, greeting(b"PLAIN"), b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\x16\x03\x01"])
def test_nothing_but_curve_is_spoken(first: bytes) -> None:
    """A peer with another mechanism, or another protocol, is cut off at its greeting; NULL is no way in."""
    daemon = server()

    daemon.read(first, 1)

    assert daemon.violation is not None
    assert daemon.commands == []


def test_message_before_the_handshakes_end_is_a_violation() -> None:
    """Nothing that is not in a box of this connection is read as a message."""
    for flags in (0, COMMAND):
        daemon = server()
        daemon.read(greeting(b"CURVE") + frame(flags, b"\x07MESSAGE" + bytes(40)), 1)
        assert daemon.violation is not None


def test_public_key_of_low_order_is_refused() -> None:
    """A key of this connection that makes the shared key known to everybody is a violation."""
    daemon, hello = server(), bytearray(CurveClient(CLIENT, SERVER.public).hello)
    at = hello.index(b"\x05HELLO") + 6 + 2 + 72
    hello[at : at + 32] = bytes(32)

    daemon.read(bytes(hello), 1)

    assert daemon.violation is not None


def test_changed_box_is_a_violation(pair: tuple[CurveClient, CurveServer]) -> None:
    """A single changed bit of a message, wherever it is, ends the connection, and no message comes out."""
    client, daemon = pair
    sealed = client.seal([b"question"])
    for at in range(2, len(sealed)):
        copy = server()
        copy.is_ready = copy._is_greeted = True
        copy._key, copy._heard = daemon._key, daemon._heard
        copy._inner.read(GREETING + frame(COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"), 1)
        changed = bytearray(sealed)
        changed[at] ^= 1 << (at % 8)
        assert copy.read(bytes(changed), MESSAGES_MAX) == []
        assert copy.violation is not None, at


def test_message_that_comes_again_is_a_violation(pair: tuple[CurveClient, CurveServer]) -> None:
    """A recorded message is taken once."""
    client, daemon = pair
    sealed = client.seal([b"drain"])

    assert daemon.read(sealed, MESSAGES_MAX) == [Message([b"drain"])]
    assert daemon.read(sealed, MESSAGES_MAX) == []
    assert daemon.violation is not None


def test_recorded_connection_opens_nothing() -> None:
    """All that a client has said, said again to the same daemon, ends in the handshake."""
    client, daemon = CurveClient(CLIENT, SERVER.public), server()
    daemon.read(client.hello, 1)
    client.read(daemon.greeting + said(daemon), 1)
    initiate = said(client)
    daemon.read(initiate, 1)
    assert daemon.is_ready

    again = server()
    again.read(client.hello + initiate, MESSAGES_MAX)

    assert not again.is_ready
    assert again.violation is not None


def test_mutated_handshakes_let_nobody_in() -> None:
    """Of thousands of handshakes with changed, cut and repeated bytes none ends in a connection, and none raises."""
    generator = random.Random(7)
    for _ in range(2000):
        client, daemon = CurveClient(CLIENT, SERVER.public), server()
        data = bytearray(client.hello)
        at = generator.randrange(len(data))
        match generator.randrange(3):
            case 0 if at not in range(12, 64):
                data[at] ^= 1 + generator.randrange(255)
            case 1:
                del data[at : at + 1 + generator.randrange(9)]
            case _:
                data[at:at] = data[at : at + 64]
        daemon.read(bytes(data), MESSAGES_MAX)
        assert not daemon.is_ready
        assert daemon.held_bytes < 2048


def test_frame_that_is_too_large_is_not_kept(pair: tuple[CurveClient, CurveServer]) -> None:
    """A box beyond the size of a part ends the connection before anything of it is kept."""
    _, daemon = pair

    daemon.read(b"\x02" + (FRAME_SIZE_BYTES_MAX + 100).to_bytes(8, "big") + bytes(1000), 1)

    assert daemon.violation is not None


def test_small_boxes_are_opened_a_few_at_a_time(pair: tuple[CurveClient, CurveServer]) -> None:
    """A turn opens so many boxes and no more; what has come is not lost."""
    client, daemon = pair
    count = 3 * FRAMES_PER_TURN_MAX
    data = b"".join(client.seal([b""]) for _ in range(count))

    messages = daemon.read(data, MESSAGES_MAX)

    assert len(messages) == FRAMES_PER_TURN_MAX
    assert daemon.has_more
    while daemon.has_more:
        messages += daemon.read(b"", MESSAGES_MAX)
    assert len(messages) == count


def test_ping_in_a_box_is_answered_in_one(pair: tuple[CurveClient, CurveServer]) -> None:
    """Heartbeats of ZeroMQ work within boxes."""
    client, daemon = pair

    daemon.read(client._seal(2, b"\x04PING\x00\x0ax"), MESSAGES_MAX)
    answer = said(daemon)

    assert answer
    assert client.read(answer, MESSAGES_MAX) == []
    assert client.violation is None
