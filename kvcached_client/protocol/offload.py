"""Messages of engines in offload mode, which own their device memory and copy blocks to and from host slots themselves.

A scheduler opens a session with `HelloOffload` and asks for leases, loads and stores. Each of its shard processes
reports the end of a copy over its own connection, with the session's token.
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
from kvcached_client.types import Verify

#: The shard in `TransferDone` when a scheduler cancels a copy: all shards.
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
    """Open a session in a namespace. A namespace that no engine has declared yet is created."""

    version_min: Id
    version_max: Id
    member: Secret  #: token from the attach socket; identifies the process
    engine: Name  #: for logs: name and version of the engine
    instance: Fingerprint  #: random, the same in every hello of one engine: a later hello replaces the session
    label: Name  #: name of the namespace for people, such as the model's
    keyspace: Digest  #: of everything that makes blocks with the same keys interchangeable, except the layout
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)]  #: tokens
    shards: Annotated[int, msgspec.Meta(ge=1, le=64)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]  #: of one block on one shard
    fingerprint: Fingerprint  #: of the order of bytes in a block
    replicated: bool = False  #: every shard holds the same bytes, so the host pool stores them once


class PrepareLoad(Header, frozen=True, kw_only=True, tag="prepare_load"):
    """Ask for the slots of blocks of a lease's hit, which the session's shards will read."""

    epoch: Id
    lease: Id
    start: Count  #: depth of the first block
    blocks: _Blocks


class PrepareStore(Header, frozen=True, kw_only=True, tag="prepare_store"):
    """Offer the next computed blocks of a lease; the reply says which of them to copy where. Frames: their keys."""

    frames = (KEYS,)

    epoch: Id
    lease: Id
    start: Count  #: depth of the first key; must equal the lease's depth


class TransferDone(Header, frozen=True, kw_only=True, tag="transfer_done"):
    """A shard no longer reads or writes the slots of a copy. Any process of the session may send it.

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
    """Clear the session's namespace: no request matches the blocks that it holds now."""

    epoch: Id


# --- replies --------------------------------------------------------------------------------------------------------


class WelcomeOffload(Header, frozen=True, kw_only=True, tag="welcome_offload"):
    """Answer to `HelloOffload`."""

    version: Id
    session: Id
    token: Secret  #: authenticates the session's processes
    daemon_epoch: Id
    epoch: Id  #: epoch of the host pool; every request contains it
    generation: Id  #: generation of the namespace now; grows with each clear
    namespace: Digest
    heartbeat_interval_ms: Id
    session_ttl_ms: Id
    verify: Verify  #: which loaded blocks are to be compared with their checksums


class Held(Header, frozen=True, kw_only=True, tag="held"):
    """Answer to `Acquire` in offload mode."""

    lease: Id
    hit: Count  #: leading blocks that the host pool holds


class LoadPrepared(Header, frozen=True, kw_only=True, tag="load_prepared"):
    """Answer to `PrepareLoad`. Frames: the blocks' host slots."""

    frames = (RANGES,)

    transfer: Id
    generation: Id  #: the generation in the blocks' headers


class StorePrepared(Header, frozen=True, kw_only=True, tag="store_prepared"):
    """Answer to `PrepareStore`. Frames: pieces as (depth, blocks), and host slots, one for each of their blocks.

    Pieces may lie before `start`, for blocks whose copies were lost meanwhile. There was no room for blocks beyond
    `depth`; they may be offered again. The write policy does not copy blocks before `depth` that are in no piece.
    """

    frames = (RANGES, RANGES)

    transfer: Id  #: 0 = there is nothing to copy
    depth: Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]  #: new depth of the lease: the `start` of its next store
    generation: Id  #: the generation for the blocks' headers


class Settled(Header, frozen=True, kw_only=True, tag="settled"):
    """Answer to `TransferDone`."""


class Cleared(Header, frozen=True, kw_only=True, tag="cleared"):
    """Answer to `Clear`."""

    generation: Id
    blocks: Id  #: blocks that the namespace held
