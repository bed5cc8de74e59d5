"""The RPC socket of one server: ZeroMQ's own sockets, connections beyond the limits, and peers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from kvcached.process.access import Access
from kvcached.server import connections
from kvcached.server import held as held_module
from kvcached.server import listener as listener_module
from kvcached.server import local as local_module
from kvcached.server import rpc as server_module
from kvcached.server.connection import Connection, Door
from kvcached.server.local import LocalDoor
from kvcached.server.rpc import RpcServer
from kvcached.service.pending import Answer
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol.engine import Bye, ErrorReply, Explain, Goodbye, Request, decode_reply, encode
from kvcached_client.protocol.zmtp import GREETING, encode_message
from tests.rpc.raw_peer import PATIENCE_S, READY, RawPeer, frame

LARGE = bytes(300_000)


class Handler:
    """Answers every request at once; an `Explain` with a large frame. `Bye(reply=False)` does not exist, so all are."""

    def __init__(self) -> None:
        self.served: list[int] = []
        self.counters: Counter[str] = Counter()
        self.changed = threading.Condition()

    def submit(self, _: bytes, request: Request, __: list[bytes], respond: Callable[[Answer], None]) -> None:
        with self.changed:
            self.served.append(request.id)
            self.changed.notify_all()
        respond(Answer(Goodbye(id=request.id), (LARGE,) if isinstance(request, Explain) else ()))

    def refused(self, error: RequestError) -> RequestError:
        return error

    def count(self, what: str) -> None:
        with self.changed:
            self.counters[what] += 1
            self.changed.notify_all()

    def wait_for(self, reached: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(reached, PATIENCE_S)


class Serving:
    """A server in a loop of its own thread."""

    def __init__(self, path: Path, access: Access | None = None, door: Callable[[], Door] | None = None) -> None:
        self.path = path
        self._door = door or partial(LocalDoor, path, access or Access())
        self.handler = Handler()
        self.server: RpcServer | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.server = RpcServer(self._door(), self.handler)
        self.server.start(self._loop)
        self._started.set()
        await self._ended.wait()
        self.server.serve_rest()
        self.server.close()

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)

    def held_bytes(self) -> int:
        """What the server holds of its peers' messages and replies, as its own thread sees it."""

        async def ask() -> int:
            assert self.server is not None
            return self.server._held.total

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(PATIENCE_S)

    def end_pause(self, owner: int) -> None:
        """End the pause of a process."""

        async def end() -> None:
            assert self.server is not None
            self.server._pauses._timers[owner].cancel()
            self.server._pauses._end(owner)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()


@contextlib.contextmanager
def held(serving: Serving) -> Iterator[None]:
    """The server's loop sees nothing of what happens in here before its end."""
    is_held, released = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        released.wait(PATIENCE_S)

    serving._loop.call_soon_threadsafe(hold)
    assert is_held.wait(PATIENCE_S)
    try:
        yield
    finally:
        released.set()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], Serving]]:
    """Starts a server, with the limits that the test has set."""
    with contextlib.ExitStack() as stack:

        def start() -> Serving:
            serving = Serving(tmp_path / "rpc.sock")
            serving.start()
            stack.callback(serving.stop)
            return serving

        yield start


def bye(number: int) -> bytes:
    return encode(Bye(id=number))


EXPLAIN = encode(Explain(id=1, replica="r", tokens=1))


def is_served(serving: Serving) -> bool:
    """Whether a new peer gets its answer."""
    with RawPeer(serving.path) as peer:
        peer.send(bye(77))
        return isinstance(peer.reply(), Goodbye)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.ROUTER])
