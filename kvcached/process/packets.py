"""One end of a SOCK_SEQPACKET connection in the event loop: messages out in order, messages in as they come.

Never waits.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from kvcached.process.seqpacket import receive, send

M = TypeVar("M")


class PacketConnection(Generic[M]):
    """An open connection. Lives in one event loop's thread.

    Args:
        connection: connected, non-blocking; closed by `close`.
        decode: makes a message of a packet, or raises `msgspec.DecodeError`.
        size_bytes_max: of a packet that comes.
    """

    def __init__(self, connection: socket.socket, decode: Callable[[bytes], M], size_bytes_max: int) -> None:
        self._connection: socket.socket | None = connection
        self._decode = decode
        self._size_bytes_max = size_bytes_max
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[bytes] = deque()  # bounded by the commands in flight
        self._on_message: Callable[[M], None] | None = None
        self._on_closed: Callable[[], None] | None = None
        self._on_garbage: Callable[[str], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages can still be exchanged, as far as is known."""
        return self._connection is not None

    def listen(
        self, on_message: Callable[[M], None], on_closed: Callable[[], None], on_garbage: Callable[[str], None]
    ) -> None:
        """From now on tell of every message, and once of the end, if the peer brings it about.

        Args:
            on_message: called with each message.
            on_closed: the peer closed the connection.
            on_garbage: it sent what is no message, and the connection was closed for that.
        """
        self._on_message, self._on_closed, self._on_garbage = on_message, on_closed, on_garbage
        if self._connection is not None:
            self._loop.add_reader(self._connection.fileno(), self.read)

    def send(self, message: bytes) -> None:
        """Send a message, or queue it until the peer has read those before. Does nothing once closed."""
        if self._connection is None:
            return
        if self._outbox:
            self._outbox.append(message)
            return
        try:
            send(self._connection, message)
        except BlockingIOError:
            self._outbox.append(message)
            self._loop.add_writer(self._connection.fileno(), self._on_writable)
        except OSError:
            self._end()

    def read(self) -> None:
        """Take every message that is there."""
        try:
            while self._connection is not None:
                packet = receive(self._connection, self._size_bytes_max, 0)
                if packet is None:
                    break
                message = self._decode(packet.data)
                if self._on_message is not None:
                    self._on_message(message)
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        except msgspec.DecodeError as error:
            self.close()
            if self._on_garbage is not None:
                self._on_garbage(f"it sent what cannot be decoded: {error}")
        self._end()

    def close(self) -> None:
        """Close it, and drop what was not sent. Does nothing the second time."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._loop.remove_reader(connection.fileno())
        self._loop.remove_writer(connection.fileno())
        connection.close()
        self._outbox.clear()

    def _on_writable(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            while self._outbox:
                send(connection, self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        self._loop.remove_writer(connection.fileno())

    def _end(self) -> None:
        if self._connection is None:
            return
        self.close()
        if self._on_closed is not None:
            self._on_closed()
