"""A hostile machine: ``python -m tests.daemon.tcp_flooder PORT SERVER_KEY KIND``. As `tests.daemon.flooder`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from kvcached_client.protocol.curve import CurveClient, KeyPair, new_pair
from kvcached_client.protocol.key_files import key_of
from tests.daemon.flooder import CONNECTIONS, flood

_OWN: Final = new_pair()
#: Connections in a step: the daemon accepts few at a time.
_STEP: Final = CONNECTIONS // 10


def _opened(port: int, first: bytes) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(1)
    with suppress(OSError):  # a daemon that is busy, or drops it
        connection.connect(("127.0.0.1", port))
        if first:
            connection.send(first)
    return connection


def _connections(port: int, first: Callable[[], bytes]) -> Iterator[None]:
    kept: list[socket.socket] = []
    while True:
        for _ in range(_STEP):
            kept.append(_opened(port, first()))
            if len(kept) > CONNECTIONS:
                kept.pop(0).close()
        yield


def _handshakes(port: int, server: bytes, keys: KeyPair) -> Iterator[None]:
    """Whole handshakes of a key that is not let in, one after the other."""
    while True:
        for _ in range(_STEP):
            client = CurveClient(keys, server)
            with _opened(port, client.hello) as connection, suppress(OSError):
                while client.violation is None and (data := connection.recv(4096)):
                    client.read(data, 1)
                    connection.sendall(b"".join(client.commands))
                    client.commands.clear()
        yield


KINDS: Final[dict[str, Callable[[int, bytes], Iterator[None]]]] = {
    "silent": lambda port, _: _connections(port, lambda: b""),
    "half a handshake": lambda port, server: _connections(port, lambda: CurveClient(_OWN, server).hello),
    "another daemon's key": lambda port, _: _connections(port, lambda: CurveClient(_OWN, _OWN.public).hello),
    "unknown key": lambda port, server: _handshakes(port, server, _OWN),
}

if __name__ == "__main__":
    flood(KINDS[sys.argv[3]](int(sys.argv[1]), key_of(sys.argv[2])))
