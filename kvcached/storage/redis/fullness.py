"""How full a server is, as of some seconds ago: the storage process asks after every request."""

from __future__ import annotations

import time
from threading import Lock
from typing import Final

from kvcached.storage.backend import Usage
from kvcached.storage.redis.connections import UNREACHABLE, Connections, accepted
from kvcached.storage.redis.nodes import Nodes

#: How old figures may be.
_AGE_S: Final = 2.0
_TIMEOUT_S: Final = 1.0
_UNKNOWN: Final = Usage(blocks=-1, size_bytes=-1, capacity_bytes=-1)


class Fullness:
    """Figures that are taken again when they are old, by the thread that asks for them.

    The number of blocks is 0 or unknown: a server counts all keys, also those of others.
    """

    def __init__(self, nodes: Nodes, record: bytes) -> None:
        self._nodes = nodes
        self._record = record
        self._taking = Lock()
        self._figures = _UNKNOWN
        self._next_s = 0.0
        self._last_write = self._write_before = object()

    def writes(self) -> None:
        """Something is being written: what was empty no longer is."""
        self._last_write = object()

    def expire(self) -> None:
        """Blocks were deleted: take the figures again when they are asked for."""
        self._next_s = 0.0

    def figures(self) -> Usage:
        """How full the server is; unknown while it does not answer."""
        if self._nodes.is_away:  # the next call finds out whether it still is
            return _UNKNOWN
        if time.monotonic() >= self._next_s and self._taking.acquire(blocking=False):
            try:
                self._take()
            finally:
                self._taking.release()
        is_empty = self._figures.blocks == 0 and self._last_write is self._write_before
        return self._figures._replace(blocks=0 if is_empty else -1)

    def _take(self) -> None:
        self._write_before = self._last_write
        self._next_s = time.monotonic() + _AGE_S
        until_s = time.monotonic() + _TIMEOUT_S
        try:
            ((owner, _),) = self._nodes.of([self._record], until_s)
            taken = [self._of(server, server is owner, until_s) for server in self._nodes.all(until_s)]
        except (*UNREACHABLE, KeyError, ValueError):
            self._figures = _UNKNOWN
            return
        keys, size_bytes, capacities = zip(*taken, strict=True)
        self._figures = Usage(sum(keys), sum(size_bytes), sum(capacities) if all(capacities) else -1)

    def _of(self, server: Connections, has_record: bool, until_s: float) -> tuple[int, int, int]:  # noqa: FBT001
        """Of one server: keys beside the record, bytes, and the most bytes that it takes; 0 = no limit."""
        # TOUCH counts as a use: a server that evicts what was not used for long then keeps the record.
        commands = [(b"INFO", b"memory"), (b"DBSIZE",), (b"TOUCH", self._record)][: 3 if has_record else 2]
        with server.taken(_TIMEOUT_S, until_s, sends_little=True) as exchange:
            exchange.send(commands)
            info, keys, *records = [exchange.read() for _ in commands]
        memory = fields_of(accepted(info))
        return (
            accepted(keys) - sum(map(accepted, records)),
            int(memory["used_memory"]),
            int(memory.get("maxmemory", 0)),
        )


def fields_of(info: bytes) -> dict[str, str]:
    """What a reply to INFO says."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
