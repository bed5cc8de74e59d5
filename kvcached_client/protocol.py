"""The wire format: typed headers in MessagePack, then raw frames. `docs/protocol.md` is the same in words.

A message is ``[header, frame, …]``. The header is one MessagePack map whose field ``op`` names the verb; frames carry
keys (16 bytes a block), slot ranges (int32 pairs) and tokens (int32), little-endian. Rules:

* A header is decoded straight into its type: no coercion, no unknown field, no missing field.
* Every size has a limit below, checked before anything is allocated for it.
* Every request that asks for a reply gets exactly one, an error included.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvcached_client.errors import ErrorCode, Fault, RequestError, request_error
from kvcached_client.layout import Layout

PROTOCOL_VERSION: Final = 1
#: A daemon speaks its own version and the one before; a client offers a range in `Hello`.
PROTOCOL_VERSION_MIN: Final = 1

#: nginx allows 8 KiB per header line, Tomcat 8 KiB in all; 16 KiB leaves room and bounds what one header can decode to.
HEADER_SIZE_BYTES_MAX: Final = 16 * 1024
#: Header, keys, slots, tokens, and room for the slots of further groups.
FRAME_COUNT_MAX: Final = 8
#: 1 Mi tokens in blocks of 16: one prompt, several times longer than any model of today reads.
BLOCKS_PER_MESSAGE_MAX: Final = 65_536
TOKENS_PER_MESSAGE_MAX: Final = 1 << 20
#: A commit of the longest prompt: keys + ranges of one slot each + tokens.
FRAME_SIZE_BYTES_MAX: Final = 4 * TOKENS_PER_MESSAGE_MAX
REQUEST_NAME_LENGTH_MAX: Final = 256
NAME_LENGTH_MAX: Final = 128
TOKEN_SIZE_BYTES: Final = 32
#: Ids and epochs are below 2^63, so that every language's signed 64-bit integer holds them.
INTEGER_MAX: Final = (1 << 63) - 1

_Id = msgspec.Meta(ge=0, le=INTEGER_MAX)
_Count = msgspec.Meta(ge=0, le=TOKENS_PER_MESSAGE_MAX)
_Name = msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)
_RequestName = msgspec.Meta(min_length=1, max_length=REQUEST_NAME_LENGTH_MAX)
_Secret = msgspec.Meta(min_length=TOKEN_SIZE_BYTES, max_length=TOKEN_SIZE_BYTES)


Id = Annotated[int, _Id]
Count = Annotated[int, _Count]
Name = Annotated[str, _Name]
RequestName = Annotated[str, _RequestName]
Secret = Annotated[bytes, _Secret]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", gc=False):
    """What every request and reply starts with: the id that pairs the two, chosen by the client, never used twice."""

    id: Id


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
    """Match, pin the hit, and reserve slots for the rest. Idempotent by `request`. Frames: keys."""

    epoch: Id
    request: RequestName  #: the engine's own id of the request
    tokens: Count
    reserve: Count = 0  #: further exclusive slots, for output to come
    full: bool = False


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


class Heartbeat(Header, frozen=True, kw_only=True, tag="heartbeat"):
    """The session lives. May come from any connection that knows the session's token. Frames: none."""

    session: Id
    token: Secret
    fence: Id = 0  #: the highest fence that has signalled
    reply: bool = True


class Bye(Header, frozen=True, kw_only=True, tag="bye"):
    """End the session: no process of it will touch the pool again. Frames: none."""


class Stats(Header, frozen=True, kw_only=True, tag="stats"):
    """Counters and gauges. Needs no session. Frames: none."""


class Health(Header, frozen=True, kw_only=True, tag="health"):
    """A real acquire, commit and release through every worker. Needs no session. Frames: none."""


class Check(Header, frozen=True, kw_only=True, tag="check"):
    """Run the invariant checker on the live core. Needs no session. Frames: none."""


class Describe(Header, frozen=True, kw_only=True, tag="describe"):
    """Replicas, layouts, limits, versions. Needs no session. Frames: none."""


Request = Hello | Match | Acquire | Allocate | Commit | Release | Heartbeat | Bye | Stats | Health | Check | Describe


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


class Acquired(Header, frozen=True, kw_only=True, tag="acquired"):
    """Answer to `Acquire`. Frames: slots of the hit, exclusive slots, in block order."""

    lease: Id
    hit: Count  #: blocks in the first frame; all of them are ready to read
    loading: Id = 0  #: a transfer that some of them wait for; 0 = none


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


class Alive(Header, frozen=True, kw_only=True, tag="alive"):
    """Answer to `Heartbeat`."""

    epoch: Id
    generation: Id


class Goodbye(Header, frozen=True, kw_only=True, tag="goodbye"):
    """Answer to `Bye`."""


class PoolStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a device pool's slots are. The states add up to `slots`."""

    replica: str
    epoch: int
    slots: int
    states: dict[str, int]
    evictable: int
    leases: int
    session: int
    healthy: bool


class StatsReport(Header, frozen=True, kw_only=True, tag="stats_report"):
    """Answer to `Stats`. Counters only grow."""

    daemon_epoch: Id
    uptime_ms: Id
    sessions: Id
    runs: Id
    cached_blocks: Id
    pools: tuple[PoolStats, ...]
    counters: dict[str, int]


class HealthPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step of the health check: which part, whether it works, and what it said if not."""

    part: str
    ok: bool
    detail: str = ""


class HealthReport(Header, frozen=True, kw_only=True, tag="health_report"):
    """Answer to `Health`."""

    ok: bool
    parts: tuple[HealthPart, ...]


class CheckReport(Header, frozen=True, kw_only=True, tag="check_report"):
    """Answer to `Check`: broken invariants in words; none is the only good answer."""

    ok: bool
    violations: tuple[str, ...]


class ReplicaInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A configured replica."""

    name: str
    layout: Layout
    fingerprint: str
    slots: int
    bytes_per_block: int
    device: str
    model: str
    key_algorithm: str


class Description(Header, frozen=True, kw_only=True, tag="description"):
    """Answer to `Describe`."""

    version: str
    protocol_min: Id
    protocol_max: Id
    daemon_epoch: Id
    pid: Id
    replicas: tuple[ReplicaInfo, ...]
    limits: dict[str, int]


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
    | Alive
    | Goodbye
    | StatsReport
    | HealthReport
    | CheckReport
    | Description
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
