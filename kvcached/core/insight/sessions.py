"""The sessions as people look at them: what each holds. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.slots.ranges import slot_count

#: More engines than a node has; expired sessions of processes that do not die may add up.
SESSIONS_SHOWN_MAX: Final = 128


class SessionView(NamedTuple):
    """A session.

    Attributes:
        id: of it.
        where: the replica, or in offload mode the namespace's label.
        is_offload: its engine keeps its own device memory.
        state: see `SessionState`.
        leases: how many it has.
        copies: that its engine makes and has not reported as done; 0 where workers copy.
        set_aside: slots that its processes may still write though it has expired.
        heard_ms: time of its last heartbeat.
    """

    id: int
    where: str
    is_offload: bool
    state: str
    leases: int
    copies: int
    set_aside: int
    heard_ms: int


def shown_sessions(cache: Cache) -> list[SessionView]:
    """The first `SESSIONS_SHOWN_MAX` of them, those on device pools before the others."""
    return list(islice(_sessions(cache), SESSIONS_SHOWN_MAX))


def _sessions(cache: Cache) -> Iterator[SessionView]:
    for managed in cache.managed.sessions.values():
        yield SessionView(
            id=managed.id,
            where=managed.pool.name,
            is_offload=False,
            state=str(managed.state),
            leases=len(managed.leases),
            copies=0,
            set_aside=slot_count(managed.quarantined),
            heard_ms=managed.last_heard_ms,
        )
    for offload in cache.offload.sessions.values():
        yield SessionView(
            id=offload.id,
            where=offload.namespace.spec.label,
            is_offload=True,
            state=str(offload.state),
            leases=len(offload.leases),
            copies=len(offload.transfers),
            set_aside=sum(slot_count(slots) for _, slots in offload.quarantined),
            heard_ms=offload.last_heard_ms,
        )