def test_zeromqs_own_sockets_are_served(serve: Callable[[], Serving], kind: int) -> None:
    """A DEALER with an identity of its own and with heartbeats, and a ROUTER, get their replies, large ones too."""
    serving = serve()
    context = zmq.Context[zmq.Socket[bytes]]()
    peer = context.socket(kind)
    peer.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
    peer.setsockopt(zmq.HEARTBEAT_IVL, 5)
    peer.setsockopt(zmq.HEARTBEAT_TIMEOUT, PATIENCE_S * 1000)
    to = []
    if kind == zmq.ROUTER:
        peer.setsockopt(zmq.CONNECT_ROUTING_ID, b"daemon")
        peer.setsockopt(zmq.ROUTER_MANDATORY, 1)
        to = [b"daemon"]
    else:
        peer.setsockopt(zmq.ROUTING_ID, b"chosen")
    connected = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    peer.connect(f"ipc://{serving.path}")
    assert connected.poll(PATIENCE_S * 1000)
    for number in range(200):
        peer.send_multipart([*to, bye(number)])
    peer.send_multipart([*to, EXPLAIN, bytes(16)])
    came = [peer.recv_multipart()[len(to) :] for _ in range(201)]

    assert [decode_reply(parts[0]).id for parts in came[:200]] == list(range(200))
    assert came[200][1] == LARGE
    peer.disable_monitor()
    connected.close()
    peer.close(linger=0)
    context.term()


def test_silent_peers_are_dropped_in_time(serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a whole handshake a connection is dropped when its time is over; one that is idle behind it stays."""
    monkeypatch.setattr(connections, "HALF_OPEN_S_MAX", 0.05)
    serving = serve()
    with (
        RawPeer(serving.path) as idle,
        RawPeer(serving.path, shakes_hands=False) as silent,
        RawPeer(serving.path, shakes_hands=False) as slow,
    ):
        slow.socket.sendall(GREETING)
        assert silent.receive() is None
        assert slow.receive() is None
        idle.send(bye(1))
        assert idle.reply() == Goodbye(id=1)


def test_flood_of_silent_peers_loses_its_own(serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred silent connections hold no more places than there are for such, and a new peer is served meanwhile."""
    monkeypatch.setattr(connections, "HALF_OPEN_MAX", 4)
    serving = serve()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(RawPeer(serving.path, shakes_hands=False)) for _ in range(100)]
        assert is_served(serving)
        assert all(each.receive() is None for each in silent[:90])


