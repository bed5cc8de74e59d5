"""Connections to a server. An exchange has a deadline; a connection with a reply that was not read is never used again.

The packages `redis` and `hiredis` connect, authenticate and parse. Commands are packed here: a value of several parts
goes to the socket from where it is, which takes a fifth of the time of a joined copy.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from redis import Connection, SSLConnection, UnixDomainSocketConnection
from redis.connection import DefaultParser
from redis.credentials import CredentialProvider
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.utils import SENTINEL

from kvcached.storage.backend import StorageUnusable
from kvcached.storage.redis.settings import RedisSettings, Server
from kvcached.storage.secret_file import read_private

#: An argument of several parts is one value.
Command: TypeAlias = Sequence[bytes | Sequence[memoryview]]
#: One of redis's, most of whose methods tell no types.
_Connection: TypeAlias = Any
#: What the server says: a text, a number, nothing, a list of these, or an error.
Reply: TypeAlias = Any
#: What `taken` raises where the server cannot be reached, does not answer, or lets nobody in.
UNREACHABLE: Final = (RedisError, OSError, StorageUnusable)

#: A reply of some hundred KiB comes in a few reads.
_READ_BYTES: Final = 256 << 10
#: TLS sends a record at a time, each with a time limit of its own.
_TLS_RECORD_BYTES: Final = 16 << 10


class _Parser(DefaultParser):  # type: ignore[misc, valid-type]
    """Redis's, where the time limit of a reply is that of all its pieces: redis gives it to each."""

    _until_s = math.inf

    def read_response(self, *args: object, timeout: float | object = SENTINEL, **options: object) -> Reply:
        self._until_s = time.monotonic() + timeout if isinstance(timeout, float) else math.inf
        return super().read_response(*args, timeout=timeout, **options)

    def read_from_socket(self, timeout: float | object = SENTINEL, **options: object) -> bool:
        if self._until_s < math.inf:
            timeout = _left_s(self._until_s)
        more: bool = super().read_from_socket(timeout=timeout, **options)
        return more


class Exchange:
    """Commands and their replies on one connection."""

    def __init__(self, connection: _Connection, until_s: float, piece_bytes: int = sys.maxsize) -> None:
        self._connection = connection
        self._piece_bytes = piece_bytes
        self._until_s = until_s
        #: Whether the server is no longer the one for this work: its name may lead to another one now.
        self.is_stale = False

    def send(self, commands: Iterable[Command]) -> None:
        """Send commands; each has one reply.

        Raises:
            RedisError: the connection failed, or there is no time left.
        """
        for whole in packed(commands):
            for first in range(0, len(whole), self._piece_bytes):
                self._connection.update_current_socket_timeout(self.left_s())
                self._connection.send_packed_command([whole[first : first + self._piece_bytes]])

    def read(self) -> Reply:
        """The next reply; an error that is one is returned.

        Raises:
            RedisError: the connection failed, or the reply did not come in time.
        """
        try:
            return self._connection.read_response(disable_decoding=True, timeout=self.left_s())
        except ResponseError as error:
            self.is_stale |= isinstance(error, ReadOnlyError)
            return error

    def ask(self, *command: bytes) -> Reply:
        """The reply to one command.

        Raises:
            RedisError: as from `read`, or the reply is an error.
        """
        self.send([command])
        return accepted(self.read())

    def left_s(self) -> float:
        """The time until its deadline.

        Raises:
            RedisTimeoutError: there is none.
        """
        return _left_s(self._until_s)


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise RedisTimeoutError("the server did not answer in time")
    return left_s


class Connections:
    """As many connections to one server as threads use at a time."""

    def __init__(self, settings: RedisSettings, server: Server) -> None:
        self.server = server
        self._settings = settings
        self._idle: list[_Connection] = []
        #: Whether the last exchange failed.
        self.is_away = False

    @contextmanager
    def taken(self, timeout_s: float, until_s: float | None = None) -> Iterator[Exchange]:
        """A connection for one thread.

        Args:
            timeout_s: how long all of it may take.
            until_s: when it has to end, if it is a part of a call that has begun.

        Raises:
            RedisError, OSError, StorageUnusable: the server cannot be reached, does not answer, or lets nobody in.
        """
        until_s = time.monotonic() + timeout_s if until_s is None else until_s
        connection = self._alive() or self._new(timeout_s)
        exchange = Exchange(connection, until_s, *[_TLS_RECORD_BYTES] * self.server.is_encrypted)
        try:
            exchange.left_s()  # a part of a call whose time is up does not begin to connect
            connection.connect()
            yield exchange
        except BaseException:
            self.is_away = True
            connection.disconnect()
            raise
        self.is_away = False
        if exchange.is_stale:
            connection.disconnect()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Close those that nobody uses."""
        while self._idle:
            self._idle.pop().disconnect()

    def _alive(self) -> _Connection | None:
        """A connection that the server has not closed meanwhile; None if there is none."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                return None
            if _is_quiet(connection):
                return connection
            connection.disconnect()
        return None

    def _new(self, timeout_s: float) -> _Connection:
        settings, server = self._settings, self.server
        options: dict[str, Any] = {
            "protocol": 2,
            "driver_info": None,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_read_size": _READ_BYTES,
            "parser_class": _Parser,
            "credential_provider": None if settings.password_file is None else _PasswordFile(settings),
        }
        kind: type[_Connection] = UnixDomainSocketConnection
        if server.path:
            return kind(path=server.path, **options)
        options |= {"host": server.host, "port": server.port, "db": server.database}
        kind = Connection
        if server.is_encrypted:
            kind = SSLConnection
            options |= {
                "ssl_ca_certs": settings.ca_file,
                "ssl_certfile": settings.certificate_file,
                "ssl_keyfile": settings.key_file,
                "ssl_password": "",  # what is given is not asked for at a terminal
            }
        return kind(**options)


class _PasswordFile(CredentialProvider):
    """Who connects, as the file says now: the password may be replaced while the daemon runs."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        username, password = self._settings.username, password_of(self._settings)
        return (password,) if username is None else (username, password)


def password_of(settings: RedisSettings) -> str:
    """The password in the file; empty where there is none.

    Raises:
        StorageUnusable: the file cannot be read, or others may read it.
    """
    if settings.password_file is None:
        return ""
    whose = "redis storage: password_file"
    try:
        password = read_private(settings.password_file, whose).decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise StorageUnusable(f"{whose}: {settings.password_file} is no text in UTF-8; write the password") from None
    if not password:
        raise StorageUnusable(f"{whose}: {settings.password_file} is empty; write the password into it")
    return password


def packed(commands: Iterable[Command]) -> list[bytes | memoryview]:
    """Commands as they are sent, in pieces; parts of values are not copied."""
    pieces: list[bytes | memoryview] = []
    text = bytearray()
    for command in commands:
        text += b"*%d\r\n" % len(command)
        for argument in command:
            if isinstance(argument, bytes):
                text += b"$%d\r\n%b\r\n" % (len(argument), argument)
                continue
            text += b"$%d\r\n" % sum(part.nbytes for part in argument)
            pieces += (bytes(text), *argument)
            text = bytearray(b"\r\n")
    return [*pieces, bytes(text)]


def accepted(reply: Reply) -> Reply:
    """A reply that is no error.

    Raises:
        ResponseError: it is one.
    """
    if isinstance(reply, ResponseError):
        raise reply
    return reply


def _is_quiet(connection: _Connection) -> bool:
    """Whether a connection is open, and nothing has come that nobody asked for."""
    try:
        return not connection.can_read()
    except UNREACHABLE:
        return False
