"""The sockets, with libzmq at the other end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kvcached.events import peers, server, stream
from kvcached.events.server import Endpoints, EventServer
from kvcached.events.stream import Batch
from kvcached_client.protocol.zmtp import DEALER, GREETING, SUBSCRIBER, Role, encode_message, subscribe
from tests.events.publisher import TIMEOUT_MS, Publisher
from tests.events.router import END, Router


@pytest.fixture
def router(publisher: Publisher) -> Iterator[Router]:
    """A router that follows it."""
    router = Router(*publisher.endpoints, timeout_ms=TIMEOUT_MS)
    yield router
    router.close()


def held(router: Router) -> int:
    return len(router.blocks.get((b"root".hex(), None), ()))


def follow(router: Router, publisher: Publisher) -> None:
    """Take in batches until the router has the last one."""
    while router.last < publisher.server._stream.last.number:
        assert router.take(TIMEOUT_MS)


def test_subscriber_of_libzmq_gets_batches_in_order(publisher: Publisher, router: Router) -> None:
    """A SUB socket of libzmq gets every batch from its subscription on, and a snapshot of what was before."""
    publisher.store(3)
    follow(router, publisher)
    assert (held(router), router.seen) == (3, {"gaps": 1, "snapshots": 1})

    for _ in range(20):
        publisher.store(2)
    follow(router, publisher)

    assert (held(router), router.seen) == (43, {"gaps": 1, "snapshots": 1})


def test_more_changes_than_one_turn_takes_are_all_published(
    publisher: Publisher, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a turn leaves is published in the next one, without a further change."""
    publisher.store()
    follow(router, publisher)
    monkeypatch.setattr(stream, "CHANGES_PER_FLUSH_MAX", 10)

    publisher.store(95)
    while held(router) < 96:
        assert router.take(TIMEOUT_MS)


def test_new_subscriber_gets_the_last_batch(publisher: Publisher, router: Router) -> None:
    """A subscriber that comes back, or comes late, is sent the last batch at once: its number tells what it missed."""
    publisher.store()
    assert router.take(TIMEOUT_MS)


def test_other_topics_are_left_out(publisher: Publisher) -> None:
    """A subscriber gets the topics that begin with what it has subscribed to."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.SUB) as other, context.socket(zmq.SUB) as own:
        publisher.store()
        for sub, topic in ((other, b"another model"), (own, b"mod")):
            sub.subscribe(topic)
            sub.connect(publisher.endpoints.events)
            sub.linger = 0
        assert own.poll(TIMEOUT_MS)
        publisher.store()
        assert [own.recv_multipart()[0] for _ in range(2)] == [b"model", b"model"]
        assert not other.poll(0)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_replay_is_that_of_vllm(publisher: Publisher, kind: int) -> None:
    """A request for a number gets the batches from it on, and -1 behind them; one of nothing gets the end alone."""
    for _ in range(3):
        publisher.store()
    last = publisher.server._stream.last.number
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(kind) as asker:
        asker.linger = 0
        asker.connect(publisher.endpoints.replay)
        lead = [] if kind == zmq.REQ else [b""]
        asker.send_multipart([*lead, (last - 1).to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        while not answers or (kind == zmq.DEALER and answers[-1][-2] != END):
            assert asker.poll(TIMEOUT_MS)
            answers.append(asker.recv_multipart())
        numbers = [int.from_bytes(answer[-2], "big", signed=True) for answer in answers]
        assert numbers == ([last - 1] if kind == zmq.REQ else [last - 1, last, -1])
        assert answers[0][-3] == b"model"


def test_request_of_nonsense_gets_the_end(publisher: Publisher) -> None:
    """Every request is answered: one that means nothing by the end alone."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as asker:
        asker.linger = 0
        asker.connect(publisher.endpoints.replay)
        for parts in ([b"", b"what?"], [b"", b"a", b"b", b"c"], [b""]):
            asker.send_multipart(parts)
            assert asker.poll(TIMEOUT_MS)
            assert asker.recv_multipart() == [b"", b"", END, b""]


