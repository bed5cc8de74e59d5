"""Suite ``door``: a good client beside hostile peers, at the daemon's local sockets and at its TCP port."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.result import Result
from benchmarks.suites.floods import CONFIG, SLICE_S, measure_beside
from kvcached_client.protocol.curve import KeyPair, new_pair
from kvcached_client.protocol.key_files import key_text, write_key_file

#: By metric: the kinds of `tests.daemon.flooder`.
LOCAL: Final = {
    "connections": "silent rpc",
    "half_handshakes": "half a handshake",
    "half_open_attach": "silent attach",
    "refused_requests": "refused",
    "mutated_frames": "mutated frames",
    "mutated_streams": "mutated stream",
    "slow_readers": "slow readers",
    "unread_replies": "unread",
}
#: The same of `tests.daemon.tcp_flooder`.
TCP: Final = {
    "tcp_connections": "silent",
    "tcp_half_handshakes": "half a handshake",
    "tcp_wrong_server_keys": "another daemon's key",
    "tcp_unknown_keys": "unknown key",
}


def run(rounds: int) -> Iterator[Result]:
    """Take turns between no flood, a busy neighbour and each hostile peer; figures are medians over the rounds."""
    yield from measure(rounds, SLICE_S)


def measure(rounds: int, slice_s: float, local: dict[str, str] = LOCAL, tcp: dict[str, str] = TCP) -> Iterator[Result]:
    """The same, with a good client's loop of `slice_s` seconds in each case of a round."""
    keys, port = new_pair(), _free_port()
    floods = {name: ["-m", "tests.daemon.flooder", "{run_dir}", kind] for name, kind in local.items()}
    there = ["-m", "tests.daemon.tcp_flooder", str(port), key_text(keys.public)]
    floods |= {name: [*there, kind] for name, kind in tcp.items()}
    useful = {"endless_requests": ["-m", "tests.daemon.flooder", "{run_dir}", "useful"]}
    yield from measure_beside("door", floods, rounds, slice_s, lambda place: _config(place, keys, port), useful)


def _config(directory: Path, keys: KeyPair, port: int) -> str:
    key_file = directory / "daemon.key"
    write_key_file(key_file, keys.secret)
    client = f'[[tcp.client]]\nname = "good"\npublic_key = "{key_text(new_pair().public)}"\nrole = "look"\n'
    return f'{CONFIG}[tcp]\nlisten = "127.0.0.1:{port}"\nkey_file = "{key_file}"\n{client}'


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
