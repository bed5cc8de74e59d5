"""Bad input of every kind at the real socket: one typed reply each, and a sound daemon afterwards."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest

from kvcached_client import Admin, Client
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.transport.attach import identify
from kvcached_client.types import pack_ranges
from tests.daemon.conftest import RunningDaemon, started
from tests.rpc.raw_peer import RawPeer

#: A peer whose requests the daemon has not read for so long has sent all that the daemon takes.
UNREAD_PATIENCE_S = 1
#: Messages of a hostile peer, how many of them are on their way at once, and what they may cost in all.
MUTATED = 100_000
AT_ONCE = 200
GROWTH_BYTES_MAX = 8 << 20


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon for every bad message: it must survive them all."""
    with started(tmp_path_factory.mktemp("bad")) as running:
        yield running


@pytest.fixture
def peer(shared_daemon: RunningDaemon) -> Iterator[RawPeer]:
    """A raw connection; after the test the daemon answers others, and its invariants hold."""
    with RawPeer(shared_daemon.run_dir / "rpc.sock") as raw:
        yield raw
    with Admin.connect(shared_daemon.run_dir) as admin:
        assert admin.check().violations == ()
        assert admin.stats().pools[0].leases == 0


def header(**fields: object) -> bytes:
    return bytes(msgpack.packb(fields))


ACQUIRE = {"op": "acquire", "id": 5, "epoch": 1, "request": "r", "tokens": 8}
KEYS = bytes(32)
TOKEN = bytes(32)
TRANSFER_DONE = wire.TransferDone(id=7, session=1, token=TOKEN, kind="load", transfer=1, shard=0)
#: Of sessions that there are none of.
OFFLOAD: list[wire.Request] = [
    wire.HelloOffload(
        id=5,
        version_min=1,
        version_max=1,
        member=TOKEN,
        engine="e",
        instance=KEYS[:16],
        label="m",
        keyspace=KEYS,
        block_size=4,
        shards=2,
        block_bytes=64,
        fingerprint=KEYS[16:],
    ),
    wire.PrepareLoad(id=5, epoch=1, lease=1, start=0, blocks=1),
    wire.PrepareStore(id=5, epoch=1, lease=1, start=0),
    TRANSFER_DONE,
    wire.Clear(id=5, epoch=1),
]


@pytest.mark.parametrize(
    ("parts", "code", "request_id"),
    [
        ([b""], "malformed", 0),
        ([b"\xc1"], "malformed", 0),
        ([os.urandom(64)], "malformed", 0),
        ([header(op="teleport", id=9)], "unknown_verb", 9),
        ([header(id=9)], "malformed", 9),
        ([header(op="stats")], "malformed", 0),
        ([header(op="stats", id="9")], "malformed", 0),
        ([header(op="stats", id=9.0)], "malformed", 0),
        ([header(op="stats", id=True)], "malformed", 0),
        ([header(op="stats", id=-1)], "malformed", 0),
        ([header(op="stats", id=1 << 63)], "malformed", 0),
        ([header(op="stats", id=9, extra=1)], "malformed", 9),
        ([header(op="stats", id=9), b""], "bad_frames", 9),
        ([header(**ACQUIRE)], "bad_frames", 5),
        ([header(**ACQUIRE), KEYS, KEYS], "bad_frames", 5),
        ([header(**ACQUIRE), b"x" * 17], "bad_frames", 5),
        ([header(**ACQUIRE), bytes(16 * 65_537)], "bad_frames", 5),
        ([header(**{**ACQUIRE, "request": ""}), KEYS], "malformed", 5),
        ([header(**{**ACQUIRE, "request": "r" * 257}), KEYS], "malformed", 5),
        ([header(**{**ACQUIRE, "tokens": -1}), KEYS], "malformed", 5),
        ([header(**{**ACQUIRE, "tokens": (1 << 20) + 1}), KEYS], "malformed", 5),
        ([header(**ACQUIRE), KEYS], "no_session", 5),
        ([wire.encode(TRANSFER_DONE)], "no_session", 7),
        ([wire.encode(TRANSFER_DONE), bytes(5)], "bad_frames", 7),
        ([wire.encode(TRANSFER_DONE), bytes(4), bytes(4)], "bad_frames", 7),
        ([wire.encode(TRANSFER_DONE), bytes(4)], "no_session", 7),
        ([header(op="stats", id=9, pad="x" * 17_000)], "oversize", 0),
        ([header(op="stats", id=9)] + [b""] * 8, "bad_frames", 9),
        ([header(op="stats", id=9)] + [b""] * 5000, "bad_frames", 9),
        ([b"\x91" * 10_000], "malformed", 0),
        ([b"\xdd\xff\xff\xff\xff"], "malformed", 0),
        ([b"\xdf\xff\xff\xff\xff"], "malformed", 0),
    ],
)
def test_malformed_message_gets_one_typed_error(peer: RawPeer, parts: list[bytes], code: str, request_id: int) -> None:
    """Random bytes, unknown verbs, wrong types and oversize headers are answered, under their id if it can be read."""
    reply = peer.error(*parts)

    assert (reply.code, reply.id) == (code, request_id)
    assert reply.message
    assert reply.fix


