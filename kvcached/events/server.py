"""The two sockets that routers use: a PUB socket for events, a ROUTER socket for replays and snapshots.

Both live in the daemon's event loop, and never make it wait. A peer gets what it reads: to a subscriber that does not
read, batches are not sent, and the numbers tell it; a replay or a snapshot goes on when its last piece has been read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, cast
from urllib.parse import SplitResult, urlsplit

from kvcached.events.stream import Batch, EventStream
from kvcached.process.seqpacket import SocketFile, listen
from kvcached.server.listener import listen_at
from kvcached_client.protocol.zmtp import GREETING, PUBLISHER, ROUTER, Reader, Role, encode_message

#: A request for a snapshot, as the only part of a message behind an empty one. A number there asks for a replay.
SNAPSHOT_REQUEST: Final = b"snapshot/1"
NUMBER_BYTES: Final = 8
#: What vLLM sends behind the last batch of a replay.
END_NUMBER: Final = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
#: Routers have one connection to each socket; there are a few routers, and their standbys.
CONNECTIONS_MAX: Final = 64
#: Unread bytes of one connection, and one message more.
UNREAD_BYTES_MAX: Final = 1 << 20
#: What a peer may send that is not a whole message.
HELD_BYTES_MAX: Final = 64 * 1024
#: What is looked at of one connection before others have a turn: a peer may send nothing but pings.
BYTES_PER_TURN: Final = 4096
#: As commands allow it.
TOPIC_BYTES_MAX: Final = 1024
HALF_OPEN_S_MAX: Final = 2.0
SUBSCRIPTIONS_MAX: Final = 64
#: Requests of one connection that wait for the end of its last one.
REQUESTS_WAITING_MAX: Final = 8
#: Events are published at most so often; a quiet daemon publishes at once.
PUBLISH_INTERVAL_S: Final = 0.02
_MESSAGES_PER_READ_MAX: Final = 128
_BACKLOG: Final = 32
_ABSENT: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})  #: of an address that this machine lacks

_log: Final = logging.getLogger(__name__)


class Endpoints(NamedTuple):
    """Where the sockets are: ``ipc://PATH``, or ``tcp://HOST:PORT``."""

    events: str
    replay: str