def test_stalled_subscriber_costs_a_bounded_buffer_and_hears_of_its_gap(publisher: Publisher, router: Router) -> None:
    """What a subscriber does not read is dropped beyond a limit; when it reads again it hears of its gap."""
    with socket.socket(socket.AF_UNIX) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(publisher.endpoints.events.removeprefix("ipc://"))
        stalled.settimeout(TIMEOUT_MS / 1000)
        stalled.sendall(GREETING + SUBSCRIBER.ready + subscribe(b""))
        publisher.store()
        follow(router, publisher)
        for _ in range(120):
            publisher.store(1000)
        waiting = max(
            peer._transport.get_write_buffer_size()
            for peer in publisher.server._events.connections
            if peer._transport is not None
        )
        assert waiting <= peers.UNREAD_BYTES_MAX + 200_000
        follow(router, publisher)
        last = publisher.server._stream.last.number.to_bytes(8, "big")
        received = bytearray()
        while last not in received[-400_000:]:
            received += stalled.recv(1 << 20)
        assert len(received) < 4 * peers.UNREAD_BYTES_MAX


def test_peers_that_do_not_speak_the_protocol_are_cut_off(publisher: Publisher) -> None:
    """Who sends something else, or a message that is too large, loses the connection; others do not notice."""
    too_large = GREETING + SUBSCRIBER.ready + b"\x02" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
    for data in (b"GET / HTTP/1.1\r\n\r\n", too_large):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(TIMEOUT_MS / 1000)
            peer.connect(publisher.endpoints.events.removeprefix("ipc://"))
            try:
                peer.sendall(data)
                while peer.recv(4096):
                    pass
            except ConnectionError:
                pass
    publisher.store()


def full_peers(publisher: Publisher) -> list[peers.Peer]:
    """Those who have much to read."""
    return [
        each for each in (*publisher.server._events.connections, *publisher.server._replays.connections) if each.is_full
    ]


@pytest.mark.full
@pytest.mark.parametrize("role", [SUBSCRIBER, DEALER], ids=["events", "replays"])
def test_peer_that_reads_no_answers_is_not_read(publisher: Publisher, router: Router, role: Role) -> None:
    """Answers to its pings take a bounded memory, and the flood keeps neither batches nor others from their turn."""
    endpoint = publisher.endpoints.events if role is SUBSCRIBER else publisher.endpoints.replay
    pings = 2000 * (b"\x04\x17\x04PING\x00\x01" + b"x" * 16)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(endpoint.removeprefix("ipc://"))
        peer.sendall(GREETING + role.ready)
        peer.settimeout(0.5)
        end_s, sent = time.monotonic() + TIMEOUT_MS / 1000, 0
        while not full_peers(publisher):
            assert time.monotonic() < end_s
            with suppress(TimeoutError):
                peer.send(pings)
        with suppress(TimeoutError):
            while sent < 64 << 20:
                sent += peer.send(pings)
        assert sent < 16 << 20
        (full,) = full_peers(publisher)
        assert full._transport is not None
        assert full._transport.get_write_buffer_size() < peers.UNREAD_BYTES_MAX + (1 << 20)
        publisher.store()
        follow(router, publisher)


def test_topics_beyond_the_limit_cut_a_peer_off(publisher: Publisher) -> None:
    """A subscription as ZMTP 3.0 sends it, a message, has no longer topic than one of ZMTP 3.1, a command."""
    for size, is_taken in ((peers.TOPIC_BYTES_MAX, True), (peers.TOPIC_BYTES_MAX + 1, False)):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(TIMEOUT_MS / 1000)
            peer.connect(publisher.endpoints.events.removeprefix("ipc://"))
            peer.sendall(GREETING + SUBSCRIBER.ready + encode_message([b"\1" + bytes(size)]))
            greeting = peer.recv(len(GREETING), socket.MSG_WAITALL)
            assert greeting == GREETING
            if is_taken:
                peer.sendall(subscribe(b""))  # the last batch is sent
                assert b"READY" in peer.recv(64)
                assert peer.recv(4096)
            else:
                with suppress(ConnectionError):
                    while peer.recv(4096):
                        pass


