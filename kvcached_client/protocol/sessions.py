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
    member: Secret  #: from the attach socket: says which process asks
    replica: Name
    layout: Annotated[str, msgspec.Meta(max_length=64)] = (
        ""  #: fingerprint the engine was built for; "" = take the daemon's
    )
    client: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] = ""
    capabilities: Annotated[tuple[Name, ...], msgspec.Meta(max_length=32)] = ()


class Match(Header, frozen=True, kw_only=True, tag="match"):
    """How many leading blocks are cached. Read-only: touches nothing. Frames: keys."""

    frames = (KEYS,)

    epoch: Id
    tokens: Count  #: length of the prompt; at most tokens - 1 are matched unless `full`
    full: bool = False


class Acquire(Header, frozen=True, kw_only=True, tag="acquire"):
    """Match, pin the hit, and reserve slots for the rest. Idempotent by `request`. Frames: keys.

    In offload mode there is nothing to reserve, and the answer is `Held`.
    """

    frames = (KEYS,)

    epoch: Id
    request: RequestName  #: the engine's own id of the request
    tokens: Count
    reserve: Count = 0  #: further exclusive slots, for output to come
    full: bool = False
    priority: Priority = 0  #: blocks that only requests of lower ones use are evicted first


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
    fence: Id = 0  #: the engine's work on these slots is over once this fence has signalled; 0 = it is over


class Release(Header, frozen=True, kw_only=True, tag="release"):
    """Give a lease back. With frames (keys, slots, [tokens]) it commits first: one message ends a request."""

    frames = (KEYS, RANGES, TOKENS)
    frame_counts = (0, 2, 3)

    epoch: Id
    lease: Id
    start: Count = 0
    fence: Id = 0
    reply: bool = True  #: false: one-way, no reply is sent


class Load(Header, frozen=True, kw_only=True, tag="load"):
    """Wait until every load that a lease depends on has ended. Until it is answered, nothing commits."""

    epoch: Id
    lease: Id


class WaitForSlots(Header, frozen=True, kw_only=True, tag="wait_for_slots"):
    """Wait until so many slots can be granted, or no copy is under way whose end could free any."""

    epoch: Id
    blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_MESSAGE_MAX)]


class Heartbeat(Header, frozen=True, kw_only=True, tag="heartbeat"):
    """The session lives. May come from any connection that knows the session's token."""

    session: Id
    token: Secret
    fence: Id = 0  #: the highest fence that has signalled
    reply: bool = True


class Bye(Header, frozen=True, kw_only=True, tag="bye"):
    """End the session: no process of it will touch the pool again."""


class Prefetch(Header, frozen=True, kw_only=True, tag="prefetch"):
    """Bring a prompt's blocks from storage into the host pool. Frames: keys of its full blocks."""

    frames = (KEYS,)

    epoch: Id = 0  #: of the device pool; says nothing in offload mode
    tokens: Count  #: length of the prompt; at most tokens - 1 are looked for unless `full`
    full: bool = False
    stop: StopPolicy = "timeout"
    deadline_ms: Annotated[int, msgspec.Meta(ge=0, le=PREFETCH_DEADLINE_MS_MAX)] = PREFETCH_DEADLINE_MS_MAX
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  #: of the engine; 0 = not known, always fetch


class Rejoin(Header, frozen=True, kw_only=True, tag="rejoin"):
    """Go on with a session that an earlier daemon has opened. Answered by `Welcome`."""

    version_min: Id
    version_max: Id
    member: Secret  #: from the attach socket: says which process asks
    session: Id  #: as the earlier daemon called it
    daemon_epoch: Id  #: of the earlier daemon
    token: Secret  #: of the session
    layout: Annotated[str, msgspec.Meta(max_length=64)]  #: fingerprint of what the engine has mapped
    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  #: root of the keys of what it holds
    fence: Id  #: the highest that the session has named and that has not signalled; 0 where all have


class Declare(Header, frozen=True, kw_only=True, tag="declare"):
    """A request of the engine holds a lease. Frames: keys; the slots of these blocks; its exclusive slots in order."""

    frames = (KEYS, RANGES, RANGES)

    epoch: Id
    request: RequestName  #: the engine's own id of the request
    tokens: Count  #: of its prompt
    hit: Count  #: blocks that it was promised: those beyond the keys were still loading