class EventServer:
    """Publishes a stream.

    Args:
        stream: of the events.
        endpoints: where.

    Attributes:
        endpoints: where.
    """

    def __init__(self, stream: EventStream, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self._stream = stream
        self._subscribers: set[_Peer] = set()
        self._askers: set[_Peer] = set()
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []
        self._files: list[SocketFile] = []
        self._timer: asyncio.TimerHandle | None = None
        self._published_s = 0.0

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: an endpoint cannot be bound; the text begins with its key in `[events]`.
        """
        subscriber = partial(_Subscriber, self._subscribers, self._stream)
        asker = partial(_Asker, self._askers, self._stream, self._publish)
        peers: tuple[Callable[[], _Peer], ...] = (subscriber, asker)
        for key, endpoint, peer in zip(("endpoint", "replay_endpoint"), self.endpoints, peers, strict=True):
            try:
                await self._listen(endpoint, peer)
            except OSError as error:
                raise OSError(error.errno, f"{key}: {error.strerror or error}") from error
        _log.info("events: %s, replays and snapshots: %s", *self.endpoints)

    def poke(self) -> None:
        """Something has changed: publish it soon."""
        if self._timer is None:
            wait_s = max(self._published_s + PUBLISH_INTERVAL_S - self._loop.time(), 0.0)
            self._timer = self._loop.call_later(wait_s, self._publish)

    def close(self) -> None:
        """Publish what is left, and end."""
        self._publish()
        for server in self._servers:
            server.close()
        for file in self._files:
            file.remove()
        for peer in (*self._subscribers, *self._askers):
            peer.close()

    def _publish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._published_s = self._loop.time()
        for batch in self._stream.flush():
            data = message_of(batch)
            for peer in self._subscribers:
                peer.offer(batch.topic, data)

    async def _listen(self, endpoint: str, peer: Callable[[], _Peer]) -> None:
        if endpoint.startswith("ipc://"):
            listener = _bound(Path(endpoint.removeprefix("ipc://")))
            self._files.append(SocketFile.at(listener.getsockname()))
            self._servers.append(await self._loop.create_unix_server(peer, sock=listener))
            return
        for listener in await _bound_at(urlsplit(endpoint)):
            self._servers.append(await self._loop.create_server(peer, sock=listener, backlog=_BACKLOG))


def _bound(path: Path) -> socket.socket:
    """A socket that listens at a path; one that an earlier daemon has left there is removed."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, f"{path} is there, and is no socket")
        path.unlink()
    return listen(str(path), _BACKLOG, socket.SOCK_STREAM)


async def _bound_at(place: SplitResult) -> list[socket.socket]:
    """Sockets that listen at a host and a port: at both addresses of `localhost`, or at the one that this machine has.

    An event loop that is given host and port passes over each address whose family is refused, and serves nobody.
    """
    found = await asyncio.get_running_loop().getaddrinfo(place.hostname, place.port, type=socket.SOCK_STREAM)
    listeners, absent = [], None
    with ExitStack() as opened:
        for address in dict.fromkeys(str(each[0]) for *_, each in found):
            try:
                listeners.append(opened.enter_context(listen_at(address, place.port or 0)))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
        if absent is not None and not listeners:
            raise absent
        opened.pop_all()
    return listeners


def message_of(batch: Batch) -> bytes:
    """A batch as subscribers get it."""
    return encode_message([batch.topic, batch.number.to_bytes(NUMBER_BYTES, "big"), batch.payload])


def reply_of(batch: Batch) -> bytes:
    """A batch as the answer to a request: behind the empty part that REQ sockets want."""
    return encode_message([b"", batch.topic, batch.number.to_bytes(NUMBER_BYTES, "big"), batch.payload])


class _Peer(asyncio.Protocol):
    """A connection of one of the sockets.

    Args:
        peers: all of the socket that are open.
        role: of this end.
    """

    def __init__(self, peers: set[_Peer], role: Role) -> None:
        self._peers = peers
        self._reader = Reader(role)
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        self._unread = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has connected."""
        both = cast("asyncio.Transport", transport)  # uvloop's have the methods, and another base
        if len(self._peers) >= CONNECTIONS_MAX:
            _log.warning("events: %d connections are open; another one is refused", CONNECTIONS_MAX)
            both.abort()
            return
        self._peers.add(self)
        self._transport = both
        both.set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        both.write(GREETING)
        self._deadline = asyncio.get_running_loop().call_later(HALF_OPEN_S_MAX, self._check_ready)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """It has ended, for any reason."""
        self._peers.discard(self)
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()

    def close(self) -> None:
        """End it; what is not read is lost."""
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        """Its peer does not read."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Its peer has read."""
        self._is_full = False
        self._take()
        self.room()

    def data_received(self, data: bytes) -> None:
        """Its peer has sent something."""
        self._unread += data
        self._take()

    def _take(self) -> None:
        """Look at some of what the peer has sent. More is received when that is all, and the peer reads answers."""
        if self._transport is None or self._transport.is_closing():
            return
        if self.is_full:
            self._read_on(self._transport, is_wanted=False)
            return
        data, self._unread = self._unread[:BYTES_PER_TURN], self._unread[BYTES_PER_TURN:]
        if data:
            self._look_at(data)
        if self._unread:
            asyncio.get_running_loop().call_soon(self._take)
        self._read_on(self._transport, is_wanted=not self._unread)

    def _read_on(self, transport: asyncio.Transport, *, is_wanted: bool) -> None:
        if transport.is_closing() or transport.is_reading() == is_wanted:
            return
        if is_wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _look_at(self, data: bytes) -> None:
        reader = self._reader
        while True:
            for message in reader.read(data, _MESSAGES_PER_READ_MAX):
                self.received([] if message.error is not None else message.parts)
            if reader.commands:  # the end of the handshake goes before the first message
                self.write(b"".join(reader.commands))
                reader.commands.clear()
            self.heard()
            data = b""
            if not reader.has_more or self._transport is None:
                break
        if reader.violation is not None or reader.held_bytes > HELD_BYTES_MAX:
            _log.warning("events: a connection is cut off: %s", reader.violation or "a message that is too large")
            self.close()

    def write(self, data: bytes) -> None:
        """Send; the caller has looked at `is_full`, where there is much."""
        if self._transport is not None:
            self._transport.write(data)

    @property
    def is_full(self) -> bool:
        """Whether its peer has much to read."""
        return self._is_full

    def _check_ready(self) -> None:
        if not self._reader.is_ready:
            self.close()

    @abstractmethod
    def received(self, parts: list[bytes]) -> None:
        """A message; one beyond the limits has no parts."""

    def heard(self) -> None:
        """What was received may have been a command."""

    @abstractmethod
    def room(self) -> None:
        """Its peer reads again."""

    def offer(self, topic: bytes, data: bytes) -> None:
        """A batch that it may want."""


class _Subscriber(_Peer):
    """Gets the batches of its topics."""

    def __init__(self, peers: set[_Peer], stream: EventStream) -> None:
        super().__init__(peers, PUBLISHER)
        self._stream = stream
        self._topics: list[bytes] = []
        self._has_missed = False

    def received(self, parts: list[bytes]) -> None:
        """A subscription of ZMTP 3.0; other messages have no meaning."""
        if len(parts) == 1 and parts[0][:1] in {b"\0", b"\1"}:
            self._subscribe(parts[0][1:], is_wanted=parts[0][0] == 1)

    def heard(self) -> None:
        """Take subscriptions of ZMTP 3.1."""
        for topic, is_wanted in self._reader.subscriptions:
            self._subscribe(topic, is_wanted=is_wanted)
        self._reader.subscriptions.clear()

    def room(self) -> None:
        """Where it has missed a batch, the last one says so: its number is too high."""
        if self._has_missed:
            self._has_missed = False
            self._send_last()

    def offer(self, topic: bytes, data: bytes) -> None:
        """Send a batch, if it is of its topics and there is room."""
        if not any(topic.startswith(each) for each in self._topics):
            return
        if self.is_full:
            self._has_missed = True
        else:
            self.write(data)

    def _subscribe(self, topic: bytes, *, is_wanted: bool) -> None:
        if not is_wanted:
            with suppress(ValueError):
                self._topics.remove(topic)
        elif len(self._topics) >= SUBSCRIPTIONS_MAX or len(topic) > TOPIC_BYTES_MAX:
            most = f"{SUBSCRIPTIONS_MAX} subscriptions, or topics of more than {TOPIC_BYTES_MAX} bytes"
            _log.warning("events: a connection with more than %s is cut off", most)
            self.close()
        else:
            self._topics.append(topic)
            self._send_last()

    def _send_last(self) -> None:
        """The last batch, maybe once more: its number tells what there was before."""
        last = self._stream.last
        self.offer(last.topic, message_of(last))


class _Asker(_Peer):
    """Asks for replays and snapshots, one after the other."""

    def __init__(self, peers: set[_Peer], stream: EventStream, publish: Callable[[], None]) -> None:
        super().__init__(peers, ROUTER)
        self._stream = stream
        self._publish = publish
        self._waiting: list[bytes] = []
        self._answer: Iterator[bytes] | None = None
        self._is_scheduled = False

    def received(self, parts: list[bytes]) -> None:
        """A request."""
        body = parts[1:] if parts and not parts[0] else parts
        self._waiting.append(body[0] if len(body) == 1 else b"")
        if len(self._waiting) > REQUESTS_WAITING_MAX:
            _log.warning("events: a connection that asks for too much at once is cut off")
            self.close()
        else:
            self.room()

    def room(self) -> None:
        """Go on with its answer in the next turn of the loop."""
        if not self._is_scheduled and (self._waiting or self._answer is not None):
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_scheduled = False
        if self._transport is None or self.is_full:
            return
        if self._answer is None:
            self._answer = self._answer_to(self._waiting.pop(0))
        piece = next(self._answer, None)
        if piece is None:
            self._answer = None
        else:
            self.write(piece)
        self.room()

    def _answer_to(self, request: bytes) -> Iterator[bytes]:
        self._publish()  # what it gets goes at least as far as what it may have seen
        if request == SNAPSHOT_REQUEST:
            yield from map(reply_of, self._stream.snapshot())
        elif len(request) == NUMBER_BYTES:
            yield from map(reply_of, self._stream.replay(int.from_bytes(request, "big")))
        else:
            _log.warning("events: a request that is neither a number nor %r: %r", SNAPSHOT_REQUEST, request[:32])
        yield encode_message([b"", b"", END_NUMBER, b""])