def test_after_a_fault_few_connect_for_a_moment(serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is cut off and others that connect wait; who is connected is served."""
    monkeypatch.setattr(listener_module, "FAULT_PAUSE_S", 1000)
    serving = serve()
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(RawPeer(serving.path))
        good.send(bye(1))
        assert good.reply() == Goodbye(id=1)
        with RawPeer(serving.path, shakes_hands=False) as faulty:
            faulty.socket.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(64))
            assert faulty.receive() is None
        with held(serving):
            for _ in range(2 * listener_module.ACCEPTS_PER_TURN_MAX):
                stack.enter_context(RawPeer(serving.path)).send(bye(2))
        serving.handler.wait_for(lambda: serving.handler.served.count(2) == listener_module.ACCEPTS_PER_TURN_MAX)
        good.send(bye(3))
        assert good.reply() == Goodbye(id=3)
        assert serving.handler.served.count(2) == listener_module.ACCEPTS_PER_TURN_MAX


def test_connections_of_one_process_take_turns(serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that always has something to be read gets every other turn of its process."""
    turns: list[bytes] = []
    take_turn = RpcServer._take_turn

    def recorded(server: RpcServer, connection: Connection) -> int:
        turns.append(connection.peer)
        return take_turn(server, connection)

    serving = serve()
    with RawPeer(serving.path) as busy, RawPeer(serving.path) as other:
        for peer in (busy, other):
            peer.send(bye(1))
            assert peer.reply() == Goodbye(id=1)
        monkeypatch.setattr(RpcServer, "_take_turn", recorded)
        with held(serving):
            busy.socket.sendall(encode_message([bytes(150_000)])[:-1])
            other.send(bye(2))
        assert other.reply() == Goodbye(id=2)
        assert turns.index((2).to_bytes(8, "big")) <= 1


def test_process_with_too_many_connections_is_told_so(
    serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request beyond the limit gets `limit` under its own id, and there is room again when one closes."""
    monkeypatch.setattr(connections, "_PER_PROCESS_MIN", 3)
    monkeypatch.setattr(local_module, "CONNECTIONS_MAX", 8)
    serving = serve()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(serving.path)) for _ in range(3)]
        for peer in peers:
            peer.send(bye(1))
            assert peer.reply() == Goodbye(id=1)
        with RawPeer(serving.path) as fourth:
            fourth.send(bye(9))
            refusal = fourth.reply()
            assert isinstance(refusal, ErrorReply)
            assert (refusal.id, refusal.code) == (9, ErrorCode.LIMIT)
            assert fourth.receive() is None
        peers[0].socket.close()
        serving.handler.wait_for(lambda: serving.handler.counters["disconnects"] >= 2)
        assert is_served(serving)


def test_peer_that_does_not_read_is_not_read_from(serve: Callable[[], Serving]) -> None:
    """Its replies wait in no memory of the daemon beyond a turn's; when it reads, it gets every one."""
    serving = serve()
    with RawPeer(serving.path) as peer:
        peer.socket.sendall(encode_message([EXPLAIN, bytes(16)]) * 200)
        serving.handler.wait_for(lambda: len(serving.handler.served) >= 1)
        assert is_served(serving)
        assert serving.held_bytes() <= server_module.MESSAGES_PER_TURN_MAX * (len(LARGE) + 100) + 65_536
        assert len(serving.handler.served) < 100
        assert all((peer.receive() or [])[1] == LARGE for _ in range(200))
    serving.stop()
    assert serving.handler.counters["dropped_replies"] == 0


def test_unfinished_messages_share_a_bound(serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """When unfinished messages are too much together, the largest of them is cut off, and others are served."""
    monkeypatch.setattr(held_module, "HELD_BYTES_MAX", 100_000)
    serving = serve()
    with RawPeer(serving.path) as small, RawPeer(serving.path) as large:
        small.socket.sendall(frame(1, bye(1)))
        large.socket.sendall(b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(110_000))
        assert large.receive() is None
        assert serving.held_bytes() < 100_000
        small.socket.sendall(frame(0, b""))
        assert isinstance(small.reply(), ErrorReply)  # a frame that this verb does not take
        assert is_served(serving)


def test_what_a_peer_said_before_it_went_is_served(serve: Callable[[], Serving]) -> None:
    """A peer that reads no answer and closes has all of its requests served, those behind a failed reply included."""
    serving = serve()
    with RawPeer(serving.path) as peer:
        peer.socket.sendall(b"".join(encode_message([bye(number)]) for number in range(100)))
    serving.handler.wait_for(lambda: serving.handler.counters["disconnects"] == 1)
    assert serving.handler.served == list(range(100))


def test_messages_behind_an_endless_one_are_others(serve: Callable[[], Serving]) -> None:
    """A message of endless parts gets one error and loses its connection; a peer beside it is served all the time."""
    serving = serve()
    with RawPeer(serving.path) as endless:
        endless.socket.sendall(frame(1, bye(5)))
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                endless.socket.sendall(frame(1, b"") * 4096)
                assert is_served(serving)
        refusal = endless.reply()
        assert isinstance(refusal, ErrorReply)
        assert (refusal.id, refusal.code) == (5, ErrorCode.BAD_FRAMES)
        assert endless.receive() is None


def test_many_messages_of_one_process_leave_turns_to_others(serve: Callable[[], Serving]) -> None:
    """What one peer sends at once is served in turns: another peer's request is answered before the last of them."""
    serving = serve()
    with RawPeer(serving.path) as busy, RawPeer(serving.path) as other:
        other.send(bye(1))
        assert other.reply() == Goodbye(id=1)
        with held(serving):  # else the loop may see what one has sent and not yet what the other has
            busy.socket.sendall(b"".join(encode_message([bye(1000 + number)]) for number in range(100)))
            other.send(bye(2))
        assert other.reply() == Goodbye(id=2)
        assert [busy.reply() for _ in range(100)] == [Goodbye(id=1000 + number) for number in range(100)]
        assert serving.handler.served.index(2) < 1 + 3 * server_module.MESSAGES_PER_TURN_MAX


def test_peer_that_goes_with_replies_unread_is_noticed(serve: Callable[[], Serving]) -> None:
    """A peer whose last words arrive together with its end, and that has not read all, is served and then closed."""
    serving = serve()
    with RawPeer(serving.path, shakes_hands=False) as peer:
        assert peer.socket.recv(1, socket.MSG_PEEK)  # the greeting is there, and stays unread
        with held(serving):
            peer.socket.sendall(GREETING + READY + encode_message([bye(1)]))
            peer.socket.close()
    serving.handler.wait_for(lambda: serving.handler.counters["disconnects"] == 1)
    assert serving.handler.served == [1]


def test_turn_ends_when_somebody_else_waits(serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes while another connection's batch is served waits for a message or two of it, not for all."""
    monkeypatch.setattr(server_module, "TURN_NS_MAX", 0)
    serving = serve()
    with RawPeer(serving.path) as busy, RawPeer(serving.path) as other:
        assert other.ask(encode(Bye(id=1))) == Goodbye(id=1)
        submit = serving.handler.submit

        def submit_and_send(peer: bytes, request: Request, *rest: Any) -> None:
            if request.id == 10:
                other.send(encode(Bye(id=99)))
            submit(peer, request, *rest)

        monkeypatch.setattr(serving.handler, "submit", submit_and_send)
        busy.socket.sendall(b"".join(encode_message([encode(Bye(id=number))]) for number in range(10, 22)))
        assert other.reply() == Goodbye(id=99)
        for number in range(10, 22):
            assert busy.reply() == Goodbye(id=number)
    assert serving.handler.served.index(99) <= 4


def test_replies_of_a_turn_leave_together(serve: Callable[[], Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of messages that came together, the first reply goes out at once, the others in one `send`, in their order."""
    sent: list[int] = []
    send = Connection.send

    def counted(connection: Connection, data: bytes | memoryview) -> int:
        sent.append(len(data))
        return send(connection, data)

    serving = serve()
    with RawPeer(serving.path) as peer:
        assert peer.ask(bye(1)) == Goodbye(id=1)
        monkeypatch.setattr(Connection, "send", counted)
        messages = [[bye(2)], [bye(3), b"a frame too many"], [bye(4)], [bye(5)]]
        with held(serving):
            peer.socket.sendall(b"".join(map(encode_message, messages)))
        replies = [peer.reply() for _ in messages]

    assert [type(reply) for reply in replies] == [Goodbye, ErrorReply, Goodbye, Goodbye]
    assert [reply.id for reply in replies if reply] == [2, 3, 4, 5]
    assert len(sent) == 2


def test_replies_before_a_violation_arrive(serve: Callable[[], Serving]) -> None:
    """A connection that is cut off in a turn has the replies to what it had asked before."""
    serving = serve()
    with RawPeer(serving.path) as peer:
        with held(serving):
            messages = [encode_message([bye(number)]) for number in (1, 2, 3)]
            peer.socket.sendall(b"".join(messages) + b"\xff" * 9)
        assert [peer.reply() for _ in messages] == [Goodbye(id=1), Goodbye(id=2), Goodbye(id=3)]
        assert peer.receive() is None


def test_place_that_cannot_be_bound_costs_no_descriptor(tmp_path: Path) -> None:
    """A daemon that tries again every few seconds, for as long as the port is taken, has as many open as before."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    servers = []

    async def fail() -> None:
        for _ in range(20):
            servers.append(RpcServer(LocalDoor(tmp_path / "missing" / "rpc.sock", Access()), Handler()))
            with pytest.raises(FileNotFoundError):
                servers[-1].start(asyncio.get_running_loop())
            servers[-1].close()

    asyncio.run(fail())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
