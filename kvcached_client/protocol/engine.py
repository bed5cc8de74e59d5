"""The wire format: typed headers in MessagePack, then raw frames. `docs/protocol.md` is the same in words.

A message is ``[header, frame, …]``. The header is one MessagePack map whose field ``op`` names the verb; frames carry
keys (16 bytes a block), slot ranges (int32 pairs) and tokens (int32), little-endian. Rules:

* A header is decoded straight into its type: no coercion, no unknown field, no missing field.
* Every size has a limit (`protocol_fields`), checked before anything is allocated for it.
* Every request that asks for a reply gets exactly one, an error included.
"""

# This module offers the whole protocol, its parts in other modules included:
# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from typing import Annotated

import msgspec

from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import ErrorCode, Fault, RequestError, request_error
from kvcached_client.protocol.admin import (
    ADMIN_DEADLINE_MS_MAX,
    WEIGHTS_VERSION_LENGTH_MAX,
    ClearReplica,
    Drain,
    Drained,
    Pause,
    Paused,
    Pin,
    Pinned,
    PolicySet,
    ReplicaCleared,
    Resume,
    Resumed,
    SetPolicy,
    SetWeights,
    Unpin,
    Unpinned,
)
from kvcached_client.protocol.fields import (
    BLOCKS_PER_MESSAGE_MAX,
    FRAME_COUNT_MAX,
    FRAME_SIZE_BYTES_MAX,
    HEADER_SIZE_BYTES_MAX,
    INTEGER_MAX,
    MESSAGE_SIZE_BYTES_MAX,
    NAME_LENGTH_MAX,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    REQUEST_NAME_LENGTH_MAX,
    TOKEN_SIZE_BYTES,
    TOKENS_PER_MESSAGE_MAX,
    TREE_CHILDREN_MAX,
    TREE_LEVELS_MAX,
    TREE_NODES_MAX,
    Count,
    Header,
    Id,
    Name,
    Priority,
    RequestName,
    Secret,
)
from kvcached_client.protocol.offload import (
    EVERY_SHARD,
    Clear,
    Cleared,
    CommitStore,
    CompleteLoad,
    Held,
    HelloAttached,
    LoadPrepared,
    PrepareLoad,
    PrepareStore,
    Settled,
    StorePrepared,
    WelcomeAttached,
)
from kvcached_client.protocol.rejoin import Declare, Declared, DeclareEnded, DeclareOver, Rejoin
from kvcached_client.protocol.reports import (
    AttachedInfo,
    BlockPlace,
    Check,
    CheckReport,
    Describe,
    Description,
    Explain,
    Explained,
    Explanation,
    Health,
    HealthPart,
    HealthReport,
    HostStats,
    Inspect,
    InspectReport,
    PoolStats,
    ReplicaInfo,
    Stats,
    StatsReport,
    Tree,
    TreeNode,
    TreeReport,
    pack_tree_nodes,
    unpack_tree_nodes,
)
from kvcached_client.protocol.storage import Prefetch, Prefetched, StorageControl, StorageReport
from kvcached_client.types import PROGRESS_SLOTS

# --- requests -------------------------------------------------------------------------------------------------------


class Hello(Header, frozen=True, kw_only=True, tag="hello"):
    """Open a session on a replica's pool. Frames: none. Sent by the scheduler's connection; it owns the session."""

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

    epoch: Id
    tokens: Count  #: length of the prompt; at most tokens - 1 are matched unless `full`
    full: bool = False


class Acquire(Header, frozen=True, kw_only=True, tag="acquire"):
    """Match, pin the hit, and reserve slots for the rest. Idempotent by `request`. Frames: keys.

    In attached mode there is nothing to reserve, and the answer is `Held`.
    """

    epoch: Id
    request: RequestName  #: the engine's own id of the request
    tokens: Count
    reserve: Count = 0  #: further exclusive slots, for output to come
    full: bool = False
    priority: Priority = 0  #: blocks that only requests of lower ones use are evicted first


class Allocate(Header, frozen=True, kw_only=True, tag="allocate"):
    """More exclusive slots for a lease. Frames: none."""

    epoch: Id
    lease: Id
    blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_MESSAGE_MAX)]


class Commit(Header, frozen=True, kw_only=True, tag="commit"):
    """Blocks of a lease are computed: make them matchable. Frames: keys, slots, [tokens]."""

    epoch: Id
    lease: Id
    start: Count  #: index in the chain of the first key; must equal the lease's depth
    fence: Id = 0  #: the engine's work on these slots is over once this fence has signalled; 0 = it is over


class Release(Header, frozen=True, kw_only=True, tag="release"):
    """Give a lease back. With frames (keys, slots, [tokens]) it commits first: one message ends a request."""

    epoch: Id
    lease: Id
    start: Count = 0
    fence: Id = 0
    reply: bool = True  #: false: one-way, no reply is sent


class Load(Header, frozen=True, kw_only=True, tag="load"):
    """Wait until every load that a lease depends on has ended. Frames: none. Until it is answered, nothing commits."""

    epoch: Id
    lease: Id


