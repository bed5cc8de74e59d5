"""The TCP port of one server: whom it lets in, what they may do there, and peers that say nothing or what they like."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvcached.config.tcp import TcpConfig
from kvcached.process.access import ROLES_OF_VERB, Role
from kvcached.server import connections
from kvcached.server import tcp as tcp_module
from kvcached.server.tcp import TcpDoor
from kvcached_client import Admin, DaemonUnreachable, RequestError
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol.curve import KeyPair, new_pair, pair_of
from kvcached_client.protocol.engine import (
    Drain,
    ErrorReply,
    Explain,
    Goodbye,
    Heartbeat,
    Stats,
    StorageControl,
    encode,
)
from kvcached_client.protocol.key_files import key_text, read_key_file, write_key_file
from kvcached_client.protocol.zmtp import GREETING
from tests.rpc.curve_peer import CurvePeer, zeromq
from tests.rpc.raw_peer import READY
from tests.rpc.test_server import Serving

SERVER, LOOKER, OPERATOR = new_pair(), new_pair(), new_pair()
REQUEST = encode(Stats(id=7))


class Port(Serving):
    """A server at a port of loopback."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        key_file = directory / "daemon.key"
        write_key_file(key_file, SERVER.secret)
        clients = [
            {"name": "dashboard", "public_key": key_text(LOOKER.public), "role": "look"},
            {"name": "ops", "public_key": key_text(OPERATOR.public), "role": "operate"},
        ]
        listen = f"127.0.0.1:{self.port}"
        self.config = TcpConfig.model_validate({"listen": listen, "key_file": str(key_file), "client": clients})
        super().__init__(directory, door=lambda: TcpDoor(self.config))

    def peer(self, keys: KeyPair, server: KeyPair = SERVER) -> CurvePeer:
        return CurvePeer(self.port, keys, server.public)

    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], Port]]:
    """Starts a server, with the limits that the test has set."""
    with contextlib.ExitStack() as stack:

        def start() -> Port:
            port = Port(tmp_path)
            port.start()
            stack.callback(port.stop)
            return port

        yield start


@pytest.fixture
def port(serve: Callable[[], Port]) -> Port:
    """A server with the usual limits."""
    return serve()


def test_key_that_looks_gets_reports_and_changes_nothing(port: Port) -> None:
    """A key with the role look sends what looks; what changes something is refused with the table to change."""
    with port.peer(LOOKER) as peer:
        assert peer.shake_hands()
        assert isinstance(peer.ask(REQUEST), Goodbye)
        assert isinstance(peer.ask(encode(Explain(id=8, tokens=1)), b"\0" * 16), Goodbye)
        assert isinstance(peer.ask(encode(StorageControl(id=9, action="status"))), Goodbye)
        refused = peer.ask(encode(Drain(id=10)))
        assert isinstance(refused, ErrorReply)
        assert (refused.code, refused.id) == (ErrorCode.FORBIDDEN, 10)
        assert "key 'dashboard' has look" in refused.message
        assert "[[tcp.client]]" in refused.fix
    assert port.handler.served == [7, 8, 9]


def test_key_that_operates_looks_and_changes(port: Port) -> None:
    """A key with the role operate may do what users with it may."""
    with port.peer(OPERATOR) as peer:
        assert peer.shake_hands()
        assert isinstance(peer.ask(REQUEST), Goodbye)
        assert isinstance(peer.ask(encode(Drain(id=8))), Goodbye)


def test_no_key_is_an_engine(port: Port) -> None:
    """What engines alone may send is refused over TCP to every key, with where to run the engine instead."""
    for keys in (LOOKER, OPERATOR):
        with port.peer(keys) as peer:
            assert peer.shake_hands()
            refused = peer.ask(encode(Heartbeat(id=3, session=1, token=bytes(32))))
            assert isinstance(refused, ErrorReply)
            assert refused.code == ErrorCode.FORBIDDEN
            assert "daemon's machine" in refused.message
            assert "run the engine on that machine" in refused.fix
    assert port.handler.served == []
    assert all(
        grants.roles <= {Role.OPERATE, Role.LOOK}
        for _, grants, _ in TcpDoor(port.config)._clients.values()
    )  # fmt: skip
    assert any(roles == {Role.ENGINE} for roles in ROLES_OF_VERB.values())


