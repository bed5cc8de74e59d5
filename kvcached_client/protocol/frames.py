"""How many frames follow a header, and how large they may be, by verb."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.engine import (
    BLOCKS_PER_MESSAGE_MAX,
    FRAME_SIZE_BYTES_MAX,
    Acquire,
    Acquired,
    Alive,
    Allocate,
    Allocated,
    Bye,
    Check,
    CheckReport,
    Clear,
    Cleared,
    ClearNamespace,
    Commit,
    Committed,
    Declare,
    Declared,
    DeclareEnded,
    DeclareOver,
    Describe,
    Description,
    Drain,
    Drained,
    ErrorReply,
    Explain,
    Explained,
    Goodbye,
    Header,
    Health,
    HealthReport,
    Heartbeat,
    Held,
    Hello,
    HelloOffload,
    Inspect,
    InspectReport,
    Load,
    Loaded,
    LoadPrepared,
    Match,
    Matched,
    NamespaceCleared,
    Pause,
    Paused,
    Pin,
    Pinned,
    PolicySet,
    Prefetch,
    Prefetched,
    PrepareLoad,
    PrepareStore,
    Rejoin,
    Release,
    Released,
    Reply,
    Request,
    Resume,
    Resumed,
    SetPolicy,
    Settled,
    SetWeights,
    SlotsAvailable,
    Stats,
    StatsReport,
    StorageControl,
    StorageReport,
    StorePrepared,
    TransferDone,
    Tree,
    TreeReport,
    Unpin,
    Unpinned,
    WaitForSlots,
    Welcome,
    WelcomeOffload,
)
from kvcached_client.types import KEY_SIZE_BYTES, RANGE_SIZE_BYTES

_TOKEN_ID_SIZE_BYTES: Final = 4
_INDEX_SIZE_BYTES: Final = 4

#: Frames after the header, as (least, most), by request type. Anything else is `bad_frames`.
REQUEST_FRAMES: Final[dict[type[Header], tuple[int, int]]] = {
    Hello: (0, 0),
    Match: (1, 1),
    Acquire: (1, 1),
    Allocate: (0, 0),
    Commit: (2, 3),
    Release: (0, 3),
    Load: (0, 0),
    WaitForSlots: (0, 0),
    Heartbeat: (0, 0),
    Bye: (0, 0),
    Rejoin: (0, 0),
    Declare: (3, 3),
    DeclareOver: (0, 0),
    HelloOffload: (0, 0),
    PrepareLoad: (0, 0),
    PrepareStore: (1, 1),
    TransferDone: (0, 1),
    Clear: (0, 0),
    Stats: (0, 0),
    Health: (0, 0),
    Check: (0, 0),
    Describe: (0, 0),
    Tree: (0, 0),
    Inspect: (0, 0),
    Explain: (1, 1),
    Pause: (0, 0),
    Resume: (0, 0),
    Drain: (0, 0),
    ClearNamespace: (0, 0),
    SetWeights: (0, 0),
    SetPolicy: (0, 0),
    Pin: (1, 1),
    Unpin: (1, 1),
    Prefetch: (1, 1),
    StorageControl: (0, 0),
}

#: Frames after the header of a reply, by its type.
REPLY_FRAMES: Final[dict[type[Header], int]] = {
    Welcome: 0,
    Matched: 0,
    Acquired: 2,
    Allocated: 1,
    Committed: 0,
    Released: 0,
    Loaded: 1,
    SlotsAvailable: 0,
    Alive: 0,
    Goodbye: 0,
    Declared: 0,
    DeclareEnded: 0,
    WelcomeOffload: 0,
    Held: 0,
    LoadPrepared: 1,
    StorePrepared: 2,
    Settled: 0,
    Cleared: 0,
    StatsReport: 0,
    HealthReport: 0,
    CheckReport: 0,
    Description: 0,
    TreeReport: 1,
    InspectReport: 0,
    Explained: 0,
    Paused: 0,
    Resumed: 0,
    Drained: 0,
    NamespaceCleared: 0,
    PolicySet: 0,
    Pinned: 0,
    Unpinned: 0,
    Prefetched: 0,
    StorageReport: 0,
    ErrorReply: 0,
}

#: Replies whose frames are slot ranges.
_SLOT_REPLIES: Final = (Acquired, Allocated, Loaded, LoadPrepared, StorePrepared)


def check_frames(request: Request, frames: Sequence[bytes | memoryview]) -> None:
    """Refuse frames whose number or sizes do not fit the verb.

    Raises:
        BadRequest: `bad_frames` or `oversize`.
    """
    least, most = REQUEST_FRAMES[type(request)]
    count = len(frames)
    if not least <= count <= most or (count == 1 and type(request) is Release):
        raise request_error(
            ErrorCode.BAD_FRAMES,
            f"{count} frames after the header",
            f"this verb takes {least} to {most}; see docs/protocol.md",
        )
    for frame in frames:
        if len(frame) > FRAME_SIZE_BYTES_MAX:
            raise request_error(ErrorCode.OVERSIZE, f"frame of {len(frame)} bytes", f"at most {FRAME_SIZE_BYTES_MAX}")
    if count and isinstance(request, TransferDone):
        _check_indices(frames[0])
    elif count:
        keys_size = len(frames[0])
        if keys_size % KEY_SIZE_BYTES or keys_size > BLOCKS_PER_MESSAGE_MAX * KEY_SIZE_BYTES:
            raise request_error(
                ErrorCode.BAD_FRAMES,
                f"keys frame of {keys_size} bytes",
                f"a multiple of {KEY_SIZE_BYTES}, at most {BLOCKS_PER_MESSAGE_MAX} keys",
            )
    last = RANGE_SIZE_BYTES if isinstance(request, Declare) else _TOKEN_ID_SIZE_BYTES
    for frame, unit in zip(frames[1:], (RANGE_SIZE_BYTES, last), strict=False):
        if len(frame) % unit:
            raise request_error(ErrorCode.BAD_FRAMES, f"frame of {len(frame)} bytes", f"a multiple of {unit} bytes")


def _check_indices(frame: bytes | memoryview) -> None:
    if len(frame) % _INDEX_SIZE_BYTES or len(frame) > BLOCKS_PER_MESSAGE_MAX * _INDEX_SIZE_BYTES:
        raise request_error(
            ErrorCode.BAD_FRAMES,
            f"frame of {len(frame)} bytes",
            f"int32 indices of blocks, at most {BLOCKS_PER_MESSAGE_MAX}",
        )


def check_reply_frames(reply: Reply, frames: Sequence[bytes]) -> None:
    """Refuse a reply whose frames do not fit its type in number or size.

    Raises:
        BadRequest: `bad_frames`.
    """
    expected = REPLY_FRAMES[type(reply)]
    ragged = isinstance(reply, _SLOT_REPLIES) and any(len(frame) % RANGE_SIZE_BYTES for frame in frames)
    if len(frames) != expected or ragged:
        sizes = ", ".join(str(len(frame)) for frame in frames) or "no"
        raise request_error(
            ErrorCode.BAD_FRAMES,
            f"{type(reply).__name__} with {len(frames)} frames ({sizes} bytes) instead of {expected}",
            "client and daemon differ in version",
        )


def slot_ranges(frame: bytes) -> array[int]:
    """A frame of slot ranges, each (first slot, count).

    Raises:
        BadRequest: a range is empty or negative.
    """
    ranges = array("i", frame)
    if ranges and (min(ranges[1::2]) <= 0 or min(ranges[::2]) < 0):
        raise request_error(ErrorCode.BAD_VALUE, "a slot range is empty or negative", "send (first slot, count >= 1)")
    return ranges
