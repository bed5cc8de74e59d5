"""Replies and attach messages with every field set, for the golden file, and the values in them."""

from __future__ import annotations

from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.errors import ErrorCode, Fault
from kvcached_client.protocol.attach import (
    AttachRefused,
    AttachReply,
    AttachRequest,
    ClaimedPool,
    ClaimPool,
    Identified,
    Identify,
    Join,
    Joined,
    JoinedHost,
    Leave,
)
from kvcached_client.protocol.engine import (
    Acquired,
    Alive,
    Allocated,
    BlockPlace,
    CheckReport,
    Cleared,
    Committed,
    Declared,
    DeclareEnded,
    Description,
    Drained,
    EnginePoolStats,
    ErrorReply,
    Explained,
    Explanation,
    Goodbye,
    HealthPart,
    HealthReport,
    Held,
    HostRegistration,
    HostStats,
    InspectReport,
    Loaded,
    LoadPrepared,
    LoadTicket,
    Matched,
    NamespaceCleared,
    OffloadInfo,
    Paused,
    Pinned,
    PolicySet,
    PoolStats,
    Released,
    ReplicaInfo,
    Reply,
    Resumed,
    Settled,
    Slept,
    SlotsAvailable,
    StatsReport,
    StoreOutcome,
    StorePrepared,
    StoresPrepared,
    TreeNode,
    TreeReport,
    Unpinned,
    Welcome,
    WelcomeOffload,
    Woken,
    pack_tree_nodes,
)
from kvcached_client.types import MissReason, Verify, WritePolicy
from tests.protocol.storage_messages import STORAGE_REPLIES

KEYS = bytes(range(32))
SLOTS = bytes.fromhex("0a000000010000002800000001000000")
INDICES = b"".join(number.to_bytes(4, "little") for number in (0, 300))
TOKENS = b"".join(number.to_bytes(4, "little") for number in range(32))
LAYOUT = Layout(
    block_size=16,
    shards=2,
    groups=(
        KvGroup(layers=30, kv_heads=4, head_dim=128, v_head_dim=128, dtype="bfloat16"),
        KvGroup(
            layers=2, kv_heads=1, head_dim=576, v_head_dim=0, dtype="float8_e4m3fn", scale_bytes=64, replicated=True
        ),
    ),
    order="block_first",
)
MEMBER, TOKEN, NAMESPACE = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32
BIG = (1 << 63) - 1
NODES = [
    TreeNode(level=0, key=NAMESPACE, start=0, blocks=0, tiers={}, loading=0, pins=0, children=1, hidden=0),
    TreeNode(
        level=1,
        key=KEYS[:16],
        start=0,
        blocks=300,
        tiers={"default": 200, "host": 300},
        loading=40,
        pins=2,
        children=9,
        hidden=1,
    ),
]

