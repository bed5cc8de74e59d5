"""Clients of the TCP port: the SDK's end of CURVE over a bare socket, ZeroMQ's own, and others."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

import zmq

from kvcached_client.protocol.curve import CurveClient, KeyPair
from kvcached_client.protocol.engine import Reply, decode_reply
from kvcached_client.protocol.key_files import key_text

PATIENCE_S = 20


class CurvePeer:
    """A connection to a port. `say` is in boxes, `socket` is not. Everything that was sent is kept in `sent`."""

    def __init__(self, port: int, keys: KeyPair, server: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.reader = CurveClient(keys, server)
        self.sent: list[bytes] = []
        self._replies: list[list[bytes]] = []
        self.send_bytes(self.reader.hello)

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.sent.append(data)
        self.socket.sendall(data)

    def shake_hands(self) -> bool:
        """Whether the other side lets this peer in."""
        while not self.reader.is_ready:
            if self.reader.violation is not None or not self._hear():
                return False
        return True

    def ask(self, *parts: bytes) -> Reply | None:
        """Send a message; the header of the next reply, or None where the other side has closed the connection."""
        self.send_bytes(self.reader.seal(list(parts)))
        while not self._replies:
            if not self._hear():
                return None
        return decode_reply(self._replies.pop(0)[0])

    def is_closed(self) -> bool:
        """Wait until the other side has closed the connection."""
        while self._hear():
            pass
        return True

    def _hear(self) -> bool:
        try:
            data = self.socket.recv(65_536)
        except ConnectionError:
            return False
        self._replies += [message.parts for message in self.reader.read(data, 1000)]
        if self.reader.commands:
            self.send_bytes(b"".join(self.reader.commands))
            self.reader.commands.clear()
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()


def zeromq(context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: KeyPair, server: bytes = b"") -> zmq.Socket[bytes]:
    """A socket of ZeroMQ's own with CURVE: a client of `server`, or without one a server."""
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
    made.curve_secretkey, made.curve_publickey = (key_text(key).encode() for key in keys)
    if server:
        made.curve_serverkey = key_text(server).encode()
    else:
        made.curve_server = True
    return made
