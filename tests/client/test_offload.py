"""The scheduler's side of offload mode, against a daemon that a test writes."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.errors import (
    BadRequest,
    DeadlineExceeded,
    ErrorCode,
    Refused,
    RequestError,
    Stale,
    request_error,
)
from kvcached_client.offload import Offered, OffloadClient, OffloadLayout, PreparedLoad, PreparedStore
from kvcached_client.protocol.engine import (
    EVERY_SHARD,
    Acquire,
    Held,
    HelloOffload,
    LoadPrepared,
    Pin,
    Pinned,
    Prefetch,
    Prefetched,
    PrepareLoad,
    PrepareStore,
    PrepareStores,
    Release,
    Settled,
    StoreOffer,
    StoreOutcome,
    StorePrepared,
    StoresPrepared,
    TransferDone,
    WelcomeOffload,
    error_reply,
)
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, Verify
from tests.client.fake_daemon import SILENCE, TOKEN, FakeDaemon

RANGE = struct.Struct("<2i")


class Script:
    """Answers of offload mode; verbs in `silent` get none the first time."""

    def __init__(self) -> None:
        self.silent: set[type] = set()
        self.heartbeat_interval_ms = 60_000
        self.version = 1
        self.knows_nothing = False
        self.load_blocks = 2  #: of the load that an acquire announces
        self.outcomes_max = 64
        self.refusal: ErrorCode | None = None  #: of releases

    def __call__(self, request: Any, frames: list[bytes]) -> Any:  # noqa: C901, PLR0911 - by verb
        if type(request) in self.silent:
            self.silent.discard(type(request))
            return SILENCE, []
        match request:
            case HelloOffload():
                return self._welcome(request.id), []
            case Acquire() if self.knows_nothing and request.known:
                return error_reply(request.id, request_error(ErrorCode.UNKNOWN_PREFIX, "forgotten", "send all")), []
            case Acquire():
                return self._held(request)
            case PrepareLoad():
                return LoadPrepared(id=request.id, transfer=7, generation=3), [RANGE.pack(4, request.blocks)]
            case PrepareStore():
                header = StorePrepared(id=request.id, transfer=8, depth=2, generation=3)
                return header, [RANGE.pack(0, 2), RANGE.pack(6, 2)]
            case PrepareStores():
                return self._stores(request)
            case TransferDone():
                return Settled(id=request.id), []
            case Release() if self.refusal is not None:
                return error_reply(request.id, request_error(self.refusal, "no", "see")), []
            case Prefetch():
                return Prefetched(id=request.id, blocks=2, fetched=0, is_over=True, reason="stored"), []
            case Pin():
                return Pinned(id=request.id, device=0, host=2), []
        return None

    def _held(self, request: Acquire) -> Any:
        if request.load_from is None:
            return Held(id=request.id, lease=1, hit=2, filling=3), []
        return Held(id=request.id, lease=1, hit=2, transfer=7, generation=3), [RANGE.pack(4, self.load_blocks)]

    def _stores(self, request: PrepareStores) -> Any:
        """Every other offer is refused; the others get a piece of their blocks each, and slots behind each other."""
        outcomes, pieces, slots = [], b"", b""
        for number, offer in enumerate(request.offers):
            if number % 2:
                outcomes.append(StoreOutcome(0, 0, 0, 0, ErrorCode.UNKNOWN_LEASE, f"lease {offer.lease}"))
                continue
            outcomes.append(StoreOutcome(80 + number, offer.start + offer.blocks, 3, 1))
            pieces += RANGE.pack(offer.start, offer.blocks)
            slots += RANGE.pack(10 * number, offer.blocks)
        return StoresPrepared(id=request.id, outcomes=tuple(outcomes[: self.outcomes_max])), [pieces, slots]

    def _welcome(self, request_id: int) -> WelcomeOffload:
        return WelcomeOffload(
            id=request_id,
            version=self.version,
            session=3,
            token=TOKEN,
            daemon_epoch=1,
            epoch=1,
            generation=3,
            namespace=bytes(32),
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            session_ttl_ms=30_000,
            verify=Verify.ALWAYS,
        )


@pytest.fixture
def script(daemon: FakeDaemon) -> Script:
    """What the daemon answers."""
    daemon.script = script = Script()
    return script


def connect(daemon: FakeDaemon, **more: Any) -> OffloadClient:
    layout = OffloadLayout(block_size=16, shards=1, block_bytes=1024, fingerprint=bytes(16))
    return OffloadClient.connect(
        daemon.run_dir, engine="e", instance=bytes(16), keyspace=bytes(32), label="m", layout=layout, **more
    )


@pytest.fixture
def client(daemon: FakeDaemon, script: Script) -> Iterator[OffloadClient]:
    """A client that waits long for what is answered."""
    with connect(daemon, deadline_ms=10_000) as connected:
        yield connected


@contextlib.contextmanager
def missed_deadline(client: OffloadClient) -> Iterator[None]:
    """A call that is not answered, and waits for 300 ms only."""
    channel = client._channel
    patient_ms, channel.deadline_ms = channel.deadline_ms, 300
    with pytest.raises(DeadlineExceeded):
        yield
    channel.deadline_ms = patient_ms


def prepare_load(client: OffloadClient) -> PreparedLoad:
    return client.prepare_load(LeaseId(1), 0, 2)


def prepare_store(client: OffloadClient) -> PreparedStore:
    return client.prepare_store(LeaseId(1), 0, bytes(32))


def test_daemon_of_another_protocol_version_is_refused(daemon: FakeDaemon, script: Script) -> None:
    """A version that the client did not offer is refused when the session opens."""
    script.version = 2
    with pytest.raises(BadRequest, match="chose version 2, not one of 1 to 1"):
        connect(daemon)


def test_answers_say_which_blocks_lie_where(client: OffloadClient) -> None:
    """Slots come as one number for each block, pieces as depth and number of blocks."""
    assert client.acquire("r", bytes(80), 81) == (1, 2, 3, None)
    load, store = prepare_load(client), prepare_store(client)
    assert (load.transfer, load.generation, load.slots.tolist()) == (7, 3, [4, 5])
    assert (store.transfer, store.depth, store.pieces, store.slots.tolist()) == (8, 2, ((0, 2),), [6, 7])


def test_acquire_brings_its_load(client: OffloadClient) -> None:
    """With `load_from`, the lease comes with the slots of the hit's blocks."""
    hold = client.acquire("r", bytes(80), 81, load_from=0)
    assert hold.load is not None
    assert (hold.hit, hold.load.transfer, hold.load.generation, hold.load.slots.tolist()) == (2, 7, 3, [4, 5])


