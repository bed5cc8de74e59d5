"""Keeps a daemon's descriptors beyond the end of its container: another container, which does nothing else.

`kvcached supervise` keeps them while the daemon is dead, but ends with the container. So it hands them to the keeper,
too, over a unix socket in a directory that both containers have. A supervisor that connects is sent what the keeper
has, and the keeper then carries out its messages, which are those of the service manager's descriptor store. One
supervisor is connected at a time, and only the keeper's own user may connect.

The keeper has one thread, starts no process and waits for nothing but its sockets and signals.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
from collections import deque
from contextlib import ExitStack, suppress
from typing import Final

from kvcached.process.descriptors import none_free, raise_soft_limit
from kvcached.process.earlier import take_lock
from kvcached.process.notify import READY, notify
from kvcached.process.seqpacket import SocketFile, listen, peer_credentials, receive, send
from kvcached.recovery.fd_store import (
    DESCRIPTORS_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    TOO_LARGE,
    KeptDescriptors,
    Notice,
    Refusals,
    store_message,
)

#: The keeper's whole answer to a supervisor that comes while another one is connected.
BUSY: Final = "BUSY=1"
#: Connections that wait to be accepted.
_BACKLOG: Final = 8
#: Connections that are accepted in one turn: a flood of them must not delay signals.
_ACCEPTS_MAX: Final = 64
_ACCEPT_PAUSE_S: Final = 1.0
#: Messages that are read in one turn: more than the socket's buffer holds, so that an end behind them is seen.
_MESSAGES_MAX: Final = 1024

_log: Final = logging.getLogger(__name__)


def keep(path: str) -> int:
    """Keep descriptors for the supervisors that connect to a socket, until SIGTERM or SIGINT. Returns the exit status.

    Raises:
        OSError: the socket cannot be made, another keeper has it, or its path is that of another file.
    """
    _check_place(path)
    # The end of a terminal drops no memory. Orphans of a pid namespace whose first process this is are not waited for.
    for number in (signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    raise_soft_limit()  # it holds up to `KEPT_MAX` descriptors
    return asyncio.run(_Keeper(path).run())


def _check_place(path: str) -> None:
    """A mistyped path costs nobody a file: only a socket is replaced.

    Raises:
        OSError: another file is there.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "a file is there that is no socket; move it away, or name another path")


class _Keeper:
    def __init__(self, path: str) -> None:
        self._path = path
        self._kept = KeptDescriptors()
        self._supervisor: socket.socket | None = None
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._refusals = Refusals("connections were refused")

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        stop: asyncio.Future[int] = self._loop.create_future()

        def on_signal() -> None:
            if not stop.done():
                stop.set_result(0)

        with ExitStack() as parts:
            parts.callback(self._kept.close)
            parts.callback(self._hang_up)
            parts.callback(os.close, take_lock(f"{self._path}.lock"))
            with suppress(FileNotFoundError):
                SocketFile.at(self._path).remove()  # a killed keeper's: this one has the lock
            self._listener = parts.enter_context(listen(self._path, _BACKLOG))
            parts.callback(SocketFile.at(self._path).remove)
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, on_signal)
            self._listen()
            parts.callback(self._loop.remove_reader, self._listener.fileno())
            _log.info("keeps descriptors for whoever supervises the daemon and connects to %s", self._path)
            notify(READY)
            status = await stop
            _log.info("stopped: %d descriptors are dropped", len(self._kept))
            return status

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._on_connection)

    def _on_connection(self) -> None:
        for _ in range(_ACCEPTS_MAX):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is free: the listener stays readable
                self._refusals.note(f"it could not be accepted: {error.strerror}")
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._listen)
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Serve a connection, or close it."""
        pid, uid, _ = peer_credentials(connection)
        (self._send if self._unsent else self._read)()  # notices the end of the supervisor before
        if uid != os.geteuid():
            self._refusals.note(f"it is of user {uid}, not of {os.geteuid()}")
            connection.close()
        elif self._supervisor is not None:
            self._refusals.note(f"it is of process {pid}, while another supervisor is connected")
            with connection, suppress(OSError):
                send(connection, BUSY.encode())
        else:
            self._serve(connection, pid)

    def _serve(self, connection: socket.socket, pid: int) -> None:
        self._supervisor = connection
        for name, descriptor in zip(self._kept.names, self._kept.descriptors, strict=True):
            self._unsent.append((store_message(name).encode(), (descriptor,)))
        self._unsent.append((READY.encode(), ()))
        # 0: a pid namespace that cannot be seen from here.
        _log.info("supervisor %d has connected, and gets %d descriptors", pid, len(self._kept))
        self._loop.add_writer(connection.fileno(), self._send)

    def _send(self) -> None:
        """Send what is kept; then listen, so that nothing that is yet to be sent is dropped."""
        if self._supervisor is None:
            return
        try:
            while self._unsent:
                send(self._supervisor, *self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"it was not sent what is kept: {error.strerror}")
            return
        self._loop.remove_writer(self._supervisor.fileno())
        self._loop.add_reader(self._supervisor.fileno(), self._read)

    def _read(self) -> None:
        """Carry out what the supervisor has sent."""
        for _ in range(_MESSAGES_MAX):
            if self._supervisor is None:
                return
            try:
                packet = receive(self._supervisor, MESSAGE_BYTES_MAX, DESCRIPTORS_PER_MESSAGE_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(error.strerror or "the connection broke")
                return
            if packet is None:
                self._lose("it has ended")
            elif packet.cut:
                packet.close()
                self._lose(none_free() if packet.is_none_free else f"it has sent {TOO_LARGE}")
            else:
                self._kept.take(Notice.of(packet.data, packet.descriptors))

    def _lose(self, reason: str) -> None:
        _log.info("the supervisor is gone: %s; %d descriptors are kept for the next", reason, len(self._kept))
        self._hang_up()

    def _hang_up(self) -> None:
        self._unsent.clear()
        if self._supervisor is not None:
            self._loop.remove_writer(self._supervisor.fileno())
            self._loop.remove_reader(self._supervisor.fileno())
            self._supervisor.close()
            self._supervisor = None
