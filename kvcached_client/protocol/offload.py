"""Messages of engines in offload mode: they keep their device memory, and copy between it and host slots themselves.

A scheduler opens a session with `HelloOffload` and asks for leases, loads and stores. Each of its shard processes
reports when it is done with a copy, over a connection of its own and with the session's token.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvcached_client.protocol.fields import (
    BLOCKS_PER_MESSAGE_MAX,
    INDICES,
    INTEGER_MAX,
    KEYS,
    RANGES,
    Count,
    Header,
    Id,
    Name,
    Secret,
)

#: In `TransferDone`: every shard at once, from a scheduler that calls off a copy.
EVERY_SHARD: Final = -1
#: Largest block of one shard.
BLOCK_BYTES_MAX: Final = 1 << 36
ERROR_LENGTH_MAX: Final = 512

_Blocks = Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_MESSAGE_MAX)]
_Shard = Annotated[int, msgspec.Meta(ge=EVERY_SHARD, lt=64)]
_Failure = Annotated[str, msgspec.Meta(max_length=ERROR_LENGTH_MAX)]
#: Of a copy: from the engine into the host pool, or back.
CopyKind = Literal["store", "load"]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

# --- requests -------------------------------------------------------------------------------------------------------


class HelloOffload(Header, frozen=True, kw_only=True, tag="hello_offload"):
    """Open a session in a namespace, which is made where nobody has declared it yet."""

    version_min: Id
    version_max: Id
    member: Secret  #: from the attach socket: says which process asks
    engine: Name  #: for logs: name and version of the engine
    instance: Fingerprint  #: random, made once by an engine: a later hello with the same one replaces the session
    label: Name  #: what people call the namespace: the model
    keyspace: Digest  #: of all that keys do not tell and that makes blocks interchangeable; the layout counts apart
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)]  #: tokens
    shards: Annotated[int, msgspec.Meta(ge=1, le=64)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]  #: of one block on one shard
    fingerprint: Fingerprint  #: of the order of bytes in it
    replicated: bool = False  #: every shard holds the same bytes, so that the host pool holds them once


class PrepareLoad(Header, frozen=True, kw_only=True, tag="prepare_load"):
    """The session's shards are about to read blocks of a lease's hit."""

    epoch: Id
    lease: Id
    start: Count  #: depth of the first block
    blocks: _Blocks


class PrepareStore(Header, frozen=True, kw_only=True, tag="prepare_store"):
    """The next blocks of a lease are computed: where to copy those that lack a copy. Frames: their keys."""

    frames = (KEYS,)

    epoch: Id
    lease: Id
    start: Count  #: depth of the first key; must equal the lease's depth


class TransferDone(Header, frozen=True, kw_only=True, tag="transfer_done"):
    """A shard no longer reads or writes the slots of a copy. May be sent by any process of the session.

    The shard has written the slots of a store, including headers, or has read those of a load; or the copy has failed.
    Frames: none, or the blocks of a load that differ from what was stored, as int32, counted from its first block.
    """

    frames = (INDICES,)
    frame_counts = (0, 1)

    session: Id
    token: Secret
    kind: CopyKind
    transfer: Id
    shard: _Shard
    error: _Failure = ""  #: why the copy failed; "" = it did not, apart from the blocks in the frame


class Clear(Header, frozen=True, kw_only=True, tag="clear"):
    """Nothing that the session's namespace holds is matched again, by anybody."""

    epoch: Id


# --- replies --------------------------------------------------------------------------------------------------------


class WelcomeOffload(Header, frozen=True, kw_only=True, tag="welcome_offload"):
    """Answer to `HelloOffload`."""

    version: Id
    session: Id
    token: Secret  #: lets the session's shard processes join, and anything of it be said from anywhere
    daemon_epoch: Id
    epoch: Id  #: of the host pool; every request names it
    generation: Id  #: of the namespace at this moment; `clear` makes it grow
    namespace: Digest
    heartbeat_interval_ms: Id
    session_ttl_ms: Id
    verify_loads: bool  #: whether loads are to compare checksums


class Held(Header, frozen=True, kw_only=True, tag="held"):
    """Answer to `Acquire` in offload mode."""

    lease: Id
    hit: Count  #: blocks that the host pool holds complete


class LoadPrepared(Header, frozen=True, kw_only=True, tag="load_prepared"):
    """Answer to `PrepareLoad`. Frames: the blocks' host slots."""

    frames = (RANGES,)

    transfer: Id
    generation: Id  #: that their headers name


class StorePrepared(Header, frozen=True, kw_only=True, tag="store_prepared"):
    """Answer to `PrepareStore`. Frames: pieces as (depth, blocks), and host slots, one for each of their blocks.

    Pieces may lie before `start`, where a copy was lost meanwhile. Blocks behind `depth` found no room; they may be
    offered again. Before it there may be blocks in no piece, which the write policy does not have copied.
    """

    frames = (RANGES, RANGES)

    transfer: Id  #: 0 = there is nothing to copy
    depth: Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]  #: of the lease now: `start` of its next store
    generation: Id  #: for the headers


class Settled(Header, frozen=True, kw_only=True, tag="settled"):
    """Answer to `TransferDone`."""


class Cleared(Header, frozen=True, kw_only=True, tag="cleared"):
    """Answer to `Clear`."""

    generation: Id
    blocks: Id  #: that were stored
