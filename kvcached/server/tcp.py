"""The TCP port: peers are keys, by CURVE. Nothing is said in the clear, and memory and processes stay where they are.

Until its handshake is over, a peer is its address: that counts for the places of half-open connections. Then it is its
key, with the role that the configuration gives it. Needs the extra `curve`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvcached.config.tcp import TcpConfig
from kvcached.process.access import NO_GRANTS, Access, Grants, Role
from kvcached.server.connection import Connection, Identity
from kvcached.server.connections import ConnectionLimits
from kvcached_client.protocol.curve import CurveServer, KeyPair, NotLetIn, pair_of
from kvcached_client.protocol.key_files import key_of, read_key_file

#: People, dashboards and routers. Each key has a quarter of the places at most.
CONNECTIONS_MAX: Final = 256
#: Of the descriptors that are left where there are few.
DESCRIPTORS_SHARE: Final = 0.125
#: A host has as many addresses of IPv6 as it likes, in a network of this size.
_NETWORK_BITS: Final = 64
#: A peer whose machine or network is gone is noticed after a minute, be it silent or not.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
#: Told from the names of local connections by its size.
_PEER_SIZE_BYTES: Final = 9


class RemoteOrigin(NamedTuple):
    """An address, or a key."""

    user: str
    process: int = 0

    @property
    def words(self) -> str:
        """For the log."""
        return self.user


class TcpDoor:
    """Where other machines connect.

    Args:
        config: where that is, and which keys there are.

    Raises:
        RequestError: the daemon's key file cannot be used.
    """

    name = "tcp"
    greeting = CurveServer.greeting

    def __init__(self, config: TcpConfig) -> None:
        self.endpoint = f"tcp://{config.listen}"
        self.place: str | tuple[str, int] = config.address
        self.access = Access()
        self.limits = ConnectionLimits.within(CONNECTIONS_MAX, DESCRIPTORS_SHARE)
        self._keys: KeyPair = pair_of(read_key_file(config.key_file))
        self._clients = dict(_clients(config))

    def take_in(self, accepted: socket.socket, serial: int) -> Connection:
        """A new connection."""
        for level, option, value in _KEEPALIVE:
            accepted.setsockopt(level, option, value)
        reader = CurveServer(self._keys, self._clients.__contains__)
        return _TcpConnection(accepted, serial.to_bytes(_PEER_SIZE_BYTES, "big"), reader, self._clients)


class _TcpConnection(Connection):
    __slots__ = ("_clients", "_curve")

    def __init__(
        self, accepted: socket.socket, peer: bytes, reader: CurveServer, clients: Mapping[bytes, Identity]
    ) -> None:
        super().__init__(accepted, peer, _stranger(accepted), reader)
        self._curve = reader
        self._clients = clients

    def introduced(self) -> Identity:
        return self._clients[self._curve.client]

    def violation_counter(self) -> str:
        return "tcp_unknown_keys" if isinstance(self._curve.violation, NotLetIn) else "tcp_violations"

    def encode(self, parts: list[bytes]) -> bytes:
        return self._curve.seal(parts)


def _clients(config: TcpConfig) -> Iterable[tuple[bytes, Identity]]:
    for client in config.client:
        words = f"key {client.name!r}"
        grants = Grants(words, -1, is_own=False, roles=frozenset({Role(client.role)}), is_remote=True)
        yield key_of(client.public_key), Identity(RemoteOrigin(words), grants, words)


def _stranger(accepted: socket.socket) -> Identity:
    """Who connects, as long as it has shown no key: its address, or the network of that."""
    try:
        address = ipaddress.ip_address(accepted.getpeername()[0].partition("%")[0])
    except OSError:  # it has gone already
        words = "an unknown address"
    else:
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            words = f"network {ipaddress.ip_network((address, _NETWORK_BITS), strict=False)}"
        else:
            words = f"address {address}"
    return Identity(RemoteOrigin(words), NO_GRANTS, words)
