"""Reports about the daemon and its cache. Their requests need no session."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.fields import (
    FRAME_SIZE_BYTES_MAX,
    KEYS,
    NAME_LENGTH_MAX,
    NODES,
    TREE_CHILDREN_MAX,
    TREE_LEVELS_MAX,
    TREE_NODES_MAX,
    Count,
    Header,
    Id,
    decode,
)
from kvcached_client.types import KEY_SIZE_BYTES, MissReason, Verify


class Stats(Header, frozen=True, kw_only=True, tag="stats"):
    """Counters and gauges. Needs no session."""


class Health(Header, frozen=True, kw_only=True, tag="health"):
    """A real acquire, commit and release through every worker. Needs no session."""


class Check(Header, frozen=True, kw_only=True, tag="check"):
    """Run the invariant checker on the live core. Needs no session."""


class Describe(Header, frozen=True, kw_only=True, tag="describe"):
    """Replicas, layouts, limits, versions. Needs no session."""


class Tree(Header, frozen=True, kw_only=True, tag="tree"):
    """A picture of the index with tiers and leases, bounded in depth and width. Needs no session."""

    replica: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] = ""  #: "" = the trees of all replicas
    levels: Annotated[int, msgspec.Meta(ge=1, le=TREE_LEVELS_MAX)] = 8
    children: Annotated[int, msgspec.Meta(ge=1, le=TREE_CHILDREN_MAX)] = 8  #: shown per run; the rest is counted


class Inspect(Header, frozen=True, kw_only=True, tag="inspect"):
    """The places of a block and the requests that hold it. Needs no session."""

    key: Annotated[bytes, msgspec.Meta(min_length=KEY_SIZE_BYTES, max_length=KEY_SIZE_BYTES)]


class Explain(Header, frozen=True, kw_only=True, tag="explain"):
    """Why a prompt's hit is not longer. Changes nothing, needs no session. Frames: keys of its full blocks."""

    frames = (KEYS,)

    tokens: Count  #: length of the prompt; at most tokens - 1 are matched unless `full`
    full: bool = False
    replica: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] = ""  #: only this replica; "" = all
    namespace: Annotated[str, msgspec.Meta(max_length=64)] = ""  #: only those with these first hex digits; "" = all


# --- replies --------------------------------------------------------------------------------------------------------


class HitEstimate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The part of asked blocks that a host pool of another size would hit."""

    size_ratio: float  #: the size, as a multiple of the host pool's
    hit_ratio: float  #: 0 to 1


class TenantStats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a tenant has of a namespace's host slots, and its bounds."""

    tenant: str
    blocks: int
    floor_blocks: int
    cap_blocks: int


class HostStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The states of one namespace's host slots; they add up to `slots`."""

    namespace: str  #: first 16 hex digits
    replicas: tuple[str, ...]  #: replicas that share the namespace; none in offload mode
    label: str  #: its label in offload mode
    generation: int
    sessions: int  #: sessions of engines in offload mode
    leases: int  #: leases of these sessions
    slots: int
    slabs: int  #: slabs that the namespace has now
    write_policy: str
    pinned: int  #: blocks that pins keep here
    states: dict[str, int]
    asked_blocks: int = 0  #: blocks of prompts that the estimates are of: the latest ones
    hit_estimates: tuple[HitEstimate, ...] = ()  #: smaller sizes first; none while too few blocks were sampled
    tenants: tuple[TenantStats, ...] = ()  #: those with a quota, the largest 100


class HostRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of the host pool the CUDA device of a shard reaches directly."""

    shard: int
    registered_bytes: int
    size_bytes: int  #: of what the shard copies, which is all that will be registered
    error: str = ""  #: why no more will be registered


class PoolStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The states of a device pool's slots; they add up to `slots`."""

    replica: str
    state: str  #: awake, falling_asleep, asleep, or waking; only an awake pool takes sessions
    epoch: int
    slots: int
    states: dict[str, int]
    evictable: int
    leases: int
    session: int
    healthy: bool
    degraded: bool  #: its workers have died repeatedly, or cannot be started
    restarts: int  #: of all its workers, since the daemon's start
    paused: bool  #: no copies are started
    pinned: int  #: blocks that pins keep here
    registered: tuple[HostRegistration, ...]  #: of shards on CUDA devices, with a host pool
    #: why it has no memory or no workers, which are tried again until they are there; or how its workers, which die
    #: repeatedly, were lost last
    trouble: str = ""


class EnginePoolStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Device memory that the daemon keeps for an engine in offload mode."""

    pool: str  #: its id, 16 hex digits
    name: str  #: of the engine
    namespace: str  #: first 16 hex digits; "" until the engine has told it
    ranks: int
    size_bytes: int  #: of all ranks, and of the table
    blocks: int  #: of the engine
    named: int  #: blocks that an engine would find there again
    used: bool  #: an engine uses it


class StatsReport(Header, frozen=True, kw_only=True, tag="stats_report"):
    """Answer to `Stats`. Counters only grow."""

    daemon_epoch: Id
    state: str  #: serving, draining, or stopping
    offload_paused: bool  #: engines in offload mode start no copies
    uptime_ms: Id
    sessions: Id
    runs: Id
    cached_blocks: Id
    pools: tuple[PoolStats, ...]
    hosts: tuple[HostStats, ...]
    engine_pools: tuple[EnginePoolStats, ...] = ()
    device_memory_bytes: int = 0  #: the limit of all engine pools
    host_pool_bytes: int = 0  #: size of the host pool
    #: Of copies that have ended, by who made them and the kind: "worker_store".
    copied_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    transfers: dict[str, int]  #: queued and running transfers, by kind
    counters: dict[str, int]


class HealthPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step of the health check: the part, whether it works, and its error if not."""

    part: str
    ok: bool
    detail: str = ""


