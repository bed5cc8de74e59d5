"""Blocks in a Valkey or Redis server: one string for each.

Values of a call are sent without waiting for replies in between, some MiB at a time, which bounds what a thread and
the server hold of them. Each has a reply of its own.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from redis.exceptions import AskError, NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from kvcached.storage.backend import (
    ABSENT,
    DONE,
    STORED_KEY_BYTES,
    WRONG,
    Block,
    Capabilities,
    Outcome,
    RecordUnusable,
    Result,
    Storage,
    Usage,
    VersionedRecord,
    no_progress,
)
from kvcached.storage.redis.connections import UNREACHABLE, Command, Connections, Reply, accepted
from kvcached.storage.redis.fullness import Fullness
from kvcached.storage.redis.nodes import Nodes
from kvcached.storage.redis.settings import RedisSettings

#: Values on their way in one thread, unless a single one is larger.
BYTES_AT_ONCE_MAX: Final = 16 << 20
#: Keys that one step of a search looks at: the server answers nobody meanwhile.
_KEYS_PER_STEP: Final = b"4000"
_VERSION_BYTES: Final = 16

#: What stands for the version of a key of another type in the place of the record.
_NO_HASH: Final = b"no hash"

#: Writes the record if it has the version that is expected, also where the server has no memory left: a namespace can
#: then still be cleared.
_WRITE_RECORD: Final = b"""#!lua flags=allow-oom
local version = redis.pcall('HGET', KEYS[1], 'version') or ''
if type(version) == 'table' then
    if not string.find(version.err, 'WRONGTYPE', 1, true) then
        return version
    end
    version = 'no hash'
end
if version ~= ARGV[1] then
    return 0
