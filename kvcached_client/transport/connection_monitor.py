"""Whether a ZeroMQ connection lives: ZeroMQ itself would connect anew and never say that an answer will not come."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
#: Each of them says that the earlier connection has ended: ZeroMQ connects again only after that.
_END_EVENTS: Final = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED
)
#: The address of a monitor that was closed is free again only some time later.
_numbers: Final = count()


def await_message_or_end(watched: zmq.Socket[bytes], remaining_ms: int) -> bool:
    """Wait until a message has come or the one connection of a socket without a monitor has ended; whether one came.

    All messages of a connection come before its end. An end of before the call is seen when ZeroMQ connects again,
    which it tries every 100 ms.
    """
    events = watched.get_monitor_socket(_END_EVENTS, f"inproc://kvcached-end-{next(_numbers)}")
    try:
        poller = zmq.Poller()
        poller.register(watched, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        poller.poll(remaining_ms)
    finally:
        watched.disable_monitor()  # nobody would read its events, and a full monitor stops the socket's I/O thread
        events.close(linger=0)
    return bool(watched.poll(0))


class ConnectionMonitor:
    """Watches a socket that has one connection, from before it connects. Belongs to the socket's thread.

    Attributes:
        events: to be polled: it turns readable when there is something to `read`.
        is_lost: the connection has ended since the last `await_connection`, though there may be a new one.
    """

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self.events = watched.get_monitor_socket(_EVENTS)
        self._is_connected = False
        self.is_lost = False

    def read(self) -> None:
        """Take in what has happened. Never waits."""
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart(zmq.NOBLOCK))["event"]
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.is_lost = self.is_lost or not self._is_connected

    def await_connection(self, remaining_ms: Callable[[], int]) -> bool:
        """Wait until there is a connection and forget those before it; False when no time remains."""
        self.read()
        while not self._is_connected:
            if not self.events.poll(remaining_ms()):
                return False
            self.read()
        self.is_lost = False
        return True

    def close(self) -> None:
        """Watch no more."""
        self._watched.disable_monitor()
        self.events.close(linger=0)
