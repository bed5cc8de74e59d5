"""The connections of the two sockets: subscribers, and those who ask for replays and snapshots.

A peer gets what it reads: to a subscriber that does not read, batches are not sent, and the numbers tell it; a replay
or a snapshot goes on when its last piece has been read.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar, Final, cast

from kvcached.events.stream import Batch, EventStream
from kvcached.server.connections import Connections
from kvcached_client.errors import RequestError
from kvcached_client.protocol.zmtp import GREETING, PUBLISHER, ROUTER, Reader, Role, encode_message

#: A request for a snapshot, as the only part of a message behind an empty one. A number there asks for a replay.
SNAPSHOT_REQUEST: Final = b"snapshot/1"
NUMBER_BYTES: Final = 8
#: What vLLM sends behind the last batch of a replay.
END_NUMBER: Final = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
#: Unread bytes of one connection, and one message more.
UNREAD_BYTES_MAX: Final = 1 << 20
#: What a peer may send that is not a whole message.
HELD_BYTES_MAX: Final = 64 * 1024
#: What is looked at of one connection before others have a turn: a peer may send nothing but pings.
BYTES_PER_TURN: Final = 4096
#: As commands allow it.
TOPIC_BYTES_MAX: Final = 1024
SUBSCRIPTIONS_MAX: Final = 64
#: Requests of one connection that wait for the end of its last one.
REQUESTS_WAITING_MAX: Final = 8
_MESSAGES_PER_READ_MAX: Final = 128


def message_of(batch: Batch) -> bytes:
    """A batch as subscribers get it."""
    return encode_message([batch.topic, batch.number.to_bytes(NUMBER_BYTES, "big"), batch.payload])


def reply_of(batch: Batch) -> bytes:
    """A batch as the answer to a request: behind the empty part that REQ sockets want."""
    return encode_message([b"", batch.topic, batch.number.to_bytes(NUMBER_BYTES, "big"), batch.payload])


class Peer(asyncio.Protocol):
    """A connection of one of the sockets.

    Args:
        connections: of the socket; this one has a place there.
        who: has connected, for the log.
        role: of this end.
    """

    socket: ClassVar[str]  #: for the log

    def __init__(self, connections: Connections[Peer], who: str, role: Role) -> None:
        self._connections = connections
        self._who = who
        self._reader = Reader(role)
        self._transport: asyncio.Transport | None = None
        self._is_admitted = False
        self._is_over = False
        self._is_full = False
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has connected."""
        both = cast("asyncio.Transport", transport)  # uvloop's have the methods, and another base
        if self._is_over:  # others have taken its place meanwhile
            both.abort()
            return
        self._transport = both
        both.set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        both.write(GREETING)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """It has ended, for any reason."""
        self._transport = None
        self.close()

    def close(self) -> None:
        """End it; what is not read is lost."""
        self._is_over = True
        self._connections.close(self)
        if self._transport is not None:
            self._transport.abort()

    def cut_off(self, kind: str, reason: object) -> None:
        """End it by its own fault."""
        fields = {"socket": self.socket, "who": self._who, "reason": reason}
        self._connections.note_fault(kind, "%(socket)s: %(who)s is cut off: %(reason)s", fields)
        self.close()

    def _admit(self) -> None:
        """Its peer has introduced itself. ZMTP has no words for a refusal that sockets of these kinds would pass on."""
        self._is_admitted = True
        try:
            self._connections.admit(self)
        except RequestError:
            self.close()

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
            messages = reader.read(data, _MESSAGES_PER_READ_MAX)
            if reader.is_ready and not self._is_admitted:
                self._admit()
            if self._is_over:
                return
            if reader.commands:  # the end of the handshake goes before the first message
                self.write(b"".join(reader.commands))
                reader.commands.clear()
            for message in messages:
                self.received([] if message.error is not None else message.parts)
            self.heard()
            data = b""
            if not reader.has_more or self._is_over:
                break
        if self._is_over:
            return
        if reader.violation is not None or reader.held_bytes > HELD_BYTES_MAX:
            self.cut_off("violation", reader.violation or "a message that is too large")

    def write(self, data: bytes) -> None:
        """Send; the caller has looked at `is_full`, where there is much."""
        if self._transport is not None and not self._is_over:
            self._transport.write(data)

    @property
    def is_full(self) -> bool:
        """Whether its peer has much to read."""
        return self._is_full

    @property
    def is_at_limit(self) -> bool:
        """Whether it could miss some of what is sent next, and has missed nothing."""
        return False

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


class Subscriber(Peer):
    """Gets the batches of its topics."""

    socket = "events"

    def __init__(self, stream: EventStream, connections: Connections[Peer], who: str) -> None:
        super().__init__(connections, who, PUBLISHER)
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

    @property
    def is_at_limit(self) -> bool:
        """Whether it could miss some of the next batches, and has missed none."""
        if self._transport is None or self._has_missed:
            return False
        return self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX // 2

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
            most = f"{SUBSCRIPTIONS_MAX} subscriptions, or a topic of more than {TOPIC_BYTES_MAX} bytes"
            self.cut_off("subscriptions", f"more than {most}")
        else:
            self._topics.append(topic)
            self._send_last()

    def _send_last(self) -> None:
        """The last batch, maybe once more: its number tells what there was before."""
        last = self._stream.last
        self.offer(last.topic, message_of(last))


class Asker(Peer):
    """Asks for replays and snapshots, one after the other."""

    socket = "replays"

    def __init__(
        self, stream: EventStream, publish: Callable[[], None], connections: Connections[Peer], who: str
    ) -> None:
        super().__init__(connections, who, ROUTER)
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
            self.cut_off("requests", f"more than {REQUESTS_WAITING_MAX} requests wait")
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
            fields = {"socket": self.socket, "who": self._who, "request": request[:32], "snapshot": SNAPSHOT_REQUEST}
            words = "%(socket)s: %(who)s asks for %(request)r, neither a number nor %(snapshot)r"
            self._connections.sampled.note("nonsense", words, fields)
        yield encode_message([b"", b"", END_NUMBER, b""])
