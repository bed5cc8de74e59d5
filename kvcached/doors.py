"""What a daemon opens beside its local sockets, if that is configured: events, HTTP, TCP."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Final

from kvcached.config.schema import Config
from kvcached.core.cache import Cache
from kvcached.events.token_book import TokenBook
from kvcached.events_start import start_events
from kvcached.server.attach import AttachServer
from kvcached.server.rpc import RpcServer
from kvcached.service.health import HealthRequests
from kvcached.service.service import Service
from kvcached_client.errors import ErrorCode, RequestError, request_error

#: Between two tries to open a door that stayed closed.
RETRY_S: Final = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Door:
    """What a daemon opens beside its local sockets, if that is configured.

    Attributes:
        name: of its table in the configuration, and of the part of `kvcached health` while it stays closed.
        key: that says where; empty where the errors begin with it.
        drop_in: the file in `configs/` with what the unit lacks for it.
        packages: what it needs, as pip takes it; empty where it needs nothing.
        loss: what there is not while it stays closed.
        fix: what to do where the place cannot be bound; empty where the errors say it.
        is_retried: whether it is tried again while it stays closed.
    """

    name: str
    key: str
    drop_in: str
    packages: str
    loss: str
    fix: str = ""
    is_retried: bool = True

    def stay_closed(self, error: OSError | ImportError | RequestError, *, is_takeover: bool) -> str:
        """Fail the start, or go on without: neither a port nor a package is a reason to lose memory.

        Args:
            error: why it cannot be opened.
            is_takeover: whether the daemon has taken over blocks or engines, which it serves all the same.

        Returns:
            Why it stays closed, for `kvcached health`.

        Raises:
            OSError: the place cannot be bound; as the next one, in words for the operator.
            RequestError: a package is missing, or a file cannot be used.
        """
        if is_takeover:
            log.error("%s", why := self.why_closed(error))
            return why
        if isinstance(error, OSError):
            raise OSError(error.errno, self._in_words(error)) from error
        if isinstance(error, ImportError):
            raise request_error(ErrorCode.INTERNAL, f"{self._place}{error}", self._install) from error
        raise error

    def why_closed(self, error: OSError | ImportError | RequestError) -> str:
        """Why it is closed, and until when."""
        until = f"this is mended, which is tried every {RETRY_S:g} s" if self.is_retried else "the next start"
        return f"{self._in_words(error)}; {self.loss} until {until}"

    @property
    def _place(self) -> str:
        return f"[{self.name}] {self.key}: " if self.key else f"[{self.name}] "

    @property
    def _install(self) -> str:
        return f"pip install {self.packages}"

    def _in_words(self, error: OSError | ImportError | RequestError) -> str:
        if isinstance(error, RequestError):
            return f"[{self.name}] {error.message}; {error.fix}"
        if isinstance(error, ImportError):
            return f"{self._place}{error}; {self._install}"
        is_forbidden = error.errno == errno.EAFNOSUPPORT
        fix = f"under systemd see configs/{self.drop_in}" if is_forbidden else self.fix
        return f"{self._place}{error.strerror or error}{f'; {fix}' if fix else ''}"


_ELSEWHERE: Final = "stop what listens there, or name an address of this machine that is free"
HTTP: Final = Door("http", "listen", "http.conf", "prometheus_client h11", "there are no metrics", _ELSEWHERE)
TCP: Final = Door("tcp", "listen", "tcp.conf", "PyNaCl", "other machines are not served", _ELSEWHERE)
EVENTS: Final = Door(
    "events", "", "http.conf", "", "there are no events", "make the place free, or name another one", is_retried=False
)


class _Opening:
    """Opens a door; if it stays closed, again after every pause, until it is open or the daemon stops.

    Args:
        start: opens it, and pushes what closes it.
        health: is told while it is closed.
    """

    def __init__(self, door: Door, start: Callable[[ExitStack], None], health: HealthRequests) -> None:
        self._door = door
        self._start = start
        self._health = health
        self._held = ExitStack()
        self._timer: asyncio.TimerHandle | None = None

    def first(self, *, is_takeover: bool) -> None:
        """Open it. Raises as `Door.stay_closed`."""
        try:
            self._open()
        except (OSError, ImportError, RequestError) as error:
            self._wait(self._door.stay_closed(error, is_takeover=is_takeover))

    def close(self) -> None:
        """Close it, and try no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._held.close()

    def _open(self) -> None:
        with ExitStack() as parts:
            self._start(parts)
            self._held = parts.pop_all()

    def _wait(self, why: str) -> None:
        self._health.closed[self._door.name] = why
        self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._again)

    def _again(self) -> None:
        try:
            self._open()
        except (OSError, ImportError, RequestError) as error:
            self._wait(self._door.why_closed(error))
        else:
            del self._health.closed[self._door.name]
            log.info("[%s] is open now", self._door.name)


async def open_events(
    config: Config,
    cache: Cache,
    service: Service,
    book: TokenBook | None,
    parts: AsyncExitStack,
    *,
    is_takeover: bool,
) -> None:
    """Publish events, if that is configured. A takeover goes on without, as in `open_http`.

    Raises:
        OSError: an endpoint cannot be bound.
    """
    try:
        service.health.sockets += await start_events(config, cache, service, book, parts)
    except OSError as error:
        service.health.closed[EVENTS.name] = EVENTS.stay_closed(error, is_takeover=is_takeover)


def open_http(
    config: Config, service: Service, attach: AttachServer, parts: AsyncExitStack, *, is_takeover: bool
) -> None:
    """Serve metrics and health, if that is configured. A takeover goes on without: a port is no reason to lose memory.

    Raises:
        OSError: the address cannot be bound.
        RequestError: a package is missing.
    """
    if (table := config.http) is None:
        return

    def start(held: ExitStack) -> None:
        from kvcached.monitoring.pages import DaemonPages, HostSize  # noqa: PLC0415 - needs an extra
        from kvcached.server.http import HttpServer  # noqa: PLC0415 - as above

        size = HostSize() if config.host is None else HostSize(config.host.slabs, config.host.slab_bytes)
        http = HttpServer(table.address, DaemonPages(service, size, attach.refusals), attach.access)
        held.callback(http.close)
        http.start()
        service.health.sockets += http.files

    opening = _Opening(HTTP, start, service.health)
    parts.callback(opening.close)
    opening.first(is_takeover=is_takeover)


def open_tcp(config: Config, service: Service, parts: AsyncExitStack, *, is_takeover: bool) -> None:
    """Serve other machines, if that is configured. A takeover goes on without, as in `open_http`.

    Raises:
        OSError: the address cannot be bound.
        RequestError: the key file cannot be used, or a package is missing.
    """
    if (table := config.tcp) is None:
        return

    def start(held: ExitStack) -> None:
        from kvcached.server.tcp import TcpDoor  # noqa: PLC0415 - needs an extra

        rpc = RpcServer(TcpDoor(table), service)
        held.callback(rpc.close)
        rpc.start(asyncio.get_running_loop())
        log.info("other machines are served at %s: %d keys are let in", rpc.endpoint, len(table.client))

    opening = _Opening(TCP, start, service.health)
    parts.callback(opening.close)
    opening.first(is_takeover=is_takeover)