def test_zeromqs_own_client_is_served(port: Port) -> None:
    """A plain DEALER with CURVE, as any language has it, asks and is answered."""
    with zmq.Context() as context, zeromq(context, zmq.DEALER, LOOKER, SERVER.public) as dealer:
        dealer.connect(port.endpoint())
        dealer.send_multipart([REQUEST])
        assert dealer.recv_multipart()


def test_unknown_key_is_refused_in_the_handshake_and_counted(port: Port, tmp_path: Path) -> None:
    """A key that is not in the list gets no connection; the SDK says which public key is missing, and where."""
    strange = tmp_path / "strange.key"
    write_key_file(strange, new_pair().secret)

    admin = Admin.connect(port.endpoint(), server_key=key_text(SERVER.public), key_file=strange)
    with admin, pytest.raises(RequestError) as refused:
        admin.stats()

    assert refused.value.code is ErrorCode.UNAUTHENTICATED
    assert key_text(pair_of(read_key_file(strange)).public) in refused.value.message
    port.handler.wait_for(lambda: port.handler.counters["tcp_unknown_keys"] == 1)
    assert port.handler.served == []


def test_client_of_another_daemons_key_is_not_served(port: Port, tmp_path: Path) -> None:
    """A client that expects another daemon sends nothing but a HELLO, and the SDK asks whether the key is right."""
    own = tmp_path / "own.key"
    write_key_file(own, LOOKER.secret)

    admin = Admin.connect(port.endpoint(), server_key=key_text(OPERATOR.public), key_file=own)
    with admin, pytest.raises(DaemonUnreachable, match=r"is .* its public key"):
        admin.stats()

    port.handler.wait_for(lambda: port.handler.counters["tcp_violations"] >= 1)
    assert port.handler.served == []


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\udcff"])
def test_host_that_no_resolver_takes_is_no_endpoint(host: str, tmp_path: Path) -> None:
    """An endpoint whose host has an empty or too long part, or is no text, is refused as a bad value."""
    key_file = tmp_path / "key"
    write_key_file(key_file, LOOKER.secret)

    with pytest.raises(RequestError, match="is no endpoint") as refused:
        Admin.connect(f"tcp://{host}:9420", server_key=key_text(SERVER.public), key_file=key_file, deadline_ms=1000)

    assert refused.value.code == ErrorCode.BAD_VALUE


def test_key_of_zeros_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """Text that Z85 allows and that is no key of the curve is refused as a bad value, and nobody is connected to."""
    key_file = tmp_path / "key"
    write_key_file(key_file, LOOKER.secret)

    with pytest.raises(RequestError, match=r"the daemon's key '0{40}' is none") as refused:
        Admin.connect("tcp://127.0.0.1:1", server_key="0" * 40, key_file=key_file, deadline_ms=1000)

    assert refused.value.code == ErrorCode.BAD_VALUE


def test_nothing_is_served_in_the_clear(port: Port) -> None:
    """A peer that speaks as on the local socket gets the greeting, and then the end of its connection."""
    with socket.create_connection(("127.0.0.1", port.port), timeout=20) as peer:
        peer.sendall(GREETING + READY)
        heard = b""
        while data := peer.recv(1024):
            heard += data
    assert b"CURVE" in heard
    assert b"NULL" not in heard
    port.handler.wait_for(lambda: port.handler.counters["tcp_violations"] == 1)