class Vacancy(Header, frozen=True, kw_only=True, tag="vacancy"):
    """Wait until so many slots can be granted, or no copy is under way whose end could free any. Frames: none."""

    epoch: Id
    blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_MESSAGE_MAX)]


class Heartbeat(Header, frozen=True, kw_only=True, tag="heartbeat"):
    """The session lives. May come from any connection that knows the session's token. Frames: none."""

    session: Id
    token: Secret
    fence: Id = 0  #: the highest fence that has signalled
    reply: bool = True


class Bye(Header, frozen=True, kw_only=True, tag="bye"):
    """End the session: no process of it will touch the pool again. Frames: none."""


Request = (
    Hello
    | Match
    | Acquire
    | Allocate
    | Commit
    | Release
    | Load
    | Vacancy
    | Heartbeat
    | Bye
    | Rejoin
    | Declare
    | DeclareOver
    | HelloAttached
    | PrepareLoad
    | PrepareStore
    | CommitStore
    | CompleteLoad
    | Clear
    | Stats
    | Health
    | Check
    | Describe
    | Tree
    | Inspect
    | Explain
    | Pause
    | Resume
    | Drain
    | ClearReplica
    | SetWeights
    | SetPolicy
    | Pin
    | Unpin
    | Prefetch
    | StorageControl
)


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

    lease: Id
    hit: Count  #: blocks in the first frame
    ready: Count  #: that many of them can be read now; the rest when `loads` have ended
    loads: Annotated[tuple[LoadTicket, ...], msgspec.Meta(max_length=PROGRESS_SLOTS)] = ()


class Allocated(Header, frozen=True, kw_only=True, tag="allocated"):
    """Answer to `Allocate`. Frames: exclusive slots."""

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

    hit: Count


class Vacant(Header, frozen=True, kw_only=True, tag="vacant"):
    """Answer to `Vacancy`."""

    available: Count  #: slots that are free or evictable now


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


Reply = (
    Welcome
    | Matched
    | Acquired
    | Allocated
    | Committed
    | Released
    | Loaded
    | Vacant
    | Alive
    | Goodbye
    | Declared
    | DeclareEnded
    | WelcomeAttached
    | Held
    | LoadPrepared
    | StorePrepared
    | Settled
    | Cleared
    | StatsReport
    | HealthReport
    | CheckReport
    | Description
    | TreeReport
    | InspectReport
    | Explained
    | Paused
    | Resumed
    | Drained
    | ReplicaCleared
    | PolicySet
    | Pinned
    | Unpinned
    | Prefetched
    | StorageReport
    | ErrorReply
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(header: Header) -> bytes:
    """A header as MessagePack."""
    return _encoder.encode(header)


def decode_request(header: bytes | memoryview) -> Request:
    """A request header, typed.

    Raises:
        BadRequest: too long, not MessagePack, an unknown verb, or a field that is missing, unknown or of a wrong type.
    """
    if len(header) > HEADER_SIZE_BYTES_MAX:
        raise request_error(
            ErrorCode.OVERSIZE,
            f"header of {len(header)} bytes",
            f"at most {HEADER_SIZE_BYTES_MAX}; data goes into frames",
        )
    try:
        return _request_decoder.decode(header)
    except msgspec.ValidationError as error:
        text = str(error)
        if "Invalid value" in text and "$.op" in text:
            raise request_error(ErrorCode.UNKNOWN_VERB, text, "see the verbs in docs/protocol.md") from None
        raise request_error(ErrorCode.MALFORMED, text, "see the fields in docs/protocol.md") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise request_error(
            ErrorCode.MALFORMED, f"header is not MessagePack: {error}", "send one MessagePack map"
        ) from None


def decode_reply(header: bytes | memoryview) -> Reply:
    """A reply header, typed.

    Raises:
        BadRequest: the daemon sent what is not in this version of the protocol.
    """
    try:
        return _reply_decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise request_error(
            ErrorCode.MALFORMED, f"unreadable reply: {error}", "client and daemon must be at most one version apart"
        ) from None


class _IdOnly(msgspec.Struct):
    id: Id = 0


_id_decoder = msgspec.msgpack.Decoder(_IdOnly)


def salvage_id(header: bytes | memoryview) -> int:
    """The request id of a header that does not decode, or 0: an error reply should reach its request if it can."""
    if len(header) > HEADER_SIZE_BYTES_MAX:
        return 0
    try:
        return _id_decoder.decode(header).id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0


def error_reply(request_id: int, error: RequestError) -> ErrorReply:
    """The reply that carries an error."""
    return ErrorReply(id=request_id, code=error.code, fault=error.fault, message=error.message[:1024], fix=error.fix)


def raise_for_error(reply: Reply) -> Reply:
    """Raise the exception that an error reply stands for; hand every other reply through."""
    if isinstance(reply, ErrorReply):
        raise request_error(reply.code, reply.message, reply.fix)
    return reply
