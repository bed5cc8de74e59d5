"""What every message consists of: the protocol's limits, the types of fields, frames, and the base of all headers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, NamedTuple, TypeVar

import msgspec

from kvcached_client.errors import ErrorCode, bad_reply, bad_value, request_error
from kvcached_client.types import KEY_SIZE_BYTES, RANGE_SIZE_BYTES

_T = TypeVar("_T")

PROTOCOL_VERSION: Final = 1
#: A daemon speaks its own version and the one before; a client offers a range in `Hello`.
PROTOCOL_VERSION_MIN: Final = 1

#: nginx allows 8 KiB per header line, Tomcat 8 KiB in all; 16 KiB leaves room and bounds what one header can decode to.
HEADER_SIZE_BYTES_MAX: Final = 16 * 1024
#: Header, keys, slots, tokens, and room for the slots of further groups.
FRAME_COUNT_MAX: Final = 8
#: 1 Mi tokens in blocks of 16: one prompt, several times longer than the longest context of a model today.
BLOCKS_PER_MESSAGE_MAX: Final = 65_536
TOKENS_PER_MESSAGE_MAX: Final = 1 << 20
#: A commit of the longest prompt: keys + ranges of one slot each + tokens.
FRAME_SIZE_BYTES_MAX: Final = 4 * TOKENS_PER_MESSAGE_MAX
#: All parts of a message together. The largest message is that commit, with a header and three frames.
MESSAGE_SIZE_BYTES_MAX: Final = 2 * FRAME_SIZE_BYTES_MAX
#: A daemon remembers the keys of acquired prompts that have at least so many blocks. Those of shorter prompts are
#: cheaper to send than to look up.
KNOWN_BLOCKS_MIN: Final = 64
REQUEST_NAME_LENGTH_MAX: Final = 256
#: The capability of a client that sends the tokens of blocks beside their keys, and of a daemon that tells routers.
TELLS_TOKENS: Final = "token_ids"
#: A request whose id has this prefix only reserves slots: a daemon that drains or stops does not wait for its release.
RESERVE_REQUEST_PREFIX: Final = "reserve of "
NAME_LENGTH_MAX: Final = 128
TOKEN_SIZE_BYTES: Final = 32
#: Limits of a picture of the index: runs beyond them are only counted.
TREE_LEVELS_MAX: Final = 64
TREE_CHILDREN_MAX: Final = 256
#: Nodes in one `TreeReport`.
TREE_NODES_MAX: Final = 4096
#: Ids and epochs are below 2^63, so that every language's signed 64-bit integer holds them.
INTEGER_MAX: Final = (1 << 63) - 1

_Id = msgspec.Meta(ge=0, le=INTEGER_MAX)
_Count = msgspec.Meta(ge=0, le=TOKENS_PER_MESSAGE_MAX)
_Name = msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)
_RequestName = msgspec.Meta(min_length=1, max_length=REQUEST_NAME_LENGTH_MAX)
_Secret = msgspec.Meta(min_length=TOKEN_SIZE_BYTES, max_length=TOKEN_SIZE_BYTES)

#: Bounds of a request's priority. Blocks of lower priority are evicted first. The range is small, because each priority
#: has its own eviction order.
PRIORITY_MIN: Final = -8
PRIORITY_MAX: Final = 7

Id = Annotated[int, _Id]
#: Tenants are names in a configuration, not secrets.
TENANT_CHARS_MAX: Final = 64

Tenant = Annotated[str, msgspec.Meta(max_length=TENANT_CHARS_MAX)]
Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
Count = Annotated[int, _Count]
Name = Annotated[str, _Name]
RequestName = Annotated[str, _RequestName]
Secret = Annotated[bytes, _Secret]


class FrameKind(NamedTuple):
    """What a frame holds: items of equal size, back to back."""

    name: str
    item_bytes: int
    size_bytes_max: int = FRAME_SIZE_BYTES_MAX


KEYS: Final = FrameKind("keys", KEY_SIZE_BYTES, KEY_SIZE_BYTES * BLOCKS_PER_MESSAGE_MAX)
RANGES: Final = FrameKind("slot ranges", RANGE_SIZE_BYTES)
TOKENS: Final = FrameKind("tokens", 4)
INDICES: Final = FrameKind("block indices", 4, 4 * BLOCKS_PER_MESSAGE_MAX)
NODES: Final = FrameKind("tree nodes", 1)


class Header(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="op",
    gc=False,
    omit_defaults=True,
):
    """The start of every request and reply: an id that pairs the two. The client chooses it, and uses each id once.

    Fields with their default are left out: so a peer of an earlier release reads a message that uses nothing new.
    """

    frames: ClassVar[tuple[FrameKind, ...]] = ()  #: the frames after the header
    frame_counts: ClassVar[tuple[int, ...]] = ()  #: how many of them there may be; empty = always all

    id: Id


def check_frames(request: Header, frames: Sequence[bytes | memoryview]) -> None:
    """Refuse frames whose number or sizes do not fit the verb.

    Raises:
        BadRequest: `bad_frames` or `oversize`.
    """
    kinds, count, counts = request.frames, len(frames), request.frame_counts
    if count not in counts if counts else count != len(kinds):
        raise request_error(
            ErrorCode.BAD_FRAMES,
            f"{count} frames after the header",
            f"this verb takes {' or '.join(map(str, counts or (len(kinds),)))}; see docs/protocol.md",
        )
    for frame, (name, item_bytes, size_bytes_max) in zip(frames, kinds, strict=False):
        size_bytes = len(frame)
        if size_bytes <= size_bytes_max and not size_bytes % item_bytes:
            continue
        if size_bytes > FRAME_SIZE_BYTES_MAX:
            raise request_error(ErrorCode.OVERSIZE, f"frame of {size_bytes} bytes", f"at most {FRAME_SIZE_BYTES_MAX}")
        raise request_error(
            ErrorCode.BAD_FRAMES,
            f"{name} of {size_bytes} bytes",
            f"a multiple of {item_bytes} bytes, at most {size_bytes_max}",
        )


def check_reply_frames(reply: Header, frames: Sequence[bytes]) -> None:
    """Refuse a reply whose frames do not fit its type in number or size.

    Raises:
        BadRequest: `bad_frames`.
    """
    kinds, count, counts = reply.frames, len(frames), reply.frame_counts
    is_bad = count not in counts if counts else count != len(kinds)
    for frame, kind in zip(frames, kinds, strict=False):
        is_bad = is_bad or len(frame) % kind.item_bytes > 0
    if is_bad:
        sizes = ", ".join(str(len(frame)) for frame in frames) or "no"
        expected = " or ".join(map(str, counts or (len(kinds),)))
        raise bad_reply(
            f"{type(reply).__name__} with {count} frames ({sizes} bytes) instead of {expected}", ErrorCode.BAD_FRAMES
        )


def slot_ranges(frame: bytes) -> array[int]:
    """A frame of slot ranges, each (first slot, count).

    Raises:
        BadRequest: a range is empty or negative.
    """
    ranges = array("i", frame)
    if ranges and (min(ranges[1::2]) <= 0 or min(ranges[::2]) < 0):
        raise bad_value("a slot range is empty or negative", "send (first slot, count >= 1)")
    return ranges


def decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, what: str, fix: str = "") -> _T:
    """What `data` encodes.

    Args:
        decoder: for the type.
        data: bytes of a peer.
        what: names the data in the error.
        fix: what to do; "" = client and daemon differ in version.

    Raises:
        BadRequest: the bytes are not MessagePack, or of another type.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        message = f"{what}: {error}"
        raise (request_error(ErrorCode.MALFORMED, message, fix) if fix else bad_reply(message)) from None
