"""Messages of the attach socket: identity, process death and memory, none of which ZeroMQ can carry.

The socket is AF_UNIX SOCK_SEQPACKET, so one send is one message: a MessagePack map as in `protocol`. A process keeps
its connection open while it uses the pool, but a closed connection is not death; a readable pidfd is.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvcached_client.blocks.engine_table import RANKS_MAX
from kvcached_client.blocks.layout import POOL_SIZE_BYTES_MAX, Layout
from kvcached_client.errors import ErrorCode, Fault
from kvcached_client.protocol.fields import Id, Secret, decode
from kvcached_client.protocol.offload import Digest, Fingerprint
from kvcached_client.types import PROGRESS_SLOTS, Verify

#: A layout with a dozen groups takes about 2 KiB.
ATTACH_MESSAGE_SIZE_BYTES_MAX: Final = 16 * 1024
#: Number of descriptors that come with `Joined`.
JOINED_DESCRIPTORS: Final = 2 + PROGRESS_SLOTS


#: UUID of a CUDA device, or empty.
DeviceId = Annotated[str, msgspec.Meta(pattern=r"^(GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?$")]


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op"):
    """Base of the attach messages."""


class Identify(Attach, frozen=True, kw_only=True, tag="identify"):
    """From a scheduler: identify this process. Ancillary data: the sender's own pidfd."""

    client: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Join(Attach, frozen=True, kw_only=True, tag="join"):
    """From a shard process: ask for the memory of its shard. Ancillary data: the sender's own pidfd."""

    session: Id
    token: Secret
    shard: Id


class Leave(Attach, frozen=True, kw_only=True, tag="leave"):
    """From a shard process, on the connection where it joined: it has unmapped the memory, or exits. No reply."""


class ClaimPool(Attach, frozen=True, kw_only=True, omit_defaults=True, tag="claim_pool"):
    """From a process of an engine: ask for device memory of the engine that the daemon keeps.

    All processes of one start of an engine send the same values, except `rank`, `device`, `renew` and `pool`. For
    memory of a CUDA device: ancillary data is the sender's own pidfd, and the answer comes when the memory is made.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]  #: of the engine, the same at each start
    claim: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]  #: of this start of the engine alone
    ranks: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)] | None = None  #: whose memory; None: only the table
    rank_bytes: Annotated[int, msgspec.Meta(ge=1, le=POOL_SIZE_BYTES_MAX)]
    blocks: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    device: DeviceId = ""  #: UUID of the CUDA device that is to have the rank's memory; empty: on the CPU
    renew: bool = False  #: the device does not know the memory that the daemon has given: make new memory
    pool: Fingerprint | None = None  #: of the engine that this process copies for, on a CUDA device, as rank `rank`


class ClaimedPool(Attach, frozen=True, kw_only=True, tag="claimed_pool"):
    """Answer to `ClaimPool`. Ancillary data: the table, and the memory of `rank` if it was asked for.

    Both are sealed, but for memory of a CUDA device, which is what the CUDA driver exports. They may be in use by
    another process: only who locks them may write (docs/protocol.md).
    """

    pool: Fingerprint  #: random, of this memory alone
    rank_bytes: Id
    blocks: Id


class Identified(Attach, frozen=True, kw_only=True, tag="identified"):
    """Answer to `Identify`: the token for `Hello`, and the endpoint of the RPC socket."""

    member: Secret
    endpoint: str
    daemon_epoch: Id


class Joined(Attach, frozen=True, kw_only=True, tag="joined"):
    """Answer to `Join`. Ancillary data: `JOINED_DESCRIPTORS` of them, in this order.

    The pool's memory, the shard's sealed progress page, an eventfd for each entry of that page. Memory of the kind
    "memfd" is sealed; memory of the kind "cuda" is what the CUDA driver exports of the device with the UUID `device`.
    """

    kind: str
    device: str = ""
    shard: Id
    epoch: Id
    layout: Layout
    slots: Id
    pool_bytes: Id


class JoinedHost(Attach, frozen=True, kw_only=True, tag="joined_host"):
    """Answer to `Join` in offload mode. Ancillary data: the host pool's sealed memory.

    The namespace's blocks lie in it as `HostGeometry` says for these sizes.
    """

    shard: Id
    shards: Id
    epoch: Id
    slabs: Id
    slab_bytes: Id
    block_bytes: Id  #: of one block on one shard
    namespace: Digest  #: its first 16 bytes are in the header of every block
    fingerprint: Fingerprint  #: in the header of every block
    verify: Verify  #: which loaded blocks are to be compared with their checksums
    replicated: bool = False  #: every shard holds the same bytes, and the host pool stores them once
    read_only: bool = False  #: the memory can be read, not written


class AttachRefused(Attach, frozen=True, kw_only=True, tag="refused"):
    """Answer to a request that cannot be served; the daemon then closes the connection."""

    code: ErrorCode
    fault: Fault
    message: str
    fix: str


AttachRequest = Identify | Join | Leave | ClaimPool
AttachReply = Identified | Joined | JoinedHost | ClaimedPool | AttachRefused

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[AttachRequest] = msgspec.msgpack.Decoder(AttachRequest)
_reply_decoder: msgspec.msgpack.Decoder[AttachReply] = msgspec.msgpack.Decoder(AttachReply)


def encode_attach(message: Attach) -> bytes:
    """A message as MessagePack."""
    return _encoder.encode(message)


def decode_attach_request(data: bytes) -> AttachRequest:
    """A request, typed.

    Raises:
        BadRequest: not MessagePack, or not one of the requests.
    """
    return decode(_request_decoder, data, "attach message", "see docs/protocol.md")


def decode_attach_reply(data: bytes) -> AttachReply:
    """A reply, typed.

    Raises:
        BadRequest: not one of the replies.
    """
    return decode(_reply_decoder, data, "attach reply")