end
if version == 'no hash' then
    redis.call('UNLINK', KEYS[1])
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'data', ARGV[3])
return 1
"""


class RedisStorage(Storage):
    """The keys of one prefix in a server or cluster.

    Raises:
        RedisError, OSError, StorageUnusable: from every method but `get`, `put` and `usage`, where the server fails.
    """

    def __init__(self, settings: RedisSettings, nodes: Nodes) -> None:
        self.capabilities = Capabilities(threads=settings.threads, is_shared=True)
        self._nodes = nodes
        self._names = f"{settings.prefix}:b:".encode()
        self._record = record_of(settings)
        self._expiry = () if settings.ttl_s is None else (b"EX", b"%d" % settings.ttl_s)
        self._fullness = Fullness(nodes, self._record)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """In one round trip to each server. Where some fail, their keys are as good as absent."""
        found, failures = [False] * len(keys), list[Exception]()
        until_s = time.monotonic() + timeout_s
        with self._finding():
            servers = self._nodes.of(list(map(self._name, keys)), until_s) if keys else []
        for server, numbers in servers:
            try:
                with server.taken(timeout_s, until_s) as exchange:
                    exchange.send((b"EXISTS", self._name(keys[number])) for number in numbers)
                    replies = [exchange.read() for _ in numbers]
                for number, reply in zip(numbers, replies, strict=True):
                    if isinstance(reply, AskError):
                        self._nodes.expire()
                    else:
                        found[number] = accepted(reply) == 1
            except UNREACHABLE as error:
                self._nodes.expire()
                failures.append(error)
        if failures and len(failures) == len(servers):
            raise failures[0]
        return found

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read values; a value of another size or type is wrong."""
        return self._each(blocks, lambda block: (b"GET", self._name(block.key)), _got, timeout_s)

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write values, over what is there.

        The record is used with them: a server that evicts what was not used for long keeps it, however much is written.
        """
        self._fullness.writes()

        def command(block: Block) -> Command:
            return b"SET", self._name(block.key), block.parts, *self._expiry

        return self._each(blocks, command, _put, timeout_s, uses=self._record)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """The server frees their memory in the background."""
        count: int = sum(self._all(b"UNLINK", list(map(self._name, keys)), timeout_s))
        self._fullness.expire()
        return count

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        """Look at all keys of each server, step by step; each step is answered in time, or this fails."""
        start = self._names + prefix.hex().encode()
        pattern = start + b"?" * (len(self._names) + 2 * STORED_KEY_BYTES - len(start))
        # A pattern also matches names of other forms, among them those of a longer prefix that begins like this one.
        is_block = re.compile(re.escape(self._names) + b"[0-9a-f]{%d}" % (2 * STORED_KEY_BYTES)).fullmatch
        count = 0
        with self._finding():
            for server in self._nodes.all(time.monotonic() + timeout_s):
                for deleted in _cleared(server, pattern, is_block, timeout_s):
                    count += deleted
                    progress()
        self._fullness.expire()
        return count

    def usage(self) -> Usage:
        """How full the server is, as of some seconds ago, with what others have in it."""
        return self._fullness.figures()

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        """The fields of one key. Where there is none, `usage` tells the state after that."""
        try:
            version, data = self._of_record((b"HMGET", self._record, b"version", b"data"), timeout_s, all)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            raise RecordUnusable(f"redis storage: the key {self._record.decode()} is no hash", _NO_HASH) from error
        if version is None or data is None:
            self._fullness.expire()
            return None
        return VersionedRecord(data, version)

    def write_record(self, data: bytes, after: bytes, *, timeout_s: float) -> bytes | None:
        """By a script, which nothing interrupts. A random version does not come again when the server was emptied."""
        version = secrets.token_bytes(_VERSION_BYTES)
        command = (b"EVAL", _WRITE_RECORD, b"1", self._record, after, version, data)
        return version if self._of_record(command, timeout_s, bool) else None

    def close(self) -> None:
        """Close the connections."""
        self._nodes.close()

    def _name(self, key: bytes) -> bytes:
        return self._names + key.hex().encode()

    @contextmanager
    def _finding(self) -> Iterator[None]:
        """Whatever fails, the next call asks again who has which keys."""
        try:
            yield
        except UNREACHABLE:
            self._nodes.expire()
            raise

    def _all(self, command: bytes, names: Sequence[bytes], timeout_s: float, more: Command = ()) -> list[Reply]:
        """The replies to a command for each key; one that is an error is raised."""
        replies: list[Reply] = [None] * len(names)
        if not names:
            return replies
        until_s = time.monotonic() + timeout_s
        with self._finding():
            for server, numbers in self._nodes.of(names, until_s):
                with server.taken(timeout_s, until_s) as exchange:
                    exchange.send((command, names[number], *more) for number in numbers)
                    for number in numbers:
                        replies[number] = exchange.read()
            return [accepted(reply) for reply in replies]

    def _of_record(self, command: Command, timeout_s: float, has_record: Callable[[Reply], bool]) -> Reply:
        """The reply to a command for the record; whether it means that the record is there."""
        with self._finding():
            until_s = time.monotonic() + timeout_s
            ((server, _),) = self._nodes.of([self._record], until_s)
            with server.taken(timeout_s, until_s) as exchange:
                exchange.send([command, (b"INFO", b"server")])  # the same connection: the process that has the record
                reply, info = exchange.read(), exchange.read()
            if has_record(accepted(reply)) and not isinstance(info, ResponseError):
                self._fullness.saw_record(info)
            return reply

    def _each(
        self,
        blocks: Sequence[Block],
        command: Callable[[Block], Command],
        result: Callable[[Block, Reply], Result],
        timeout_s: float,
        *,
        uses: bytes | None = None,
    ) -> list[Result]:
        """The result of a command for each block. After a connection fails, the rest of what it was for has failed.

        The server that has the key `uses` counts it as used.
        """
        results: dict[int, Result] = {}
        until_s = time.monotonic() + timeout_s
        failure = ""
        try:
            found = self._nodes.of([self._name(block.key) for block in blocks], until_s)
        except UNREACHABLE as error:
            found, failure = [], str(error)
        for server, numbers in found:
            try:
                with server.taken(timeout_s, until_s) as exchange:
                    is_used = [(b"TOUCH", uses)] if uses and self._nodes.has(server, uses) else []
                    for some in _portions(blocks, numbers):
                        exchange.send([*is_used, *(command(blocks[number]) for number in some)])
                        for _ in is_used:
                            exchange.read()
                        for number in some:
                            reply = exchange.read()
                            results[number] = result(blocks[number], reply)
                            if isinstance(reply, AskError):
                                self._nodes.expire()
            except UNREACHABLE as error:
                self._nodes.expire()
                failure = str(error)
                results |= {number: Result(Outcome.FAILED, failure) for number in numbers if number not in results}
        return [results.get(number, Result(Outcome.FAILED, failure)) for number in range(len(blocks))]


def record_of(settings: RedisSettings) -> bytes:
    """The key of the record of generations."""
    return f"{settings.prefix}:record".encode()


def uses_of(settings: RedisSettings) -> list[tuple[bytes, ...]]:
    """Each command that a backend sends, in a form that leaves nothing behind: for a look whether its user may."""
    key = f"{settings.prefix}:probe".encode()
    return [
        (b"SET", key, b"", b"EX", b"10"),
        (b"GET", key),
        (b"EXISTS", key),
        (b"TOUCH", key),
        # The key is no hash: where these are permitted, they fail, or change nothing.
        (b"HGET", key, b"version"),
        (b"HMGET", key, b"version", b"data"),
        (b"HSET", key, b"version", b""),
        (b"EVAL", _WRITE_RECORD, b"1", key, b"", b"", b""),
        (b"SCAN", b"0", b"MATCH", key, b"COUNT", b"1"),
        (b"DBSIZE",),
        (b"UNLINK", key),
    ]


def _got(block: Block, reply: Reply) -> Result:
    if isinstance(reply, ResponseError):
        return WRONG if str(reply).startswith("WRONGTYPE") else _refused(reply)
    if reply is None:
        return ABSENT
    if len(reply) != block.size_bytes:
        return WRONG
    value, at = memoryview(reply), 0
    for part in block.parts:
        part[:] = value[at : at + part.nbytes]
        at += part.nbytes
    return DONE


def _put(_: Block, reply: Reply) -> Result:
    return _refused(reply) if isinstance(reply, ResponseError) else DONE


def _refused(error: ResponseError) -> Result:
    """What the server's error means for one block."""
    if isinstance(error, OutOfMemoryError):
        fix = "raise its maxmemory, or let it evict blocks: maxmemory-policy allkeys-lru"
        return Result(Outcome.FULL, f"the server has no memory left: {error}; {fix}")
    if isinstance(error, ReadOnlyError):
        return Result(Outcome.FAILED, "the server has become a read-only replica; name the primary in url")
    if isinstance(error, NoPermissionError):
        return Result(Outcome.FAILED, f"{error}; give the user the permissions in docs/storage.md")
    if isinstance(error, AskError):  # or MovedError, which is one
        return Result(Outcome.FAILED, "another node of the cluster has this slot of keys now; the next call asks which")
    return Result(Outcome.FAILED, str(error))


def _portions(blocks: Sequence[Block], numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    first = size_bytes = 0
    for at, number in enumerate(numbers):
        if size_bytes and size_bytes + blocks[number].size_bytes > BYTES_AT_ONCE_MAX:
            yield numbers[first:at]
            first = at
            size_bytes = 0
        size_bytes += blocks[number].size_bytes
    yield numbers[first:]


def _cleared(
    server: Connections, pattern: bytes, is_block: Callable[[bytes], object], timeout_s: float
) -> Iterator[int]:
    """Delete the blocks with such names; how many there were, step by step."""
    cursor = b""
    while cursor != b"0":
        with server.taken(timeout_s) as exchange:
            cursor, names = exchange.ask(b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", _KEYS_PER_STEP)
            names = list(filter(is_block, names))
            exchange.send((b"UNLINK", name) for name in names)
            replies = [exchange.read() for _ in names]
        yield sum(map(accepted, replies))
