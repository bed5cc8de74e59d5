"""Requests of people and tools that change what the daemon does. They need no session.

The reply to each comes when the change is complete, or at the deadline with what is left. Each may be repeated.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvcached_client.protocol.fields import KEYS, NAME_LENGTH_MAX, Count, Header, Id, Name
from kvcached_client.types import LogLevel, WritePolicy

#: Ten minutes: a client that waits longer asks again.
ADMIN_DEADLINE_MS_MAX: Final = 600_000
#: The limit of `revision` in the configuration, which it replaces.
WEIGHTS_VERSION_LENGTH_MAX: Final = 256

#: A week: a longer pin is repeated.
PIN_TTL_MS_MAX: Final = 7 * 24 * 3_600_000

StorageAction = Literal["status", "attach", "detach", "clear"]
_AnyReplica = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
_Deadline = Annotated[int, msgspec.Meta(ge=0, le=ADMIN_DEADLINE_MS_MAX)]


class Pause(Header, frozen=True, kw_only=True, tag="pause"):
    """Start no copies between device and host memory until `Resume`."""

    replica: _AnyReplica = ""  #: "" = all, and engines in offload mode
    deadline_ms: _Deadline = 5000  #: at the deadline the reply says how many copies are still in flight


class Resume(Header, frozen=True, kw_only=True, tag="resume"):
    """End a `Pause`; for all replicas, also a `Drain`."""

    replica: _AnyReplica = ""  #: "" = all, and engines in offload mode


class Drain(Header, frozen=True, kw_only=True, tag="drain"):
    """Admit no new sessions and leases until `Resume`. Leases that are held stay valid."""

    deadline_ms: _Deadline = 5000  #: at the deadline the reply says what is left


class ClearNamespace(Header, frozen=True, kw_only=True, tag="clear_namespace"):
    """Clear a namespace: no replica or engine that shares it matches the blocks that it holds now."""

    target: Name  #: a replica, or a namespace as in `SetPolicy`


class SetWeights(Header, frozen=True, kw_only=True, tag="set_weights"):
    """Give a replica's namespace other weights: as `ClearNamespace`, unless it has these weights already."""

    target: Name  #: a replica, or the first hex digits of its namespace
    version: Annotated[str, msgspec.Meta(min_length=1, max_length=WEIGHTS_VERSION_LENGTH_MAX)]


class SetPolicy(Header, frozen=True, kw_only=True, tag="set_policy"):
    """Change the policy by which blocks of a namespace are copied to the host pool."""

    target: Name  #: a replica, the first hex digits of a namespace, or its label in offload mode
    policy: WritePolicy


class Pin(Header, frozen=True, kw_only=True, tag="pin"):
    """Keep the cached blocks of a prefix for a time. Repeat it with the same keys to extend the time. Frames: keys."""

    frames = (KEYS,)

    target: Name  #: a replica, for its pool and the host pool; or a namespace as in `SetPolicy`, for the host pool
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=PIN_TTL_MS_MAX)]


class Unpin(Header, frozen=True, kw_only=True, tag="unpin"):
    """End the `Pin` with the same target and keys. Frames: keys."""

    frames = (KEYS,)

    target: Name


class ForgetPrefix(Header, frozen=True, kw_only=True, tag="forget"):
    """Remove the cached blocks of a prompt, and all that continue them, as far as nothing uses them. Frames: keys."""

    frames = (KEYS,)

    target: Name  #: a replica, with all that share its namespace, or a namespace as in `SetPolicy`
    from_block: Count = 0  #: so many leading blocks stay; fewer than the keys name
    deadline_ms: _Deadline = 60_000  #: at the deadline, the reply says that storage has not answered


class Sleep(Header, frozen=True, kw_only=True, tag="sleep"):
    """Give the memory of device pools back until `Wake`. Refused while an engine has a session on one of them."""

    target: Name  #: a replica, or the first hex digits of a namespace, for all its replicas
    deadline_ms: _Deadline = 30_000  #: blocks that the host pool does not have by then are dropped


class Wake(Header, frozen=True, kw_only=True, tag="wake"):
    """Make the memory of device pools again after `Sleep`. They are empty."""

    target: Name  #: as in `Sleep`


class StorageControl(Header, frozen=True, kw_only=True, tag="storage_control"):
    """Report the state of storage; or attach it, detach it, or clear it. Needs no session."""

    action: StorageAction = "status"


