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

from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.protocol.attach import (
    Attach,
    AttachReply,
    AttachRequest,
    decode_attach_reply,
    decode_attach_request,
    encode_attach,
)
from kvcached_client.protocol.engine import (
    Acquire,
    Allocate,
    Bye,
    Check,
    Clear,
    ClearNamespace,
    Commit,
    Declare,
    DeclareOver,
    Describe,
    Drain,
    Explain,
    ForgetPrefix,
    Header,
    Health,
    Heartbeat,
    Hello,
    HelloOffload,
    Inspect,
    Load,
    Match,
    Pause,
    Pin,
    PrepareLoad,
    PrepareStore,
    PrepareStores,
    Rejoin,
    Release,
    Reply,
    Request,
    Resume,
    SetLogLevel,
    SetPolicy,
    SetWeights,
    Sleep,
    Stats,
    StoreOffer,
    TransferDone,
    Tree,
    Unpin,
    WaitForSlots,
    Wake,
    decode_reply,
    decode_request,
    encode,
    unpack_tree_nodes,
)
from kvcached_client.protocol.fields import check_frames, check_reply_frames
from kvcached_client.types import WritePolicy
from tests.protocol.replies import (
    ATTACH_REPLIES,
    ATTACH_REQUESTS,
    BIG,
    INDICES,
    KEYS,
    MEMBER,
    NAMESPACE,
    NODES,
    REPLIES,
    SLOTS,
    TOKEN,
    TOKENS,
)
from tests.protocol.storage_messages import STORAGE_REQUESTS

GOLDEN: dict[str, list[str]] = json.loads(Path(__file__).with_name("golden.json").read_text())

_HELLO_OFFLOAD = HelloOffload(
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
    replicated=True,
)
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
    "acquire-known": (Acquire(id=32, epoch=4, request="req-2", tokens=64, known=3), [KEYS]),
    "acquire-load": (Acquire(id=40, epoch=4, request="req-3", tokens=64, load_from=1), [KEYS]),
    "acquire-tenant": (Acquire(id=43, epoch=4, request="req-4", tokens=64, tenant="free-7"), [KEYS]),
    "allocate": (Allocate(id=4, epoch=4, lease=9, blocks=2), []),
    "commit": (Commit(id=5, epoch=4, lease=9, start=0, fence=7), [KEYS, SLOTS]),
    "commit-tokens": (Commit(id=6, epoch=4, lease=9, start=0), [KEYS, SLOTS, TOKENS]),
    "release": (Release(id=7, epoch=4, lease=9), []),
    "release-commit": (Release(id=8, epoch=4, lease=9, start=2, fence=8), [KEYS, SLOTS]),
    "release-one-way": (Release(id=9, epoch=4, lease=9, reply=False), []),
    "release-load": (Release(id=41, epoch=4, lease=9, reply=False, call_off=301), []),
    "load": (Load(id=15, epoch=4, lease=9), []),
    "wait_for_slots": (WaitForSlots(id=16, epoch=4, blocks=300), []),
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
            fence=7,
        ),
        [],
    ),
    "declare": (Declare(id=27, epoch=4, request="req-1", tokens=40, hit=3), [KEYS, SLOTS[:8], SLOTS[8:]]),
    "declare_over": (DeclareOver(id=28, epoch=4), []),
    "hello_offload": (_HELLO_OFFLOAD, []),
    "hello_offload-canonical": (
        msgspec.structs.replace(
            _HELLO_OFFLOAD, read_only=True, canonical=CanonicalLayout(fingerprint=KEYS[:16], parts=8, runs=64)
        ),
        [],
    ),
    "prepare_load": (PrepareLoad(id=20, epoch=4, lease=9, start=1, blocks=2), []),
    "prepare_store": (PrepareStore(id=21, epoch=4, lease=9, start=2), [KEYS]),
    "prepare_stores": (
        PrepareStores(id=36, epoch=4, offers=(StoreOffer(9, 2, 1), StoreOffer(BIG, 0, 1)), releases=(7, 300)),
        [KEYS],
    ),
    "transfer_done": (TransferDone(id=22, session=BIG, token=TOKEN, kind="store", transfer=300, shard=63), []),
    "transfer_done-more": (
        TransferDone(id=37, session=BIG, token=TOKEN, kind="store", transfer=300, shard=1, more=(301, BIG)),
        [],
    ),
    "transfer_done-failed": (
        TransferDone(id=23, session=BIG, token=TOKEN, kind="store", transfer=300, shard=-1, error="preempted"),
        [],
    ),
    "transfer_done-bad": (
        TransferDone(id=25, session=BIG, token=TOKEN, kind="load", transfer=301, shard=0, error="cut short"),
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
    "clear_namespace": (ClearNamespace(id=30, target="default"), []),
    "set_weights": (SetWeights(id=31, target="default", version="step 2000"), []),
    "pin": (Pin(id=34, target="default", ttl_ms=3_600_000), [KEYS]),
    "unpin": (Unpin(id=35, target="default"), [KEYS]),
    "forget": (ForgetPrefix(id=44, target="default", from_block=1, deadline_ms=600_000), [KEYS]),
    "set_policy": (SetPolicy(id=33, target="default", policy=WritePolicy.WRITE_BACK), []),
    "sleep": (Sleep(id=38, target="default", deadline_ms=600_000), []),
    "wake": (Wake(id=39, target="default"), []),
    "set_log_level": (SetLogLevel(id=40, level="debug"), []),
    **STORAGE_REQUESTS,
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
    check_reply_frames(reply, stored_frames)


@pytest.mark.parametrize("name", RPC)
def test_default_that_is_sent_is_the_same_as_one_that_is_left_out(name: str) -> None:
    """A message is shortest without its defaults, and means the same with them."""
    message = RPC[name][0]
    fields = msgspec.structs.fields(type(message))
    full = msgpack.unpackb(parts_of(name)[0]) | {
        field.encode_name: msgspec.to_builtins(getattr(message, field.name), builtin_types=(bytes,)) for field in fields
    }
    decode = decode_request if name in REQUESTS else decode_reply
    assert decode(msgpack.packb(full)) == message
    defaults = {
        field.encode_name for field in fields if not field.required and field.default == getattr(message, field.name)
    }
    assert defaults.isdisjoint(msgpack.unpackb(parts_of(name)[0]))


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
