"""One connection to the daemon's RPC socket: a DEALER without libzmq, so that a request is one system call away.

ZeroMQ hands each message to a thread of its own, and takes each reply from it: four switches of threads for a round
trip, and it never says that a reply will not come. This connection writes to the kernel's socket and reads from it.
Or to the TCP port of a daemon on another machine, in boxes of CURVE.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from kvcached_client.errors import DaemonUnreachable, RequestError
from kvcached_client.protocol.zmtp import DEALER, GREETING, Message, Reader, message_pieces
from kvcached_client.transport.listener import connect

if TYPE_CHECKING:
    from kvcached_client.protocol.curve import CurveClient
    from kvcached_client.transport.tcp import RemoteDaemon

#: So much may be unsent when another message is queued. It is room for the prompts of a burst of requests, not for
#: those of an outage.
UNSENT_BYTES_MAX: Final = 64 << 20
_RECEIVE_BYTES: Final = 64 * 1024
#: Messages of one look at what has arrived: all of them.
_MESSAGES_MAX: Final = 1 << 30

P = ParamSpec("P")
T = TypeVar("T")


class InUse(RuntimeError):
    """Another thread is inside a call. Nothing was sent or changed; the session goes on."""


class OneThread:
    """What one thread at a time may be inside of; another one is refused, before it changes anything.

    There is no lock, because an exception of a signal handler could leave it held. `_user` is looked at and set without
    a call in between: there CPython neither switches threads nor calls signal handlers.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._user = 0  #: the thread that is inside; 0 if none is

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made this, which alone may use it."""
        return os.getpid() != self._process_id

    def check_thread(self) -> None:
        """Refuse a call while another thread is inside one. A forked child passes: no thread of its own is inside.

        Raises:
            InUse: another thread is inside.
        """
        user = self._user
        if user and user != get_ident() and not self.is_forked:
            self._refuse(user)

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this kvcached client belongs to process {self._process_id}; "
                f"a forked child connects its own, or joins the session with map_pool"
            )

    def _refuse(self, user: int) -> NoReturn:
        self._check_process()
        name = next((thread.name for thread in threading.enumerate() if thread.ident == user), str(user))
        raise InUse(
            f"this client is used by two threads at once: thread {name!r} is inside a call, and thread "
            f"{threading.current_thread().name!r} has begun another; use it in one thread, or hold a lock of your own "
            "around every call"
        )


G = TypeVar("G", bound=OneThread)


def by_one_thread(call: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """A method that raises `InUse` while another thread is inside one. The same thread may be inside several."""

    @wraps(call)
    def guarded(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread = get_ident()
        outer = self._user
        if outer and outer != thread:
            self._refuse(outer)
        self._user = thread
        try:
            return call(self, *args, **kwargs)
        finally:
            self._user = outer

    return guarded


class Connection:
    """Sends and receives whole messages. Its calls never wait; `poll` on its descriptor tells when one is useful."""

    def __init__(self, place: str | RemoteDaemon, *, deadline_ms: int) -> None:
        """Connect to the path of a socket, or to a daemon on another machine.

        Raises:
            DaemonUnreachable: nothing listens at `place`, or it takes no connection within `deadline_ms`.
            Refused: another user's daemon does.
        """
        self._remote: tuple[RemoteDaemon, CurveClient] | None = None
        self._reader: Reader | CurveClient
        if isinstance(place, str):
            self._socket = connect(place, deadline_ms=deadline_ms)
            self._reader = Reader(DEALER)
            first = [GREETING, DEALER.ready]
        else:
            self._reader = reader = place.reader()
            self._socket = place.connect(deadline_ms)
            self._remote = place, reader
            first = [reader.hello]
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._unsent = bytearray()
        #: The message that the kernel was given, what it has taken, what was unsent before; None once the rest is kept.
        self._handed_over: tuple[Sequence[bytes | memoryview], list[int], int] | None = None
        self._is_reading = False  #: what was received may not be taken yet
        self._is_over = False
        self._write(first)

    @property
    def is_over(self) -> bool:
        """Whether the other end has closed it or does not speak the protocol, or a signal has interrupted `receive`."""
        return self._is_over or self._is_reading

    @property
    def is_ready(self) -> bool:
        """Whether the daemon has accepted the connection."""
        return self._reader.is_ready

    @property
    def refusal(self) -> RequestError | DaemonUnreachable | None:
        """Why the connection is over, where that is known: another machine has not accepted it, or a signal came."""
        if self._is_reading:
            return DaemonUnreachable(
                "a signal interrupted the reading of replies, so some are lost",
                fix="close this client and connect again",
            )
        return None if self._remote is None else self._remote[0].refusal(self._remote[1])

    @property
    def events(self) -> int:
        """What to poll for; nothing once the other end has closed. After an interrupted `receive` nothing is read."""
        if self._is_over:
            return 0
        reading = 0 if self._is_reading else select.POLLIN
        return reading if not self._unsent and self._handed_over is None else reading | select.POLLOUT

    def fileno(self) -> int:
        """The descriptor."""
        return self._socket.fileno()

    def send(self, parts: list[bytes], *, queued: bool = False) -> bool:
        """Send a message; False before the daemon has accepted the connection, or while an earlier one is not sent.

        The end of a message that the socket does not take at once is kept, and sent by `flush`. With `queued`, a whole
        message is kept behind an earlier one, too; False only once more than `UNSENT_BYTES_MAX` bytes are unsent.
        """
        if self._unsent or self._handed_over is not None:
            self.flush()
            if len(self._unsent) > (UNSENT_BYTES_MAX if queued else 0):
                return False
        if self.is_over or not self._reader.is_ready:
            return False
        self._write(self._pieces(parts))
        return not self.is_over

    def send_last(self, parts: list[bytes]) -> None:
        """Send a message behind all others, if the daemon has accepted the connection; its reply is not read.

        Also after an interrupted `receive`: what was read is lost, but each message that was written is whole.
        """
        self.flush()
        if self.is_ready and not self._is_over:
            self._write(self._pieces(parts))

    def _pieces(self, parts: list[bytes]) -> list[bytes]:
        return message_pieces(parts) if self._remote is None else [self._remote[1].seal(parts)]

    def flush(self) -> None:
        """Send what is kept, as far as the socket takes it."""
        self._settle()
        if self._unsent:
            with memoryview(self._unsent) as unsent:
                self._hand_over([unsent])
            self._settle()

    def receive(self, take: Callable[[Message], None]) -> None:
        """Hand all whole messages that have arrived to `take`.

        An exception of a signal handler, as of Ctrl-C, may come in the middle, with bytes or messages that nobody has:
        what is read then would not be what was sent. The connection is over.
        """
        reader, size = self._reader, _RECEIVE_BYTES
        while size == _RECEIVE_BYTES and not self.is_over:
            self._is_reading = True
            size = self._receive_once()
            messages = reader.read(self._buffer[:size], _MESSAGES_MAX) if size else []
            while reader.has_more:
                messages += reader.read(b"", _MESSAGES_MAX)
            for message in messages:
                take(message)
            self._is_reading = False
            self._is_over = self._is_over or reader.violation is not None
        if reader.commands:
            answers = reader.commands.copy()
            reader.commands.clear()
            self._write(answers)

    def _receive_once(self) -> int:
        """How many bytes were received; 0 where there are none now, and at the end."""
        try:
            size = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return 0
        except OSError:
            size = 0
        self._is_over = self._is_over or not size
        return size

    def close(self) -> None:
        """Close; what is not sent is lost. Does nothing the second time."""
        self._is_over = True
        self._socket.close()

    def _write(self, pieces: list[bytes]) -> None:
        if self._handed_over is not None:
            self._settle()
        if self._unsent:
            self._unsent += b"".join(pieces)
        else:
            self._hand_over(pieces)
            self._settle()

    def _hand_over(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Have the kernel take what it can of a message, or of what is unsent; the rest is unsent.

        An exception may come behind any instruction, from the handler of a signal such as Ctrl-C. How much was taken is
        noted before that, within one instruction: without it, the next message would be read as the end of this one.
        No SIGPIPE comes, which would kill a process that does not ignore it.
        """
        taken: list[int] = []
        self._handed_over = () if self._unsent else pieces, taken, len(self._unsent)
        try:
            taken.extend(map(self._socket.sendmsg, (pieces,), ((),), (socket.MSG_NOSIGNAL,)))
        except BlockingIOError:
            pass
        except OSError:
            self._is_over = True

    def _settle(self) -> None:
        """Keep what was not taken of what was handed over last. Interrupted, it is repeated by the next call."""
        if self._handed_over is None:
            return
        pieces, taken, unsent = self._handed_over
        if len(self._unsent) == unsent and not self._is_over:  # else it is kept already
            if unsent:
                del self._unsent[: sum(taken)]
            elif sum(taken) < sum(map(len, pieces)):
                self._unsent += b"".join(pieces)[sum(taken) :]
        self._handed_over = None
