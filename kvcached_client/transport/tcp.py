"""A daemon on another machine: its TCP port, and the keys with which both ends know each other.

Needs the extra `curve`.
"""

from __future__ import annotations

import os
import socket
from typing import Final, NamedTuple, Self

from kvcached_client.errors import DaemonUnreachable, ErrorCode, RequestError, bad_value, request_error
from kvcached_client.protocol.curve import CurveClient, KeyPair, NotLetIn, new_pair, pair_of
from kvcached_client.protocol.greeting import ProtocolViolation
from kvcached_client.protocol.key_files import key_of, key_text, read_key_file
from kvcached_client.transport.run_dir import host_and_port

_ENDPOINT: Final = "tcp://HOST:PORT"
_MS_PER_S: Final = 1000


class RemoteDaemon(NamedTuple):
    """A daemon behind a TCP port, and this client's keys.

    Attributes:
        endpoint: ``tcp://HOST:PORT``.
        host, port: the same.
        server: the daemon's public key.
        keys: of this client.
    """

    endpoint: str
    host: str
    port: int
    server: bytes
    keys: KeyPair

    @classmethod
    def of(cls, endpoint: str, server_key: str, key_file: str | os.PathLike[str] | None) -> Self:
        """The one that an endpoint names.

        Raises:
            BadRequest: it is no endpoint, or a key is missing or is none.
        """
        address = host_and_port(endpoint)
        if address is None:
            raise bad_value(f"{endpoint!r} is no endpoint", f"give {_ENDPOINT}")
        if not server_key or key_file is None:
            raise bad_value(
                f"{endpoint} needs the daemon's public key and a key file of this client",
                "give both; on the daemon's machine `kvcached keys show FILE` prints the public key, and "
                "`kvcached keys make FILE` makes a key file",
            )
        try:
            server = key_of(server_key)
            CurveClient(new_pair(), server)  # not all that is written like a key is one
        except (ValueError, ProtocolViolation) as error:
            raise bad_value(
                f"the daemon's key {server_key!r} is none: {error}",
                "give what `kvcached keys show` prints on the daemon's machine, quoted in a shell",
            ) from None
        return cls(endpoint, *address, server, pair_of(read_key_file(key_file)))

    def connect(self, deadline_ms: int) -> socket.socket:
        """A connection that does not block.

        Raises:
            DaemonUnreachable: nothing listens there, or nobody takes the connection in time.
        """
        try:
            connection = socket.create_connection((self.host, self.port), timeout=deadline_ms / _MS_PER_S)
        except OSError as error:
            why = error.strerror or str(error)
            raise DaemonUnreachable(f"{self.endpoint}: {why}; does the daemon have [tcp]?") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)  # noqa: FBT003
        return connection

    def reader(self) -> CurveClient:
        """This end of a new connection."""
        return CurveClient(self.keys, self.server)

    def refusal(self, reader: CurveClient) -> RequestError | DaemonUnreachable | None:
        """Why a connection has ended, if that was during its handshake."""
        if reader.is_ready:
            return None
        if isinstance(reader.violation, NotLetIn):
            own = key_text(self.keys.public)
            return request_error(
                ErrorCode.UNAUTHENTICATED,
                f"the daemon at {self.endpoint} does not know this client's public key {own}",
                "give it a [[tcp.client]] in the daemon's configuration, and restart the daemon",
            )
        why = f" ({reader.violation})" if reader.violation is not None else ""
        return DaemonUnreachable(
            f"{self.endpoint} ended the connection during the handshake{why}: is {key_text(self.server)} its public "
            "key, as `kvcached keys show` prints it there? Its log says why"
        )
