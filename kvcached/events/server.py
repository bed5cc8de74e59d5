"""The two sockets that routers use: a PUB socket for events, a ROUTER socket for replays and snapshots.

Both live in the daemon's event loop, and never make it wait. Peers that lose a connection by their own fault fill no
log, and keep nobody from being served, as at the daemon's other sockets.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from kvcached.events.peers import Asker, Peer, Subscriber, message_of
from kvcached.events.stream import EventStream
from kvcached.process.access import Access
from kvcached.process.seqpacket import Credentials, SocketFile, peer_credentials
from kvcached.server.connections import ConnectionLimits, Connections
from kvcached.server.listener import Listener, remove_stale

#: Routers have one connection to each socket; there are a few routers, and their standbys.
CONNECTIONS_MAX: Final = 64
#: That have not introduced themselves yet. All routers of a daemon that has restarted connect at once.
HALF_OPEN_MAX: Final = 32
#: Of each socket, of the descriptors that are left where there are few.
_DESCRIPTORS_SHARE: Final = 0.05
#: Events are published at most so often; a quiet daemon publishes at once.
PUBLISH_INTERVAL_S: Final = 0.02
#: How long a subscriber without room, that has missed nothing, is waited for, and how often it is looked at.
READER_PATIENCE_S: Final = 0.2
_READER_PAUSE_S: Final = 0.001
_ABSENT: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})  #: of an address that this machine lacks

_log: Final = logging.getLogger(__name__)


class Endpoints(NamedTuple):
    """Where the sockets are: ``ipc://PATH``, or ``tcp://HOST:PORT``."""

    events: str
    replay: str


class EventServer:
    """Publishes a stream.

    Args:
        stream: of the events.
        endpoints: where.

    Attributes:
        endpoints: where.
    """

    def __init__(self, stream: EventStream, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self._stream = stream
        self._events = _Socket(Subscriber.socket, partial(Subscriber, stream))
        self._replays = _Socket(Asker.socket, partial(Asker, stream, self._publish))
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._published_s = 0.0
        self._waits_since_s = 0.0  #: for a subscriber that has no room; 0 = for none

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: an endpoint cannot be bound; the text begins with its key in `[events]`.
        """
        sockets = (self._events, self._replays)
        for key, endpoint, each in zip(("endpoint", "replay_endpoint"), self.endpoints, sockets, strict=True):
            try:
                await each.listen(endpoint)
            except OSError as error:
                raise OSError(error.errno, f"{key}: {error.strerror or error}") from error
        _log.info("events: %s, replays and snapshots: %s", *self.endpoints)

    @property
    def files(self) -> list[SocketFile]:
        """Those of its sockets, where they have some."""
        return [*self._events.files, *self._replays.files]

    def poke(self) -> None:
        """Something has changed: publish it soon."""
        if self._timer is None:
            wait_s = max(self._published_s + PUBLISH_INTERVAL_S - self._loop.time(), 0.0)
            self._timer = self._loop.call_later(wait_s, self._publish)

    def close(self) -> None:
        """Publish what is left, and end."""
        self._waits_since_s = -READER_PATIENCE_S  # nobody is waited for any more
        self._publish()
        while self._stream.has_more:
            self._publish()
        if self._timer is not None:
            self._timer.cancel()
        self._events.close()
        self._replays.close()

    def _publish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._has_slow_reader():
            self._timer = self._loop.call_later(_READER_PAUSE_S, self._publish)
            return
        self._published_s = self._loop.time()
        for batch in self._stream.flush():
            data = message_of(batch)
            for peer in self._events.connections:
                peer.offer(batch.topic, data)
        if self._stream.has_more:
            self._timer = self._loop.call_later(0, self._publish)

    def _has_slow_reader(self) -> bool:
        """Whether a subscriber that has missed nothing has no room: it gets some time to read, and then misses a batch.

        A long prompt with tokens is more than a subscriber's share of memory, however fast it reads.
        """
        if not any(peer.is_at_limit for peer in self._events.connections):
            self._waits_since_s = 0.0
            return False
        now_s = self._loop.time()
        self._waits_since_s = self._waits_since_s or now_s
        return now_s - self._waits_since_s < READER_PATIENCE_S


class _Socket:
    """One of the two: where it listens, and its connections.

    Args:
        name: for the log.
        make: makes a peer that has a place among connections, and a name for the log.

    Attributes:
        connections: those that are open.
    """

    def __init__(self, name: str, make: Callable[[Connections[Peer], str], Peer]) -> None:
        limits = ConnectionLimits.within(CONNECTIONS_MAX, _DESCRIPTORS_SHARE)
        limits = limits._replace(per_process=limits.connections, half_open=min(HALF_OPEN_MAX, limits.half_open))
        access = Access()
        self.connections: Connections[Peer] = Connections(name, limits, Peer.close, access)
        self._own = Credentials(0, os.geteuid(), os.getegid())
        self._grants = access.grants(self._own)  # the file, or the interface, says who can connect
        self._name = name
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Listener[Peer]] = []
        self._connecting: set[asyncio.Task[None]] = set()

    async def listen(self, endpoint: str) -> None:
        """Listen there.

        Raises:
            OSError: nobody can, or a living process does.
        """
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            _make_room(Path(path))
            self._listen(path)
        else:
            await self._listen_at(urlsplit(endpoint))

    @property
    def files(self) -> list[SocketFile]:
        """That where it listens, unless it listens at a port."""
        return [each.file for each in self._listeners if each.file is not None]

    def close(self) -> None:
        """End it, and all of its connections. Does nothing the second time."""
        while self._listeners:
            self._listeners.pop().close()
        for task in self._connecting:
            task.cancel()
        for peer in list(self.connections):
            peer.close()

    def _listen(self, place: str | tuple[str, int]) -> None:
        self._listeners.append(Listener(self._name, place, socket.SOCK_STREAM, self.connections, self._accept))

    async def _listen_at(self, place: SplitResult) -> None:
        """Listen at a host and a port: at both addresses of `localhost`, or at the one that this machine has.

        An event loop that is given host and port passes over each address whose family is refused, and serves nobody.
        """
        found = await self._loop.getaddrinfo(place.hostname, place.port, type=socket.SOCK_STREAM)
        absent = None
        for address in dict.fromkeys(str(each[0]) for *_, each in found):
            try:
                self._listen((address, place.port or 0))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
        if absent is not None and not self._listeners:
            raise absent

    def _accept(self, accepted: socket.socket) -> None:
        origin = peer_credentials(accepted) if accepted.family is socket.AF_UNIX else self._own
        peer = self._make(self.connections, origin.words)
        self.connections.open(peer, origin, self._grants, accepted.fileno())
        task = self._loop.create_task(self._connect(peer, accepted))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, peer: Peer, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: peer, accepted)
        except OSError:
            peer.close()
            accepted.close()


def _make_room(path: Path) -> None:
    """Remove the socket that an earlier daemon has left at a path.

    Raises:
        OSError: something else is there, or a living process listens.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, f"{path} is there, and is no socket")
        remove_stale(str(path), socket.SOCK_STREAM)