#: By their names in the golden file: header and frames.
REPLIES: dict[str, tuple[Reply, list[bytes]]] = {
    "welcome": (
        Welcome(
            id=1,
            version=1,
            session=BIG,
            token=TOKEN,
            daemon_epoch=300,
            epoch=4,
            generation=1,
            namespace=NAMESPACE,
            key_algorithm="blake3",
            layout=LAYOUT,
            slots=70_000,
            heartbeat_interval_ms=1000,
            session_ttl_ms=10_000,
            capabilities=(),
        ),
        [],
    ),
    "matched": (Matched(id=2, device=2, host=1), []),
    "acquired": (Acquired(id=3, lease=9, hit=2, ready=2), [SLOTS, SLOTS]),
    "acquired-loading": (
        Acquired(id=3, lease=9, hit=2, ready=1, loads=(LoadTicket(300, 0), LoadTicket(BIG, 31))),
        [SLOTS, SLOTS],
    ),
    "allocated": (Allocated(id=4, blocks=2), [SLOTS]),
    "committed": (Committed(id=5, depth=2, adopted=1, duplicates=1), []),
    "released": (Released(id=8, adopted=1, duplicates=1), []),
    "loaded": (Loaded(id=15, hit=1), [SLOTS[:8]]),
    "slots_available": (SlotsAvailable(id=16, available=299), []),
    "alive": (Alive(id=10, epoch=4, generation=1), []),
    "goodbye": (Goodbye(id=11), []),
    "declared": (Declared(id=27, lease=9), []),
    "declare_ended": (DeclareEnded(id=28, freed=70_000), []),
    "welcome_offload": (
        WelcomeOffload(
            id=1,
            version=1,
            session=BIG,
            token=TOKEN,
            daemon_epoch=300,
            epoch=300,
            generation=2,
            namespace=NAMESPACE,
            heartbeat_interval_ms=1000,
            session_ttl_ms=10_000,
            verify=Verify.ALWAYS,
        ),
        [],
    ),
    "held": (Held(id=3, lease=9, hit=2, filling=3), []),
    "held-load": (Held(id=40, lease=9, hit=3, transfer=301, generation=2), [SLOTS[:8]]),
    "load_prepared": (LoadPrepared(id=20, transfer=301, generation=2), [SLOTS[:8]]),
    "store_prepared": (StorePrepared(id=21, transfer=300, depth=4, generation=2), [SLOTS, SLOTS]),
    "stores_prepared": (
        StoresPrepared(
            id=36,
            outcomes=(StoreOutcome(300, 4, 2, 2), StoreOutcome(0, 0, 0, 0, ErrorCode.UNKNOWN_LEASE, "no such lease")),
        ),
        [SLOTS, SLOTS],
    ),
    "settled": (Settled(id=22), []),
    "cleared": (Cleared(id=26, generation=3, blocks=70_000), []),
    "stats_report": (
        StatsReport(
            id=12,
            daemon_epoch=300,
            state="draining",
            offload_paused=True,
            uptime_ms=5,
            sessions=1,
            runs=2,
            cached_blocks=3,
            pools=(
                PoolStats(
                    replica="default",
                    state="falling_asleep",
                    epoch=4,
                    slots=10,
                    states={"free": 7, "cached": 3},
                    evictable=3,
                    leases=0,
                    session=BIG,
                    healthy=True,
                    degraded=True,
                    restarts=300,
                    paused=False,
                    pinned=0,
                    registered=(HostRegistration(shard=1, registered_bytes=BIG, size_bytes=BIG, error="refused"),),
                    trouble="CUDA device 0: lost",
                ),
            ),
            engine_pools=(
                EnginePoolStats(
                    pool="0404040404040404",
                    name="model tp2",
                    namespace="0303030303030303",
                    ranks=2,
                    size_bytes=BIG,
                    blocks=300,
                    named=200,
                    used=True,
                ),
            ),
            device_memory_bytes=BIG,
            hosts=(
                HostStats(
                    namespace="0303030303030303",
                    replicas=("default", "other"),
                    label="",
                    generation=0,
                    sessions=0,
                    leases=0,
                    slots=20,
                    slabs=2,
                    write_policy="write_through",
                    pinned=0,
                    states={"free": 15, "cached": 5},
                ),
            ),
            transfers={"store": 1, "load": 2},
            counters={"requests": 1},
        ),
        [],
    ),
    "health_report": (
        HealthReport(id=13, ok=False, parts=(HealthPart(part="worker-default-0", ok=False, detail="no answer"),)),
        [],
    ),
    "check_report": (CheckReport(id=14, ok=True, violations=()), []),
    "description": (
        Description(
            id=BIG,
            version="0.1.0",
            protocol_min=1,
            protocol_max=1,
            daemon_epoch=300,
            state="serving",
            pid=42,
            replicas=(
                ReplicaInfo(
                    name="default",
                    layout=LAYOUT,
                    fingerprint=LAYOUT.fingerprint(),
                    slots=10,
                    bytes_per_block=LAYOUT.bytes_per_block(),
                    device="cpu",
                    model="",
                    key_algorithm="blake3",
                    namespace="03" * 32,
                    generation=3,
                    weights_version="step 2000",
                ),
            ),
            offload=OffloadInfo(slabs=64, slab_bytes=1 << 24, namespaces_max=8, verify=Verify.ALWAYS),
            limits={"header_bytes": 16384},
        ),
        [],
    ),
    "tree_report": (TreeReport(id=17, runs=3, blocks=400, shown=2), [pack_tree_nodes(NODES)]),
    "inspect_report": (
        InspectReport(
            id=18,
            found=True,
            namespace="0303030303030303",
            depth=17,
            run_start=16,
            run_blocks=300,
            parent=KEYS[:16],
            children=2,
            places=(
                BlockPlace(tier="default", slot=40, state="filling"),
                BlockPlace(tier="host", slot=70_000, state="cached"),
            ),
            leases=("req-1",),
            transfers=("load 300",),
        ),
        [],
    ),
    "explained": (
        Explained(
            id=19,
            explanations=(
                Explanation(
                    namespace="0303030303030303",
                    replica="",
                    label="tiny",
                    generation=2,
                    block_size=16,
                    device=0,
                    host=300,
                    hit=300,
                    key=KEYS[:16],
                    reason=MissReason.EVICTED,
                    others=1,
                ),
            ),
        ),
        [],
    ),
    "paused": (Paused(id=27, under_way=300, holds=True), []),
    "resumed": (Resumed(id=28, state="serving"), []),
    "drained": (Drained(id=29, leases=300, copies=2, requests=1, holds=True), []),
    "namespace_cleared": (
        NamespaceCleared(
            id=31,
            replicas=("default", "other"),
            generation=3,
            namespace=NAMESPACE,
            label="",
            weights_version="step 2000",
            blocks=70_000,
        ),
        [],
    ),
    "pinned": (Pinned(id=34, device=2, host=1), []),
    "unpinned": (Unpinned(id=35, was_pinned=True), []),
    "policy_set": (
        PolicySet(
            id=33,
            replicas=("default",),
            namespace="0303030303030303",
            label="",
            policy=WritePolicy.WRITE_BACK,
            before=WritePolicy.WRITE_THROUGH,
        ),
        [],
    ),
    "slept": (Slept(id=38, replicas=("default", "other"), blocks=70_000, dropped=3), []),
    "woken": (Woken(id=39, replicas=("default",)), []),
    "inspect_report-unknown": (InspectReport(id=18, found=False), []),
    "error": (
        ErrorReply(
            id=0, code=ErrorCode.OVERSIZE, fault=Fault.CALLER, message="header of 16385 bytes", fix="at most 16384"
        ),
        [],
    ),
    **STORAGE_REPLIES,
}

