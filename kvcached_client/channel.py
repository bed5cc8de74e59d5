"""Blocking calls over one ZeroMQ connection: deadlines, the daemon's death, and failures as misses.

A call is sent once. On a local socket a message is neither lost nor reordered while its connection lives, so a second
copy would only add to the load of a daemon that is slow. What a passed deadline leaves unknown is settled by sending
the same request with the same id again, which is the caller's decision (see `Lease`).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Literal, TypeVar

import zmq

from kvcached_client.attach import AttachConnection
from kvcached_client.connection_monitor import ConnectionMonitor
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    RequestError,
    Stale,
    request_error,
)
from kvcached_client.protocol import FRAME_SIZE_BYTES_MAX, Bye, Header, Release, Request, raise_for_error
from kvcached_client.session import PENDING_MAX, ClientSession
from kvcached_client.types import RequestId

Failures = Literal["raise", "miss"]
R = TypeVar("R", bound=Header)

#: How long a farewell that nobody answers may take to get into the daemon's socket.
_FAREWELL_MS: Final = 100
_IPC: Final = "ipc://"

_log: Final = logging.getLogger("kvcached_client")


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, queue_length: int) -> zmq.Socket[bytes]:
    """A connected DEALER socket that queues only for a peer that is there, and drops what is left when it is closed."""
    dealer = make_dealer(context, queue_length=queue_length)
    dealer.connect(endpoint)
    return dealer


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], *, queue_length: int) -> zmq.Socket[bytes]:
    """The same, not connected yet."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, queue_length)
    dealer.setsockopt(zmq.RCVHWM, queue_length)
    dealer.setsockopt(zmq.MAXMSGSIZE, FRAME_SIZE_BYTES_MAX)
    return dealer


