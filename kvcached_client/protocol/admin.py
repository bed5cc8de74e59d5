"""Messages of people and tools that change what the daemon does. They need no session.

Each is answered when it has happened, or at its deadline with what is left. Sending one again changes nothing more.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvcached_client.protocol.fields import KEYS, NAME_LENGTH_MAX, Count, Header, Id, Name
from kvcached_client.types import WritePolicy

#: Ten minutes: whoever waits for longer asks again.
ADMIN_DEADLINE_MS_MAX: Final = 600_000
#: As long as `revision` in the configuration, in whose place it stands.
WEIGHTS_VERSION_LENGTH_MAX: Final = 256

#: A week: whoever wants longer says so again.
PIN_TTL_MS_MAX: Final = 7 * 24 * 3_600_000

StorageAction = Literal["status", "attach", "detach", "clear"]
_AnyReplica = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
_Deadline = Annotated[int, msgspec.Meta(ge=0, le=ADMIN_DEADLINE_MS_MAX)]


class Pause(Header, frozen=True, kw_only=True, tag="pause"):
    """Start no copies between device and host memory until `Resume`."""

    replica: _AnyReplica = ""  #: "" = all, and engines in offload mode
    deadline_ms: _Deadline = 5000  #: past it the answer says how many copies are still under way


class Resume(Header, frozen=True, kw_only=True, tag="resume"):
    """The end of `Pause`, and, for all, of `Drain`."""

    replica: _AnyReplica = ""  #: "" = all, and engines in offload mode


class Drain(Header, frozen=True, kw_only=True, tag="drain"):
    """No new sessions and leases until `Resume`; what is held goes on."""

    deadline_ms: _Deadline = 5000  #: past it the answer says what is left


class ClearNamespace(Header, frozen=True, kw_only=True, tag="clear_namespace"):
    """Nothing that a namespace holds is matched again, by any replica or engine that shares it."""

    target: Name  #: a replica, or a namespace as in `SetPolicy`


class SetWeights(Header, frozen=True, kw_only=True, tag="set_weights"):
    """A replica's namespace has other weights: as `ClearNamespace`, unless it has them already."""

    target: Name  #: a replica, or the first hex digits of its namespace
    version: Annotated[str, msgspec.Meta(min_length=1, max_length=WEIGHTS_VERSION_LENGTH_MAX)]


class SetPolicy(Header, frozen=True, kw_only=True, tag="set_policy"):
    """Blocks of a namespace are copied to the host pool by another policy from now on."""

    target: Name  #: a replica, the first hex digits of a namespace, or what engines in offload mode call it
    policy: WritePolicy


class Pin(Header, frozen=True, kw_only=True, tag="pin"):
    """Keep what is cached of a prefix for a time; again with the same keys for longer. Frames: keys."""

    frames = (KEYS,)

    target: Name  #: a replica, for its pool and the host pool; or a namespace as in `SetPolicy`, for the host pool
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=PIN_TTL_MS_MAX)]


class Unpin(Header, frozen=True, kw_only=True, tag="unpin"):
    """The end of `Pin` with the same target and keys. Frames: keys."""

    frames = (KEYS,)

    target: Name


class StorageControl(Header, frozen=True, kw_only=True, tag="storage_control"):
    """What storage does; start it, end it, or forget all that it holds. Needs no session."""

    action: StorageAction = "status"


# --- replies --------------------------------------------------------------------------------------------------------


class Paused(Header, frozen=True, kw_only=True, tag="paused"):
    """Answer to `Pause`."""

    under_way: Id  #: copies that have not ended; 0 unless the deadline passed, or the pause was ended
    holds: bool  #: false: somebody has ended it meanwhile


class Resumed(Header, frozen=True, kw_only=True, tag="resumed"):
    """Answer to `Resume`."""

    state: str  #: of the daemon: serving, draining, or stopping, which nothing ends


class Drained(Header, frozen=True, kw_only=True, tag="drained"):
    """Answer to `Drain`: what is left. Zeros unless the deadline passed, or the draining was ended."""

    leases: Id
    copies: Id
    requests: Id  #: that wait for an answer
    holds: bool  #: false: somebody has ended it meanwhile


class NamespaceCleared(Header, frozen=True, kw_only=True, tag="namespace_cleared"):
    """Answer to `ClearNamespace` and `SetWeights`. What it says outlives the daemon."""

    replicas: tuple[str, ...]  #: all that share the namespace; none for engines in offload mode
    generation: Id
    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  #: root of every chain of keys from now on
    label: str  #: what engines in offload mode call it
    weights_version: str  #: "" = what the configuration says, or what engines in offload mode say
    blocks: Id  #: that were found before and are not any more


class PolicySet(Header, frozen=True, kw_only=True, tag="policy_set"):
    """Answer to `SetPolicy`. What it says outlives the daemon, until the configuration says something else."""

    replicas: tuple[str, ...]  #: that share the namespace; none for engines in offload mode
    namespace: str  #: first 16 hex digits
    label: str  #: what engines in offload mode call it
    policy: WritePolicy
    before: WritePolicy


class Pinned(Header, frozen=True, kw_only=True, tag="pinned"):
    """Answer to `Pin`: how much is kept. The rest was not cached."""

    device: Count  #: leading blocks in the replica's pool
    host: Count  #: leading blocks in the host pool


class Unpinned(Header, frozen=True, kw_only=True, tag="unpinned"):
    """Answer to `Unpin`."""

    was_pinned: bool


class StorageReport(Header, frozen=True, kw_only=True, tag="storage_report"):
    """Answer to `StorageControl`."""

    backend: str  #: "" = none is configured
    state: str  #: detached, starting, ready, read_only, suspended, waiting
    why: str  #: the last failure, or why it takes no blocks; "" = there was none
    backup: str  #: which blocks are written: every, second_sighting, on_eviction, never
    restarts: Id
    blocks: int  #: that it holds; -1 where the backend cannot tell, as in the two below
    size_bytes: int
    capacity_bytes: int
    counters: dict[str, int]