ATTACH_REQUESTS: dict[str, AttachRequest] = {
    "attach-identify": Identify(client="engine 1.0"),
    "attach-join": Join(session=BIG, token=TOKEN, shard=1),
    "attach-leave": Leave(),
    "attach-claim_pool": ClaimPool(name="model tp2", claim="start", ranks=2, rank=1, rank_bytes=BIG >> 20, blocks=300),
}
ATTACH_REPLIES: dict[str, AttachReply] = {
    "attach-identified": Identified(member=MEMBER, endpoint="ipc:///run/kvcached/rpc.sock", daemon_epoch=300),
    "attach-joined": Joined(
        kind="memfd", shard=1, epoch=4, layout=LAYOUT, slots=10, pool_bytes=10 * LAYOUT.bytes_per_block()
    ),
    "attach-joined_host": JoinedHost(
        shard=1,
        shards=2,
        epoch=300,
        slabs=16,
        slab_bytes=64 << 20,
        block_bytes=1 << 20,
        namespace=NAMESPACE,
        fingerprint=KEYS[16:],
        verify=Verify.ALWAYS,
        replicated=True,
    ),
    "attach-claimed_pool": ClaimedPool(pool=KEYS[:16], rank_bytes=BIG >> 20, blocks=300),
    "attach-refused": AttachRefused(
        code=ErrorCode.UNAUTHENTICATED, fault=Fault.CALLER, message="no pidfd", fix="send your own"
    ),
}
