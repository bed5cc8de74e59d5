"""GET over HTTP/1.1, for pages about the daemon. One connection is one request and one answer; h11 parses.

What a peer can take is bounded: connections, the bytes of a request, the time until the request is whole, the time
until the answer is read, and connections accepted in a time. A peer beyond a bound loses its own connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol

import h11

from kvcached.process.access import Access
from kvcached.process.seqpacket import Credentials, SocketFile, peer_credentials, peer_groups
from kvcached.server.connections import ConnectionLimits, Connections
from kvcached.server.listener import Listener, remove_stale
from kvcached_client.errors import ErrorCode, RequestError

#: Whose request is whole, and of the others. A node has one or two scrapers and some probes.
CONNECTIONS_MAX: Final = 16
#: Of the request line and all headers before the last `recv`, which may end a request of somewhat more. Scrapers send
#: some hundred bytes.
REQUEST_BYTES_MAX: Final = 8 * 1024
#: Of one `recv`.
_RECEIVE_BYTES: Final = 4096
#: From a whole request until its answer is in the hands of the kernel: a health check takes 3 s at most.
ANSWER_S_MAX: Final = 10.0
#: A peer that has its answer closes its end. What it sends meanwhile is read, or the kernel would take the answer back.
#: It is not served any more, so it takes no place from others; of more of these, the oldest ones are closed.
LINGERING_MAX: Final = 16
_LINGER_S_MAX: Final = 1.0
_LINGER_BYTES_MAX: Final = 256 * 1024
#: More connections in a second are a mistake in some loop: few are accepted then, see `Connections.note_fault`.
ACCEPTED_PER_S_MAX: Final = 50
#: Of the descriptors that are left where there are few.
_DESCRIPTORS_SHARE: Final = 0.1
_HEAD: Final = b"HEAD "
_TEXT: Final = "text/plain; charset=utf-8"

_log: Final = logging.getLogger(__name__)


class Page(NamedTuple):
    """An answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


class Pages(Protocol):
    """What is served."""

    async def get(self, path: str, accept: str) -> Page:
        """The page at a path, in a form that the header `Accept` names if there are several."""


class _Connection:
    """An open connection.

    Attributes:
        socket: of it.
        task: serves it.
        is_head: whether its request begins as one of HEAD, whose answer has no body, whatever it says.
    """

    __slots__ = ("is_head", "parser", "socket", "task")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.parser = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        self.task: asyncio.Task[None] | None = None
        self.is_head = False


