"""Messages of engines in offload mode, which own their device memory and copy blocks to and from host slots themselves.

A scheduler opens a session with `HelloOffload` and asks for leases, loads and stores. Each of its shard processes
reports the end of a copy over its own connection, with the session's token.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import msgspec

from kvcached_client.blocks.host_layout import CanonicalLayout, host_parts
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol.fields import (
    BLOCKS_PER_MESSAGE_MAX,
    INDICES,
    INTEGER_MAX,
    KEYS,
    RANGES,
    TOKENS,
    Count,
    Header,
    Id,
    Name,
    Secret,
)
from kvcached_client.types import Verify

#: The shard in `TransferDone` when a scheduler cancels a copy: all shards.
EVERY_SHARD: Final = -1
#: Tokens of the longest block.
BLOCK_SIZE_MAX: Final = 65_536
#: Largest block of one shard.
BLOCK_BYTES_MAX: Final = 1 << 36
ERROR_LENGTH_MAX: Final = 512
#: Offers of one message, leases that it gives back, and copies whose end it reports.
LEASES_PER_MESSAGE_MAX: Final = 64

_Blocks = Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_MESSAGE_MAX)]
_Shard = Annotated[int, msgspec.Meta(ge=EVERY_SHARD, lt=64)]
_Failure = Annotated[str, msgspec.Meta(max_length=ERROR_LENGTH_MAX)]
#: Of a copy: from the engine into the host pool, or back.
CopyKind = Literal["store", "load"]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

#: Of the digest that makes a namespace's root.
_PERSON: Final = b"kvcached attach1"
#: Of the digest that makes a canonical root.
_PERSON_CANONICAL: Final = b"kvcached canon 1"

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
    block_size: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_SIZE_MAX)]  #: tokens
    shards: Annotated[int, msgspec.Meta(ge=1, le=64)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]  #: of one block on one shard
    fingerprint: Fingerprint  #: of the order of bytes in a block
    replicated: bool = False  #: every shard holds the same bytes, so the host pool stores them once
    read_only: bool = False  #: only load: store nothing, and map the host pool to read it
    canonical: CanonicalLayout | None = None  #: how storage may hold the blocks for engines with other shards

    @property
    def root(self) -> bytes:
        """Root of the namespace that it declares: other sizes or another order of bytes make another one."""
        return offload_root(
            self.keyspace, self.fingerprint, self.block_size, self.shards, self.block_bytes,
            replicated=self.replicated, canonical=self.canonical,
        )  # fmt: skip

    @property
    def canonical_root(self) -> bytes:
        """Root that it shares in storage with engines that have another number of shards; empty if it cannot."""
        if self.canonical is None:
            return b""
        block_bytes = host_parts(self.shards, replicated=self.replicated) * self.block_bytes
        return canonical_root(self.keyspace, self.canonical, self.block_size, block_bytes)


class PrepareLoad(Header, frozen=True, kw_only=True, tag="prepare_load"):
    """Ask for the slots of blocks of a lease's hit, which the session's shards will read."""

    epoch: Id
    lease: Id
    start: Count  #: depth of the first block
    blocks: _Blocks


class PrepareStore(Header, frozen=True, kw_only=True, tag="prepare_store"):
    """Offer the next computed blocks of a lease; the reply says which of them to copy where. Frames: keys, [tokens]."""

    frames = (KEYS, TOKENS)
    frame_counts = (1, 2)

    epoch: Id
    lease: Id
    start: Count  #: depth of the first key; must equal the lease's depth


class StoreOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The next computed blocks of one lease, in `PrepareStores`."""

    lease: Id
    start: Count  #: depth of the first block; must equal the lease's depth
    blocks: Count  #: number of its keys in the frame


class PrepareStores(Header, frozen=True, kw_only=True, tag="prepare_stores"):
    """Offer the next computed blocks of several leases, then give leases back. Frames: keys, [tokens] of all offers.

    Each offer is served as a `PrepareStore`, in their order, and refused by itself. A lease that does not exist is not
    given back, and nothing is said.
    """

    frames = (KEYS, TOKENS)
    frame_counts = (1, 2)

    epoch: Id
    offers: Annotated[tuple[StoreOffer, ...], msgspec.Meta(max_length=LEASES_PER_MESSAGE_MAX)]
    releases: Annotated[tuple[Id, ...], msgspec.Meta(max_length=LEASES_PER_MESSAGE_MAX)] = ()


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
    more: Annotated[tuple[Id, ...], msgspec.Meta(max_length=LEASES_PER_MESSAGE_MAX)] = ()  #: copies that ended alike


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
    read_only: bool = False  #: only load, because the engine or the configuration says so
    token_ids: bool = False  #: routers may know the tokens of this namespace: they are to be sent beside the keys


class Held(Header, frozen=True, kw_only=True, tag="held"):
    """Answer to `Acquire` in offload mode. Frames: none, or if a load was announced, the host slots of its blocks."""

    frames = (RANGES,)
    frame_counts = (0, 1)

    lease: Id
    hit: Count  #: leading blocks that the host pool holds
    filling: Count = 0  #: blocks behind the hit that other sessions were storing; `Prefetch` waits for them
    transfer: Id = 0  #: the announced load, of the hit's blocks from `load_from` on; 0 = there is none
    generation: Id = 0  #: of the load: the generation in the blocks' headers


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


class StoreOutcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The answer to one offer of `PrepareStores`: as `StorePrepared`, or a refusal."""

    transfer: Id
    depth: Id
    generation: Id
    pieces: Count  #: number of its pieces in the frame
    refusal: ErrorCode | None = None  #: None = it was not refused
    why: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class StoresPrepared(Header, frozen=True, kw_only=True, tag="stores_prepared"):
    """Answer to `PrepareStores`. Frames: pieces and host slots of all offers, as in `StorePrepared`."""

    frames = (RANGES, RANGES)

    outcomes: tuple[StoreOutcome, ...]  #: one for each offer, in their order


class Settled(Header, frozen=True, kw_only=True, tag="settled"):
    """Answer to `TransferDone`."""

    ended: tuple[Id, ...] = ()  #: stores that a shard says it has made, and that were called off before it said so


class Cleared(Header, frozen=True, kw_only=True, tag="cleared"):
    """Answer to `Clear`."""

    generation: Id
    blocks: Id  #: blocks that the namespace held


def offload_root(
    keyspace: bytes,
    fingerprint: bytes,
    block_size: int,
    shards: int,
    block_bytes: int,
    *,
    replicated: bool,
    canonical: CanonicalLayout | None,
) -> bytes:
    """Root of the namespace of engines in offload mode that declare these values."""
    parts = host_parts(shards, replicated=replicated)
    shape = f"{block_size} {shards} {block_bytes} {parts}".encode()
    stored = b"" if canonical is None else canonical_root(keyspace, canonical, block_size, parts * block_bytes)
    return hashlib.blake2b(keyspace + fingerprint + shape + stored, digest_size=32, person=_PERSON).digest()


def canonical_root(keyspace: bytes, layout: CanonicalLayout, block_size: int, block_bytes: int) -> bytes:
    """Root under which storage has the blocks of engines with any number of shards; `block_bytes` is of all parts."""
    shape = f"{block_size} {layout.parts} {layout.runs} {block_bytes}".encode()
    return hashlib.blake2b(keyspace + layout.fingerprint + shape, digest_size=32, person=_PERSON_CANONICAL).digest()
