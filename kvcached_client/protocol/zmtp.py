"""ZMTP 3.1 with the NULL mechanism, as either end of the daemon's socket speaks it: bytes in, messages out. No I/O.

The protocol of ZeroMQ's connections (rfc.zeromq.org/spec/37). `Reader` is strict, and bounds everything before it is
kept: parts and bytes of a message by the protocol's limits, the handshake by its own. A message beyond a limit becomes
one error, at once; what follows of it is skipped, and where that has no end either, the connection is over.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Final, NamedTuple

from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.engine import FRAME_COUNT_MAX, FRAME_SIZE_BYTES_MAX, MESSAGE_SIZE_BYTES_MAX
from kvcached_client.protocol.greeting import ProtocolViolation, greeting, greeting_size

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
HEAD_SIZE_BYTES: Final = 2
LONG_HEAD: Final = struct.Struct(">BQ")
SHORT_MAX: Final = 255
_PROPERTY_SIZE: Final = struct.Struct(">I")
#: A READY with an identity of 255 bytes takes 300.
COMMAND_SIZE_BYTES_MAX: Final = 1024
#: Of a PING, to be sent back.
_PING_CONTEXT_BYTES_MAX: Final = 16
_PING_TTL_BYTES: Final = 2
#: Subscribers of ZMTP 3.0 send messages instead, whose first byte is 1 or 0.
_SUBSCRIPTIONS: Final = frozenset({b"SUBSCRIBE", b"CANCEL"})

#: A longer frame that is not whole yet is gathered in pieces: a copy of it all at once would take a millisecond.
_GATHERED_BYTES_MIN: Final = 64 * 1024
#: So much is copied before it is parsed: the parts of bytes are cheaper to take than those of a memoryview.
_COPIED_BYTES_MAX: Final = 4096
#: Frames in one turn, so that a peer of many small ones takes as much time as one request.
FRAMES_PER_TURN_MAX: Final = 128
#: Of a message that was refused already: a request whose keys are a part each is a mistake, and so many are no request.
SKIPPED_PARTS_MAX: Final = 8192
SKIPPED_BYTES_MAX: Final = 2 * MESSAGE_SIZE_BYTES_MAX


_NULL: Final = b"NULL"
#: NULL has no server.
GREETING: Final = greeting(_NULL)


class Role(NamedTuple):
    """An end of a connection.

    Attributes:
        peers: types of sockets that it talks to.
        ready: the command that ends its part of the handshake.
        answers: it sends this command when it has the peer's.
    """

    peers: tuple[bytes, ...]
    ready: bytes
    answers: bool


class Message(NamedTuple):
    """What a peer sent: its parts; or, where it is beyond a limit, those before the limit and the error."""

    parts: list[bytes]
    error: RequestError | None = None


def encode_message(parts: list[bytes]) -> bytes:
    """A message as it is on the wire."""
    return b"".join(message_pieces(parts))


def message_pieces(parts: list[bytes]) -> list[bytes]:
    """A message as it is on the wire, its parts not copied."""
    pieces: list[bytes] = []
    last = len(parts) - 1
    for index, part in enumerate(parts):
        flags = MORE if index < last else 0
        size = len(part)
        pieces.append(bytes((flags, size)) if size <= SHORT_MAX else LONG_HEAD.pack(flags | LONG, size))
        pieces.append(part)
    return pieces


def _command(name: bytes, body: bytes) -> bytes:
    return frame(COMMAND, bytes((len(name),)) + name + body)


def frame(flags: int, body: bytes) -> bytes:
    """A frame as it is on the wire."""
    size = len(body)
    return (bytes((flags, size)) if size <= SHORT_MAX else LONG_HEAD.pack(flags | LONG, size)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + _PROPERTY_SIZE.pack(len(value)) + value


def _role(name: bytes, *peers: bytes, answers: bool = False) -> Role:
    ready = _command(b"READY", _property(b"Socket-Type", name) + _property(b"Identity", b""))
    return Role(peers, ready, answers)


#: The daemon, which answers a client's READY, ...
ROUTER: Final = _role(b"ROUTER", b"DEALER", b"ROUTER", b"REQ", answers=True)
#: ... and a client, which sends its own without waiting.
DEALER: Final = _role(b"DEALER", b"ROUTER")
#: The daemon as a source of events, and who listens to them.
PUBLISHER: Final = _role(b"PUB", b"SUB", b"XSUB", answers=True)
SUBSCRIBER: Final = _role(b"SUB", b"PUB", b"XPUB")


def subscribe(topic: bytes) -> bytes:
    """The command of a subscriber that wants messages whose first part begins with `topic`."""
    return _command(b"SUBSCRIBE", topic)


class Subscription(NamedTuple):
    """What a subscriber has said: that it wants messages of a topic, or does not any more."""

    topic: bytes
    is_wanted: bool


class Reader:
    """One connection's incoming side.

    Args:
        role: of this end.

    Attributes:
        is_ready: the handshake is over.
        violation: why the connection is over; nothing is read after it.
        commands: what has to be sent to the peer beside replies.
        subscriptions: what a subscriber has said since somebody last took it from here; of a publisher's end.
        has_more: another `read` may find messages without further bytes.
    """

    __slots__ = (
        "_gathered", "_gathered_flags", "_greeted", "_is_refused", "_missing_bytes", "_needed", "_parts",
        "_parts_bytes", "_rest", "_role", "_skip_bytes", "_skipped_bytes", "_skipped_parts", "commands", "has_more",
        "is_ready", "subscriptions", "violation",
    )  # fmt: skip

    def __init__(self, role: Role = ROUTER) -> None:
        self._role = role
        self.is_ready = False
        self.violation: ProtocolViolation | None = None
        self.commands: list[bytes] = []
        self.subscriptions: list[Subscription] = []
        self.has_more = False
        self._greeted = False
        self._rest = bytearray()  #: received, not parsed
        self._needed = 1  #: bytes of `_rest` without which there is nothing to parse
        self._parts: list[bytes] = []  #: of the message that is not whole yet
        self._parts_bytes = 0
        self._gathered = BytesIO()  #: the start of its next part, where that is a long one
        self._gathered_flags = 0
        self._missing_bytes = 0  #: of that part, still to come
        self._is_refused = False  #: that message is skipped
        self._skip_bytes = 0  #: of the frame that is skipped, still to come
        self._skipped_bytes = 0
        self._skipped_parts = 0

    @property
    def is_skipping(self) -> bool:
        """Whether what comes next belongs to a message that was refused."""
        return self._is_refused or self._skip_bytes > 0

    @property
    def held_bytes(self) -> int:
        """What is kept of messages that are not whole yet, or not taken yet."""
        return len(self._rest) + self._parts_bytes + self._gathered.tell()

    def read(self, data: memoryview | bytes, messages_max: int) -> list[Message]:
        """The next messages, of what was received before and `data`, at most so many.

        `data` may be used again afterwards.
        """
        messages: list[Message] = []
        self.has_more = False
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = data[skipped:]
        if self._missing_bytes:
            data = self._gather(data, messages)
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._needed:
                return messages
            if len(rest) <= _COPIED_BYTES_MAX:
                used = self._parse(bytes(rest), messages, messages_max)
            else:
                with memoryview(rest) as whole:
                    used = self._parse(whole, messages, messages_max)
            del rest[:used]
        else:
            if len(data) <= _COPIED_BYTES_MAX:
                data = bytes(data)
            used = self._parse(data, messages, messages_max)
            if used < len(data):
                rest += data[used:]
        self.has_more = len(rest) >= self._needed and self.violation is None
        return messages

    def _parse(self, data: memoryview | bytes, messages: list[Message], messages_max: int) -> int:
        """Take frames from the start of `data`; how many bytes they had. What is skipped may be longer than `data`."""
        at, length = 0, len(data)
        try:
            if not self._greeted:
                at = self._take_greeting(data)
                if not self._greeted:
                    return 0
            for _ in range(FRAMES_PER_TURN_MAX):
                if len(messages) >= messages_max or at == length:
                    break
                end = at
                if self.is_ready and not self._is_refused and not self._parts:
                    end = _take_message(data, at, messages)
                if end == at:
                    end = self._take_frame(data, at, messages)
                if end == at:
                    return at
                at = end
            self._needed = HEAD_SIZE_BYTES
        except ProtocolViolation as violation:
            self.violation = violation
        return at

    def _take_frame(self, data: memoryview | bytes, at: int, messages: list[Message]) -> int:
        """Take the frame that begins at `at`; where it ends, or `at` while it is not there whole."""
        left = len(data) - at
        if left < HEAD_SIZE_BYTES:
            self._needed = HEAD_SIZE_BYTES
            return at
        flags, size, body = data[at], data[at + 1], at + HEAD_SIZE_BYTES
        if flags & LONG:
            if left < LONG_HEAD.size:
                self._needed = LONG_HEAD.size
                return at
            size, body = int.from_bytes(data[at + 1 : at + LONG_HEAD.size], "big"), at + LONG_HEAD.size
        end = body + size
        if flags & ~(MORE | LONG):
            if flags & ~(COMMAND | LONG) or size > COMMAND_SIZE_BYTES_MAX:
                raise ProtocolViolation(f"frame with flags {flags} and {size} bytes")
        elif not self.is_ready:
            raise ProtocolViolation("a message before the handshake's end")
        elif self._is_refused or not self._fits(size, messages):
            return self._skip(flags, size, body, len(data))
        if end > len(data) and size >= _GATHERED_BYTES_MIN:
            self._gathered_flags, self._missing_bytes = flags, size
            self._gather(data[body:], messages)
            return len(data)
        if end > len(data):
            self._needed = end - at
            return at
        self._keep(flags, bytes(data[body:end]), messages)
        return end

    def _gather(self, data: memoryview | bytes, messages: list[Message]) -> memoryview | bytes:
        """Take what belongs to the long part; what is behind it."""
        taken = self._gathered.write(data[: self._missing_bytes])
        self._missing_bytes -= taken
        if not self._missing_bytes:
            body, self._gathered = self._gathered.getvalue(), BytesIO()  # which does not copy
            self._keep(self._gathered_flags, body, messages)
        return data[taken:]

    def _keep(self, flags: int, body: bytes, messages: list[Message]) -> None:
        if flags & COMMAND:
            self._obey(body)
            return
        self._parts.append(body)
        self._parts_bytes += len(body)
        if not flags & MORE:
            messages.append(Message(self._parts))
            self._parts, self._parts_bytes = [], 0

    def _fits(self, size: int, messages: list[Message]) -> bool:
        """Whether a further part of so many bytes is within the limits; if not, the message becomes an error."""
        if len(self._parts) >= FRAME_COUNT_MAX:
            error = request_error(
                ErrorCode.BAD_FRAMES,
                f"a message of more than {FRAME_COUNT_MAX} parts",
                f"a header and at most {FRAME_COUNT_MAX - 1} frames",
            )
        elif size > FRAME_SIZE_BYTES_MAX:
            error = request_error(ErrorCode.OVERSIZE, f"frame of {size} bytes", f"at most {FRAME_SIZE_BYTES_MAX}")
        elif self._parts_bytes + size > MESSAGE_SIZE_BYTES_MAX:
            error = request_error(
                ErrorCode.OVERSIZE,
                f"a message of at least {self._parts_bytes + size} bytes",
                f"at most {MESSAGE_SIZE_BYTES_MAX}",
            )
        else:
            return True
        messages.append(Message(self._parts, error))
        self._parts, self._parts_bytes = [], 0
        self._is_refused, self._skipped_bytes, self._skipped_parts = True, 0, 0
        return False

    def _skip(self, flags: int, size: int, body: int, length: int) -> int:
        """Pass over a frame of a refused message; where its bytes in `data` end."""
        self._skipped_parts += 1
        self._skipped_bytes += size
        if self._skipped_parts > SKIPPED_PARTS_MAX or self._skipped_bytes > SKIPPED_BYTES_MAX:
            raise ProtocolViolation("a message that was refused goes on and on")
        if not flags & MORE:
            self._is_refused = False
        end = min(body + size, length)
        self._skip_bytes = body + size - end
        return end

    def _take_greeting(self, data: memoryview | bytes) -> int:
        size = greeting_size(data, _NULL)
        self._greeted = size > 0
        self._needed = len(data) + 1
        return size

    def _obey(self, command: bytes) -> None:
        length = command[0] if command else 0
        name, body = command[1 : 1 + length], command[1 + length :]
        if not self.is_ready and name == b"READY":
            kind = _socket_type(body)
            if kind not in self._role.peers:
                raise ProtocolViolation(f"a socket of type {kind!r}; use {self._role.peers[0].decode()}")
            self.is_ready = True
            if self._role.answers:
                self.commands.append(self._role.ready)
        elif self.is_ready and name == b"PING" and 0 <= len(body) - _PING_TTL_BYTES <= _PING_CONTEXT_BYTES_MAX:
            self.commands.append(_command(b"PONG", body[_PING_TTL_BYTES:]))
        elif self.is_ready and self._role is PUBLISHER and name in _SUBSCRIPTIONS:
            self.subscriptions.append(Subscription(bytes(body), name == b"SUBSCRIBE"))
        elif not self.is_ready or name != b"PONG":
            raise ProtocolViolation(f"command {name!r}")


def _take_message(data: memoryview | bytes, at: int, messages: list[Message]) -> int:
    """Take the message that begins at `at`, if it is there whole and within the limits; where it ends, else `at`.

    This is how nearly all messages come; it has no state, so that it costs a third of `Reader._take_frame`.
    """
    parts: list[bytes] = []
    end, length = at, len(data)
    while length - end >= HEAD_SIZE_BYTES and len(parts) < FRAME_COUNT_MAX:
        flags, size, body = data[end], data[end + 1], end + HEAD_SIZE_BYTES
        if flags & LONG:
            body = end + LONG_HEAD.size
            size = int.from_bytes(data[end + 1 : body], "big")
        end = body + size
        if flags & ~(MORE | LONG) or end > length or size > FRAME_SIZE_BYTES_MAX:
            break
        parts.append(bytes(data[body:end]))
        if not flags & MORE:
            if end - at > MESSAGE_SIZE_BYTES_MAX and sum(map(len, parts)) > MESSAGE_SIZE_BYTES_MAX:
                break
            messages.append(Message(parts))
            return end
    return at


def _socket_type(properties: bytes) -> bytes:
    """The value of Socket-Type; every property is checked."""
    kind, at = b"", 0
    while at < len(properties):
        value = at + 1 + properties[at] + _PROPERTY_SIZE.size
        if value > len(properties):
            raise ProtocolViolation("properties that end too early")
        name = properties[at + 1 : value - _PROPERTY_SIZE.size]
        (size,) = _PROPERTY_SIZE.unpack_from(properties, value - _PROPERTY_SIZE.size)
        at = value + size
        if at > len(properties):
            raise ProtocolViolation("a property that ends too late")
        if name.lower() == b"socket-type":
            kind = properties[value:at]
    return kind
