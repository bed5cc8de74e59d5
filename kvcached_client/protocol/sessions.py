"""Messages of sessions: those on a device pool, those that every engine sends, and those after a restart.

When the daemon was restarted, the pool has outlived it. The scheduler then sends `Rejoin` instead of `Hello`, `Declare`
for each lease that it keeps, and `DeclareOver`. Until then no slot of its pool is granted to anybody.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import ErrorCode, Fault
from kvcached_client.protocol.fields import (
    BLOCKS_PER_MESSAGE_MAX,
    KEYS,
    NAME_LENGTH_MAX,
    RANGES,
    TOKENS,
    Count,
    Header,
    Id,
    Name,
    Priority,
    RequestName,
    Secret,
    Tenant,
)
from kvcached_client.types import PROGRESS_SLOTS

#: Ten minutes: a client that waits longer asks again.
PREFETCH_DEADLINE_MS_MAX: Final = 600_000

#: When a prefetch is answered: at once; when every block that will come has come; or then, but at the latest after the
#: configured time, which grows with the prompt.
StopPolicy = Literal["best_effort", "wait_complete", "timeout"]

# --- requests -------------------------------------------------------------------------------------------------------


class Hello(Header, frozen=True, kw_only=True, tag="hello"):
    """Open a session on a replica's pool. Sent by the scheduler's connection; it owns the session."""

    version_min: Id
    version_max: Id
    member: Secret  #: token from the attach socket; identifies the process
    replica: Name
    layout: Annotated[str, msgspec.Meta(max_length=64)] = (
        ""  #: fingerprint of the layout that the engine was built for; "" = accept the daemon's
    )
    client: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] = ""
    capabilities: Annotated[tuple[Name, ...], msgspec.Meta(max_length=32)] = ()


class Match(Header, frozen=True, kw_only=True, tag="match"):
    """How many leading blocks are cached. Changes nothing. Frames: keys."""

    frames = (KEYS,)

    epoch: Id
    tokens: Count  #: length of the prompt; at most tokens - 1 are matched unless `full`
    full: bool = False


class Acquire(Header, frozen=True, kw_only=True, tag="acquire"):
    """Match, lock the hit, and reserve slots for the rest. Idempotent by `request`. Frames: keys.

    If the session has acquired a prompt that this one continues, only the keys behind that prompt need to be sent. If
    the daemon has forgotten the prompt, it replies with `unknown_prefix`.

    In offload mode no slots are reserved, the reply is `Held`, and `load_from` also announces a load, as `PrepareLoad`.
    """

    frames = (KEYS,)

    epoch: Id
    request: RequestName  #: the engine's own id of the request
    tokens: Count
    reserve: Count = 0  #: further exclusive slots, for output
    full: bool = False
    priority: Priority = 0  #: blocks that only requests of lower priority use are evicted first
    tenant: Tenant = ""  #: whose quota the blocks count against
    #: blocks of an earlier acquire's prompt, whose last key is the first of the frame; 0: the frame holds all keys
    known: Count = 0
    load_from: Count | None = None  #: offload mode: also announce a load of the hit's blocks from this depth on


class Allocate(Header, frozen=True, kw_only=True, tag="allocate"):
    """More exclusive slots for a lease."""

    epoch: Id
    lease: Id
    blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_MESSAGE_MAX)]


class Commit(Header, frozen=True, kw_only=True, tag="commit"):
    """Blocks of a lease are computed: make them matchable. Frames: keys, slots, [tokens]."""

    frames = (KEYS, RANGES, TOKENS)
    frame_counts = (2, 3)

    epoch: Id
    lease: Id
    start: Count  #: index in the chain of the first key; must equal the lease's depth
    fence: Id = 0  #: the engine has written these slots once this fence has signalled; 0 = they are written


class Release(Header, frozen=True, kw_only=True, tag="release"):
    """Give a lease back. With frames (keys, slots, [tokens]) it commits first: one message ends a request."""

    frames = (KEYS, RANGES, TOKENS)
    frame_counts = (0, 2, 3)

    epoch: Id
    lease: Id
    start: Count = 0
    fence: Id = 0
    reply: bool = True  #: false: one-way, no reply is sent
    call_off: Id = 0  #: offload mode: an announced load, which no shard has begun and none will


class Load(Header, frozen=True, kw_only=True, tag="load"):
    """Wait until every load that a lease depends on has ended. Until the reply, the lease commits nothing."""

    epoch: Id
    lease: Id


class WaitForSlots(Header, frozen=True, kw_only=True, tag="wait_for_slots"):
    """Wait until `blocks` slots can be granted, or until no copy in flight can free any more slots."""

    epoch: Id
    blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_MESSAGE_MAX)]


class Heartbeat(Header, frozen=True, kw_only=True, tag="heartbeat"):
    """Keep the session alive. May come over any connection, because it carries the session's token."""

    session: Id
    token: Secret
    fence: Id = 0  #: the highest fence that has signalled
    reply: bool = True


class Bye(Header, frozen=True, kw_only=True, tag="bye"):
    """End the session: its processes no longer use the pool."""


class Prefetch(Header, frozen=True, kw_only=True, tag="prefetch"):
    """Bring a prompt's blocks from storage into the host pool. Frames: keys of its full blocks, [their tokens]."""

    frames = (KEYS, TOKENS)
    frame_counts = (1, 2)

    epoch: Id = 0  #: of the device pool; ignored in offload mode
    tokens: Count  #: length of the prompt; at most tokens - 1 are fetched unless `full`
    full: bool = False
    stop: StopPolicy = "timeout"
    deadline_ms: Annotated[int, msgspec.Meta(ge=0, le=PREFETCH_DEADLINE_MS_MAX)] = PREFETCH_DEADLINE_MS_MAX
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  #: speed of the engine; 0 = unknown: always fetch
    tenant: Tenant = ""  #: whose quota the blocks count against