def test_load_of_other_blocks_is_refused(client: OffloadClient, script: Script) -> None:
    """A reply whose load is not of the hit's blocks from `load_from` on is not used."""
    script.load_blocks = 3
    with pytest.raises(BadRequest, match="3 slots for 2 blocks"):
        client.acquire("r", bytes(80), 81, load_from=0)
    with pytest.raises(BadRequest, match="load 7 from 2 on, for a hit of 2"):
        client.acquire("r", bytes(80), 81, load_from=2)


def test_load_of_an_acquire_that_was_granted_too_late_is_called_off(client: OffloadClient, daemon: FakeDaemon) -> None:
    """Nobody reads the slots of a lease that nobody holds: its release says so."""
    daemon.replies_together = 2
    with missed_deadline(client):
        client.acquire("r", bytes(80), 81, load_from=0)
    client.settle()
    daemon.replies_together = 1
    client.acquire("other", bytes(80), 81)  # comes behind the release
    (release,) = daemon.of(Release)
    assert isinstance(release, Release)
    assert (release.lease, release.call_off, release.reply) == (1, 7, False)


def test_copies_that_were_granted_too_late_are_called_off(
    daemon: FakeDaemon, script: Script, client: OffloadClient
) -> None:
    """A preparation that was not answered in time is asked for again with its id, and what it granted is given back."""
    script.silent = {PrepareLoad, PrepareStore}
    with missed_deadline(client):
        prepare_load(client)
    with missed_deadline(client):
        prepare_store(client)

    prepare_load(client)

    first, again, _ = daemon.of(PrepareLoad)
    assert first == again
    first_store, again_store = daemon.of(PrepareStore)
    assert first_store == again_store
    load, store = daemon.of(TransferDone)
    assert isinstance(load, TransferDone)
    assert isinstance(store, TransferDone)
    assert (load.kind, load.transfer, load.shard) == ("load", 7, EVERY_SHARD)
    assert (store.kind, store.transfer, store.shard, store.error) == (
        "store",
        8,
        EVERY_SHARD,
        "the answer came too late",
    )


