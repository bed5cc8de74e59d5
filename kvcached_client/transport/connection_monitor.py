"""Detects the end of a ZeroMQ connection: ZeroMQ itself reconnects, and never says that a reply will not come."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
#: Each of these means that the earlier connection has ended: ZeroMQ reconnects only after that.
_END_EVENTS: Final = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED
)
#: Each monitor gets a new address, because that of a closed monitor stays in use for some time.
_numbers: Final = count()


def await_message_or_end(watched: zmq.Socket[bytes], remaining_ms: int) -> bool:
    """Wait for a message or the end of the socket's only connection; returns whether a message has arrived.

    The socket has no monitor yet. All messages of a connection arrive before its end. If the connection ended before
    this call, that shows when ZeroMQ tries to reconnect, which it does every 100 ms.
    """
    events = watched.get_monitor_socket(_END_EVENTS, f"inproc://kvcached-end-{next(_numbers)}")
    try:
        poller = zmq.Poller()
        poller.register(watched, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        poller.poll(remaining_ms)
    finally:
        watched.disable_monitor()  # a full monitor that nobody reads would stop the socket's I/O thread
        events.close(linger=0)
    return bool(watched.poll(0))


class ConnectionMonitor:
    """Watches a socket with one connection, from before it connects. Belongs to the socket's thread.

    Attributes:
        events: to be polled; it becomes readable when there is something to `read`.
        is_lost: the connection has ended since the last `await_connection`; there may be a new one.
    """

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self.events = watched.get_monitor_socket(_EVENTS)
        self._is_connected = False
        self.is_lost = False

    def read(self) -> None:
        """Process the events so far. Never waits."""
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart(zmq.NOBLOCK))["event"]
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.is_lost = self.is_lost or not self._is_connected

    def await_connection(self, remaining_ms: Callable[[], int]) -> bool:
        """Wait until there is a connection, and reset `is_lost`; False when no time remains."""
        self.read()
        while not self._is_connected:
            if not self.events.poll(remaining_ms()):
                return False
            self.read()
        self.is_lost = False
        return True

    def close(self) -> None:
        """Stop watching."""
        self._watched.disable_monitor()
        self.events.close(linger=0)