class Channel:
    """One connection to a daemon. Not thread-safe, and of no use in a forked child."""

    def __init__(self, endpoint: str, *, deadline_ms: int, attached: AttachConnection | None = None) -> None:
        """Connect to `endpoint`; calls take at most `deadline_ms`.

        With `attached`, the end of that connection ends every call at once, the one that waits included. It is closed
        with the channel. Without it, the end of the ZeroMQ connection ends the call that waits, and later ones may
        find the next daemon.

        Raises:
            DaemonUnreachable: nothing listens at `endpoint`.
        """
        _check_listener(endpoint)
        self.endpoint = endpoint
        self.is_closed = False
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.is_gone = False  #: the daemon closed the attach connection; this channel is of no more use
        self.deadline_ms = deadline_ms
        self._attached = attached
        self._process_id = os.getpid()
        self._session = ClientSession()
        self._socket = make_dealer(self.context, queue_length=PENDING_MAX)
        self._monitor = ConnectionMonitor(self._socket) if attached is None else None
        self._socket.connect(endpoint)
        self._readable = self._poller(zmq.POLLIN)
        self._writable = self._poller(zmq.POLLOUT)

    def next_id(self) -> RequestId:
        """An id for the next request."""
        return self._session.next_id()

    def deadline_ns(self) -> int:
        """When a call that starts now has to be over, on the monotonic clock."""
        return time.monotonic_ns() + self.deadline_ms * 1_000_000

    def attach_fileno(self) -> int:
        """The descriptor of the attach connection: it turns readable when the daemon ends it.

        Raises:
            DaemonUnreachable: the channel is closed, or has none.
        """
        if self._attached is None or self.is_closed:
            raise DaemonUnreachable(f"this client of {self.endpoint} has no attach connection")
        return self._attached.fileno()

    def ask(
        self, request: Request, expected: type[R], frames: Sequence[bytes] = (), *, deadline_ns: int | None = None
    ) -> tuple[R, list[bytes]]:
        """Send a request and wait for its reply and the reply's frames, until `deadline_ns` (default: as a new call).

        Raises:
            RequestError: the daemon, or this side before sending, refused.
            DaemonUnreachable: the daemon is gone, or was not there to take the request; or the channel is closed.
            DeadlineExceeded: no reply came in time; whether the request took effect is unknown.
            RuntimeError: this process is a fork of the one that opened the channel.
        """
        self.send(request, frames, deadline_ns=deadline_ns)
        return self.receive(request, expected)

    def send(self, request: Request, frames: Sequence[bytes] = (), *, deadline_ns: int | None = None) -> None:
        """The first half of `ask`, with a deadline for the answer. Where it raises, nothing was sent.

        To be sent it has no longer than the channel's own deadline, however long its answer may take.
        """
        self._check_usable()
        if deadline_ns is None:
            deadline_ns = self.deadline_ns()
        parts = self._session.send(request, frames, deadline_ns=deadline_ns)
        try:
            self._send(parts, min(deadline_ns, self.deadline_ns()))
        except BaseException:
            self._session.abandon(RequestId(request.id))
            raise

    def receive(self, request: Request, expected: type[R]) -> tuple[R, list[bytes]]:
        """The second half of `ask`, for a request that was sent, with the deadline that it was sent with."""
        request_id = RequestId(request.id)
        try:
            reply, reply_frames = self._wait_for_reply(request_id)
        except BaseException:
            self._session.abandon(request_id)
            raise
        if not isinstance(reply, expected):
            raise request_error(
                ErrorCode.MALFORMED,
                f"{type(reply).__name__} instead of {expected.__name__}",
                "client and daemon differ in version",
            )
        return reply, reply_frames

    def is_over(self, request: Request) -> bool:
        """Whether `receive` would not wait for a request that was sent. Reads what has come.

        Raises:
            DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        request_id = RequestId(request.id)
        if self._session.is_answered(request_id):
            return True
        while self._poll(self._readable, 0):
            self._session.receive(self._socket.recv_multipart(zmq.NOBLOCK))
        self._session.expire(time.monotonic_ns())
        return self._session.is_answered(request_id) or not self._session.is_pending(request_id)

    def abandon(self, request: Request) -> None:
        """Wait no longer for the reply to a request that was sent."""
        self._session.abandon(RequestId(request.id))

    def listen(self, wake: int, deadline_ns: int) -> bool:
        """Wait until a message has come, or the descriptor `wake` is readable; whether that was in time.

        Raises:
            DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        poller = self._poller(zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        return self._poll(poller, deadline_ns, wake)

    def post(self, request: Request) -> bool:
        """Send a request whose reply nobody waits for, if it can be sent without waiting; whether it was.

        Raises:
            RequestError, DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        parts = self._session.send(request, deadline_ns=0)
        self._session.abandon(RequestId(request.id))
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the connection and the attach connection. Sockets that others opened in `context` must be closed.

        Messages that are still on their way out have `linger_ms` to leave. Does nothing the second time.
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
        if self._monitor is not None and event == zmq.POLLIN:
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
        # However long the answer may take: a daemon that is there takes a request at once.
        deadline_ns = min(deadline_ns, self.deadline_ns())
        while True:
            try:
                if self._monitor is not None and not self._monitor.await_connection(lambda: _remaining_ms(deadline_ns)):
                    raise self._untaken()
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                return
            except zmq.Again:
                if not self._poll(self._writable, deadline_ns):
                    raise self._untaken() from None

    def _untaken(self) -> DaemonUnreachable:
        return DaemonUnreachable(f"{self.endpoint} took no request for {self.deadline_ms} ms; is the daemon running?")

    def _wait_for_reply(self, request_id: RequestId) -> tuple[Header, list[bytes]]:
        answer = self._session.take(request_id)  # it may have come while another one was waited for
        while answer is None and self._session.is_pending(request_id):
            if self._poll(self._readable, self._session.deadline_ns(request_id)):
                self._session.receive(self._socket.recv_multipart(zmq.NOBLOCK))
            answer = self._session.take(request_id)
            self._session.expire(time.monotonic_ns())
        if answer is None:
            raise DeadlineExceeded(f"no reply from {self.endpoint} within {self.deadline_ms} ms")
        return raise_for_error(answer.reply), answer.frames

    def _poll(self, poller: zmq.Poller, deadline_ns: int, wake: int | None = None) -> bool:
        """Whether the socket, or the descriptor `wake` that is polled beside it, is ready before the deadline.

        Raises:
            DaemonUnreachable: the socket is not ready, and the daemon closed the attach connection, or this one.
        """
        ready = [which for which, _ in poller.poll(_remaining_ms(deadline_ns))]
        if self._socket in ready or wake in ready:
            return True
        if ready and self._attached is not None and self._attached.is_closed_by_daemon():
            self.is_gone = True
            raise DaemonUnreachable(f"the daemon behind {self.endpoint} is gone")
        if ready and self._monitor is not None:
            self._monitor.read()
            if self._socket.poll(0):  # what came before the end
                return True
            if self._monitor.is_lost:
                raise DaemonUnreachable(
                    f"the daemon behind {self.endpoint} was gone before it answered; whether it did as asked is unknown"
                )
        return False


class SessionChannel(Channel):
    """A channel whose connection owns a session: it knows the pool's epoch and what to do about failures."""

    def __init__(self, endpoint: str, *, deadline_ms: int, attached: AttachConnection, failures: Failures) -> None:
        super().__init__(endpoint, deadline_ms=deadline_ms, attached=attached)
        self.epoch = 0
        self.is_stale = False  #: the daemon said that the session or the pool's epoch is over
        self.misses = MissPolicy(failures)

    def send(self, request: Request, frames: Sequence[bytes] = (), *, deadline_ns: int | None = None) -> None:
        """As `Channel.send`; gives back first what was granted after the caller had stopped waiting for it."""
        self.give_back_late()
        super().send(request, frames, deadline_ns=deadline_ns)

    def give_back_late(self) -> None:
        """Release the leases that came, among replies that were read, after the caller had stopped waiting."""
        for lease in self._session.orphans():
            if not self.post(Release(id=self.next_id(), epoch=self.epoch, lease=lease, reply=False)):
                break
            self._session.drop_orphan(lease)

    def receive(self, request: Request, expected: type[R]) -> tuple[R, list[bytes]]:
        """As `Channel.receive`; notes when the session is over."""
        try:
            return super().receive(request, expected)
        except Stale:
            self.is_stale = True
            raise

    def hang_up(self) -> None:
        """Close, and end the session without waiting for the daemon's answer, or for the one to a hello before it."""
        linger_ms = 0
        try:
            if self.post(Bye(id=self.next_id())):
                linger_ms = _FAREWELL_MS
        except DaemonUnreachable as error:
            _log.debug("no goodbye: %s", error)
        finally:
            self.close(linger_ms=linger_ms)


class MissPolicy:
    """``with policy:`` lets errors pass, or counts them and goes on after the block, as configured."""

    def __init__(self, failures: Failures) -> None:
        self._swallows = failures == "miss"
        #: Failures that became misses.
        self.count = 0
        #: Kinds of failure already logged: there are few, and one line of each is enough.
        self._logged: set[str] = set()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not self._swallows or not isinstance(error, KvcachedError):
            return False
        self.count += 1
        name = error.code.value if isinstance(error, RequestError) else type(error).__name__
        if name not in self._logged:
            self._logged.add(name)
            _log.warning("kvcached failed, going on without cached blocks (logged once per kind of failure): %s", error)
        return True


def _remaining_ms(deadline_ns: int) -> int:
    """Whole milliseconds until a moment of the monotonic clock, rounded up."""
    return max(0, -((time.monotonic_ns() - deadline_ns) // 1_000_000))


def _check_listener(endpoint: str) -> None:
    """Raise `DaemonUnreachable` where nothing listens: ZeroMQ would wait for somebody to come."""
    if not endpoint.startswith(_IPC):
        return
    path = endpoint.removeprefix(_IPC)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(0)
        try:
            trial.connect(path)
        except BlockingIOError:
            return  # a full queue of connections is somebody's
        except FileNotFoundError:
            raise DaemonUnreachable(f"no socket {path}; is the daemon running?") from None
        except OSError as error:
            raise DaemonUnreachable(f"{path}: {error.strerror}; is the daemon running?") from error
