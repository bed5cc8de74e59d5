"""A hostile process: ``python -m tests.daemon.flooder RUN_DIR KIND``.

It floods until its standard input ends, and prints a line when it has sent more than the daemon has room for.
"""

from __future__ import annotations

import itertools
import random
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvcached_client.protocol.engine import FRAME_SIZE_BYTES_MAX, Describe, Heartbeat, Stats, encode
from kvcached_client.protocol.zmtp import GREETING, encode_message
from tests.rpc.raw_peer import READY, frame

#: Connections that are kept open, and how often they are replaced by new ones before the line is printed.
CONNECTIONS: Final = 400
ROUNDS: Final = 3


def flood(steps: Iterator[None]) -> None:
    """Flood, say so, and go on."""
    for _ in range(ROUNDS):
        next(steps)
    sys.stdout.write("flooding\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        next(steps)


def _opened(path: Path, kind: socket.SocketKind, first: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(1)
    with suppress(OSError):  # a daemon that is busy, or drops it
        connection.connect(str(path))
        if first:
            connection.send(first)
    return connection


def _connections(name: str, kind: socket.SocketKind, first: bytes) -> Callable[[Path], Iterator[None]]:
    def steps(run_dir: Path) -> Iterator[None]:
        kept: list[socket.socket] = []
        while True:
            for _ in range(CONNECTIONS):
                kept.append(_opened(run_dir / name, kind, first))
                if len(kept) > CONNECTIONS:
                    kept.pop(0).close()
            yield

    return steps


def _streams(start: bytes, more: bytes) -> Callable[[Path], Iterator[None]]:
    """A few connections that send `more` on and on behind `start`, and never read; those that end are replaced."""
    return _talk(lambda: more, start, reads_bytes=0)


def _talk(
    more: Callable[[], bytes], start: bytes = b"", *, reads_bytes: int = 1 << 20, reads_every_s: float = 0.0
) -> Callable[[Path], Iterator[None]]:
    """The same, with something else to send each time, reading so many bytes at a time, at most as often as said."""

    def steps(run_dir: Path) -> Iterator[None]:
        def opened() -> socket.socket:
            connection = _opened(run_dir / "rpc.sock", socket.SOCK_STREAM, GREETING + READY + start)
            connection.setblocking(False)
            return connection

        left = {opened(): more() for _ in range(8)}  # what each of them has to send before it begins anew
        read_s = 0.0
        for turn in itertools.count():
            now_s = time.monotonic()
            reads = reads_bytes and now_s >= read_s + reads_every_s
            read_s = now_s if reads else read_s
            readable, writable, _ = select.select(left if reads else [], left, [], reads_every_s or 0.01)
            for stream in {*readable, *writable}:
                try:
                    if stream in readable and not stream.recv(reads_bytes):
                        raise ConnectionError
                    if stream in writable:
                        left[stream] = left[stream][stream.send(left[stream]) :] or more()
                except BlockingIOError:
                    pass
                except OSError:
                    stream.close()
                    del left[stream]
                    left[opened()] = more()
            if turn % 100 == 99:
                yield

    return steps


_REQUEST: Final = encode(Describe(id=1))
#: Of a session that there is not.
_REFUSED: Final = encode(Heartbeat(id=1, session=1, token=bytes(32)))
_GENERATOR: Final = random.Random(5)


def _mutated(data: bytes, where: range) -> bytes:
    changed = bytearray(data)
    for _ in range(1 + _GENERATOR.randrange(3)):
        changed[_GENERATOR.choice(where)] = _GENERATOR.randrange(256)
    return bytes(changed)


def _mutated_frames() -> bytes:
    """Requests with changed bytes, each in a whole frame."""
    return b"".join(frame(0, _mutated(each, range(len(each)))) for each in (_REFUSED, encode(Stats(id=2))) * 500)


def _mutated_stream() -> bytes:
    """Frames with changed bytes, their heads included: sooner or later one ends the connection."""
    whole = frame(0, _REFUSED)
    return b"".join(_mutated(whole, range(len(whole))) for _ in range(100))


KINDS: Final[dict[str, Callable[[Path], Iterator[None]]]] = {
    "silent rpc": _connections("rpc.sock", socket.SOCK_STREAM, b""),
    "half a handshake": _connections("rpc.sock", socket.SOCK_STREAM, GREETING),
    "idle rpc": _connections("rpc.sock", socket.SOCK_STREAM, GREETING + READY),
    "silent attach": _connections("attach.sock", socket.SOCK_SEQPACKET, b""),
    "no attach message": _connections("attach.sock", socket.SOCK_SEQPACKET, b"\xc1"),
    "no zmtp": _connections("rpc.sock", socket.SOCK_STREAM, b"GET / HTTP/1.1\r\n\r\n"),
    "parts": _streams(frame(1, _REQUEST), frame(1, b"") * 100_000),
    "large parts": _streams(
        frame(1, _REQUEST), b"\x03" + FRAME_SIZE_BYTES_MAX.to_bytes(8, "big") + bytes(FRAME_SIZE_BYTES_MAX)
    ),
    "no requests": _streams(b"", encode_message([b"\xc1"]) * 10_000),
    "unread": _streams(b"", encode_message([_REQUEST]) * 1000),
    "slow readers": _talk(lambda: encode_message([_REQUEST]) * 1000, reads_bytes=16, reads_every_s=0.001),
    "useful": _talk(lambda: encode_message([_REQUEST]) * 1000),
    "refused": _talk(lambda: encode_message([_REFUSED]) * 1000),
    "mutated frames": _talk(_mutated_frames),
    "mutated stream": _talk(_mutated_stream),
}

if __name__ == "__main__":
    flood(KINDS[sys.argv[2]](Path(sys.argv[1])))
