"""A peer that speaks ZMTP over a bare socket, and whatever else it likes."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from kvcached_client.protocol.engine import ErrorReply, Reply, decode_reply
from kvcached_client.protocol.zmtp import DEALER, GREETING, Reader, encode_message

READY = DEALER.ready
PATIENCE_S = 20


def frame(flags: int, body: bytes) -> bytes:
    """A short frame."""
    return bytes((flags, len(body))) + body


class RawPeer:
    """A connection to `path`; with `shakes_hands` it has sent all of its handshake."""

    def __init__(self, path: Path, *, shakes_hands: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))  # which waits for a place, and would not with a timeout
        self.socket.settimeout(PATIENCE_S)
        self._reader = Reader(DEALER)
        self._replies: list[list[bytes]] = []
        if shakes_hands:
            self.socket.sendall(GREETING + READY)

    def send(self, *parts: bytes) -> None:
        """Send a message."""
        self.socket.sendall(encode_message(list(parts)))

    def receive(self) -> list[bytes] | None:
        """The parts of the next reply, or None where the other side has closed the connection."""
        while not self._replies:
            try:
                data = self.socket.recv(65_536)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._replies += [message.parts for message in self._reader.read(data, 1000)]
            while self._reader.has_more:
                self._replies += [message.parts for message in self._reader.read(b"", 1000)]
        return self._replies.pop(0)

    def reply(self) -> Reply | None:
        """The header of the next reply."""
        parts = self.receive()
        return None if parts is None else decode_reply(parts[0])

    def ask(self, *parts: bytes) -> Reply:
        """Send a message; returns the header of the next reply."""
        self.send(*parts)
        reply = self.reply()
        assert reply is not None, "no reply"
        return reply

    def error(self, *parts: bytes) -> ErrorReply:
        """Send a message that is refused; returns the reply, which has no other parts."""
        self.send(*parts)
        received = self.receive()
        assert received is not None, "no reply"
        (header,) = received
        reply = decode_reply(header)
        assert isinstance(reply, ErrorReply), reply
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()
