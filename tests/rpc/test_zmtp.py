"""What a peer's bytes become, however they are cut; none of them makes the daemon keep more than a message."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import zmtp
from kvcached_client.protocol.engine import FRAME_COUNT_MAX, FRAME_SIZE_BYTES_MAX, MESSAGE_SIZE_BYTES_MAX
from kvcached_client.protocol.zmtp import (
    GREETING,
    PUBLISHER,
    SUBSCRIBER,
    Message,
    Reader,
    Subscription,
    encode_message,
    subscribe,
)
from tests.rpc.raw_peer import READY, frame

MESSAGES_MAX = 1 << 20


def long_head(flags: int, size: int) -> bytes:
    return struct.pack(">BQ", flags | 2, size)


def ready() -> Reader:
    """A reader whose peer has shaken hands."""
    reader = Reader()
    assert reader.read(GREETING + READY, 1) == []
    assert reader.is_ready
    reader.commands.clear()
    return reader


def read_all(reader: Reader, data: bytes) -> list[Message]:
    """Every message in `data`."""
    messages = reader.read(data, MESSAGES_MAX)
    while reader.has_more:
        messages += reader.read(b"", MESSAGES_MAX)
    return messages


def test_publisher_hears_what_subscribers_want() -> None:
    """Subscriptions are commands of a subscriber; a socket that does not publish ends a connection that sends them."""
    cancel = subscribe(b"a").replace(b"\x09SUBSCRIBE", b"\x06CANCEL").replace(b"\x04\x0b", b"\x04\x08")
    publisher = Reader(PUBLISHER)

    assert publisher.read(GREETING + SUBSCRIBER.ready + subscribe(b"a") + subscribe(b"") + cancel, 1) == []

    assert publisher.commands == [PUBLISHER.ready]
    assert publisher.subscriptions == [Subscription(b"a", True), Subscription(b"", True), Subscription(b"a", False)]
    router = ready()
    router.read(subscribe(b"a"), 1)
    assert router.violation is not None


@pytest.mark.parametrize("seed", range(20))
def test_messages_survive_every_cut(seed: int) -> None:
    """Messages of all sizes come out as they were, whatever pieces they arrive in, however few are taken at once."""
    rng = random.Random(seed)
    sizes = [0, 1, 255, 256, 5000, 70_000]
    sent = [[rng.randbytes(rng.choice(sizes)) for _ in range(rng.randrange(1, 9))] for _ in range(12)]
    stream = GREETING + READY + b"".join(map(encode_message, sent))
    reader, came = Reader(), []
    at = 0
    while at < len(stream):
        size = rng.choice([1, 2, 7, 63, 4096, 65_536])
        came += reader.read(memoryview(stream)[at : at + size], rng.randrange(1, 4))
        at += size
        while reader.has_more and rng.random() < 0.7:
            came += reader.read(b"", 1)
    came += read_all(reader, b"")

    assert [message.parts for message in came] == sent
    assert reader.violation is None
    assert reader.held_bytes == 0


def test_many_parts_become_one_error_at_once() -> None:
    """The ninth part is the error, before the others come; they are skipped, and the next message is served."""
    reader = ready()
    start = frame(1, b"header") + frame(1, b"") * FRAME_COUNT_MAX
    (message,) = read_all(reader, start)
    assert message.error is not None
    assert (message.error.code, message.parts[0]) == (ErrorCode.BAD_FRAMES, b"header")

    assert read_all(reader, frame(1, b"x" * 200) * 5000 + frame(0, b"")) == []
    assert reader.held_bytes == 0
    assert [each.parts for each in read_all(reader, frame(0, b"next"))] == [[b"next"]]


def test_large_parts_become_an_error_before_they_come() -> None:
    """A part or a message beyond its size is refused by what its head says, and none of its bytes is kept."""
    for start, rest in (
        (frame(1, b"header") + long_head(0, FRAME_SIZE_BYTES_MAX + 1), FRAME_SIZE_BYTES_MAX + 1),
        (long_head(1, FRAME_SIZE_BYTES_MAX) + bytes(FRAME_SIZE_BYTES_MAX) + long_head(1, FRAME_SIZE_BYTES_MAX)
         + bytes(FRAME_SIZE_BYTES_MAX) + long_head(0, 300), 300),
    ):  # fmt: skip
        reader = ready()
        (message,) = read_all(reader, start)
        assert message.error is not None
        assert message.error.code is ErrorCode.OVERSIZE
        assert reader.held_bytes == 0
        assert read_all(reader, bytes(rest - 1)) == []
        assert reader.held_bytes == 0
        assert [each.parts for each in read_all(reader, b"x" + frame(0, b"next"))] == [[b"next"]]


@pytest.mark.parametrize(
    "endless",
    [
        frame(1, b"") * 512,
        long_head(1, FRAME_SIZE_BYTES_MAX) + bytes(FRAME_SIZE_BYTES_MAX),
        long_head(1, 1 << 62) + bytes(1000),
    ],
    ids=["empty parts", "large parts", "a part"],
)
def test_endless_message_is_one_error_and_the_end(endless: bytes) -> None:
    """A message without an end is refused once, and its connection is over soon after; nothing of it is kept."""
    reader, came, sent = ready(), [], 0
    while reader.violation is None:
        came += read_all(reader, endless)
        assert reader.held_bytes <= MESSAGE_SIZE_BYTES_MAX
        sent += len(endless)

    assert len(came) == 1
    assert sent <= zmtp.SKIPPED_BYTES_MAX + MESSAGE_SIZE_BYTES_MAX + 2 * len(endless)
    assert reader.held_bytes <= len(endless)


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(9),
        GREETING[:10] + b"\x02" + GREETING[11:],
        GREETING[:12] + b"PLAIN".ljust(20, b"\0") + GREETING[32:],
        GREETING + frame(0, b"message"),
        GREETING + frame(4, b"\x05HELLO"),
        GREETING + frame(4, b""),
        GREETING + frame(5, READY[2:]),
        GREETING + frame(4, READY[2:-6] + b"SUBBER"),
        GREETING + frame(4, READY[2:-1]),
        GREETING + frame(4, READY[2:] + b"\xff"),
        GREETING + long_head(4, zmtp.COMMAND_SIZE_BYTES_MAX + 1),
        GREETING + frame(8, b""),
        GREETING + READY + READY,
        GREETING + READY + frame(4, b"\x09SUBSCRIBE"),
        GREETING + READY + frame(4, b"\x04PING" + bytes(19)),
        GREETING + READY + frame(4, b"\x04PING" + bytes(1)),
    ],
)
def test_what_is_no_zmtp_ends_the_connection(hello: bytes) -> None:
    """Another protocol, version, mechanism, socket type or command, and a message before its time, are cut off."""
    reader = Reader()

    assert reader.read(hello, MESSAGES_MAX) == []
    assert reader.violation is not None


def test_heartbeats_are_answered_between_parts() -> None:
    """A PING, between two parts as well, is answered by a PONG with its context; a PONG is not."""
    reader = ready()
    ping = frame(4, b"\x04PING\x00\x0acontext")
    (message,) = read_all(reader, frame(1, b"a") + ping + frame(4, b"\x04PONG") + frame(0, b"b"))

    assert message.parts == [b"a", b"b"]
    assert reader.commands == [frame(4, b"\x04PONGcontext")]


def _flip(rng: random.Random, stream: bytearray) -> None:
    stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, stream: bytearray) -> None:
    at = rng.randrange(len(stream))
    del stream[at : at + rng.randrange(1, 20)]


def _insert(rng: random.Random, stream: bytearray) -> None:
    at = rng.randrange(len(stream))
    stream[at:at] = rng.randbytes(rng.randrange(1, 20))


@pytest.mark.parametrize("seed", range(40))
def test_mutated_streams_are_bounded(seed: int) -> None:
    """Of a stream with bytes changed, cut out or put in, nothing raises, and no more is kept than is allowed."""
    rng = random.Random(seed)
    mutations: list[Callable[[random.Random, bytearray], None]] = [_flip, _cut, _insert]
    for _ in range(50):
        messages = [[rng.randbytes(rng.choice([0, 3, 300])) for _ in range(rng.randrange(1, 12))] for _ in range(5)]
        stream = bytearray(GREETING + READY + b"".join(map(encode_message, messages)))
        for _ in range(rng.randrange(1, 6)):
            rng.choice(mutations)(rng, stream)
        reader, at = Reader(), 0
        while at < len(stream) and reader.violation is None:
            size = rng.randrange(1, 400)
            for message in read_all(reader, bytes(stream[at : at + size])):
                assert len(message.parts) <= FRAME_COUNT_MAX
            at += size
            assert reader.held_bytes <= min(at, MESSAGE_SIZE_BYTES_MAX + 9)