def test_connections_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit a socket refuses who has introduced itself; when a connection ends there is room again."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    publisher = Publisher(tmp_path)

    def introduced() -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(TIMEOUT_MS / 1000)
        peer.connect(publisher.endpoints.replay.removeprefix("ipc://"))
        peer.sendall(GREETING + DEALER.ready)
        assert peer.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
        return peer

    def is_served(peer: socket.socket) -> bool:
        with suppress(ConnectionError):
            return b"READY" in peer.recv(64)
        return False

    with closing(publisher), ExitStack() as stack:
        opened = [stack.enter_context(introduced()) for _ in range(4)]
        assert [is_served(peer) for peer in opened] == [True, True, False, False]
        opened[0].close()
        end_s = time.monotonic() + TIMEOUT_MS / 1000
        while not is_served(stack.enter_context(introduced())):
            assert time.monotonic() < end_s


@pytest.mark.full
def test_log_of_a_flood_is_bounded(publisher: Publisher, router: Router, caplog: pytest.LogCaptureFixture) -> None:
    """Peers that connect anew each time they are cut off write a line of each kind, and others are served."""
    subscriptions = GREETING + SUBSCRIBER.ready + subscribe(b"") * (peers.SUBSCRIPTIONS_MAX + 1)
    requests = GREETING + DEALER.ready + encode_message([b"", b"what?"]) * (peers.REQUESTS_WAITING_MAX + 2)
    events, replay = (place.removeprefix("ipc://") for place in publisher.endpoints)
    for place, data in ((events, b"x" * 100), (events, subscriptions), (replay, b"x" * 100), (replay, requests)):
        for _ in range(12):
            with socket.socket(socket.AF_UNIX) as peer, suppress(ConnectionError):
                peer.settimeout(TIMEOUT_MS / 1000)
                peer.connect(place)
                peer.sendall(data)
                while peer.recv(1 << 16):
                    pass

    assert 4 <= len([each for each in caplog.records if each.levelno == logging.WARNING]) <= 5
    publisher.store()
    follow(router, publisher)


def test_socket_of_a_living_daemon_is_left_alone(publisher: Publisher, router: Router, tmp_path: Path) -> None:
    """A second publisher does not start at the place of one that lives, and takes nothing from it."""
    with pytest.raises(OSError, match=r"endpoint: another process serves .*/events\.sock"):
        Publisher(tmp_path)

    publisher.store()
    follow(router, publisher)
    assert held(router) == 1


def test_socket_that_a_dead_daemon_left_is_replaced(tmp_path: Path) -> None:
    """Files of sockets at which nobody listens are no obstacle: a killed daemon leaves them."""
    for name in ("events.sock", "replay.sock"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / name))
            left.listen()

    with closing(Publisher(tmp_path)) as publisher, closing(Router(*publisher.endpoints)) as router:
        publisher.store()
        follow(router, publisher)
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_way_is_named(tmp_path: Path) -> None:
    """A file that is no socket is left alone, and the error names it."""
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="is no socket"):
        server._make_room(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_endpoint_of_the_machine(tmp_path: Path) -> None:
    """Both sockets can be ports of the loopback interface."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    publisher = Publisher(tmp_path, Endpoints(*(f"tcp://127.0.0.1:{port}" for port in ports)))
    router = Router(*publisher.endpoints, timeout_ms=TIMEOUT_MS)
    try:
        publisher.store(5)
        follow(router, publisher)
        assert held(router) == 5
    finally:
        router.close()
        publisher.close()


class FakeStream:
    """Counts its flushes; each has more."""

    has_more = True

    def __init__(self) -> None:
        self.flushed = asyncio.Event()

    def flush(self) -> list[Batch]:
        self.flushed.set()
        return []


def test_reader_without_room_is_waited_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More is published when a subscriber that reads has room again, or has not read for too long."""
    monkeypatch.setattr(server, "READER_PATIENCE_S", 0.05)

    async def main() -> None:
        published, reader = FakeStream(), SimpleNamespace(is_at_limit=True)
        events = EventServer(published, Endpoints(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"))  # type: ignore[arg-type]
        monkeypatch.setattr(events, "_events", SimpleNamespace(connections=[reader], close=lambda: None))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        events._publish()
        assert not published.flushed.is_set()
        await published.flushed.wait()
        assert loop.time() - began_s >= 0.05

        reader.is_at_limit = False
        events._publish()
        reader.is_at_limit = True
        published.flushed.clear()
        events._publish()
        assert not published.flushed.is_set()
        reader.is_at_limit = False
        await published.flushed.wait()
        published.has_more = False
        events.close()

    asyncio.run(main())
