"""Blocking calls over one ZeroMQ connection, with deadlines and detection of the daemon's death.

A request is sent once. On a local socket no message is lost or reordered while its connection lives, so a second copy
would only add to the load of a slow daemon. After a missed deadline it is unknown whether the request took effect; to
find out, the caller may send the same request again with the same id (see `Lease`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final, TypeVar

import zmq

from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    bad_reply,
)
from kvcached_client.protocol.engine import (
    FRAME_SIZE_BYTES_MAX,
    Header,
    Request,
    raise_for_error,
)
from kvcached_client.transport.attach import AttachConnection
from kvcached_client.transport.calls import PENDING_MAX, PendingCalls
from kvcached_client.transport.connection_monitor import ConnectionMonitor, await_message_or_end
from kvcached_client.transport.listener import check_own, silent
from kvcached_client.types import RequestId

R = TypeVar("R", bound=Header)

#: How long replies may take to arrive after the daemon has closed the attach connection. It sends them before.
_LAST_REPLIES_MS: Final = 1000
#: A full listener refuses ZeroMQ at once, and the process that fills it takes each place that becomes free. Measured
#: beside such a process: with ZeroMQ's 100 ms, 7 of 15 clients had no connection after 5 s; with 2 ms all had one after
#: 0.2 s (`docs/decisions/0022-the-daemon-speaks-zmtp-itself.md`).
_CONNECT_INTERVAL_MS: Final = 2
_IPC: Final = "ipc://"


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, queue_length: int) -> zmq.Socket[bytes]:
    """A connected DEALER socket. It queues messages only while a peer is connected, and drops them when closed."""
    dealer = make_dealer(context, queue_length=queue_length)
    dealer.connect(endpoint)
    return dealer


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], *, queue_length: int) -> zmq.Socket[bytes]:
    """The same socket, not connected yet."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, queue_length)
    dealer.setsockopt(zmq.RCVHWM, queue_length)
    dealer.setsockopt(zmq.RECONNECT_IVL, _CONNECT_INTERVAL_MS)
    dealer.setsockopt(zmq.MAXMSGSIZE, FRAME_SIZE_BYTES_MAX)
    return dealer


