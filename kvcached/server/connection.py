"""An open connection of the RPC server: who is at its other end, what comes in, and what has not gone out."""

from __future__ import annotations

import socket
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from kvcached.process.access import Access, Grants
from kvcached.server.connections import ConnectionLimits, Origin
from kvcached_client.errors import RequestError
from kvcached_client.protocol.greeting import ProtocolViolation
from kvcached_client.protocol.zmtp import Message, message_pieces


class IncomingReader(Protocol):
    """What comes in, as messages: `zmtp.Reader`, or `curve.CurveServer`."""

    is_ready: bool
    violation: ProtocolViolation | None
    commands: list[bytes]
    has_more: bool

    @property
    def is_skipping(self) -> bool:
        """Whether what comes next belongs to a message that was refused."""

    @property
    def held_bytes(self) -> int:
        """What is kept of messages that are not whole yet, or not taken yet."""

    def read(self, data: memoryview | bytes, messages_max: int) -> list[Message]:
        """The next messages, of what was received before and `data`, at most so many."""


class Identity(NamedTuple):
    """Who is at the other end.

    Attributes:
        origin: whose limits count.
        grants: what it may do.
        owner: whoever shares turns, pauses and memory with it.
    """

    origin: Origin
    grants: Grants
    owner: Hashable


class Connection:
    """An open connection.

    Attributes:
        descriptor: of the socket; -1 once it is closed.
        is_open: it has not been closed.
        origin: who connected.
        grants: what its user, or its key, may do.
        owner: whoever shares turns, pauses and memory with it.
        peer: names it to the handler; never used again.
        reader: what comes in.
        replies: to messages of its present turn, which leave together: each `send` may wake its peer.
        unsent: replies that its peer has not made room for. While there are any, nothing is read from it.
        refusal: the answer to its first request where it is not admitted.
        is_deaf: nothing can be sent any more; what its peer said before that is read to the end.
        watched_events: of what the server hears; 0 for nothing.
        is_queued: it waits for its next turn.
        counted_bytes: what the server's total has for it.
    """

    __slots__ = (
        "counted_bytes", "descriptor", "grants", "is_deaf", "is_open", "is_queued", "origin", "owner", "peer",
        "reader", "refusal", "replies", "socket", "unsent", "watched_events",
    )  # fmt: skip

    def __init__(self, accepted: socket.socket, peer: bytes, identity: Identity, reader: IncomingReader) -> None:
        self.socket = accepted
        self.descriptor = accepted.fileno()
        self.is_open = True
        self.origin, self.grants, self.owner = identity
        self.peer = peer
        self.reader = reader
        self.replies = bytearray()
        self.unsent = bytearray()
        self.refusal: RequestError | None = None
        self.is_deaf = False
        self.watched_events = 0
        self.is_queued = False
        self.counted_bytes = 0

    def introduced(self) -> Identity | None:
        """Who its peer is, where that is known only once it has introduced itself."""
        return None

    def violation_counter(self) -> str:
        """What a violation of its peer is counted as; empty where it is only logged."""
        return ""

    def encode(self, parts: list[bytes]) -> bytes:
        """A message as this connection's peer expects it."""
        return b"".join(message_pieces(parts))

    @property
    def held_bytes(self) -> int:
        """The memory that its messages and replies take."""
        return self.reader.held_bytes + len(self.unsent)

    def send(self, data: bytes | memoryview) -> int:
        """Send what the peer has room for; how many bytes that was.

        Raises:
            OSError: nothing can be sent any more.
        """
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Close it. The loop must not watch it any more."""
        self.descriptor, self.is_open = -1, False
        self.replies.clear()
        self.unsent.clear()
        self.socket.close()


class Door(Protocol):
    """Where peers connect, and how it is known who they are.

    Attributes:
        name: for the log.
        endpoint: what clients connect to.
        place: the path of the socket, or its address and port.
        greeting: what each new peer gets first.
        access: who may do what.
        limits: of its connections.
    """

    name: str
    endpoint: str
    place: str | tuple[str, int]
    greeting: bytes
    access: Access
    limits: ConnectionLimits

    def take_in(self, accepted: socket.socket, serial: int) -> Connection:
        """A new connection, whose peer has said nothing yet."""