def test_recorded_connection_is_not_served_again(port: Port) -> None:
    """All bytes of a connection, sent once more, let nobody in and ask nothing."""
    with port.peer(OPERATOR) as peer:
        assert peer.shake_hands()
        assert peer.ask(encode(Drain(id=8)))
        recorded = list(peer.sent)
    with socket.create_connection(("127.0.0.1", port.port), timeout=20) as thief, contextlib.suppress(ConnectionError):
        thief.sendall(b"".join(recorded))
        while thief.recv(65_536):
            pass
    assert port.handler.served == [8]


@pytest.mark.full
def test_repeated_and_changed_boxes_end_the_connection(port: Port) -> None:
    """A box that comes twice, or is not as it was made, is no request; others are served meanwhile."""
    generator = random.Random(3)
    with port.peer(LOOKER) as other:
        assert other.shake_hands()
        for round_ in range(20):
            with port.peer(LOOKER) as peer:
                assert peer.shake_hands()
                box = bytearray(peer.reader.seal([REQUEST]))
                if round_:
                    box[generator.randrange(2, len(box))] ^= 1 + generator.randrange(255)
                peer.send_bytes(bytes(box) * 2)
                assert peer.is_closed()
            assert isinstance(other.ask(REQUEST), Goodbye)
    assert port.handler.counters["tcp_violations"] == 20
    assert len(port.handler.served) == 21
    assert port.held_bytes() == 0


def test_silent_peers_lose_their_connections(serve: Callable[[], Port], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not end its handshake in time is dropped, wherever in it that is."""
    monkeypatch.setattr(connections, "HALF_OPEN_S_MAX", 0.05)
    port = serve()
    with port.peer(LOOKER) as halfway, socket.create_connection(("127.0.0.1", port.port), timeout=20) as silent:
        while silent.recv(1024):
            pass
        while halfway.socket.recv(1024):
            pass


@pytest.mark.full
def test_silent_peers_have_few_places(serve: Callable[[], Port], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred connections that say nothing have no more places than there are for such, and a key gets in."""
    monkeypatch.setattr(connections, "HALF_OPEN_MAX", 4)
    port = serve()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port.port), timeout=20))
        peer = stack.enter_context(port.peer(LOOKER))
        assert peer.shake_hands()
        assert isinstance(peer.ask(REQUEST), Goodbye)


def test_key_has_a_share_of_the_places(serve: Callable[[], Port], monkeypatch: pytest.MonkeyPatch) -> None:
    """One key cannot take all places: it is told so, and another one gets in."""
    monkeypatch.setattr(tcp_module, "CONNECTIONS_MAX", 32)
    port = serve()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(port.peer(LOOKER)) for _ in range(9)]
        assert all(peer.shake_hands() for peer in peers)
        replies = [peer.ask(REQUEST) for peer in peers]
        refused = [reply for reply in replies if isinstance(reply, ErrorReply)]
        assert [reply.code for reply in refused] == [ErrorCode.LIMIT]
        assert "key 'dashboard' has 8 connections" in refused[0].message
        operator = stack.enter_context(port.peer(OPERATOR))
        assert operator.shake_hands()
        assert isinstance(operator.ask(REQUEST), Goodbye)


def test_dead_machines_are_noticed(port: Port) -> None:
    """The kernel asks silent peers whether they are there, and gives up on one that takes no bytes."""
    one, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with one, other:
        other.connect(one.getsockname())
        accepted, _ = one.accept()
        with accepted:
            TcpDoor(port.config).take_in(accepted, 1)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


def test_strangers_of_one_network_share_their_places() -> None:
    """Addresses of IPv6 count by their network, those of IPv4 one by one."""

    class Stranger(socket.socket):
        def getpeername(self) -> tuple[str, int]:
            return self.at, 1

        at = ""

    def user(address: str) -> str:
        with Stranger() as stranger:
            stranger.at = address
            return str(tcp_module._stranger(stranger).origin.user)

    assert user("2001:db8::1") == user("2001:db8::2%eth0") != user("2001:db8:0:1::1")
    assert user("192.0.2.1") != user("192.0.2.2")
    assert user("::ffff:192.0.2.1") != user("::ffff:192.0.2.2")
