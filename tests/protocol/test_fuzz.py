"""Hostile headers: each gives a valid request or a typed `BadRequest`, never another exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_client.errors import BadRequest, ErrorCode
from kvcached_client.protocol.attach import AttachReply, AttachRequest, decode_attach_reply, decode_attach_request
from kvcached_client.protocol.engine import (
    BLOCKS_PER_MESSAGE_MAX,
    FRAME_SIZE_BYTES_MAX,
    HEADER_SIZE_BYTES_MAX,
    LEASES_PER_MESSAGE_MAX,
    TREE_NODES_MAX,
    Acquired,
    Clear,
    Commit,
    Held,
    Load,
    Loaded,
    LoadPrepared,
    Match,
    PrepareStore,
    Release,
    Reply,
    Request,
    SlotsAvailable,
    Stats,
    StorePrepared,
    TransferDone,
    TreeNode,
    TreeReport,
    WaitForSlots,
    decode_reply,
    decode_request,
    pack_tree_nodes,
    salvage_id,
    unpack_tree_nodes,
)
from kvcached_client.protocol.fields import PRIORITY_MIN, check_frames, check_reply_frames
from kvcached_client.types import PROGRESS_SLOTS

GOLDEN: dict[str, list[str]] = json.loads(Path(__file__).with_name("golden.json").read_text())
HEADERS = {name: bytes.fromhex(parts[0]) for name, parts in GOLDEN.items()}
REQUEST_TAGS = {kind.__struct_config__.tag for kind in get_args(Request)}
REQUEST_HEADERS = {name: header for name, header in HEADERS.items() if msgpack.unpackb(header)["op"] in REQUEST_TAGS}
DECODERS = {
    "request": (decode_request, Request),
    "reply": (decode_reply, Reply),
    "attach request": (decode_attach_request, AttachRequest),
    "attach reply": (decode_attach_reply, AttachReply),
}

#: Values that a careless client could put where something else belongs.
wrong_values = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(allow_nan=True),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(max_size=300),
    st.binary(max_size=300),
    st.lists(st.integers(0, 9), max_size=40),
    st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3),
)


def decodes_or_refuses(data: bytes) -> None:
    for decode, union in DECODERS.values():
        try:
            message = decode(data)
        except BadRequest:
            continue
        assert isinstance(message, get_args(union))
    assert 0 <= salvage_id(data) < 1 << 63


def refused(header: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode_request(header)
    return caught.value


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=512))
def test_random_bytes_are_refused_or_valid(data: bytes) -> None:
    """Whatever arrives, the decoders raise nothing but their typed error."""
    decodes_or_refuses(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(HEADERS)), st.data())
def test_mutated_golden_headers_are_refused_or_valid(name: str, data: st.DataObject) -> None:
    """A real header with bytes changed, cut, doubled or inserted is refused or still valid."""
    header = bytearray(HEADERS[name])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(header)))
        length = data.draw(st.integers(0, 4))
        header[position : position + length] = data.draw(st.binary(max_size=4))
    decodes_or_refuses(bytes(header))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(REQUEST_HEADERS)), st.data(), wrong_values)
def test_headers_with_a_wrong_value_are_refused_or_valid(name: str, data: st.DataObject, value: Any) -> None:
    """Any value in any field is refused or taken as it is; only a whole number becomes a fraction where one is due."""
    fields = msgpack.unpackb(REQUEST_HEADERS[name])
    field = data.draw(st.sampled_from(sorted(fields)))
    is_fraction = type(fields[field]) is float and type(value) is int
    fields[field] = value
    header = msgpack.packb(fields)
    decodes_or_refuses(header)
    try:
        request = decode_request(header)
    except BadRequest:
        return
    taken = request.__struct_config__.tag if field == "op" else getattr(request, field)
    expected = tuple if isinstance(value, list) else float if is_fraction else type(value)
    assert type(taken) is expected
    assert taken == (tuple(value) if isinstance(value, list) else float(value) if is_fraction else value)


def test_whole_number_is_taken_for_a_fraction() -> None:
    """MessagePack has no point in 40: a client may send a rate so, and the daemon has the same number."""
    fields = msgpack.unpackb(REQUEST_HEADERS["prefetch"])
    assert type(fields["prefill_tokens_per_s"]) is float
    fields["prefill_tokens_per_s"] = 40

    request: Any = decode_request(msgpack.packb(fields))
    rate = request.prefill_tokens_per_s
    assert (type(rate), rate) == (float, 40.0)


@pytest.mark.parametrize("name", sorted(REQUEST_HEADERS))
def test_every_integer_field_refuses_floats_booleans_and_text(name: str) -> None:
    """1.0, true and "1" are no integers, in any field of any verb; only a shard may be -1, only `load_from` nothing."""
    fields = msgpack.unpackb(REQUEST_HEADERS[name])
    integers = [field for field, value in fields.items() if type(value) is int]
    assert "id" in integers
    for field in integers:
        below = {"shard": -2, "priority": PRIORITY_MIN - 1}.get(field, -1)
        nothing = () if field == "load_from" else (None,)
        for value in (1.0, True, "1", below, 1 << 63, *nothing):
            assert refused(msgpack.packb({**fields, field: value})).code == ErrorCode.MALFORMED


@pytest.mark.parametrize("name", sorted(REQUEST_HEADERS))
def test_unknown_and_missing_fields_are_refused(name: str) -> None:
    """A field that the verb lacks is refused, and so is a header without one that it needs."""
    fields = msgpack.unpackb(REQUEST_HEADERS[name])
    assert refused(msgpack.packb({**fields, "surprise": 1})).code == ErrorCode.MALFORMED
    for required in ("op", "id"):
        less = {field: value for field, value in fields.items() if field != required}
        assert refused(msgpack.packb(less)).code == ErrorCode.MALFORMED


def test_unknown_verb_has_its_own_code() -> None:
    """A client of a later version learns that the verb is unknown, not that its bytes are broken."""
    assert refused(msgpack.packb({"op": "teleport", "id": 1})).code == ErrorCode.UNKNOWN_VERB


BOMBS = {
    "deep arrays": b"\x91" * (HEADER_SIZE_BYTES_MAX - 1) + b"\x00",
    "deep maps": b"\x81\xa0" * (HEADER_SIZE_BYTES_MAX // 2 - 1) + b"\xc0",
    "deep value": b"\x82\xa2op\xa5match\xa2id" + b"\x91" * 16_000,
    "deep unknown value": b"\x83\xa2op\xa5stats\xa2id\x01\xa1x" + b"\x91" * 16_000 + b"\xc0",
    "array of 4 Gi": b"\xdd\xff\xff\xff\xff",
    "map of 4 Gi": b"\xdf\xff\xff\xff\xff",
    "text of 4 GiB": b"\x82\xa2op\xdb\xff\xff\xff\xff",
    "capabilities of 4 Gi": b"\x82\xa2op\xa5hello\xaccapabilities\xdd\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\x82\xa2op\xa5hello\xa6member\xc6\xff\xff\xff\xff",
    "not UTF-8": b"\x82\xa2op\xa5match\xa2id\xa1\xff",
    "key not UTF-8": b"\x81\xa1\xff\x00",
    "extension type": b"\xc7\x04\x01abcd",
    "timestamp": b"\x82\xa2op\xa5stats\xa2id\xd6\xff\x00\x00\x00\x00",
    "never used byte": b"\xc1",
    "nothing": b"",
    "two headers": HEADERS["stats"] * 2,
    "trailing byte": HEADERS["stats"] + b"\x00",
}


@pytest.mark.parametrize("header", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused(header: bytes) -> None:
    """Nesting, announced sizes and stray bytes cost an error reply, not memory or a stack."""
    assert refused(header).code in {ErrorCode.MALFORMED, ErrorCode.OVERSIZE}
    decodes_or_refuses(header)


def test_last_of_two_equal_fields_holds() -> None:
    """A repeated field is no error; both sides read the last one."""
    header = b"\x83\xa2op\xa5stats\xa2id\x01\xa2id\x02"
    assert decode_request(header) == Stats(id=2)
    assert msgpack.unpackb(header)["id"] == salvage_id(header) == 2


def test_header_limit_is_exact() -> None:
    """A header of 16 KiB is read and one byte more is refused, before it is decoded."""
    fits = b"\x80" + bytes(HEADER_SIZE_BYTES_MAX - 1)
    assert refused(fits).code == ErrorCode.MALFORMED
    assert refused(fits + b"\0").code == ErrorCode.OVERSIZE
    assert salvage_id(HEADERS["stats"] + bytes(HEADER_SIZE_BYTES_MAX)) == 0


@pytest.mark.parametrize(
    ("fields", "salvaged"),
    [
        ({"op": "teleport", "id": 5}, 5),
        ({"id": 5, "surprise": [1, {"a": None}]}, 5),
        ({"op": "match", "id": "5"}, 0),
        ({"op": "match", "id": -5}, 0),
        ({"op": "match"}, 0),
        ([5], 0),
    ],
)
def test_id_is_salvaged_where_it_can_be_read(fields: Any, salvaged: int) -> None:
    """The error reply to a broken header reaches its request if the id is sound, and has id 0 if not."""
    assert salvage_id(msgpack.packb(fields)) == salvaged


KEY = bytes(16)
MATCH = Match(id=1, epoch=1, tokens=8)
COMMIT = Commit(id=1, epoch=1, lease=1, start=0)
RELEASE = Release(id=1, epoch=1, lease=1)
PREPARE_STORE = PrepareStore(id=1, epoch=1, lease=1, start=0)
TRANSFER_DONE = TransferDone(id=1, session=1, token=bytes(32), kind="load", transfer=1, shard=0)


@pytest.mark.parametrize(
    ("request_", "frames", "code"),
    [
        (MATCH, [], ErrorCode.BAD_FRAMES),
        (MATCH, [KEY, b""], ErrorCode.BAD_FRAMES),
        (MATCH, [KEY[:-1]], ErrorCode.BAD_FRAMES),
        (MATCH, [KEY * (BLOCKS_PER_MESSAGE_MAX + 1)], ErrorCode.BAD_FRAMES),
        (MATCH, [bytes(FRAME_SIZE_BYTES_MAX + 16)], ErrorCode.OVERSIZE),
        (COMMIT, [KEY], ErrorCode.BAD_FRAMES),
        (COMMIT, [KEY, bytes(7)], ErrorCode.BAD_FRAMES),
        (COMMIT, [KEY, bytes(8), bytes(3)], ErrorCode.BAD_FRAMES),
        (COMMIT, [KEY, bytes(8), bytes(4), b""], ErrorCode.BAD_FRAMES),
        (RELEASE, [KEY], ErrorCode.BAD_FRAMES),
        (Load(id=1, epoch=1, lease=1), [b""], ErrorCode.BAD_FRAMES),
        (WaitForSlots(id=1, epoch=1, blocks=1), [bytes(16)], ErrorCode.BAD_FRAMES),
        (Stats(id=1), [b""], ErrorCode.BAD_FRAMES),
        (PREPARE_STORE, [], ErrorCode.BAD_FRAMES),
        (PREPARE_STORE, [KEY[:-1]], ErrorCode.BAD_FRAMES),
        (PREPARE_STORE, [KEY, bytes(3)], ErrorCode.BAD_FRAMES),
        (PREPARE_STORE, [KEY, bytes(4), b""], ErrorCode.BAD_FRAMES),
        (PREPARE_STORE, [KEY * (BLOCKS_PER_MESSAGE_MAX + 1)], ErrorCode.BAD_FRAMES),
        (TRANSFER_DONE, [bytes(3)], ErrorCode.BAD_FRAMES),
        (TRANSFER_DONE, [bytes(4), b""], ErrorCode.BAD_FRAMES),
        (TRANSFER_DONE, [bytes(4 * BLOCKS_PER_MESSAGE_MAX + 4)], ErrorCode.BAD_FRAMES),
        (TRANSFER_DONE, [bytes(FRAME_SIZE_BYTES_MAX + 4)], ErrorCode.OVERSIZE),
        (Clear(id=1, epoch=1), [KEY], ErrorCode.BAD_FRAMES),
    ],
)
def test_frames_that_do_not_fit_the_verb_are_refused(request_: Request, frames: list[bytes], code: ErrorCode) -> None:
    """Too few, too many, ragged and too long frames are told apart from a broken header."""
    with pytest.raises(BadRequest) as caught:
        check_frames(request_, frames)
    assert caught.value.code == code


@given(st.sampled_from(get_args(Request)), st.lists(st.binary(max_size=40), max_size=9))
def test_any_frames_are_refused_or_fit(kind: type[Any], frames: list[bytes]) -> None:
    """Frames pass only in the number that the verb takes, with keys, ranges, tokens and indices of whole size."""
    request = next(
        decode_request(header) for header in REQUEST_HEADERS.values() if isinstance(decode_request(header), kind)
    )
    try:
        check_frames(request, frames)
    except BadRequest:
        return
    assert len(frames) in (kind.frame_counts or (len(kind.frames),))
    units = [each.item_bytes for each in kind.frames]
    assert all(len(frame) % unit == 0 for frame, unit in zip(frames, units, strict=False))


@pytest.mark.parametrize(
    ("reply", "frames"),
    [
        (Acquired(id=1, lease=1, hit=1, ready=1), [bytes(8)]),
        (Acquired(id=1, lease=1, hit=1, ready=1), [bytes(8), bytes(9)]),
        (Loaded(id=1, hit=1), []),
        (Loaded(id=1, hit=1), [bytes(8), b""]),
        (Loaded(id=1, hit=1), [bytes(7)]),
        (SlotsAvailable(id=1, available=1), [b""]),
        (Held(id=1, lease=1, hit=1), [bytes(8), bytes(8)]),
        (Held(id=1, lease=1, hit=1), [bytes(7)]),
        (LoadPrepared(id=1, transfer=1, generation=0), []),
        (LoadPrepared(id=1, transfer=1, generation=0), [bytes(4)]),
        (StorePrepared(id=1, transfer=1, depth=1, generation=0), [bytes(8)]),
        (StorePrepared(id=1, transfer=1, depth=1, generation=0), [bytes(7), bytes(8)]),
        (TreeReport(id=1, runs=0, blocks=0, shown=0), []),
    ],
)
def test_frames_that_do_not_fit_the_reply_are_refused(reply: Reply, frames: list[bytes]) -> None:
    """A client takes no reply with too few, too many or ragged frames."""
    with pytest.raises(BadRequest) as caught:
        check_reply_frames(reply, frames)
    assert caught.value.code == ErrorCode.BAD_FRAMES


@given(st.sampled_from(sorted(HEADERS.keys() - REQUEST_HEADERS.keys())), st.lists(st.binary(max_size=17), max_size=4))
def test_any_reply_frames_are_refused_or_fit(name: str, frames: list[bytes]) -> None:
    """Frames pass only in the number of the reply, slots only as whole ranges, and a tree of any bytes."""
    if name.startswith("attach"):
        return
    reply = decode_reply(HEADERS[name])
    try:
        check_reply_frames(reply, frames)
    except BadRequest:
        return
    assert len(frames) in (reply.frame_counts or (len(reply.frames),))
    assert isinstance(reply, TreeReport) or all(len(frame) % 8 == 0 for frame in frames)


OFFLOAD_LIMITS: dict[str, list[dict[str, Any]]] = {
    "hello_offload": [
        *({"shards": value} for value in (0, 65)),
        *({"block_size": value} for value in (0, 65_537)),
        *({"block_bytes": value} for value in (0, (1 << 36) + 1)),
        *({name: bytes(size)} for name, size in [("keyspace", 31), ("keyspace", 33), ("fingerprint", 15)]),
        *({"instance": bytes(size)} for size in (0, 15, 17)),
        *({name: ""} for name in ("engine", "label")),
    ],
    "prepare_load": [{"blocks": value} for value in (0, BLOCKS_PER_MESSAGE_MAX + 1)],
    "transfer_done": [
        {"kind": "copy"},
        {"shard": 64},
        {"shard": -2},
        {"error": "x" * 513},
        {"token": bytes(31)},
        {"token": b""},
        {"more": [1] * (LEASES_PER_MESSAGE_MAX + 1)},
        {"more": [-1]},
    ],
    "prepare_stores": [
        {"offers": [[9, 0, 1]] * (LEASES_PER_MESSAGE_MAX + 1)},
        {"releases": [9] * (LEASES_PER_MESSAGE_MAX + 1)},
        *({"offers": [offer]} for offer in ([9, 0, -1], [9, -1, 1], [9, 0], [9, 0, 1, 0], {"lease": 9})),
    ],
}


@pytest.mark.parametrize(("name", "fields"), [(name, each) for name, all_ in OFFLOAD_LIMITS.items() for each in all_])
def test_offload_fields_out_of_their_limits_are_refused(name: str, fields: dict[str, Any]) -> None:
    """Shards, sizes, digests and errors beyond what the protocol allows never reach the daemon's core."""
    assert refused(msgpack.packb({**msgpack.unpackb(REQUEST_HEADERS[name]), **fields})).code == ErrorCode.MALFORMED


