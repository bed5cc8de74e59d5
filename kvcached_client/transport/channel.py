"""Blocking calls over one connection, with deadlines and detection of the daemon's death.

A request is sent once. On a local socket no message is lost or reordered while its connection lives, so a second copy
would only add to the load of a slow daemon. After a missed deadline it is unknown whether the request took effect; to
find out, the caller may send the same request again with the same id (see `Lease`).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from kvcached_client.errors import (
    BadRequest,
    DaemonSilent,
    DaemonUnreachable,
    DeadlineExceeded,
    KvcachedError,
    RequestError,
    bad_reply,
)
from kvcached_client.protocol.engine import Header, Request, raise_for_error
from kvcached_client.protocol.zmtp import Message
from kvcached_client.transport.attach import AttachConnection
from kvcached_client.transport.calls import PendingCalls
from kvcached_client.transport.connection import Connection, OneThread, by_one_thread
from kvcached_client.transport.listener import check_deadline, silent
from kvcached_client.transport.wording import about_argument
from kvcached_client.types import RequestId

if TYPE_CHECKING:
    from kvcached_client.transport.tcp import RemoteDaemon

R = TypeVar("R", bound=Header)

#: How long replies may take to arrive after the daemon has closed the attach connection. It sends them before.
_LAST_REPLIES_MS: Final = 1000
_IPC: Final = "ipc://"


class Channel(OneThread):
    """One connection to a daemon. Unusable in a forked child. Refuses a call while another thread is inside one."""

    def __init__(
        self, endpoint: str | RemoteDaemon, *, deadline_ms: int, attached: AttachConnection | None = None
    ) -> None:
        """Connect to `endpoint`, or to a daemon on another machine; calls take at most `deadline_ms`.

        With `attached`, the end of that connection ends every call at once, including a waiting one. The channel
        closes it. Without `attached`, the end of the connection ends only the waiting call; later calls connect again
        and may reach the next daemon.

        Raises:
            DaemonUnreachable: nothing listens at `endpoint`, or nobody takes the connection in time.
            Refused: another user's daemon does.
            ValueError: `deadline_ms` is less than 1, or more than `DEADLINE_MS_MAX`.
        """
        super().__init__()
        self.deadline_ms = check_deadline(deadline_ms)
        self.endpoint = endpoint if isinstance(endpoint, str) else endpoint.endpoint
        self.is_closed = False
        self.is_gone = False  #: the daemon closed a connection; this channel is unusable
        self.path = self.endpoint.removeprefix(_IPC)
        self._place = self.path if isinstance(endpoint, str) else endpoint
        self._attached = attached
        self._never_waits = False
        self._calls = PendingCalls()
        self._is_news = False  #: messages have arrived since the last `listen`
        self._connection = Connection(self._place, deadline_ms=self.deadline_ms)
        self._usual_poller = self._new_poller()  #: while all is sent

    def never_wait(self) -> None:
        """From now on only `receive`, `ask` and `listen` wait. What the socket does not take is queued by `send`.

        For event loops: `over` sends the queued messages, and says for which requests `receive` does not wait either.
        """
        self._never_waits = True

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
            raise DaemonUnreachable(f"this client of {self.endpoint} is closed, or has no session")
        return self._attached.fileno()

    def ask(
        self, request: Request, expected: type[R], frames: Sequence[bytes] = (), *, deadline_ns: int | None = None
    ) -> tuple[R, list[bytes]]:
        """Send a request and wait for its reply and frames, until `deadline_ns` (default: that of a new call).

        Raises:
            RequestError: the request was refused, by the daemon or before it was sent.
            DaemonUnreachable: the daemon is gone or did not accept the request, or the channel is closed.
            DeadlineExceeded: no reply came in time; whether the request took effect is unknown.
            RuntimeError: this process is a fork of the process that opened the channel, or another thread is inside a
                call.
        """
        self.send(request, frames, deadline_ns=deadline_ns)
        return self.receive(request, expected)

    @by_one_thread
    def send(self, request: Request, frames: Sequence[bytes] = (), *, deadline_ns: int | None = None) -> None:
        """The first half of `ask`; `deadline_ns` is for the reply. If it raises, nothing was sent.

        Sending takes no longer than the channel's own deadline, however long the reply may take. After `never_wait` it
        fails at once, as `DaemonSilent`, if too much is queued.
        """
        self._send_request(request, frames, deadline_ns)

    @by_one_thread
    def receive(self, request: Request, expected: type[R]) -> tuple[R, list[bytes]]:
        """The second half of `ask`: wait for the reply, until the deadline given to `send`."""
        return self._receive_reply(request, expected)

    def _send_request(self, request: Request, frames: Sequence[bytes], deadline_ns: int | None) -> None:
        self._check_usable()
        if deadline_ns is None:
            deadline_ns = self.deadline_ns()
        parts = self._calls.send(request, frames, deadline_ns=deadline_ns)
        try:
            self._send(parts, deadline_ns)
        except KvcachedError:  # nothing was sent
            self._calls.take_back(RequestId(request.id))
            raise
        except BaseException:
            self._calls.abandon(RequestId(request.id))
            raise

    def _receive_reply(self, request: Request, expected: type[R]) -> tuple[R, list[bytes]]:
        self._check_process()
        request_id = RequestId(request.id)
        try:
            reply, reply_frames = self._wait_for_reply(request_id)
        except BadRequest as error:
            self._calls.abandon(request_id)
            raise about_argument(request, error) from None
        except BaseException:
            self._calls.abandon(request_id)
            raise
        if not isinstance(reply, expected):
            raise bad_reply(f"{type(reply).__name__} instead of {expected.__name__}")
        return reply, reply_frames

    @by_one_thread
    def is_over(self, request: Request) -> bool:
        """Whether `receive` would return at once. Reads the messages that have arrived.

        Raises:
            DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        request_id = RequestId(request.id)
        if self._calls.is_answered(request_id):
            return True
        self._poll(0)
        self._calls.expire(time.monotonic_ns())
        if self._calls.is_answered(request_id) or not self._calls.is_pending(request_id):
            return True
        self._check_daemon()
        return False

    def has_come(self, request: Request) -> bool:
        """Whether the reply to a request has been read, or will not be waited for any longer. Reads nothing."""
        request_id = RequestId(request.id)
        if self.is_ended or self._calls.is_answered(request_id) or not self._calls.is_pending(request_id):
            return True
        return self._calls.deadline_ns(request_id) <= time.monotonic_ns()

    @by_one_thread
    def over(self, requests: Iterable[Request]) -> list[Request]:
        """Those requests whose reply has arrived; all of them if no reply will come any more.

        Sends and reads what is possible, and never waits. For an event loop, which is told of each reply once: if no
        message has arrived since the last call, it looks through nothing.
        """
        if not self.is_ended:
            self._poll(0)
        if self.is_ended:
            return list(requests)
        is_news, self._is_news = self._is_news, False
        return [request for request in requests if self._calls.is_answered(RequestId(request.id))] if is_news else []

    def reply_deadline_ns(self, request: Request) -> int:
        """Until when a pending request waits for its reply, on the monotonic clock."""
        return self._calls.deadline_ns(RequestId(request.id))

    @property
    def is_ended(self) -> bool:
        """Whether no reply will come over this channel any more."""
        return self.is_closed or self.is_gone or self._connection.is_over

    @by_one_thread
    def is_connected(self) -> bool:
        """Whether replies may come. Reads what has arrived, also that the daemon has ended.

        Raises:
            RuntimeError: this process is a fork, whose reads its parent would miss.
        """
        self._check_process()
        if not self.is_ended:
            self._poll(0)
        return not self.is_ended

    @by_one_thread
    def alone(self, call: Callable[[], None]) -> None:
        """Make several calls with none of another thread between them."""
        call()

    @property
    def has_unsent(self) -> bool:
        """Whether messages, or the end of one, wait until the daemon reads."""
        return bool(self._connection.events & select.POLLOUT)

    def descriptors(self) -> tuple[int, ...]:
        """What to poll for messages of the daemon and for its end; the first one also takes what is unsent."""
        attached = () if self._attached is None else (self._attached.fileno(),)
        return (self._connection.fileno(), *attached)

    def abandon(self, request: Request) -> None:
        """Stop waiting for the reply to a request."""
        self._calls.abandon(RequestId(request.id))

    @by_one_thread
    def listen(self, wake: int, deadline_ns: int) -> bool:
        """Wait for a message, or until the descriptor `wake` is readable; returns False at the deadline.

        Raises:
            DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        ready: dict[int, int] = {}
        while not self._has_news():
            self._check_daemon()
            ready = self._poll(deadline_ns, wake)
            if not ready or wake in ready:
                break
        has_news, self._is_news = self._has_news(), False
        return has_news or wake in ready

    @by_one_thread
    def post(self, request: Request) -> bool:
        """Send a request without waiting, and ignore its reply; returns whether it could be sent.

        Raises:
            RequestError, DaemonUnreachable, RuntimeError: as `ask`.
        """
        self._check_usable()
        parts = self._calls.send(request, deadline_ns=0)
        self._calls.abandon(RequestId(request.id))
        return self._connection.send(parts)

    def close(self, *, linger_ms: int = 0, leaves: bool = False) -> None:
        """Close both connections. Does nothing the second time.

        Queued messages have `linger_ms` to be sent, but none after `never_wait`. With `leaves` the daemon is told, as
        by `AttachConnection.leave`.

        Raises:
            InUse: another thread is inside a call.
        """
        self.check_thread()
        if self.is_closed:
            return
        self.is_closed = True
        if not self.is_forked and not self._never_waits:
            deadline_ns = time.monotonic_ns() + linger_ms * 1_000_000
            while self._connection.events & select.POLLOUT and _remaining_ms(deadline_ns) and self._poll(deadline_ns):
                pass
        self._connection.close()
        if self._attached is not None and leaves:
            self._attached.leave()
        elif self._attached is not None:
            self._attached.close()

    def _check_usable(self) -> None:
        self._check_process()
        if self.is_closed:
            raise DaemonUnreachable(f"this client of {self.endpoint} is closed", fix="connect again")
        if self.is_gone:
            raise self._gone()

    @property
    def _is_queueing(self) -> bool:
        """Whether a message goes behind what is unsent, instead of waiting until that is sent."""
        return self._never_waits

    def _send(self, parts: list[bytes], reply_deadline_ns: int) -> None:
        """Send a message: at once, as nearly always, or when the daemon is ready for it.

        First it reads what has come. Where that can only be the end of a local connection, sending tells of it as well;
        a message to another machine would be lost.
        """
        may_have_come = self._calls.pending_count > 1 or self._place is not self.path  # this request is one of them
        if may_have_come and self._connection.is_ready:  # else `_await_connection` reads, once: it may connect again
            self._poll(0)
        if not self.is_gone and self._connection.send(parts, queued=self._is_queueing):
            return
        deadline_ns = min(reply_deadline_ns, self.deadline_ns())
        self._await_connection(deadline_ns)
        while not self._connection.send(parts, queued=self._is_queueing):
            self._check_daemon()
            if self._is_queueing:
                raise DaemonSilent(f"{self.endpoint} does not read, and too many requests wait for that already")
            if not self._poll(deadline_ns):
                raise self._silent()

    def _await_connection(self, deadline_ns: int) -> None:
        """Wait until the daemon has accepted the connection; without `attached`, connect again where it has ended."""
        self._poll(0)
        if self._connection.is_over and self._attached is None:
            self._connection.close()
            self._connection = Connection(self._place, deadline_ms=max(1, _remaining_ms(deadline_ns)))
            self._usual_poller = self._new_poller()
        while not self._connection.is_ready:
            self._check_daemon()
            if not self._poll(deadline_ns):
                raise self._silent()
        self._check_daemon()

    def _check_daemon(self) -> None:
        """Notice the end of a connection.

        Raises:
            DaemonUnreachable: it has ended. With `attached`, for good.
        """
        if self.is_gone:
            raise self._gone()
        if self._connection.is_over:
            self.is_gone = self._attached is not None
            raise self._gone()

    def _silent(self) -> DaemonUnreachable:
        if isinstance(self._place, str):
            return silent(self._place, self.deadline_ms)
        said = f"{self.endpoint} accepted no request for {self.deadline_ms} ms"
        return DaemonSilent(said, fix="see the daemon's log")

    def _gone(self) -> DaemonUnreachable | RequestError:
        """What every call is told behind the end of the connection: the reason, where it is not the daemon's end."""
        if (refusal := self._connection.refusal) is not None:
            return refusal
        if self.is_gone:
            return DaemonUnreachable(f"the daemon behind {self.endpoint} is gone")
        return DaemonUnreachable(
            f"the daemon behind {self.endpoint} was gone before it replied; whether the request took effect is unknown"
        )

    def _wait_for_reply(self, request_id: RequestId) -> tuple[Header, list[bytes]]:
        answer = self._calls.take(request_id)  # it may have arrived during the wait for another one
        while answer is None and self._calls.is_pending(request_id):
            self._check_daemon()
            self._poll(self._calls.deadline_ns(request_id))
            answer = self._calls.take(request_id)
            if answer is None:
                self._calls.expire(time.monotonic_ns())
        if answer is None:
            raise DeadlineExceeded(f"no reply from {self.endpoint} within {self.deadline_ms} ms")
        return raise_for_error(answer.reply), answer.frames

    def _poll(self, deadline_ns: int, wake: int | None = None) -> dict[int, int]:
        """Wait until a connection, or the descriptor `wake`, is ready, and read and send what is possible.

        Returns:
            The descriptors that were ready, with what they were ready for; none at the deadline.
        """
        connection, attached = self._connection, self._attached
        is_usual = wake is None and connection.events == select.POLLIN
        poller = self._usual_poller if is_usual else self._new_poller(wake)
        ready = dict(poller.poll(_remaining_ms(deadline_ns) if deadline_ns else 0))
        if not ready:
            return ready
        if connection.fileno() in ready:
            connection.flush()
            self._read()
        if attached is not None and attached.fileno() in ready and attached.is_closed_by_daemon():
            self._read_last()
            self.is_gone = True
        return ready

    def _new_poller(self, wake: int | None = None) -> select.poll:
        poller = select.poll()
        if self._connection.events:
            poller.register(self._connection.fileno(), self._connection.events)
        if self._attached is not None:
            poller.register(self._attached.fileno(), select.POLLIN)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        return poller

    def _has_news(self) -> bool:
        """Whether there are replies that nobody has taken and `listen` has not told of."""
        return self._is_news and self._calls.has_answers

    def _read(self) -> None:
        """Read the messages that have arrived."""
        self._connection.receive(self._take)

    def _take(self, message: Message) -> None:
        self._is_news = True
        self._calls.receive(message.parts)

    def _read_last(self) -> None:
        """Read the replies that the daemon has sent before it closed the attach connection, or ended."""
        poller = select.poll()
        poller.register(self._connection.fileno(), select.POLLIN)
        if not self._connection.is_over and poller.poll(0 if self._never_waits else _LAST_REPLIES_MS):
            self._read()


def _remaining_ms(deadline_ns: int) -> int:
    """Whole milliseconds until a time of the monotonic clock, rounded up; 0 is a time that has passed."""
    return max(0, -((time.monotonic_ns() - deadline_ns) // 1_000_000))
