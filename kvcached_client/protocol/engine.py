"""The wire format: typed headers in MessagePack, then raw frames. `docs/protocol.md` describes it.

A message is ``[header, frame, …]``. The header is one MessagePack map whose field ``op`` names the verb; frames carry
keys (16 bytes a block), slot ranges (int32 pairs) and tokens (int32), little-endian. Rules:

* A header is decoded straight into its type: no coercion, no unknown field, no missing field.
* Every size has a limit (`protocol.fields`), checked before anything is allocated for it.
* Every request that asks for a reply gets exactly one reply, which may be an error.
"""

# This module exports the whole protocol, including the parts in other modules:
# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from typing import Final

import msgspec

from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.admin import (
    ADMIN_DEADLINE_MS_MAX,
    WEIGHTS_VERSION_LENGTH_MAX,
    ClearNamespace,
    Drain,
    Drained,
    ForgetPrefix,
    LocalDisk,
    LogLevelSet,
    NamespaceCleared,
    Pause,
    Paused,
    Pin,
    Pinned,
    PolicySet,
    PrefixForgotten,
    Resume,
    Resumed,
    SetLogLevel,
    SetPolicy,
    SetWeights,
    Sleep,
    Slept,
    StorageControl,
    StorageReport,
    Unpin,
    Unpinned,
    Wake,
    Woken,
)
from kvcached_client.protocol.fields import (
    BLOCKS_PER_MESSAGE_MAX,
    FRAME_COUNT_MAX,
    FRAME_SIZE_BYTES_MAX,
    HEADER_SIZE_BYTES_MAX,
    INTEGER_MAX,
    KNOWN_BLOCKS_MIN,
    MESSAGE_SIZE_BYTES_MAX,
    NAME_LENGTH_MAX,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    REQUEST_NAME_LENGTH_MAX,
    TELLS_TOKENS,
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
    decode,
)
from kvcached_client.protocol.offload import (
    EVERY_SHARD,
    LEASES_PER_MESSAGE_MAX,
    Clear,
    Cleared,
    Held,
    HelloOffload,
    LoadPrepared,
    PrepareLoad,
    PrepareStore,
    PrepareStores,
    Settled,
    StoreOffer,
    StoreOutcome,
    StorePrepared,
    StoresPrepared,
    TransferDone,
    WelcomeOffload,
)
from kvcached_client.protocol.reports import (
    BlockPlace,
    Check,
    CheckReport,
    Describe,
    Description,
    EnginePoolStats,
    Explain,
    Explained,
    Explanation,
    Health,
    HealthPart,
    HealthReport,
    HitEstimate,
    HostRegistration,
    HostStats,
    Inspect,
    InspectReport,
    OffloadInfo,
    PoolStats,
    ReplicaInfo,
    Stats,
    StatsReport,
    TenantStats,
    Tree,
    TreeNode,
    TreeReport,
    pack_tree_nodes,
    unpack_tree_nodes,
)
from kvcached_client.protocol.sessions import (
    Acquire,
    Acquired,
    Alive,
    Allocate,
    Allocated,
    Bye,
    Commit,
    Committed,
    Declare,
    Declared,
    DeclareEnded,
    DeclareOver,
    ErrorReply,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadTicket,
    Match,
    Matched,
    Prefetch,
    Prefetched,
    Rejoin,
    Release,
    Released,
    SlotsAvailable,
    WaitForSlots,
    Welcome,
)
from kvcached_client.types import PROGRESS_SLOTS

Request = (
    Hello
    | Match
    | Acquire
    | Allocate
    | Commit
    | Release
    | Load
    | WaitForSlots
    | Heartbeat
    | Bye
    | Rejoin
    | Declare
    | DeclareOver
    | HelloOffload
    | PrepareLoad
    | PrepareStore
    | PrepareStores
    | TransferDone
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
    | ClearNamespace
    | SetWeights
    | SetPolicy
    | Pin
    | Unpin
    | ForgetPrefix
    | Prefetch
    | StorageControl
    | Sleep
    | Wake
    | SetLogLevel
)

Reply = (
    Welcome
    | Matched
    | Acquired
    | Allocated
    | Committed
    | Released
    | Loaded
    | SlotsAvailable
    | Alive
    | Goodbye
    | Declared
    | DeclareEnded
    | WelcomeOffload
    | Held
    | LoadPrepared
    | StorePrepared
    | StoresPrepared
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
    | NamespaceCleared
    | PolicySet
    | Pinned
    | Unpinned
    | PrefixForgotten
    | Prefetched
    | StorageReport
    | Slept
    | Woken
    | LogLevelSet
    | ErrorReply
)

#: A message of more than 15 fields begins so under msgspec, also if fewer are sent; MessagePack has a shorter head.
_LONG_HEAD: Final = b"\xde\0"
_SHORT_HEAD: Final = 0x80
_SHORT_MAP: Final = 15

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(header: Header) -> bytes:
    """A header as MessagePack."""
    data = _encoder.encode(header)
    if data[:2] == _LONG_HEAD and data[2] <= _SHORT_MAP:
        return bytes((_SHORT_HEAD + data[2],)) + data[3:]
    return data


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
        BadRequest: the reply is not part of this version of the protocol.
    """
    return decode(_reply_decoder, header, "unreadable reply")


class _IdOnly(msgspec.Struct):
    id: Id = 0


_id_decoder = msgspec.msgpack.Decoder(_IdOnly)


def salvage_id(header: bytes | memoryview) -> int:
    """The request id of a header that cannot be decoded, so that the error reply finds its request; 0 if unreadable."""
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
    """Raise the exception of an error reply; return every other reply."""
    if isinstance(reply, ErrorReply):
        raise request_error(reply.code, reply.message, reply.fix)
    return reply