TICKET = [300, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"loads": [TICKET] * (PROGRESS_SLOTS + 1)},
        {"loads": [[300, PROGRESS_SLOTS]]},
        {"loads": [[300, -1]]},
        {"loads": [[1 << 63, 0]]},
        {"loads": [[300]]},
        {"loads": [[300, 0, 0]]},
        {"loads": [{"transfer": 300, "progress": 0}]},
        {"loads": TICKET},
        {"ready": -1},
        {"ready": None},
    ],
    ids=str,
)
def test_loads_out_of_their_limits_are_refused(fields: dict[str, Any]) -> None:
    """A ticket names an entry that the progress page has, and there are no more of them than entries."""
    granted = {"op": "acquired", "id": 3, "lease": 9, "hit": 2, "ready": 1, "loads": [TICKET] * PROGRESS_SLOTS}
    assert isinstance(decode_reply(msgpack.packb(granted)), Acquired)
    with pytest.raises(BadRequest):
        decode_reply(msgpack.packb({**granted, **fields}))


TREE = bytes.fromhex(GOLDEN["tree_report"][1])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_tree_frames_are_refused_or_nodes(data: st.DataObject) -> None:
    """Whatever comes as the frame of a tree, it is nodes or one typed error."""
    frame = bytearray(data.draw(st.sampled_from([b"", TREE])))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(frame)))
        length = data.draw(st.integers(0, 4))
        frame[position : position + length] = data.draw(st.binary(max_size=4))
    try:
        nodes = unpack_tree_nodes(bytes(frame))
    except BadRequest:
        return
    assert all(isinstance(node, TreeNode) for node in nodes)


@pytest.mark.parametrize(("count", "tiers"), [(TREE_NODES_MAX + 1, 0), (TREE_NODES_MAX, 12)], ids=["nodes", "bytes"])
def test_tree_that_fits_no_frame_is_refused(count: int, tiers: int) -> None:
    """More nodes or bytes than a frame may have are an error that says what to ask for, not a dropped connection."""
    names = {f"replica {number}".ljust(128): 1 for number in range(tiers)}
    node = TreeNode(level=1, key=bytes(16), start=0, blocks=1, tiers=names, loading=0, pins=0, children=0, hidden=0)
    assert unpack_tree_nodes(pack_tree_nodes([node] * 2000)) == [node] * 2000
    with pytest.raises(BadRequest, match="fewer levels") as caught:
        pack_tree_nodes([node] * count)
    assert caught.value.code == ErrorCode.OVERSIZE
