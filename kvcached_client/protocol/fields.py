"""What every message is made of: the protocol's limits, the types of fields, and the root of all headers."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

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
#: A message's parts together. The largest that a verb takes is that commit, of a header and three frames.
MESSAGE_SIZE_BYTES_MAX: Final = 2 * FRAME_SIZE_BYTES_MAX
REQUEST_NAME_LENGTH_MAX: Final = 256
#: A request whose id begins so holds slots for later: a daemon that drains or stops does not wait for its release.
RESERVE_REQUEST_PREFIX: Final = "reserve of "
NAME_LENGTH_MAX: Final = 128
TOKEN_SIZE_BYTES: Final = 32
#: A picture of the index, for people: what is deeper or wider is only counted.
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

#: Of a request: blocks of a lower one are evicted first. Few, for each has an order of its own.
PRIORITY_MIN: Final = -8
PRIORITY_MAX: Final = 7

Id = Annotated[int, _Id]
Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
Count = Annotated[int, _Count]
Name = Annotated[str, _Name]
RequestName = Annotated[str, _RequestName]
Secret = Annotated[bytes, _Secret]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", gc=False):
    """What every request and reply starts with: the id that pairs the two, chosen by the client, never used twice."""

    id: Id
