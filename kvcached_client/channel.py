"""Blocking calls over one ZeroMQ connection: deadlines, the daemon's death, and failures as misses.

A call is sent once. On a local socket a message is neither lost nor reordered while its connection lives, so a second
copy would only add to the load of a daemon that is slow. What a passed deadline leaves unknown is settled by sending
the same request with the same id again, which is the caller's decision (see `Lease`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Literal, TypeVar

import zmq

from kvcached_client.attach import AttachConnection
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    RequestError,
    Stale,
    request_error,
)
from kvcached_client.protocol import FRAME_SIZE_BYTES_MAX, Header, Release, Request, raise_for_error
from kvcached_client.session import PENDING_MAX, ClientSession
from kvcached_client.types import RequestId

Failures = Literal["raise", "miss"]
R = TypeVar("R", bound=Header)

_log: Final = logging.getLogger("kvcached_client")


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, queue_length: int) -> zmq.Socket[bytes]:
    """A DEALER socket that queues only for a peer that is there, and drops what is left when it is closed."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, queue_length)
    dealer.setsockopt(zmq.RCVHWM, queue_length)
    dealer.setsockopt(zmq.MAXMSGSIZE, FRAME_SIZE_BYTES_MAX)
    dealer.connect(endpoint)
    return dealer


class Channel:
    """One connection to a daemon. Not thread-safe, and of no use in a forked child."""

    def __init__(self, endpoint: str, *, deadline_ms: int, attached: AttachConnection | None = None) -> None:
        """Connect to `endpoint`; calls take at most `deadline_ms`.

        With `attached`, the end of that connection ends every call at once, the one that waits included. It is closed
        with the channel.
        """
        self.endpoint = endpoint
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.is_gone = False  #: the daemon closed the attach connection; this channel is of no more use
        self._deadline_ms = deadline_ms
        self._attached = attached
        self._process_id = os.getpid()
        self._session = ClientSession()
        self._socket = open_dealer(self.context, endpoint, queue_length=PENDING_MAX)
        self._readable = self._poller(zmq.POLLIN)
        self._writable = self._poller(zmq.POLLOUT)

    def next_id(self) -> RequestId:
        """An id for the next request."""
        return self._session.next_id()

    def ask(self, request: Request, expected: type[R], frames: Sequence[bytes] = ()) -> tuple[R, list[bytes]]:
        """Send a request and wait for its reply and the reply's frames.

        Raises:
            RequestError: the daemon, or this side before sending, refused.
            DaemonUnreachable: the daemon is gone, or was not there to take the request.
            DeadlineExceeded: no reply came in time; whether the request took effect is unknown.
            RuntimeError: this process is a fork of the one that opened the channel.
        """
        self._check_process()
        deadline_ns = time.monotonic_ns() + self._deadline_ms * 1_000_000
        parts = self._session.send(request, frames, deadline_ns=deadline_ns)
        request_id = RequestId(request.id)
        try:
            self._send(parts, deadline_ns)
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

    def post(self, request: Request) -> bool:
        """Send a request that asks for no reply, if it can be sent without waiting; whether it was.

        Raises:
            RequestError, RuntimeError: as `ask`.
        """
        self._check_process()
        parts = self._session.send(request, deadline_ns=0)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the connection and the attach connection. Sockets that others opened in `context` must be closed."""
        if os.getpid() == self._process_id:
            self._socket.close(linger=0)
            self.context.term()
        if self._attached is not None:
            self._attached.close()

    def _poller(self, event: int) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._socket, event)
        if self._attached is not None:
            poller.register(self._attached.fileno(), zmq.POLLIN)
        return poller

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this kvcached client belongs to process {self._process_id}; "
                f"a forked child connects its own, or joins the session with map_pool"
            )
        if self.is_gone:
            raise DaemonUnreachable(f"the daemon behind {self.endpoint} is gone")

    def _send(self, parts: list[bytes], deadline_ns: int) -> None:
        while True:
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                return
            except zmq.Again:
                if not self._poll(self._writable, deadline_ns):
                    raise DaemonUnreachable(
                        f"{self.endpoint} took no request for {self._deadline_ms} ms; is the daemon running?"
                    ) from None

    def _wait_for_reply(self, request_id: RequestId) -> tuple[Header, list[bytes]]:
        deadline_ns = self._session.deadline_ns(request_id)
        while True:
            if self._poll(self._readable, deadline_ns):
                self._session.receive(self._socket.recv_multipart(zmq.NOBLOCK))
            answer = self._session.take(request_id)
            if answer is not None:
                return raise_for_error(answer.reply), answer.frames
            if request_id in self._session.expire(time.monotonic_ns()):
                raise DeadlineExceeded(f"no reply from {self.endpoint} within {self._deadline_ms} ms")

    def _poll(self, poller: zmq.Poller, deadline_ns: int) -> bool:
        """Whether the socket is ready before the deadline.

        Raises:
            DaemonUnreachable: the socket is not ready, and the daemon closed the attach connection.
        """
        remaining_ms = max(0, -((time.monotonic_ns() - deadline_ns) // 1_000_000))
        ready = [which for which, _ in poller.poll(remaining_ms)]
        if self._socket in ready:
            return True
        if ready and self._attached is not None and self._attached.is_closed_by_daemon():
            self.is_gone = True
            raise DaemonUnreachable(f"the daemon behind {self.endpoint} is gone")
        return False


class SessionChannel(Channel):
    """A channel whose connection owns a session: it knows the pool's epoch and what to do about failures."""

    def __init__(self, endpoint: str, *, deadline_ms: int, attached: AttachConnection, failures: Failures) -> None:
        super().__init__(endpoint, deadline_ms=deadline_ms, attached=attached)
        self.epoch = 0
        self.is_stale = False  #: the daemon said that the session or the pool's epoch is over
        self.misses = MissPolicy(failures)

    def ask(self, request: Request, expected: type[R], frames: Sequence[bytes] = ()) -> tuple[R, list[bytes]]:
        """As `Channel.ask`; gives back first what was granted after the caller had stopped waiting for it."""
        for lease in self._session.take_orphans():
            self.post(Release(id=self.next_id(), epoch=self.epoch, lease=lease, reply=False))
        try:
            return super().ask(request, expected, frames)
        except Stale:
            self.is_stale = True
            raise


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
