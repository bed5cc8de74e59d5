"""What a slot, a session, the daemon, a pool, a transfer, storage and a prefetch can be, and every edge between.

==============  ==========================================  ================================================
slot state      who may touch its bytes                     left by
==============  ==========================================  ================================================
FREE            nobody                                      a grant
LEASED          the engine processes of one lease           commit, release, or the end of the session
CACHED          readers under a lease; nobody writes        eviction, or a drop of what can't be trusted
FENCED          work that an engine has queued              the fence signals, or every process is dead
FILLING         the workers, or in offload mode the        every shard is through with it, or its worker is dead
                engine processes, of one transfer
QUARANTINED     a process that is silent or lost its group, confirmed death, or its own word that it is over
                or storage, which reads a bad block
ABSENT          nobody: its slab is not this pool's         the pool gets the slab
==============  ==========================================  ================================================
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TypeVar

_State = TypeVar("_State", bound=StrEnum)


class SlotState(IntEnum):
    """State of one slot of a pool; every slot is in exactly one. Host slots are never LEASED or FENCED."""

    FREE = 0
    LEASED = 1
    CACHED = 2
    FENCED = 3
    QUARANTINED = 4
    FILLING = 5
    ABSENT = 6


SLOT_TRANSITIONS: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (SlotState.FREE, SlotState.LEASED),  # granted to a lease
        (SlotState.LEASED, SlotState.CACHED),  # committed
        (SlotState.LEASED, SlotState.FREE),  # released, the engine's work on it is over
        (SlotState.LEASED, SlotState.FENCED),  # released, work still queued
        (SlotState.LEASED, SlotState.QUARANTINED),  # its session stopped answering
        (SlotState.CACHED, SlotState.FREE),  # evicted or dropped
        # committed under a fence that a stopped session never signalled; a bad host block that storage reads yet;
        # after a restart: its engine says that it may be writing it
        (SlotState.CACHED, SlotState.QUARANTINED),
        (SlotState.FENCED, SlotState.FREE),  # fence signalled
        (SlotState.QUARANTINED, SlotState.FREE),  # death confirmed
        (SlotState.QUARANTINED, SlotState.CACHED),  # after a restart: its header says that its block is complete
        (SlotState.QUARANTINED, SlotState.LEASED),  # after a restart: its engine says that a lease holds it
        (SlotState.QUARANTINED, SlotState.FENCED),  # after a restart: no lease holds it, but work may be queued on it
        (SlotState.LEASED, SlotState.FILLING),  # a device slot that a load will write
        (SlotState.FREE, SlotState.FILLING),  # a host slot that a store will write
        (SlotState.FREE, SlotState.QUARANTINED),  # after a restart: an engine of before may write it
        (SlotState.FILLING, SlotState.CACHED),  # every shard has written it
        (SlotState.FILLING, SlotState.FREE),  # some shard has not
        (SlotState.FILLING, SlotState.QUARANTINED),  # an engine that was to write it stopped answering
        (SlotState.ABSENT, SlotState.FREE),  # the host pool got a slab
        (SlotState.FREE, SlotState.ABSENT),  # and gave it back
        (SlotState.ABSENT, SlotState.CACHED),  # found again after a restart
        (SlotState.ABSENT, SlotState.QUARANTINED),  # the same, and somebody of before may write it
    }
)


class SessionState(StrEnum):
    """State of a session (one engine group on one pool)."""

    ACTIVE = "active"  #: its heartbeats arrive; it may hold leases
    EXPIRED = "expired"  #: silent for a TTL, or short of a member: leases gone, what it could write is quarantined
    ENDED = "ended"  #: every process dead, or said goodbye: nothing of it is left


SESSION_TRANSITIONS: frozenset[tuple[SessionState, SessionState]] = frozenset(
    {
        (SessionState.ACTIVE, SessionState.EXPIRED),
        (SessionState.ACTIVE, SessionState.ENDED),
        (SessionState.EXPIRED, SessionState.ENDED),
        (SessionState.EXPIRED, SessionState.ACTIVE),  # of before a restart, and its engine has come back
    }
)


class DaemonState(StrEnum):
    """What the daemon does for engines."""

    SERVING = "serving"  #: everything
    DRAINING = "draining"  #: no new sessions and leases; what is held goes on
    STOPPING = "stopping"  #: the same, and it ends when nothing is held any more


DAEMON_TRANSITIONS: frozenset[tuple[DaemonState, DaemonState]] = frozenset(
    {
        (DaemonState.SERVING, DaemonState.DRAINING),
        (DaemonState.DRAINING, DaemonState.SERVING),
        (DaemonState.SERVING, DaemonState.STOPPING),
        (DaemonState.DRAINING, DaemonState.STOPPING),
    }
)


class PoolState(StrEnum):
    """Whether a device pool has its memory, which somebody may want for something else for a while."""

    AWAKE = "awake"  #: it serves
    FALLING_ASLEEP = "falling_asleep"  #: nobody gets a session; its blocks go to the host pool, then out of the index
    ASLEEP = "asleep"  #: nothing is in it, and its memory is given back
    WAKING = "waking"  #: its memory is being made, and its workers are started


#: A pool in one of these has no memory, or none that anybody may use.
NO_MEMORY: frozenset[PoolState] = frozenset({PoolState.ASLEEP, PoolState.WAKING})

POOL_TRANSITIONS: frozenset[tuple[PoolState, PoolState]] = frozenset(
    {
        (PoolState.AWAKE, PoolState.FALLING_ASLEEP),
        (PoolState.AWAKE, PoolState.ASLEEP),  # before the first request: the daemon before has left it asleep
        (PoolState.FALLING_ASLEEP, PoolState.ASLEEP),  # nothing uses its memory any more
        (PoolState.ASLEEP, PoolState.WAKING),
        (PoolState.WAKING, PoolState.AWAKE),
        (PoolState.WAKING, PoolState.ASLEEP),  # its memory could not be made, or its workers could not be started
    }
)


class TransferState(StrEnum):
    """State of a copy between tiers, over all shards."""

    QUEUED = "queued"  #: it waits for other transfers; no shard knows of it
    RUNNING = "running"  #: ordered; some shard is not through with it
    DONE = "done"  #: every shard has carried it out
    FAILED = "failed"  #: not done, or not wholly, and no shard works on it


TRANSFER_TRANSITIONS: frozenset[tuple[TransferState, TransferState]] = frozenset(
    {
        (TransferState.QUEUED, TransferState.RUNNING),
        (TransferState.QUEUED, TransferState.FAILED),
        (TransferState.RUNNING, TransferState.DONE),
        (TransferState.RUNNING, TransferState.FAILED),
    }
)


class StorageState(StrEnum):
    """Whether storage can be used."""

    ABSENT = "absent"  #: there is none, or it has not started yet
    READY = "ready"
    SUSPENDED = "suspended"  #: it fails; nothing is begun


STORAGE_TRANSITIONS: frozenset[tuple[StorageState, StorageState]] = frozenset(
    {
        (StorageState.ABSENT, StorageState.READY),
        (StorageState.READY, StorageState.SUSPENDED),  # it failed too often
        (StorageState.SUSPENDED, StorageState.READY),  # it answers again
        (StorageState.READY, StorageState.ABSENT),  # its process is dead
        (StorageState.SUSPENDED, StorageState.ABSENT),
    }
)


class PrefetchState(StrEnum):
    """Where a prefetch is."""

    WAITING = "waiting"  #: storage was not asked yet; somebody's store may bring its next block
    ASKING = "asking"  #: storage looks up which blocks it has
    FETCHING = "fetching"  #: copies are under way
    OVER = "over"  #: nothing is under way, and nothing will be


PREFETCH_TRANSITIONS: frozenset[tuple[PrefetchState, PrefetchState]] = frozenset(
    {
        (PrefetchState.WAITING, PrefetchState.ASKING),  # no store brings its next block
        (PrefetchState.WAITING, PrefetchState.OVER),  # everything is there, nobody waits, or there is no storage
        (PrefetchState.ASKING, PrefetchState.FETCHING),  # enough of it is there
        (PrefetchState.ASKING, PrefetchState.OVER),  # too little is, or it is not worth it, or storage was lost
        (PrefetchState.FETCHING, PrefetchState.ASKING),  # all that was asked for has come: what comes behind it?
        (PrefetchState.FETCHING, PrefetchState.OVER),  # the last copy has ended
    }
)


def follow(transitions: frozenset[tuple[_State, _State]], source: _State, target: _State, name: str) -> _State:
    """The target, if a table has an edge to it.

    Args:
        transitions: the table.
        source: the present state.
        target: the next one.
        name: of whatever changes its state, for the error.

    Raises:
        RuntimeError: there is no such edge: a bug of ours.
    """
    if (source, target) not in transitions:
        raise RuntimeError(f"{name} cannot go from {source} to {target}")
    return target