class SetLogLevel(Header, frozen=True, kw_only=True, tag="set_log_level"):
    """Have the daemon log messages of this level and above, until its end."""

    level: LogLevel  #: with debug, also a line for each request of an engine


# --- replies --------------------------------------------------------------------------------------------------------


class Paused(Header, frozen=True, kw_only=True, tag="paused"):
    """Answer to `Pause`."""

    under_way: Id  #: copies that have not ended; 0 unless the deadline passed or the pause was ended
    holds: bool  #: false: another request has ended it meanwhile


class Resumed(Header, frozen=True, kw_only=True, tag="resumed"):
    """Answer to `Resume`."""

    state: str  #: of the daemon: serving, draining, or stopping, which cannot be ended


class Drained(Header, frozen=True, kw_only=True, tag="drained"):
    """Answer to `Drain`: what is left. Zeros unless the deadline passed or the draining was ended."""

    leases: Id
    copies: Id
    requests: Id  #: requests that wait for a reply
    holds: bool  #: false: another request has ended it meanwhile


class NamespaceCleared(Header, frozen=True, kw_only=True, tag="namespace_cleared"):
    """Answer to `ClearNamespace` and `SetWeights`. The change outlives the daemon."""

    replicas: tuple[str, ...]  #: all replicas that share the namespace; none in offload mode
    generation: Id
    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  #: new root of every chain of keys
    label: str  #: its label in offload mode
    weights_version: str  #: "" = that of the configuration, or of the engines in offload mode
    blocks: Id  #: blocks that were findable before


class PolicySet(Header, frozen=True, kw_only=True, tag="policy_set"):
    """Answer to `SetPolicy`. The policy outlives the daemon, until the configuration sets another."""

    replicas: tuple[str, ...]  #: replicas that share the namespace; none in offload mode
    namespace: str  #: first 16 hex digits
    label: str  #: its label in offload mode
    policy: WritePolicy
    before: WritePolicy


class Pinned(Header, frozen=True, kw_only=True, tag="pinned"):
    """Answer to `Pin`: the blocks that are kept. The other blocks were not cached."""

    device: Count  #: leading blocks in the replica's pool
    host: Count  #: leading blocks in the host pool


class Unpinned(Header, frozen=True, kw_only=True, tag="unpinned"):
    """Answer to `Unpin`."""

    was_pinned: bool


class PrefixForgotten(Header, frozen=True, kw_only=True, tag="forgotten"):
    """Answer to `ForgetPrefix`. Nothing of the prefix is left if `in_use` is 0 and `left_in_storage` is empty."""

    device: Id  #: copies removed from device pools
    host: Id  #: copies removed from the host pool
    stored: Id  #: blocks deleted from storage
    in_use: Id  #: blocks that stay, in memory and in storage, because something uses them now
    left_in_storage: str  #: why storage may still have others of the blocks; "" = it has none, or there is no storage


class Slept(Header, frozen=True, kw_only=True, tag="slept"):
    """Answer to `Sleep`: the memory is given back. It stays so, also in the next daemon, until `Wake`."""

    replicas: tuple[str, ...]
    blocks: Id  #: blocks that the device pools held
    dropped: Id  #: of them, those that are cached nowhere now


class Woken(Header, frozen=True, kw_only=True, tag="woken"):
    """Answer to `Wake`: the pools serve."""

    replicas: tuple[str, ...]


class LocalDisk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A disk of the daemon's machine, in front of a service that is its storage."""

    blocks: int
    size_bytes: int
    capacity_bytes: int
    read_blocks: Id  #: blocks read from it, and not from the service, since the storage process began


class StorageReport(Header, frozen=True, kw_only=True, tag="storage_report"):
    """Answer to `StorageControl`."""

    backend: str  #: "" = none is configured
    state: str  #: detached, starting, ready, read_only, suspended, waiting
    why: str  #: the last failure, or why it accepts no blocks; "" = there was none
    backup: str  #: which blocks are written: every, second_sighting, on_eviction, never
    restarts: Id
    blocks: int  #: blocks that it holds; -1 if the backend does not know; so for the two sizes below
    size_bytes: int
    capacity_bytes: int
    counters: dict[str, int]
    record_age_ms: int = -1  #: how long ago the record was seen that several machines share; -1 = there is none
    local_disk: LocalDisk | None = None  #: None = there is none, or storage has not been ready yet


class LogLevelSet(Header, frozen=True, kw_only=True, tag="log_level_set"):
    """Answer to `SetLogLevel`."""

    level: LogLevel
    before: LogLevel