@pytest.mark.parametrize("where", ["_send", "_wait_for_reply"])
@pytest.mark.parametrize(("verb", "prepare"), [(PrepareLoad, "load"), (PrepareStore, "store")])
def test_copy_whose_preparation_was_interrupted_is_called_off(
    daemon: FakeDaemon, client: OffloadClient, monkeypatch: pytest.MonkeyPatch, where: str, verb: type, prepare: str
) -> None:
    """After Ctrl-C in a preparation that was sent, the next call finds out what it granted, and gives that back."""
    interrupted = getattr(client._channel, where)

    def interrupt(*args: Any) -> None:
        interrupted(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._channel, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            (prepare_load if prepare == "load" else prepare_store)(client)

    client.settle()

    first, again = daemon.of(verb)
    assert first == again
    (done,) = daemon.of(TransferDone)
    assert isinstance(done, TransferDone)
    assert (done.kind, done.transfer) == (prepare, 7 if prepare == "load" else 8)


def test_settling_calls_off_what_was_granted_too_late(
    daemon: FakeDaemon, script: Script, client: OffloadClient
) -> None:
    """Settling gives back copies that were granted too late without another copy to ask for."""
    script.silent = {PrepareStore}
    with missed_deadline(client):
        prepare_store(client)

    client.settle()

    (store,) = daemon.of(TransferDone)
    assert isinstance(store, TransferDone)
    assert store.transfer == 8


def test_late_preparation_that_was_refused_holds_nothing(
    daemon: FakeDaemon, script: Script, client: OffloadClient
) -> None:
    """Where the daemon had refused what it did not answer in time, there is nothing to call off."""
    script.silent = {PrepareStore}
    with missed_deadline(client):
        prepare_store(client)
    gone = request_error(ErrorCode.ALREADY_RELEASED, "lease 1 has been released", "acquire again")
    daemon.script = lambda request, frames: (
        (error_reply(request.id, gone), []) if isinstance(request, PrepareStore) else script(request, frames)
    )

    assert prepare_load(client).transfer == 7
    assert not daemon.of(TransferDone)


def test_end_of_the_session_is_told_at_once(daemon: FakeDaemon, script: Script) -> None:
    """An engine without requests hears by its heartbeats that its session is over."""
    script.heartbeat_interval_ms = 10
    over = request_error(ErrorCode.NO_SESSION, "no session 3", "attach again")
    told = threading.Event()

    def answer(request: Any, frames: list[bytes]) -> Any:
        if isinstance(request, HelloOffload):
            return script(request, frames)
        return error_reply(request.id, over), []

    daemon.script = answer
    with connect(daemon, on_stale=told.set) as client:
        assert told.wait(10)
        assert not client.is_alive
        with pytest.raises(Stale):
            client.match(bytes(16), 17)
    assert msgspec.structs.asdict(client.session)["id"] == 3


def test_requests_may_be_sent_before_the_first_answer_is_fetched(client: OffloadClient, daemon: FakeDaemon) -> None:
    """Several requests are out at once, and each gets its own answer, in whatever order they are fetched."""
    acquire = client.begin_acquire("r", bytes(80), 81)
    store = client.begin_prepare_store(LeaseId(1), 0, bytes(32))
    load = client.begin_prepare_load(LeaseId(1), 0, 2)
    assert load.result().slots.tolist() == [4, 5]
    assert store.result().depth == 2
    assert acquire.result() == (1, 2, 3, None)
    kinds = [
        type(request) for request, _ in daemon.requests if isinstance(request, Acquire | PrepareLoad | PrepareStore)
    ]
    assert kinds == [Acquire, PrepareStore, PrepareLoad]


@pytest.mark.parametrize("kind", [bytearray, lambda keys: memoryview(bytearray(keys)), memoryview])
def test_keys_are_those_that_were_given(
    daemon: FakeDaemon, client: OffloadClient, kind: Callable[[bytes], Any]
) -> None:
    """Keys in memory that may be written to are copied when they are given: leases and copies go by these."""
    keys = b"".join(number.to_bytes(KEY_SIZE_BYTES, "big") for number in range(1, 101))
    given = kind(keys)
    acquire = client.begin_acquire("r", given, 100 * 16)
    store = client.begin_prepare_store(LeaseId(1), 0, kind(keys[:32]))
    match, prefetch = client.begin_match(given, 100 * 16), client.begin_prefetch(given, 100 * 16)
    stores = client.begin_prepare_stores([Offered(LeaseId(1), 0, given)])
    if not memoryview(given).readonly:
        given[:] = bytes(len(keys))
    assert acquire.result() == (1, 2, 3, None)
    assert (match.result(), prefetch.result().blocks) == (0, 2)
    job = store.result().job(kind(keys), range(2))
    assert BlockJob.from_bytes(job.to_bytes()).spans[0].keys == keys[:32]
    assert isinstance(stores.result()[0], PreparedStore)
    frames = [sent for request, sent in daemon.requests if not isinstance(request, HelloOffload)]
    assert frames == [[keys], [keys[:32]], [keys], [keys], [keys]]
    assert client.pin(kind(keys), ttl_ms=1000) == 2


def test_next_turn_sends_the_keys_behind_the_last_prompt(
    daemon: FakeDaemon, script: Script, client: OffloadClient
) -> None:
    """A prompt that begins with an acquired one sends the keys behind that; all if the daemon has forgotten it."""
    keys = b"".join(number.to_bytes(KEY_SIZE_BYTES, "big") for number in range(1, 101))
    client.acquire("turn 1", keys[: 80 * KEY_SIZE_BYTES], 80 * 16)
    assert client.acquire("turn 2", keys, 100 * 16) == (1, 2, 3, None)
    script.knows_nothing = True
    assert client.acquire("turn 2 again", keys, 100 * 16) == (1, 2, 3, None)
    acquires = [(request.known, frames[0]) for request, frames in daemon.requests if isinstance(request, Acquire)]
    first, behind, last = keys[: 80 * KEY_SIZE_BYTES], keys[79 * KEY_SIZE_BYTES :], keys[-KEY_SIZE_BYTES:]
    assert acquires == [(0, first), (80, behind), (100, last), (0, keys)]


def test_release_may_be_posted(client: OffloadClient, daemon: FakeDaemon) -> None:
    """A posted release asks for no answer, and later requests go on."""
    client.post_release(LeaseId(1))
    assert client.acquire("r", bytes(80), 81) == (1, 2, 3, None)
    (release,) = daemon.of(Release)
    assert isinstance(release, Release)
    assert (release.lease, release.reply) == (1, False)


def test_release_may_be_repeated(client: OffloadClient, script: Script) -> None:
    """A release that got no reply in time may have taken effect: repeated, it is no error. Other refusals are."""
    script.silent = {Release}
    with missed_deadline(client):
        client.release(LeaseId(1))
    script.refusal = ErrorCode.ALREADY_RELEASED
    client.release(LeaseId(1))
    script.refusal = ErrorCode.FOREIGN_LEASE
    with pytest.raises(Refused, match="foreign_lease"):
        client.release(LeaseId(1))


def test_engine_pins_in_its_own_namespace(client: OffloadClient, daemon: FakeDaemon) -> None:
    """An engine need not know how its namespace is called to keep blocks there."""
    assert client.pin(bytes(32), ttl_ms=5000) == 2
    ((request, frames),) = [each for each in daemon.requests if isinstance(each[0], Pin)]
    assert isinstance(request, Pin)
    assert (request.target, request.ttl_ms, frames) == ("00" * 32, 5000, [bytes(32)])


def test_copy_that_was_begun_and_granted_too_late_is_called_off(
    client: OffloadClient, daemon: FakeDaemon, script: Script
) -> None:
    """A copy whose answer was not fetched in time is called off with the next one, as one that was waited for."""
    script.silent.add(PrepareStore)
    with missed_deadline(client):
        client.begin_prepare_store(LeaseId(1), 0, bytes(32)).result()
    assert prepare_store(client).transfer == 8
    assert [request.transfer for request in daemon.of(TransferDone) if isinstance(request, TransferDone)] == [8]


OFFERS = [
    Offered(LeaseId(lease), start, bytes(16 * blocks)) for lease, start, blocks in ((1, 0, 2), (2, 5, 1), (3, 4, 3))
]


def test_offers_of_several_leases_go_in_one_message(client: OffloadClient, daemon: FakeDaemon) -> None:
    """Each offer gets its own slots, or its own error; leases are given back in the same message."""
    first, refused, last = client.begin_prepare_stores(OFFERS, [LeaseId(9)]).result()
    assert isinstance(first, PreparedStore)
    assert isinstance(last, PreparedStore)
    assert (first.transfer, first.depth, first.pieces, first.slots.tolist()) == (80, 2, ((0, 2),), [0, 1])
    assert (last.transfer, last.depth, last.pieces, last.slots.tolist()) == (82, 7, ((4, 3),), [20, 21, 22])
    assert isinstance(refused, RequestError)
    assert (refused.code, "lease 2" in str(refused)) == (ErrorCode.UNKNOWN_LEASE, True)
    ((request, frames),) = [each for each in daemon.requests if isinstance(each[0], PrepareStores)]
    assert isinstance(request, PrepareStores)
    assert request.offers == (StoreOffer(1, 0, 2), StoreOffer(2, 5, 1), StoreOffer(3, 4, 3))
    assert (request.releases, frames) == ((9,), [bytes(6 * 16)])


def test_answer_to_other_offers_is_refused(client: OffloadClient, script: Script) -> None:
    """A reply that is not for as many offers is not used."""
    script.outcomes_max = 2
    with pytest.raises(BadRequest, match="2 of 3 offers"):
        client.begin_prepare_stores(OFFERS).result()


def test_offers_that_were_granted_too_late_are_called_off(
    daemon: FakeDaemon, script: Script, client: OffloadClient
) -> None:
    """What a message granted too late is asked for again with its id, and every copy of it is called off."""
    script.silent = {PrepareStores}
    with missed_deadline(client):
        client.begin_prepare_stores(OFFERS).result()

    client.settle()

    first, again = daemon.of(PrepareStores)
    assert first == again
    assert [request.transfer for request in daemon.of(TransferDone) if isinstance(request, TransferDone)] == [80, 82]