class DeclareOver(Header, frozen=True, kw_only=True, tag="declare_over"):
    """All is declared: slots that no lease holds are free, once the fence of `Rejoin` has signalled."""

    epoch: Id


# --- replies --------------------------------------------------------------------------------------------------------


class Welcome(Header, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `Hello`."""

    version: Id
    session: Id
    token: Secret  #: lets the session's shard processes join, and its heartbeats be sent from anywhere
    daemon_epoch: Id
    epoch: Id  #: of the replica's pool; every request names it
    generation: Id  #: of the namespace; grows when its contents are cleared
    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  #: root of every chain of keys
    key_algorithm: Name
    layout: Layout
    slots: Id
    heartbeat_interval_ms: Id
    session_ttl_ms: Id
    capabilities: tuple[Name, ...]


class Matched(Header, frozen=True, kw_only=True, tag="matched"):
    """Answer to `Match`: leading blocks by the best place they can be had from."""

    device: Count
    host: Count = 0  #: further blocks after those, in the host pool


class LoadTicket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A copy from the host pool into device slots that is under way, and where each shard's progress page tells it."""

    transfer: Id
    progress: Annotated[int, msgspec.Meta(ge=0, lt=PROGRESS_SLOTS)]  #: index of its entry in the progress page


class Acquired(Header, frozen=True, kw_only=True, tag="acquired"):
    """Answer to `Acquire`. Frames: slots of the hit, exclusive slots, in block order."""

    frames = (RANGES, RANGES)

    lease: Id
    hit: Count  #: blocks in the first frame
    ready: Count  #: that many of them can be read now; the rest when `loads` have ended
    loads: Annotated[tuple[LoadTicket, ...], msgspec.Meta(max_length=PROGRESS_SLOTS)] = ()


class Allocated(Header, frozen=True, kw_only=True, tag="allocated"):
    """Answer to `Allocate`. Frames: exclusive slots."""

    frames = (RANGES,)

    blocks: Count


class Committed(Header, frozen=True, kw_only=True, tag="committed"):
    """Answer to `Commit`. What was there already comes before what is new, for residency is a prefix."""

    depth: Count  #: the lease's depth now: the `start` of its next commit
    adopted: Count
    duplicates: Count  #: that many of the first blocks were there already; their slots stay the lease's until release


class Released(Header, frozen=True, kw_only=True, tag="released"):
    """Answer to `Release`; the counts are those of the commit that it carried."""

    adopted: Count = 0
    duplicates: Count = 0


class Loaded(Header, frozen=True, kw_only=True, tag="loaded"):
    """Answer to `Load`: the hit as it is now. Frames: exclusive slots for blocks that could not be loaded.

    Where a load failed the hit is shorter than `Acquired` said. The slots then replace those of the blocks from `hit`
    to the old hit in the lease's block table: the engine computes them.
    """

    frames = (RANGES,)

    hit: Count


class SlotsAvailable(Header, frozen=True, kw_only=True, tag="slots_available"):
    """Answer to `WaitForSlots`."""

    available: Count  #: slots that are free or evictable now


class Prefetched(Header, frozen=True, kw_only=True, tag="prefetched"):
    """Answer to `Prefetch`."""

    blocks: Id  #: leading blocks of the prompt that were in the index, or have come; what a match finds may be fewer
    fetched: Id  #: blocks that have come from storage
    is_over: bool  #: nothing more will come; false where nobody waited for the rest
    reason: str  #: why it is over, or "waiting"


class Declared(Header, frozen=True, kw_only=True, tag="declared"):
    """Answer to `Declare`."""

    lease: Id  #: as it is called from now on


class DeclareEnded(Header, frozen=True, kw_only=True, tag="declare_ended"):
    """Answer to `DeclareOver`."""

    freed: Count  #: slots that are free now; 0 while the fence of `Rejoin` has not signalled


class Alive(Header, frozen=True, kw_only=True, tag="alive"):
    """Answer to `Heartbeat`."""

    epoch: Id
    generation: Id


class Goodbye(Header, frozen=True, kw_only=True, tag="goodbye"):
    """Answer to `Bye`."""


class ErrorReply(Header, frozen=True, kw_only=True, tag="error"):
    """Answer to any request that cannot be served. `id` is 0 where the request's own could not be read."""

    code: ErrorCode
    fault: Fault
    message: str
    fix: str
