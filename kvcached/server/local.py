"""The RPC socket of this machine: peers are processes, known by the kernel's word."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from kvcached.process.access import Access
from kvcached.process.seqpacket import peer_credentials, peer_groups
from kvcached.server.connection import Connection, Identity
from kvcached.server.connections import ConnectionLimits
from kvcached_client.protocol.zmtp import GREETING, Reader

#: A node has a few dozen engine processes with two connections each, and their shards.
CONNECTIONS_MAX: Final = 1024
#: Of the descriptors that are left where there are few; the rest is for attach.sock, processes and workers.
DESCRIPTORS_SHARE: Final = 0.5
_PEER_SIZE_BYTES: Final = 8
#: Numbers of users among those of processes: above all pids.
_USERS: Final = 1 << 32


class LocalDoor:
    """Where processes of this machine connect.

    Args:
        path: of the socket.
        access: who may do what.
    """

    name = "rpc"
    greeting = GREETING

    def __init__(self, path: Path, access: Access) -> None:
        self.endpoint = f"ipc://{path}"
        self.place: str | tuple[str, int] = str(path)
        self.access = access
        self.limits = ConnectionLimits.within(CONNECTIONS_MAX, DESCRIPTORS_SHARE)

    def take_in(self, accepted: socket.socket, serial: int) -> Connection:
        """A new connection.

        It shares turns, pauses and memory with those of its process; with nobody where the pid is not visible from
        here; with those of its user where that is not the daemon's own.
        """
        credentials = peer_credentials(accepted)
        grants = self.access.grants(credentials, peer_groups(accepted))
        owner = (credentials.pid or -serial) if grants.is_own else _USERS + credentials.uid
        identity = Identity(credentials, grants, owner)
        return Connection(accepted, serial.to_bytes(_PEER_SIZE_BYTES, "big"), identity, Reader())
