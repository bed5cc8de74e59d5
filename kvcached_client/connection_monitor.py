"""Whether a ZeroMQ connection lives: ZeroMQ itself would connect anew and never say that an answer will not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


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