class HttpServer:
    """Serves pages, in the running event loop.

    Args:
        place: the path of a unix socket, or an IP address and a port.
        pages: what is served.
        access: who may do what; at a unix socket, whoever may look or operate is served.
    """

    def __init__(self, place: str | tuple[str, int], pages: Pages, access: Access) -> None:
        self._place = place
        self._pages = pages
        self._loop = asyncio.get_running_loop()
        limits = ConnectionLimits.within(CONNECTIONS_MAX, _DESCRIPTORS_SHARE)
        limits = limits._replace(per_process=limits.connections, half_open=min(CONNECTIONS_MAX, limits.half_open))
        self._connections: Connections[_Connection] = Connections("http", limits, self._drop, access.of_reports())
        self._lingering: dict[_Connection, None] = {}  #: those that have their answer, the oldest first
        self._listener: Listener[_Connection] | None = None
        self._second = 0
        self._accepted = 0

    def start(self) -> None:
        """Listen, and serve from now on.

        Raises:
            OSError: the address or path cannot be bound.
        """
        if isinstance(self._place, str):
            remove_stale(self._place, socket.SOCK_STREAM)
        self._listener = Listener("http", self._place, socket.SOCK_STREAM, self._connections, self._accept)
        _log.info("metrics and health at %s", _shown(self._place))

    @property
    def files(self) -> list[SocketFile]:
        """That of its socket, unless it listens at a port."""
        return [] if self._listener is None or self._listener.file is None else [self._listener.file]

    def close(self) -> None:
        """Stop serving, and close every connection."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        for connection in [*self._connections, *self._lingering]:
            self._drop(connection)

    def _accept(self, accepted: socket.socket) -> None:
        connection = _Connection(accepted)
        is_unix = accepted.family is socket.AF_UNIX
        peer = peer_credentials(accepted) if is_unix else Credentials(0, os.geteuid(), os.getegid())
        grants = self._connections.access.grants(peer, peer_groups(accepted) if is_unix else ())
        self._connections.open(connection, peer, grants, accepted.fileno())
        connection.task = self._loop.create_task(self._serve(connection))
        connection.task.add_done_callback(partial(self._ended, connection))
        self._count()

    def _count(self) -> None:
        second = int(self._loop.time())
        if second != self._second:
            self._second, self._accepted = second, 0
        self._accepted += 1
        if self._accepted > ACCEPTED_PER_S_MAX:
            words = "http: more than %(most)d connections in a second"
            self._connections.note_fault("many", words, {"most": ACCEPTED_PER_S_MAX})

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        if connection.task is not None:
            connection.task.cancel()

    def _forget(self, connection: _Connection) -> None:
        self._connections.close(connection)
        self._lingering.pop(connection, None)

    def _ended(self, connection: _Connection, task: asyncio.Task[None]) -> None:
        self._forget(connection)
        connection.socket.close()
        if not task.cancelled() and (error := task.exception()) is not None and not _is_peers(error):
            _log.error("http: internal error", exc_info=error)

    async def _serve(self, connection: _Connection) -> None:
        asked = await self._receive(connection)  # `Connections` drops a peer that takes long
        if asked is None:
            return
        async with asyncio.timeout(ANSWER_S_MAX):
            await self._answer(connection, asked if isinstance(asked, Page) else await self._page(asked))
        await self._linger(connection)

    async def _receive(self, connection: _Connection) -> h11.Request | Page | None:
        """The request, or the page that says why it is refused; None where the peer has closed its end."""
        parser, begin = connection.parser, b""
        try:
            while (event := parser.next_event()) is h11.NEED_DATA:
                data = await self._loop.sock_recv(connection.socket, _RECEIVE_BYTES)
                begin = (begin + data)[: len(_HEAD)]
                connection.is_head = begin == _HEAD  # the parser does not say it of a request that it refuses
                parser.receive_data(data)
            if not isinstance(event, h11.Request):
                return None
            self._connections.admit(connection)
        except h11.RemoteProtocolError as error:
            return _refusal(HTTPStatus(error.error_status_hint), str(error))
        except RequestError as error:
            is_stranger = error.code is ErrorCode.UNAUTHENTICATED
            status = HTTPStatus.FORBIDDEN if is_stranger else HTTPStatus.SERVICE_UNAVAILABLE
            return _refusal(status, f"{error.message}; {error.fix}")
        return event

    async def _page(self, request: h11.Request) -> Page:
        if request.method not in {b"GET", b"HEAD"}:
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "there is GET, and HEAD")
        path = request.target.partition(b"?")[0].decode("latin-1")
        hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        if not isinstance(self._place, str) and not all(map(_is_this_machine, hosts)):
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST, "ask for this address by its number, or as localhost")
        accept = b",".join(value for name, value in request.headers if name == b"accept")
        try:
            return await self._pages.get(path, accept.decode("latin-1"))
        except Exception:  # noqa: BLE001  as the attach server: one failure must not end the daemon
            _log.exception("http: internal error at %s", path)
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the daemon failed to make this page; see its log")

    async def _answer(self, connection: _Connection, page: Page) -> None:
        """Send a page, and close this end."""
        parser = connection.parser
        headers = [
            ("content-type", page.content_type),
            ("content-length", str(len(page.body))),
            ("connection", "close"),
            ("x-content-type-options", "nosniff"),
            *page.headers,
        ]
        if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("allow", "GET, HEAD"))
        head = parser.send(h11.Response(status_code=page.status, headers=headers, reason=page.status.phrase))
        body = b"" if connection.is_head else page.body
        await self._loop.sock_sendall(connection.socket, (head or b"") + body)
        connection.socket.shutdown(socket.SHUT_WR)

    async def _linger(self, connection: _Connection) -> None:
        """Give the place to others, and wait a moment until the peer has closed its end."""
        self._connections.close(connection)
        self._lingering[connection] = None
        if len(self._lingering) > LINGERING_MAX:
            self._drop(next(iter(self._lingering)))
        left_bytes = _LINGER_BYTES_MAX
        async with asyncio.timeout(_LINGER_S_MAX):
            while left_bytes > 0 and (data := await self._loop.sock_recv(connection.socket, _RECEIVE_BYTES)):
                left_bytes -= len(data)


def _shown(place: str | tuple[str, int]) -> str:
    """A place as a person would ask for it."""
    if isinstance(place, str):
        return f"unix:{place}"
    host, port = place
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _refusal(status: HTTPStatus, why: str) -> Page:
    return Page(status, f"{why}\n".encode())


def _is_this_machine(host: str) -> bool:
    """Whether a header ``Host`` names an address, or localhost.

    Any other name may be that of a page on the internet whose owner has let it point here: the browser that shows the
    page would let it read what is answered.
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost" or name.lower().endswith(".localhost")
    return True


def _is_peers(error: BaseException) -> bool:
    """Whether a connection has ended by what its peer did, or did not."""
    return isinstance(error, TimeoutError | OSError)
