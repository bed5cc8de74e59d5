"""How many connections one socket serves, and whose: per process, per user, and until they have introduced themselves.

Users other than the daemon's own have a share each, and the last places are for those who operate the daemon.

A connection is half-open until its peer has introduced itself. Half-open ones have a deadline and a limit of their own:
at the limit the user that has most of them loses the oldest one of its process that has most, so a process that opens
them without end loses its own, and another one gets in. A peer that has introduced itself is admitted, or its first
answer says why it is not.

The servers accept and close connections; this module decides which may stay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kvcached.process.access import Access, Grants, Role
from kvcached_client.errors import ErrorCode, RequestError, request_error

#: To introduce itself a client needs no more than this machine's attention for a moment.
HALF_OPEN_S_MAX: Final = 2.0
#: Descriptors that admitted connections leave free: half-open ones of all sockets, new workers, storage, files.
DESCRIPTORS_RESERVED: Final = 192
#: Of one socket, where files are plenty.
HALF_OPEN_MAX: Final = DESCRIPTORS_RESERVED // 4
#: So many processes together fill a socket, and no fewer.
_PROCESSES_TO_FILL: Final = 8
_PER_PROCESS_MIN: Final = 8
#: So many users other than the daemon's own together fill a socket, and no fewer.
_USERS_TO_FILL: Final = 4
#: This part of the places is kept for those who operate the daemon.
_RESERVED_DIVISOR: Final = 8

#: A kind of log line that peers can cause as often as they like is written once in this time.
_LOG_INTERVAL_S: Final = 60.0

C = TypeVar("C", bound=Hashable)
K = TypeVar("K", bound=Hashable)

_log: Final = logging.getLogger(__name__)


class Origin(Protocol):
    """Where a connection comes from: a process of this machine, or an address or a key of another one."""

    @property
    def process(self) -> int:
        """Whose limits of processes count; 0 where that is not visible from here."""

    @property
    def user(self) -> Hashable:
        """Whose limits of users count."""

    @property
    def words(self) -> str:
        """For the log."""


class SampledLog:
    """Writes the first line of a kind at once, then one each `_LOG_INTERVAL_S` with the number of those left out."""

    def __init__(self, log: logging.Logger, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now_s = now_s
        self._last_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def note(self, kind: str, message: str, fields: Mapping[str, object]) -> None:
        """Log a warning whose message names these fields, or count that it was left out."""
        now_s = self._now_s()
        if now_s - self._last_s.get(kind, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last_s[kind] = now_s
        left_out = self._left_out.pop(kind, 0)
        if left_out:
            message += "; %(left_out)d more like it in the last %(interval_s)d s or more were left out"
            fields = {**fields, "left_out": left_out, "interval_s": int(_LOG_INTERVAL_S)}
        self._log.warning(message, fields)


class ConnectionLimits(NamedTuple):
    """The limits of one socket.

    Attributes:
        connections: admitted, of all processes.
        per_process: admitted, of one. Processes that are not visible from here (pid 0) have the other limits only.
        per_user: admitted, of one user other than the daemon's own.
        reserved: of `connections`, those for users who operate the daemon.
        half_open: not admitted yet.
        descriptor: connections with this descriptor or a higher one are not admitted.
        is_cut: there would be more of them where this process may open more files.
    """

    connections: int
    per_process: int
    per_user: int
    reserved: int
    half_open: int
    descriptor: int
    is_cut: bool = False

    @classmethod
    def within(cls, connections_max: int, share: float) -> ConnectionLimits:
        """At most `connections_max`, or where this process may open few files, `share` of those left."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserved = min(DESCRIPTORS_RESERVED, limit // 2)
        free = _left(limit, _open_files())
        connections = min(connections_max, int(free * share))
        return cls(
            connections,
            max(connections // _PROCESSES_TO_FILL, _PER_PROCESS_MIN),
            max(connections // _USERS_TO_FILL, _PER_PROCESS_MIN),
            connections // _RESERVED_DIVISOR,
            min(HALF_OPEN_MAX, reserved // 4),
            limit - reserved,
            connections < connections_max,
        )


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _left(limit: int, open_files: int) -> int:
    """Descriptors that connections of all sockets may have, where this process may have `limit` files open."""
    return max(limit - min(DESCRIPTORS_RESERVED, limit // 2) - open_files, 0)


def limit_needed(open_files: int, connections: int, share: float) -> int:
    """The lowest limit of open files with which a socket that has this share of what is left has these connections."""
    wanted = math.ceil(connections / share)
    low = open_files + wanted
    return next(limit for limit in range(low, low + DESCRIPTORS_RESERVED + 1) if _left(limit, open_files) >= wanted)


class _Place:
    __slots__ = ("descriptor", "expires_s", "grants", "is_admitted", "origin")

    def __init__(self, origin: Origin, grants: Grants, descriptor: int, expires_s: float) -> None:
        self.origin = origin
        self.grants = grants
        self.descriptor = descriptor
        self.expires_s = expires_s
        self.is_admitted = False


class Connections(Generic[C]):
    """The connections of one socket, in the running event loop.

    Args:
        name: of the socket, for the log.
        limits: of it.
        drop: closes a connection that loses its place; it calls `close` here.
        access: who may do what; whoever has no role is not admitted.

    Attributes:
        access: the same.
        sampled: the log of what peers can cause as often as they like.
    """

    def __init__(
        self,
        name: str,
        limits: ConnectionLimits,
        drop: Callable[[C], None],
        access: Access,
    ) -> None:
        self.access = access
        self.sampled = SampledLog(_log)
        self._name = name
        self._limits = limits
        self._drop = drop
        self._places: dict[C, _Place] = {}
        self._half_open: dict[C, None] = {}  #: the oldest first
        self._of_process: Counter[int] = Counter()
        self._of_user: Counter[Hashable] = Counter()
        self._admitted = 0
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.TimerHandle | None = None
        self._is_fault_new = False

    def __iter__(self) -> Iterator[C]:
        return iter(self._places)

    def open(self, connection: C, origin: Origin, grants: Grants, descriptor: int) -> None:
        """Somebody has connected, and has a place until it has introduced itself. Somebody else may lose one."""
        self._places[connection] = _Place(origin, grants, descriptor, self._loop.time() + HALF_OPEN_S_MAX)
        self._half_open[connection] = None
        if len(self._half_open) > self._limits.half_open:
            self._drop_half_open()
        if self._expiry is None:
            self._expiry = self._loop.call_later(HALF_OPEN_S_MAX, self._drop_expired)

    def _drop_half_open(self) -> None:
        peers = {each: self._places[each].origin for each in self._half_open}
        ((user, _),) = Counter(peer.user for peer in peers.values()).most_common(1)
        ((process, count),) = Counter(peer.process for peer in peers.values() if peer.user == user).most_common(1)
        oldest = next(each for each, peer in peers.items() if (peer.user, peer.process) == (user, process))
        self.note_fault(
            "half-open",
            "%(socket)s: %(who)s has %(count)d connections that say nothing: dropped",
            {"socket": self._name, "who": peers[oldest].words, "count": count},
        )  # fmt: skip
        self._drop(oldest)

    def note_fault(self, kind: str, message: str, fields: Mapping[str, object]) -> None:
        """A peer loses a connection by its own fault: log it, and let nobody connect for a moment.

        A peer that connects anew each time would otherwise keep this process busy, and clients that are served waiting.
        """
        self._is_fault_new = True
        self.sampled.note(kind, message, fields)

    def take_fault(self) -> bool:
        """Whether there was such a fault since the last call."""
        was_new, self._is_fault_new = self._is_fault_new, False
        return was_new

    def introduce(self, connection: C, origin: Origin, grants: Grants) -> None:
        """A peer that was an address has shown a key: from now on it counts towards the limits of that."""
        place = self._places[connection]
        place.origin, place.grants = origin, grants

    def admit(self, connection: C) -> None:
        """A peer has introduced itself. Where it is not admitted its connection stays half-open.

        Raises:
            RequestError: why it is not.
        """
        place = self._places[connection]
        if place.is_admitted:
            return
        try:
            self._check(place)
        except RequestError as error:
            fields = {"socket": self._name, "who": place.origin.words, "reason": error.message}
            self.note_fault(f"refused {error.code}", "%(socket)s: refused %(who)s: %(reason)s", fields)
            raise
        place.is_admitted = True
        del self._half_open[connection]
        self._admitted += 1
        self._of_process[place.origin.process] += 1
        self._of_user[place.origin.user] += 1

    def close(self, connection: C) -> None:
        """A connection has ended. Does nothing the second time."""
        place = self._places.pop(connection, None)
        if place is None:
            return
        if not place.is_admitted:
            del self._half_open[connection]
        else:
            self._admitted -= 1
            _count_down(self._of_process, place.origin.process)
            _count_down(self._of_user, place.origin.user)
        if not self._places and self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _drop_expired(self) -> None:
        self._expiry = None
        now_s = self._loop.time()
        for connection in [each for each in self._half_open if self._places[each].expires_s <= now_s]:
            who = self._places[connection].origin.words
            fields = {"socket": self._name, "who": who, "seconds": HALF_OPEN_S_MAX}
            self.sampled.note("silent", "%(socket)s: %(who)s said nothing for %(seconds)g s: dropped", fields)
            self._drop(connection)
        oldest = next(iter(self._half_open), None)
        if oldest is not None and self._expiry is None:
            self._expiry = self._loop.call_at(self._places[oldest].expires_s, self._drop_expired)

    def _check(self, place: _Place) -> None:
        limits, grants, pid, user = self._limits, place.grants, place.origin.process, place.origin.user
        grants.check_known()
        if pid and self._of_process[pid] >= limits.per_process:
            raise _too_many(f"process {pid} has {limits.per_process} connections")
        if not grants.is_own and self._of_user[user] >= limits.per_user:
            raise _too_many(f"{grants.user} has {limits.per_user} connections")
        room = limits.connections - (0 if Role.OPERATE in grants.roles else limits.reserved)
        if self._admitted >= room and limits.is_cut:
            left = f"the limit of open files leaves room for {limits.connections}"
            raise no_descriptors(f"{self._admitted} connections are open, and {left}")
        if self._admitted >= room:
            raise _too_many(f"{self._admitted} connections are open")
        if place.descriptor >= limits.descriptor:
            raise no_descriptors()


def _count_down(counts: Counter[K], whose: K) -> None:
    counts[whose] -= 1
    if not counts[whose]:
        del counts[whose]


def no_descriptors(message: str = "the daemon keeps its last descriptors for itself") -> RequestError:
    """What is told to who would take a descriptor that the daemon keeps for itself."""
    return request_error(
        ErrorCode.LIMIT,
        message,
        "allow the daemon more open files (LimitNOFILE, ulimit -n), or close connections",
    )


def _too_many(message: str) -> RequestError:
    return request_error(ErrorCode.LIMIT, message, "close those that are not needed")