class Rejoin(Header, frozen=True, kw_only=True, tag="rejoin"):
    """Continue a session that an earlier daemon opened. The reply is `Welcome`."""

    version_min: Id
    version_max: Id
    member: Secret  #: token from the attach socket; identifies the process
    session: Id  #: its id at the earlier daemon
    daemon_epoch: Id  #: of the earlier daemon
    token: Secret  #: of the session
    layout: Annotated[str, msgspec.Meta(max_length=64)]  #: fingerprint of the mapped pool's layout
    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  #: root of the keys of the engine's blocks
    fence: Id  #: the highest fence that the session has named, if it has not signalled; 0 = all have signalled


class Declare(Header, frozen=True, kw_only=True, tag="declare"):
    """Declare a lease that a request holds. Frames: keys; the slots of these blocks; the exclusive slots in order."""

    frames = (KEYS, RANGES, RANGES)

    epoch: Id
    request: RequestName  #: the engine's own id of the request
    tokens: Count  #: length of its prompt
    hit: Count  #: blocks of its hit; those beyond the keys were still loading


class DeclareOver(Header, frozen=True, kw_only=True, tag="declare_over"):
    """End the declarations: slots that no lease holds are free once the fence of `Rejoin` has signalled."""

    epoch: Id


# --- replies --------------------------------------------------------------------------------------------------------


class Welcome(Header, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `Hello`."""

    version: Id
    session: Id
    token: Secret  #: authenticates the session's shard processes and its heartbeats
    daemon_epoch: Id
    epoch: Id  #: epoch of the replica's pool; every request contains it
    generation: Id  #: generation of the namespace; grows with each clear
    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  #: root of every chain of keys
    key_algorithm: Name
    layout: Layout
    slots: Id
    heartbeat_interval_ms: Id
    session_ttl_ms: Id
    capabilities: tuple[Name, ...]


class Matched(Header, frozen=True, kw_only=True, tag="matched"):
    """Answer to `Match`: leading blocks, by the fastest tier that holds them."""

    device: Count
    host: Count = 0  #: further blocks after those, in the host pool


class LoadTicket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A load in flight, from the host pool into device slots, and its entry in each shard's progress page."""

    transfer: Id
    progress: Annotated[int, msgspec.Meta(ge=0, lt=PROGRESS_SLOTS)]  #: index of its entry in the progress page


class Acquired(Header, frozen=True, kw_only=True, tag="acquired"):
    """Answer to `Acquire`. Frames: slots of the hit, exclusive slots, in block order."""

    frames = (RANGES, RANGES)

    lease: Id
    hit: Count  #: blocks in the first frame
    ready: Count  #: leading blocks of the hit that can be read now; the others when `loads` have ended
    loads: Annotated[tuple[LoadTicket, ...], msgspec.Meta(max_length=PROGRESS_SLOTS)] = ()


class Allocated(Header, frozen=True, kw_only=True, tag="allocated"):
    """Answer to `Allocate`. Frames: exclusive slots."""

    frames = (RANGES,)

    blocks: Count


class Committed(Header, frozen=True, kw_only=True, tag="committed"):
    """Answer to `Commit`. Duplicates come before adopted blocks, because cached blocks form a prefix."""

    depth: Count  #: new depth of the lease: the `start` of its next commit
    adopted: Count
    duplicates: Count  #: leading blocks that were cached already; the lease keeps its slots for them until its release


class Released(Header, frozen=True, kw_only=True, tag="released"):
    """Answer to `Release`; the counts are those of its commit."""

    adopted: Count = 0
    duplicates: Count = 0


class Loaded(Header, frozen=True, kw_only=True, tag="loaded"):
    """Answer to `Load`: the hit as it is now. Frames: exclusive slots for blocks that could not be loaded.

    If a load failed, the hit is shorter than in `Acquired`. In the lease's block table, the slots then replace those of
    the blocks from `hit` to the old hit; the engine computes these blocks.
    """

    frames = (RANGES,)

    hit: Count


class SlotsAvailable(Header, frozen=True, kw_only=True, tag="slots_available"):
    """Answer to `WaitForSlots`."""

    available: Count  #: slots that are free or evictable now


class Prefetched(Header, frozen=True, kw_only=True, tag="prefetched"):
    """Answer to `Prefetch`."""

    blocks: Id  #: leading blocks of the prompt that were in the index or were fetched; a match may find fewer
    fetched: Id  #: blocks that were fetched from storage
    is_over: bool  #: no more blocks will come; false if the wait ended before the fetches
    reason: str  #: why it is over, or "waiting"


class Declared(Header, frozen=True, kw_only=True, tag="declared"):
    """Answer to `Declare`."""

    lease: Id  #: new id of the lease


class DeclareEnded(Header, frozen=True, kw_only=True, tag="declare_ended"):
    """Answer to `DeclareOver`."""

    freed: Count  #: slots that are free now; 0 until the fence of `Rejoin` has signalled


class Alive(Header, frozen=True, kw_only=True, tag="alive"):
    """Answer to `Heartbeat`."""

    epoch: Id
    generation: Id


class Goodbye(Header, frozen=True, kw_only=True, tag="goodbye"):
    """Answer to `Bye`."""


class ErrorReply(Header, frozen=True, kw_only=True, tag="error"):
    """Answer to any request that cannot be served. `id` is 0 if the id of the request could not be read."""

    code: ErrorCode
    fault: Fault
    message: str
    fix: str