class HealthReport(Header, frozen=True, kw_only=True, tag="health_report"):
    """Answer to `Health`."""

    ok: bool
    parts: tuple[HealthPart, ...]


class CheckReport(Header, frozen=True, kw_only=True, tag="check_report"):
    """Answer to `Check`: the violated invariants; there should be none."""

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
    namespace: str  #: root of its keys, 64 hex digits
    generation: int  #: of the namespace; grows when it is cleared
    weights_version: str  #: as it was set; "" = that of the configuration


class OffloadInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The daemon's limits for engines in offload mode."""

    slabs: int  #: of the host pool
    slab_bytes: int
    namespaces_max: int
    verify: Verify


class Description(Header, frozen=True, kw_only=True, tag="description"):
    """Answer to `Describe`."""

    version: str
    protocol_min: Id
    protocol_max: Id
    daemon_epoch: Id
    state: str  #: serving, draining, or stopping
    pid: Id
    replicas: tuple[ReplicaInfo, ...]
    offload: OffloadInfo | None  #: None: the daemon does not serve offload mode
    limits: dict[str, int]


class TreeNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of blocks in a `TreeReport`; its children follow it."""

    level: int  #: 0 for the root of a namespace, a run without blocks
    key: bytes  #: name of its first block (not a key); for a root the namespace's 32 bytes
    start: int  #: depth of its first block
    blocks: int
    tiers: dict[str, int]  #: its blocks by replica, and under "host"
    loading: int  #: device blocks that a load is writing
    pins: int  #: leases, fences and transfers that end in it
    children: int
    hidden: int  #: children that are not shown


class TreeReport(Header, frozen=True, kw_only=True, tag="tree_report"):
    """Answer to `Tree`. Frames: the nodes in preorder, as one MessagePack array of `TreeNode`."""

    frames = (NODES,)

    runs: Id
    blocks: Id
    shown: Count
    deepest: Id = 0  #: depth behind the deepest block; how many blocks the longest chain has
    half_depth: Id = 0  #: the smallest depth within which half of the blocks lie
    nine_tenths_depth: Id = 0  #: the same for nine tenths of them


class BlockPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One copy of a block."""

    tier: str  #: a replica's name, or "host"
    slot: int
    state: str


class InspectReport(Header, frozen=True, kw_only=True, tag="inspect_report"):
    """Answer to `Inspect`. Without `found` the other fields are empty."""

    found: bool
    namespace: str = ""
    depth: Count = 0  #: blocks before it
    run_start: Count = 0
    run_blocks: Count = 0
    parent: bytes = b""  #: name of the block before it (not a key)
    children: Count = 0
    places: tuple[BlockPlace, ...] = ()
    leases: tuple[str, ...] = ()  #: at most 32 requests that hold it
    transfers: tuple[str, ...] = ()  #: copies in flight that read or write it


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The hit of a prompt in a replica, or in a namespace of engines in offload mode, and why it is not longer."""

    namespace: str  #: first 16 hex digits
    replica: str  #: "" for engines in offload mode
    label: str  #: label of the namespace in offload mode
    generation: int
    block_size: int  #: tokens
    device: int  #: leading blocks in the replica's device pool
    host: int  #: further blocks in the host pool
    hit: int  #: blocks that an acquire would hit
    key: bytes  #: key of the block after the hit; empty if there is none
    reason: MissReason  #: what happened to that block
    others: int  #: chains in the index that continue the hit with other blocks


class Explained(Header, frozen=True, kw_only=True, tag="explained"):
    """Answer to `Explain`: one entry for each replica and for each namespace of engines in offload mode."""

    explanations: tuple[Explanation, ...]


_nodes_decoder: msgspec.msgpack.Decoder[list[TreeNode]] = msgspec.msgpack.Decoder(list[TreeNode])


def pack_tree_nodes(nodes: list[TreeNode]) -> bytes:
    """The frame of a `TreeReport`.

    Raises:
        BadRequest: more nodes, or more bytes, than a frame may have.
    """
    frame = msgspec.msgpack.encode(nodes)
    if len(nodes) > TREE_NODES_MAX or len(frame) > FRAME_SIZE_BYTES_MAX:
        raise request_error(
            ErrorCode.OVERSIZE,
            f"a tree of {len(nodes)} nodes in {len(frame)} bytes",
            f"ask for fewer levels or children: at most {TREE_NODES_MAX} nodes and {FRAME_SIZE_BYTES_MAX} bytes",
        )
    return frame


def unpack_tree_nodes(frame: bytes) -> list[TreeNode]:
    """The inverse of `pack_tree_nodes`.

    Raises:
        BadRequest: the frame is no array of nodes.
    """
    return decode(_nodes_decoder, frame, "unreadable tree")