class Channel:
    """One connection to a daemon. Not thread-safe, and unusable in a forked child."""

    def __init__(self, endpoint: str, *, deadline_ms: int, attached: AttachConnection | None = None) -> None:
        """Connect to `endpoint`; calls take at most `deadline_ms`.

        With `attached`, the end of that connection ends every call at once, including a waiting one. The channel
        closes it. Without `attached`, the end of the ZeroMQ connection ends only the waiting call; later calls may
        reach the next daemon.

        Raises:
            DaemonUnreachable: nothing listens at `endpoint`.
            Refused: another user's daemon does.
        """
        if path := _socket_of(endpoint):  # ZeroMQ would wait for a listener
            check_own(path)
        self.endpoint = endpoint
        self.is_closed = False
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.is_gone = False  #: the daemon closed the attach connection; this channel is unusable
        self.deadline_ms = deadline_ms
        self._attached = attached
        self._process_id = os.getpid()
        self._calls = PendingCalls()
        self._socket = make_dealer(self.context, queue_length=PENDING_MAX)
        # Otherwise ZeroMQ drops unread messages when the connection ends. `_send` checks the connection itself.
        self._socket.setsockopt(zmq.IMMEDIATE, 0)
        self._monitor: ConnectionMonitor | None = ConnectionMonitor(self._socket)
        self._socket.connect(endpoint)
        self._readable = self._poller(zmq.POLLIN)
        self._writable = self._poller(zmq.POLLOUT)

    def next_id(self) -> RequestId:
        """An id for the next request."""
        return self._calls.next_id()

    def deadline_ns(self) -> int:
        """The deadline of a call that starts now, on the monotonic clock."""
        return time.monotonic_ns() + self.deadline_ms * 1_000_000

    def attach_fileno(self) -> int:
        """The descriptor of the attach connection; it becomes readable when the daemon closes the connection.

        Raises:
            DaemonUnreachable: the channel is closed, or has none.
        """
        if self._attached is None or self.is_closed:
            raise DaemonUnreachable(f"this client of {self.endpoint} has no attach connection")
        return self._attached.fileno()

    def ask(
        self, request: Request, expected: type[R], frames: Sequence[bytes] = (), *, deadline_ns: int | None = None
    ) -> tuple[R, list[bytes]]:
        """Send a request and wait for its reply and frames, until `deadline_ns` (default: that of a new call).

        Raises:
            RequestError: the request was refused, by the daemon or before it was sent.
            DaemonUnreachable: the daemon is gone or did not accept the request, or the channel is closed.
            DeadlineExceeded: no reply came in time; whether the request took effect is unknown.
            RuntimeError: this process is a fork of the process that opened the channel.
        """
        self.send(request, frames, deadline_ns=deadline_ns)
        return self.receive(request, expected)

    def send(self, request: Request, frames: Sequence[bytes] = (), *, deadline_ns: int | None = None) -> None:
        """The first half of `ask`; `deadline_ns` is for the reply. If it raises, nothing was sent.

        Sending takes no longer than the channel's own deadline, however long the reply may take.
        """
        self._check_usable()
        if deadline_ns is None:
            deadline_ns = self.deadline_ns()
        parts = self._calls.send(request, frames, deadline_ns=deadline_ns)
        try:
            self._send(parts, min(deadline_ns, self.deadline_ns()))
        except BaseException:
            self._calls.abandon(RequestId(request.id))
            raise

    def receive(self, request: Request, expected: type[R]) -> tuple[R, list[bytes]]:
        """The second half of `ask`: wait for the reply, until the deadline given to `send`."""
        request_id = RequestId(request.id)
        try:
            reply, reply_frames = self._wait_for_reply(request_id)
        except BaseException:
            self._calls.abandon(request_id)
            raise
        if not isinstance(reply, expected):
            raise bad_reply(f"{type(reply).__name__} instead of {expected.__name__}")
        return reply, reply_frames

    def is_over(self, request: Request) -> bool:
        """Whether `receive` would return at once. Reads the messages that have arrived.

        Raises:
            DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        request_id = RequestId(request.id)
        if self._calls.is_answered(request_id):
            return True
        while self._poll(self._readable, 0):
            self._calls.receive(self._socket.recv_multipart(zmq.NOBLOCK))
        self._calls.expire(time.monotonic_ns())
        return self._calls.is_answered(request_id) or not self._calls.is_pending(request_id)

    def abandon(self, request: Request) -> None:
        """Stop waiting for the reply to a request."""
        self._calls.abandon(RequestId(request.id))

    def listen(self, wake: int, deadline_ns: int) -> bool:
        """Wait for a message, or until the descriptor `wake` is readable; returns False at the deadline.

        Raises:
            DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        poller = self._poller(zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        return self._poll(poller, deadline_ns, wake)

    def post(self, request: Request) -> bool:
        """Send a request without waiting, and ignore its reply; returns whether it could be sent.

        Raises:
            RequestError, DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        parts = self._calls.send(request, deadline_ns=0)
        self._calls.abandon(RequestId(request.id))
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, *, linger_ms: int = 0) -> None:
        """Close both connections. Other sockets of `context` must be closed before.

        Queued messages have `linger_ms` to be sent. Does nothing the second time.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if os.getpid() == self._process_id:
            if self._monitor is not None:
                self._monitor.close()
            self._socket.close(linger=linger_ms)
            self.context.term()
        if self._attached is not None:
            self._attached.close()

    def _poller(self, event: int) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._socket, event)
        if self._attached is not None:
            poller.register(self._attached.fileno(), zmq.POLLIN)
        if self._monitor is not None and self._attached is None and event == zmq.POLLIN:
            poller.register(self._monitor.events, zmq.POLLIN)
        return poller

    def _check_usable(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this kvcached client belongs to process {self._process_id}; "
                f"a forked child connects its own, or joins the session with map_pool"
            )
        if self.is_closed:
            raise DaemonUnreachable(f"this client of {self.endpoint} is closed; connect again")
        if self.is_gone:
            raise DaemonUnreachable(f"the daemon behind {self.endpoint} is gone")

    def _send(self, parts: list[bytes], deadline_ns: int) -> None:
        while True:
            try:
                if self._monitor is not None and not self._monitor.await_connection(lambda: _remaining_ms(deadline_ns)):
                    raise self._untaken()
                if self._attached is not None:
                    self._check_daemon(self._attached)
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                return
            except zmq.Again:
                if not self._poll(self._writable, deadline_ns):
                    raise self._untaken() from None

    def _check_daemon(self, attached: AttachConnection) -> None:
        """From the first request on, the attach connection shows whether the daemon lives, not the monitor."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if attached.is_closed_by_daemon():
            self.is_gone = True
            raise DaemonUnreachable(f"the daemon behind {self.endpoint} is gone")

    def _untaken(self) -> DaemonUnreachable:
        if path := _socket_of(self.endpoint):
            return silent(path, self.deadline_ms)
        return DaemonUnreachable(
            f"{self.endpoint} accepted no request for {self.deadline_ms} ms; is the daemon running?"
        )

    def _wait_for_reply(self, request_id: RequestId) -> tuple[Header, list[bytes]]:
        answer = self._calls.take(request_id)  # it may have arrived during the wait for another one
        while answer is None and self._calls.is_pending(request_id):
            if self._poll(self._readable, self._calls.deadline_ns(request_id)):
                self._calls.receive(self._socket.recv_multipart(zmq.NOBLOCK))
            answer = self._calls.take(request_id)
            self._calls.expire(time.monotonic_ns())
        if answer is None:
            raise DeadlineExceeded(f"no reply from {self.endpoint} within {self.deadline_ms} ms")
        return raise_for_error(answer.reply), answer.frames

    def _poll(self, poller: zmq.Poller, deadline_ns: int, wake: int | None = None) -> bool:
        """Whether the socket, or the descriptor `wake`, is ready before the deadline.

        If the daemon has closed the attach connection, replies that it sent before are still awaited. That may take
        `_LAST_REPLIES_MS` beyond the deadline, but mostly a tenth of it.

        Raises:
            DaemonUnreachable: the socket is not ready, and the daemon has closed a connection.
        """
        ready = [which for which, _ in poller.poll(_remaining_ms(deadline_ns))]
        if self._socket in ready or wake in ready:
            return True
        if ready and self._attached is not None and self._attached.is_closed_by_daemon():
            if poller is not self._writable and await_message_or_end(self._socket, _LAST_REPLIES_MS):
                return True
            self.is_gone = True
            raise DaemonUnreachable(f"the daemon behind {self.endpoint} is gone")
        if ready and self._monitor is not None:
            self._monitor.read()
            if self._socket.poll(0):  # messages from before the end
                return True
            if self._monitor.is_lost:
                raise DaemonUnreachable(
                    f"the daemon behind {self.endpoint} was gone before it replied; "
                    "whether the request took effect is unknown"
                )
        return False


def _remaining_ms(deadline_ns: int) -> int:
    """Whole milliseconds until a time of the monotonic clock, rounded up."""
    return max(0, -((time.monotonic_ns() - deadline_ns) // 1_000_000))


def _socket_of(endpoint: str) -> str:
    """The path of a local socket; "" for another kind of endpoint."""
    return endpoint.removeprefix(_IPC) if endpoint.startswith(_IPC) else ""
