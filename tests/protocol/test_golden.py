"""Stored bytes of every message of protocol version 1. They never change; a new version adds its own.

`golden.json` holds each message as a list of parts in hexadecimal: the header, then the frames.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest

from kvcached_client.attach_protocol import (
    Attach,
    AttachRefused,
    AttachReply,
    AttachRequest,
    Identified,
    Identify,
    Join,
    Joined,
    JoinedHost,
    decode_attach_reply,
    decode_attach_request,
    encode_attach,
)
from kvcached_client.errors import ErrorCode, Fault
from kvcached_client.frames import REPLY_FRAMES, check_frames
from kvcached_client.layout import KvGroup, Layout
from kvcached_client.protocol import (
    Acquire,
    Acquired,
    Alive,
    Allocate,
    Allocated,
    AttachedInfo,
    BlockPlace,
    Bye,
    Check,
    CheckReport,
    Clear,
    Cleared,
    ClearReplica,
    Commit,
    CommitStore,
    Committed,
    CompleteLoad,
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
    Explanation,
    Goodbye,
    Header,
    Health,
    HealthPart,
    HealthReport,
    Heartbeat,
    Held,
    Hello,
    HelloAttached,
    HostStats,
    Inspect,
    InspectReport,
    Load,
    Loaded,
    LoadPrepared,
    LoadTicket,
    Match,
    Matched,
    Pause,
    Paused,
    Pin,
    Pinned,
    PolicySet,
    PoolStats,
    PrepareLoad,
    PrepareStore,
    Rejoin,
    Release,
    Released,
    ReplicaCleared,
    ReplicaInfo,
    Reply,
    Request,
    Resume,
    Resumed,
    SetPolicy,
    Settled,
    SetWeights,
    Stats,
    StatsReport,
    StorePrepared,
    Tree,
    TreeNode,
    TreeReport,
    Unpin,
    Unpinned,
    Vacancy,
    Vacant,
    Welcome,
    WelcomeAttached,
    decode_reply,
    decode_request,
    encode,
    pack_tree_nodes,
    unpack_tree_nodes,
)
from kvcached_client.types import MissReason, WritePolicy
from tests.protocol.storage_messages import STORAGE_REPLIES, STORAGE_REQUESTS

GOLDEN: dict[str, list[str]] = json.loads(Path(__file__).with_name("golden.json").read_text())

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

REQUESTS: dict[str, tuple[Request, list[bytes]]] = {
    "hello": (
        Hello(
            id=1,
            version_min=1,
            version_max=1,
            member=MEMBER,
            replica="default",
            layout="00112233445566778899aabbccddeeff",
            client="engine 1.0",
            capabilities=("tokens",),
        ),
        [],
    ),
    "match": (Match(id=2, epoch=4, tokens=40, full=True), [KEYS]),
    "acquire": (Acquire(id=3, epoch=4, request="req-1", tokens=40, reserve=2), [KEYS]),
    "allocate": (Allocate(id=4, epoch=4, lease=9, blocks=2), []),
    "commit": (Commit(id=5, epoch=4, lease=9, start=0, fence=7), [KEYS, SLOTS]),
    "commit-tokens": (Commit(id=6, epoch=4, lease=9, start=0), [KEYS, SLOTS, TOKENS]),
    "release": (Release(id=7, epoch=4, lease=9), []),
    "release-commit": (Release(id=8, epoch=4, lease=9, start=2, fence=8), [KEYS, SLOTS]),
    "release-one-way": (Release(id=9, epoch=4, lease=9, reply=False), []),
    "load": (Load(id=15, epoch=4, lease=9), []),
    "vacancy": (Vacancy(id=16, epoch=4, blocks=300), []),
    "heartbeat": (Heartbeat(id=10, session=BIG, token=TOKEN, fence=8), []),
    "bye": (Bye(id=11), []),
    "rejoin": (
        Rejoin(
            id=1,
            version_min=1,
            version_max=1,
            member=MEMBER,
            session=BIG,
            daemon_epoch=300,
            token=TOKEN,
            layout="00112233445566778899aabbccddeeff",
            namespace=NAMESPACE,
        ),
        [],
    ),
    "declare": (Declare(id=27, epoch=4, request="req-1", tokens=40, hit=3, fence=7), [KEYS, SLOTS[:8], SLOTS[8:]]),
    "declare_over": (DeclareOver(id=28, epoch=4), []),
    "hello_attached": (
        HelloAttached(
            id=1,
            version_min=1,
            version_max=1,
            member=MEMBER,
            engine="engine 1.0",
            instance=KEYS[:16],
            label="model",
            keyspace=KEYS,
            block_size=16,
            shards=2,
            block_bytes=1 << 36,
            fingerprint=KEYS[16:],
        ),
        [],
    ),
    "prepare_load": (PrepareLoad(id=20, epoch=4, lease=9, start=1, blocks=2), []),
    "prepare_store": (PrepareStore(id=21, epoch=4, lease=9, start=2), [KEYS]),
    "commit_store": (CommitStore(id=22, session=BIG, token=TOKEN, transfer=300, shard=1), []),
    "commit_store-failed": (
        CommitStore(id=23, session=BIG, token=TOKEN, transfer=300, shard=-1, error="preempted"),
        [],
    ),
    "complete_load": (CompleteLoad(id=24, session=BIG, token=TOKEN, transfer=301, shard=63), [b""]),
    "complete_load-corrupt": (
        CompleteLoad(id=25, session=BIG, token=TOKEN, transfer=301, shard=0, error="cut short"),
        [INDICES],
    ),
    "clear": (Clear(id=26, epoch=4), []),
    "stats": (Stats(id=12), []),
    "health": (Health(id=13), []),
    "check": (Check(id=14), []),
    "describe": (Describe(id=BIG), []),
    "tree": (Tree(id=17, replica="default", levels=2, children=3), []),
    "inspect": (Inspect(id=18, key=KEYS[16:]), []),
    "explain": (Explain(id=19, tokens=40, full=True, replica="default", namespace="0303"), [KEYS]),
    "pause": (Pause(id=27, replica="default", deadline_ms=600_000), []),
    "resume": (Resume(id=28), []),
    "drain": (Drain(id=29, deadline_ms=0), []),
    "clear_replica": (ClearReplica(id=30, replica="default"), []),
    "set_weights": (SetWeights(id=31, replica="default", version="step 2000"), []),
    "pin": (Pin(id=34, target="default", ttl_ms=3_600_000), [KEYS]),
    "unpin": (Unpin(id=35, target="default"), [KEYS]),
    "set_policy": (SetPolicy(id=33, target="default", policy=WritePolicy.WRITE_BACK), []),
    **STORAGE_REQUESTS,
}

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
    "vacant": (Vacant(id=16, available=299), []),
    "alive": (Alive(id=10, epoch=4, generation=1), []),
    "goodbye": (Goodbye(id=11), []),
    "declared": (Declared(id=27, lease=9), []),
    "declare_ended": (DeclareEnded(id=28, freed=70_000), []),
    "welcome_attached": (
        WelcomeAttached(
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
            verify_loads=True,
        ),
        [],
    ),
    "held": (Held(id=3, lease=9, hit=2), []),
    "load_prepared": (LoadPrepared(id=20, transfer=301, generation=2), [SLOTS[:8]]),
    "store_prepared": (StorePrepared(id=21, transfer=300, depth=4, generation=2), [SLOTS, SLOTS]),
    "settled": (Settled(id=22), []),
    "cleared": (Cleared(id=26, generation=3, blocks=70_000), []),
    "stats_report": (
        StatsReport(
            id=12,
            daemon_epoch=300,
            state="draining",
            attached_paused=True,
            uptime_ms=5,
            sessions=1,
            runs=2,
            cached_blocks=3,
            pools=(
                PoolStats(
                    replica="default",
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
                ),
            ),
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
            attached=AttachedInfo(slabs=64, slab_bytes=1 << 24, namespaces_max=8, verify_loads=True),
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
    "replica_cleared": (
        ReplicaCleared(
            id=31,
            replicas=("default", "other"),
            generation=3,
            namespace=NAMESPACE,
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
        verify_loads=True,
    ),
    "attach-refused": AttachRefused(
        code=ErrorCode.UNAUTHENTICATED, fault=Fault.CALLER, message="no pidfd", fix="send your own"
    ),
}
RPC: dict[str, tuple[Header, list[bytes]]] = {**REQUESTS, **REPLIES}
ATTACH: dict[str, Attach] = {**ATTACH_REQUESTS, **ATTACH_REPLIES}


def parts_of(name: str) -> list[bytes]:
    return [bytes.fromhex(part) for part in GOLDEN[name]]


def plain(message: Header | Attach) -> Any:
    """What another language sees: maps, arrays, integers, text, bytes."""
    return msgpack.unpackb(msgspec.msgpack.encode(msgspec.to_builtins(message, builtin_types=(bytes,))))


def test_golden_frames_cover_every_message() -> None:
    """Each request, reply and attach message of the protocol is stored, and nothing else."""
    stored = {type(message) for message, _ in RPC.values()} | {type(message) for message in ATTACH.values()}
    union = (Request, Reply, AttachRequest, AttachReply)
    assert stored == {kind for each in union for kind in get_args(each)}
    assert GOLDEN.keys() == RPC.keys() | ATTACH.keys()


@pytest.mark.parametrize("name", REQUESTS)
def test_golden_request_decodes_and_encodes(name: str) -> None:
    """The stored bytes are this request, and this request is the stored bytes."""
    request, frames = REQUESTS[name]
    header, *stored_frames = parts_of(name)
    assert decode_request(header) == request
    assert encode(request) == header
    assert stored_frames == frames
    check_frames(request, stored_frames)


@pytest.mark.parametrize("name", REPLIES)
def test_golden_reply_decodes_and_encodes(name: str) -> None:
    """The stored bytes are this reply, and this reply is the stored bytes."""
    reply, frames = REPLIES[name]
    header, *stored_frames = parts_of(name)
    assert decode_reply(header) == reply
    assert encode(reply) == header
    assert stored_frames == frames
    assert len(frames) == REPLY_FRAMES[type(reply)]


@pytest.mark.parametrize("name", ATTACH)
def test_golden_attach_message_decodes_and_encodes(name: str) -> None:
    """The stored bytes are this attach message, and this attach message is the stored bytes."""
    (stored,) = parts_of(name)
    message = ATTACH[name]
    decode = decode_attach_request if name in ATTACH_REQUESTS else decode_attach_reply
    assert decode(stored) == message
    assert encode_attach(message) == stored


@pytest.mark.parametrize("name", [*RPC, *ATTACH])
def test_golden_header_is_plain_messagepack(name: str) -> None:
    """An independent MessagePack library reads a map that starts with its verb, and writes the same bytes."""
    header = parts_of(name)[0]
    message: Header | Attach = RPC[name][0] if name in RPC else ATTACH[name]
    read = msgpack.unpackb(header)
    assert read == plain(message)
    assert next(iter(read)) == "op"
    assert msgpack.packb(read) == header


def test_golden_tree_frame_is_the_nodes() -> None:
    """The stored frame of a tree is an array of arrays, which becomes the nodes again."""
    frame = parts_of("tree_report")[1]
    assert unpack_tree_nodes(frame) == NODES
    assert msgpack.unpackb(frame)[0] == [0, NAMESPACE, 0, 0, {}, 0, 0, 1, 0]
