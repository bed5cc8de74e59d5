"""A listening socket that accepts no faster than is good for the connections that are served already."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic

from kvcached.process.file_access import CONNECT, let_in
from kvcached.process.seqpacket import SocketFile, listen
from kvcached.server.connections import C, Connections

_SO_PASSRIGHTS: Final = 83
#: Connections accepted before others get a turn.
ACCEPTS_PER_TURN_MAX: Final = 4
#: Without free descriptors a connection can be neither accepted nor refused, and the listener stays readable.
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_DESCRIPTORS_PAUSE_S: Final = 1.0
#: After a turn in which a peer lost a connection by its own fault. So many turns of a flood cost the clients that are
#: served less than one request in a hundred; a client that connects meanwhile waits for its place in the backlog.
FAULT_PAUSE_S: Final = 0.05
#: In turns: how many pauses a client waits for at most.
_BACKLOG: Final = 8 * ACCEPTS_PER_TURN_MAX


class Listener(Generic[C]):
    """Listens, for those who may connect, and hands over what it accepts, in the running event loop.

    Args:
        name: of the socket, for the log.
        place: a path, for an AF_UNIX socket that this user only can connect to; or an IP address and a port.
        kind: of the socket.
        connections: those of the socket that are open.
        accepted: takes each new one, which is not blocking.

    Attributes:
        file: of the socket, if it has one.

    Raises:
        OSError: the place cannot be bound.
    """

    def __init__(
        self,
        name: str,
        place: str | tuple[str, int],
        kind: socket.SocketKind,
        connections: Connections[C],
        accepted: Callable[[socket.socket], None],
    ) -> None:
        self._name = name
        self._connections = connections
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self.file: SocketFile | None = None
        if isinstance(place, str):
            self._socket = listen(place, _BACKLOG, kind)
            _refuse_descriptors(self._socket)
            let_in(place, connections.access.others(), CONNECT)
            self.file = SocketFile.at(place)
        else:
            self._socket = listen_at(*place)
        self._paused: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept nothing more, and remove the file of the socket, if it has one."""
        if self._paused is not None:
            self._paused.cancel()
        else:
            self._loop.remove_reader(self._socket.fileno())
        if self.file is not None:
            self.file.remove()
        self._socket.close()

    def _listen(self) -> None:
        self._paused = None
        self._loop.add_reader(self._socket.fileno(), self._on_connecting)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._paused = self._loop.call_later(seconds, self._listen)

    def _on_connecting(self) -> None:
        for _ in range(ACCEPTS_PER_TURN_MAX):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                pause_s = _NO_DESCRIPTORS_PAUSE_S
                fields = {"socket": self._name, "reason": error.strerror, "pause_s": pause_s}
                words = "%(socket)s: %(reason)s; no connection is accepted for %(pause_s)g s"
                self._connections.sampled.note("accept", words, fields)
                self._pause(pause_s)
                return
            accepted.setblocking(False)  # noqa: FBT003
            self._accepted(accepted)
        if self._connections.take_fault():
            self._pause(FAULT_PAUSE_S)


def _refuse_descriptors(listener: socket.socket) -> None:
    """Have the kernel refuse descriptors that peers send; connections have this of their listener.

    Closing a peer's file may take as long as the peer likes: a socket lingers, a file system of its own hangs. Kernels
    before Linux 6.16 have no such option.
    """
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def listen_at(host: str, port: int) -> socket.socket:
    """A non-blocking socket of TCP that listens.

    Raises:
        OSError: the address is in use, or this machine does not have it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)  # its own words name the address, too
        raise OSError(error.errno, f"{why}: {host}, port {port}") from error
    listener.setblocking(False)  # noqa: FBT003
    return listener


def remove_stale(path: str, kind: socket.SocketKind) -> None:
    """Remove a socket that a dead daemon left behind.

    Raises:
        OSError: a living process listens there.
    """
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as trial:
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except BlockingIOError:
            pass  # it lives, and is busy
    raise OSError(errno.EADDRINUSE, f"another process serves {path}")