def test_message_without_a_header_is_answered(peer: RawPeer) -> None:
    """A message of a single empty part is malformed like any other; the connection goes on."""
    assert peer.error(b"").code is ErrorCode.MALFORMED
    assert isinstance(peer.ask(header(op="stats", id=3)), wire.StatsReport)


def test_random_messages_are_each_answered_once(peer: RawPeer) -> None:
    """Three thousand random and mutated messages get as many replies, none of them fatal."""
    rng = random.Random(1)
    sound = [header(**ACQUIRE), *map(wire.encode, OFFLOAD)]
    for number in range(3000):
        mutated = bytearray(rng.choice(sound))
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        first = bytes(mutated) if number % 2 else rng.randbytes(rng.randrange(80))
        peer.error(first, *[rng.randbytes(16) for _ in range(rng.randrange(3))])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundred_thousand_mutated_messages_cost_no_memory(shared_daemon: RunningDaemon, peer: RawPeer) -> None:
    """Each is answered once, be it refused or, by chance, sound; the daemon is as large as after the first thousand."""
    rng = random.Random(2)
    sound = [header(**ACQUIRE), *map(wire.encode, OFFLOAD)]
    status = Path(f"/proc/{shared_daemon.process.pid}/statm")
    pages = []
    for _ in range(MUTATED // AT_ONCE):
        for _ in range(AT_ONCE):
            mutated = bytearray(rng.choice(sound))
            for _ in range(rng.randrange(1, 4)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            peer.send(bytes(mutated), *[rng.randbytes(16) for _ in range(rng.randrange(3))])
        assert all(peer.receive() for _ in range(AT_ONCE))
        pages.append(int(status.read_text().split()[1]))

    assert (max(pages) - pages[1000 // AT_ONCE]) * os.sysconf("SC_PAGESIZE") <= GROWTH_BYTES_MAX


def test_frame_beyond_its_limit_is_answered_and_skipped(peer: RawPeer) -> None:
    """A frame over the limit gets `oversize`, and what its connection says next is served."""
    reply = peer.error(header(**ACQUIRE), bytes(wire.FRAME_SIZE_BYTES_MAX + 1))

    assert (reply.code, reply.id) == (ErrorCode.OVERSIZE, 5)
    assert isinstance(peer.ask(header(op="stats", id=3)), wire.StatsReport)


def test_message_without_an_end_ends_its_own_connection(shared_daemon: RunningDaemon, peer: RawPeer) -> None:
    """A message of so many parts that it is none is refused, and its connection closed; the others are served."""
    with Admin.connect(shared_daemon.run_dir) as admin:
        before = admin.stats().counters.get("disconnects", 0)
        assert peer.error(header(**ACQUIRE), *[b""] * 10_000).code is ErrorCode.BAD_FRAMES
        after = before
        for _ in range(1000):
            after = admin.stats().counters.get("disconnects", 0)
            if after > before:
                break

    assert after > before


def test_hello_of_another_version_is_refused(shared_daemon: RunningDaemon, peer: RawPeer) -> None:
    """A client that is more than one version away is told which versions meet."""
    attached, identified = identify(shared_daemon.run_dir, deadline_ms=5000)
    hello = wire.Hello(id=1, version_min=7, version_max=9, member=identified.member, replica="default")

    reply = peer.error(wire.encode(hello))

    assert (reply.code, "7 to 9" in reply.message) == (ErrorCode.UNSUPPORTED_VERSION, True)
    attached.close()


def test_wrong_requests_of_a_session_are_refused_by_name(shared_daemon: RunningDaemon, peer: RawPeer) -> None:
    """Foreign lease, double release, unknown slot, wrong order and stale epoch each get their own code."""
    attached, identified = identify(shared_daemon.run_dir, deadline_ms=5000)
    hello = wire.Hello(id=1, version_min=1, version_max=1, member=identified.member, replica="default")
    welcome = peer.ask(wire.encode(hello))
    assert isinstance(welcome, wire.Welcome)
    epoch = welcome.epoch
    acquire = wire.Acquire(id=2, epoch=epoch, request="r", tokens=8, full=True)
    acquired = peer.ask(wire.encode(acquire), KEYS)
    assert isinstance(acquired, wire.Acquired)
    lease = acquired.lease
    slots = pack_ranges([(15, 2)])
    wrong: list[tuple[wire.Header, list[bytes], ErrorCode]] = [
        (wire.Acquire(id=10, epoch=epoch - 1, request="s", tokens=8), [KEYS], ErrorCode.STALE_EPOCH),
        (wire.Acquire(id=11, epoch=epoch, request="r", tokens=9), [KEYS], ErrorCode.REQUEST_CONFLICT),
        (wire.Acquire(id=12, epoch=epoch, request="t", tokens=1), [KEYS], ErrorCode.BAD_VALUE),
        (wire.Acquire(id=13, epoch=epoch, request="u", tokens=900), [KEYS], ErrorCode.NO_CAPACITY),
        (wire.Release(id=14, epoch=epoch, lease=lease + 100), [], ErrorCode.UNKNOWN_LEASE),
        (wire.Commit(id=15, epoch=epoch, lease=lease, start=0), [KEYS, slots], ErrorCode.UNKNOWN_SLOT),
        (wire.Commit(id=16, epoch=epoch, lease=lease, start=1), [KEYS, slots], ErrorCode.OUT_OF_ORDER),
        (wire.Commit(id=17, epoch=epoch, lease=lease, start=0), [KEYS, b"1234"], ErrorCode.BAD_FRAMES),
    ]
    for request, frames, code in wrong:
        reply = peer.error(wire.encode(request), *frames)
        assert (reply.code, reply.id) == (code, request.id)
    peer.ask(wire.encode(wire.Release(id=20, epoch=epoch, lease=lease)))
    again = peer.error(wire.encode(wire.Release(id=21, epoch=epoch, lease=lease)))
    assert again.code is ErrorCode.ALREADY_RELEASED
    peer.ask(wire.encode(wire.Bye(id=22)))
    attached.close()


def test_another_connection_cannot_use_a_session(shared_daemon: RunningDaemon, peer: RawPeer) -> None:
    """A session belongs to the connection that opened it: its lease ids are of no use elsewhere."""
    with Client.connect(shared_daemon.run_dir) as client, client.acquire("r", client.chain(range(8))) as lease:
        release = wire.Release(id=3, epoch=client.epoch, lease=lease.id)

        assert peer.error(wire.encode(release)).code is ErrorCode.NO_SESSION
        assert client.stats().pools[0].leases == 1


def test_stopped_reader_does_not_hold_up_others(shared_daemon: RunningDaemon, peer: RawPeer) -> None:
    """Thousands of unread replies cost their own peer; the daemon keeps answering and its memory stays bounded."""
    status = Path(f"/proc/{shared_daemon.process.pid}/statm")
    before = int(status.read_text().split()[1])
    peer.socket.settimeout(UNREAD_PATIENCE_S)
    with suppress(TimeoutError):  # the daemon reads no more requests of a peer that does not read its replies
        for number in range(10_000):
            peer.send(header(op="describe", id=number))
    with Admin.connect(shared_daemon.run_dir) as admin:
        assert admin.health().ok

    grown_bytes = (int(status.read_text().split()[1]) - before) * os.sysconf("SC_PAGESIZE")
    assert grown_bytes < 64 << 20
