"""How full a server is, as of some seconds ago: the storage process asks after every request."""

from __future__ import annotations

import math
import time
from threading import Lock
from typing import Final, NamedTuple

from kvcached.storage.backend import UNKNOWN_USAGE, Usage
from kvcached.storage.redis.connections import UNREACHABLE, Connections, accepted
from kvcached.storage.redis.nodes import Nodes

#: How old figures may be.
_AGE_S: Final = 2.0
_TIMEOUT_S: Final = 1.0
#: A server counts whole seconds of its clock: it may have started up to a second later than it says.
_UPTIME_ERROR_S: Final = 1


class _Node(NamedTuple):
    """A server of the url, as it is now.

    Attributes:
        keys: beside the record.
        size_bytes: what it uses.
        capacity_bytes: the most that it uses; 0 = no limit.
        is_new: whether all that it has was written after the record was last seen.
        lost_record: whether it is another process than the one that had the record, and has none.
    """

    keys: int
    size_bytes: int
    capacity_bytes: int
    is_new: bool
    lost_record: bool


class Fullness:
    """Figures that are taken again when they are old, by the thread that asks for them.

    The number of blocks is 0 or unknown: a server counts all keys, also those of others. It is 0 where there is no key
    but the record, and where all that was stored is known to be lost, though blocks and other keys are there again: a
    server without persistence has restarted, and daemons have written to it before they looked for the record.

    That is so if there is no record, its server has another `run_id` than when this process last saw the record, and
    each server is empty, or has loaded nothing and has started since then. The `run_id` alone does not tell: another
    server may answer under the same name after a failover, a replica that lagged behind, with blocks and no record. But
    it was started before the record was last seen, or has loaded its blocks from its primary. A replica that was itself
    restarted meanwhile, when its primary had nothing, is as good as empty. A server that restores a snapshot or a log
    of commands may have old blocks. In a cluster, the other nodes have theirs when one restarts. A FLUSHALL leaves no
    trace that could be told from an eviction of the record.
    """

    def __init__(self, nodes: Nodes, record: bytes) -> None:
        self._nodes = nodes
        self._record = record
        self._taking = Lock()
        self._figures = UNKNOWN_USAGE
        #: Whether all that was stored is lost, as of then.
        self._is_lost = False
        self._taken_s = self._expired_s = -math.inf
        #: Which process had the record when it was last seen, and when that was.
        self._seen: tuple[str, float] | None = None
        self._last_write = self._write_before = object()

    def writes(self) -> None:
        """Something is being written: what was empty no longer is."""
        self._last_write = object()

    def expire(self) -> None:
        """Blocks were deleted, or the record is gone: who asks from now on gets figures that are taken from now on."""
        self._expired_s = time.monotonic()

    def saw_record(self, info: bytes) -> None:
        """The record is there, in the server that says this of itself."""
        self._seen = fields_of(info).get("run_id", ""), time.monotonic()
        self._is_lost = False

    def figures(self) -> Usage:
        """How full the server is; unknown while it does not answer."""
        if self._nodes.is_away:  # the next call finds out whether it still is
            return UNKNOWN_USAGE
        is_expired = self._taken_s <= self._expired_s
        if self._is_old() and self._taking.acquire(blocking=is_expired):
            try:
                if self._is_old():
                    self._take()
            finally:
                self._taking.release()
        is_empty = self._figures.blocks == 0 and self._last_write is self._write_before
        return self._figures._replace(blocks=0 if is_empty or self._is_lost else -1)

    def _is_old(self) -> bool:
        return self._taken_s <= self._expired_s or time.monotonic() >= self._taken_s + _AGE_S

    def _take(self) -> None:
        self._write_before = self._last_write
        began_s = time.monotonic()
        self._figures, self._is_lost = self._now(began_s + _TIMEOUT_S)
        self._taken_s = began_s

    def _now(self, until_s: float) -> tuple[Usage, bool]:
        """The figures, and whether all that was stored is lost."""
        try:
            ((owner, _),) = self._nodes.of([self._record], until_s)
            nodes = [self._of(server, server is owner, until_s) for server in self._nodes.all(until_s)]
        except (*UNREACHABLE, KeyError, ValueError):
            return UNKNOWN_USAGE, False
        keys, size_bytes, capacities, *_ = zip(*nodes, strict=True)
        is_lost = any(node.lost_record for node in nodes) and all(node.is_new or not node.keys for node in nodes)
        return Usage(sum(keys), sum(size_bytes), sum(capacities) if all(capacities) else -1), is_lost

    def _of(self, server: Connections, is_owner: bool, until_s: float) -> _Node:  # noqa: FBT001
        """One server; whether it is the one that has the record, or would have it."""
        # TOUCH counts as a use: a server that evicts what was not used for long then keeps the record.
        asked = (b"INFO", b"server", b"memory", b"persistence")
        commands = [asked, (b"DBSIZE",), (b"TOUCH", self._record)][: 3 if is_owner else 2]
        with server.taken(_TIMEOUT_S, until_s) as exchange:
            exchange.send(commands)
            info, keys, *records = [exchange.read() for _ in commands]
        fields, has_record = fields_of(accepted(info)), sum(map(accepted, records))
        run_id, seen_s = self._seen or ("", math.inf)
        return _Node(
            keys=accepted(keys) - has_record,
            size_bytes=int(fields["used_memory"]),
            capacity_bytes=int(fields.get("maxmemory", 0)),
            is_new=_is_new(fields, time.monotonic() - seen_s),
            lost_record=is_owner and not has_record and bool(run_id) and fields.get("run_id", run_id) != run_id,
        )


def _is_new(info: dict[str, str], since_s: float) -> bool:
    """Whether a server has started within this time, and had nothing then."""
    has_loaded = info.get("rdb_last_load_keys_loaded") != "0" or info.get("aof_enabled") != "0"
    return not has_loaded and int(info["uptime_in_seconds"]) - _UPTIME_ERROR_S < since_s


def fields_of(info: bytes) -> dict[str, str]:
    """What a reply to INFO says."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
