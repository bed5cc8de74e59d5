"""The daemon's end of a worker's socket: messages out in order, messages in as they come. Never waits."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import msgspec

from kvcached.seqpacket import Packet, receive, send
from kvcached.worker.messages import REPLY_SIZE_BYTES_MAX, WorkerMessage, decode_worker_message
from kvcached_client.protocol import PROGRESS_SLOTS

#: What `WorkerReady` brings: the pool's memory, the progress page, and an eventfd for each entry of it.
READY_DESCRIPTORS: Final = 2 + PROGRESS_SLOTS


class WorkerConnection:
    """An open connection. Lives in one event loop's thread.

    Args:
        connection: connected, non-blocking; closed by `close`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[bytes] = deque()  # bounded by the commands in flight
        self._on_message: Callable[[WorkerMessage], None] | None = None
        self._on_closed: Callable[[], None] | None = None
        self._on_garbage: Callable[[str], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages can still be exchanged, as far as is known."""
        return self._connection is not None

    def listen(
        self,
        on_message: Callable[[WorkerMessage], None],
        on_closed: Callable[[], None],
        on_garbage: Callable[[str], None],
    ) -> None:
        """From now on tell of every message, and once of the end, if the worker brings it about.

        Args:
            on_message: called with each message.
            on_closed: the worker closed the connection.
            on_garbage: it sent what is no message, and the connection was closed for that.
        """
        self._on_message, self._on_closed, self._on_garbage = on_message, on_closed, on_garbage
        if self._connection is not None:
            self._loop.add_reader(self._connection.fileno(), self.read)

    def send(self, message: bytes) -> None:
        """Send a message, or queue it until the worker has read those before. Does nothing once closed."""
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
                packet = receive(self._connection, REPLY_SIZE_BYTES_MAX, 0)
                if packet is None:
                    break
                message = decode_worker_message(packet.data)
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


async def next_message(connection: socket.socket) -> tuple[WorkerMessage, tuple[int, ...]] | None:
    """The next message with the descriptors that came along, now the caller's; None where the worker closed.

    Raises:
        ValueError: it cannot be decoded, or more came than can be meant.
    """
    packet = await _next_packet(connection)
    if packet is None:
        return None
    with ExitStack() as unwanted:
        unwanted.callback(packet.close)
        if packet.cut:
            raise ValueError(f"it sent more than {REPLY_SIZE_BYTES_MAX} bytes or {READY_DESCRIPTORS} descriptors")
        message = decode_worker_message(packet.data)  # msgspec.DecodeError is a ValueError
        unwanted.pop_all()
    return message, tuple(packet.descriptors)


async def _next_packet(connection: socket.socket) -> Packet | None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection.fileno(), _set, readable)
    try:
        await readable
    finally:
        loop.remove_reader(connection.fileno())
    try:
        return receive(connection, REPLY_SIZE_BYTES_MAX, READY_DESCRIPTORS)
    except ConnectionError:
        return None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
