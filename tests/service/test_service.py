"""Requests and deaths at the service, without a socket: one answer each, and nothing left behind."""

from __future__ import annotations

import asyncio
import socket
from array import array
from pathlib import Path

import pytest

from kvcached.core.insight.invariants import check
from kvcached.core.messages import Ticked, WorkerDied
from kvcached.core.slots.states import SlotState
from kvcached.process import notify
from kvcached.service.health import HealthChecks
from kvcached.service.pending import Answer
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import Joined
from kvcached_client.types import SessionId, ShardIndex, pack_ranges, unpack_ranges
from tests.service.office import EPOCH, LAYOUT, ONE, SLOTS, TWO, FakePeer, Office, key_chain


def test_hello_needs_a_living_process() -> None:
    """A member token that nobody holds, or whose process is dead, opens nothing."""
    office, process = Office(), FakePeer(1)
    forged = wire.Hello(id=1, version_min=1, version_max=1, member=bytes(32), replica="a")
    hello = office.hello(process)
    process.dead = True

    assert office.error(forged) is ErrorCode.UNAUTHENTICATED
    assert office.error(hello) is ErrorCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("replica", "layout", "version", "code"),
    [
        ("b", "", 1, ErrorCode.UNKNOWN_REPLICA),
        ("a", "00" * 16, 1, ErrorCode.WRONG_LAYOUT),
        ("a", "", 2, ErrorCode.UNSUPPORTED_VERSION),
    ],
)
def test_hello_refuses_what_does_not_fit(replica: str, layout: str, version: int, code: ErrorCode) -> None:
    """Unknown replica, another layout and another version are told apart, and open nothing."""
    office = Office()

    assert office.error(office.hello(FakePeer(1), replica, layout=layout, version=version)) is code
    assert office.cache.managed.sessions == {}


def test_hello_tells_what_an_engine_needs() -> None:
    """The welcome names layout, slots, epochs and the root of all keys; the right fingerprint is accepted."""
    office = Office()
    welcome = office.expect(wire.Welcome, office.hello(FakePeer(1), layout=LAYOUT.fingerprint()))

    assert (welcome.layout, welcome.slots, welcome.epoch, welcome.namespace) == (LAYOUT, SLOTS, EPOCH, b"n" * 32)


def test_pool_belongs_to_one_engine_at_a_time() -> None:
    """While another process of the old session lives, a newcomer is refused by name; after its death it takes over."""
    office, old, new = Office(), FakePeer(1), FakePeer(2)
    office.enter(old)
    office.store(key_chain(4))
    refused = office.expect(wire.ErrorReply, office.hello(new), peer=TWO)
    old.dead = True
    office.service.peer_lost(old)

    assert (refused.code, "[1]" in refused.message) == (ErrorCode.POOL_BUSY, True)
    office.enter(new, peer=TWO)
    match = wire.Match(id=office.next_id(), epoch=EPOCH, tokens=16, full=True)
    assert office.expect(wire.Matched, match, key_chain(4), peer=TWO).device == 4


def test_busy_pool_is_explained_by_who_holds_it() -> None:
    """A process is told of its own client that was not closed; of processes that are not seen only where there are."""
    office, process = Office(), FakePeer(1)
    office.enter(process)
    own = office.expect(wire.ErrorReply, office.hello(process), peer=TWO)
    other = office.expect(wire.ErrorReply, office.hello(FakePeer(2)), peer=b"three")
    unseen = Office()
    unseen.enter(FakePeer(0))
    hidden = unseen.expect(wire.ErrorReply, unseen.hello(FakePeer(2)), peer=TWO)

    texts = [reply.message + reply.fix for reply in (own, other, hidden)]
    assert ["a client of it was not closed, or was interrupted" in text for text in texts] == [True, False, False]
    assert ["process 0 is not seen here" in text for text in texts] == [False, False, True]
    assert {reply.code for reply in (own, other, hidden)} == {ErrorCode.POOL_BUSY}


def test_active_session_is_not_replaced_even_by_its_own_process() -> None:
    """A second hello of the same process is refused, on any connection, until the first session has said bye."""
    office, process = Office("a", "b"), FakePeer(1)
    office.enter(process)
    office.ask(office.acquire(key_chain(4)), key_chain(4))

    assert office.error(office.hello(process), peer=TWO) is ErrorCode.POOL_BUSY
    assert office.error(office.hello(process)) is ErrorCode.POOL_BUSY
    assert office.error(office.hello(process, "b")) is ErrorCode.POOL_BUSY  # one session per connection
    assert office.cache.pools["a"].free == SLOTS - 4
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))
    office.enter(process, peer=TWO)
    assert office.cache.pools["a"].free == SLOTS


def test_expired_session_is_replaced_by_its_own_process_which_stays_watched() -> None:
    """Saying hello again is a process's word that its expired session is over; its later death is still seen."""
    office, process = Office(), FakePeer(1)
    hello = office.hello(process)
    office.expect(wire.Welcome, hello)
    grant = office.ask(office.acquire(key_chain(4)), key_chain(4))
    commit = wire.Commit(id=office.next_id(), epoch=EPOCH, lease=grant.header.lease, start=0, fence=9)  # type: ignore[attr-defined]
    office.expect(wire.Committed, commit, key_chain(4), grant.frames[1])
    for now_ms in (1, 500, 1000, 1001):
        office.service.on_event(Ticked(now_ms))
    office.enter(process, peer=TWO)

    assert office.forgotten == []
    assert office.cache.pools["a"].free == SLOTS  # blocks under the fence that never signalled are gone, too
    office.ask(office.acquire(key_chain(4)), key_chain(4), peer=TWO)
    process.dead = True
    office.service.peer_lost(process)
    assert office.cache.pools["a"].free == SLOTS


def test_processes_without_visible_pids_are_never_taken_for_one() -> None:
    """Where the daemon sees no pids (another pid namespace), two processes are two."""
    office = Office()
    office.enter(FakePeer(0))

    assert office.error(office.hello(FakePeer(0)), peer=TWO) is ErrorCode.POOL_BUSY


def test_bye_while_shards_live_frees_nothing_yet() -> None:
    """A goodbye is the scheduler's word, not its shards': their slots are free when they are dead."""
    office, scheduler, shard = Office(), FakePeer(1), FakePeer(2)
    welcome = office.enter(scheduler)
    office.service.join(shard, SessionId(welcome.session), welcome.token, ShardIndex(0))
    office.ask(office.acquire(key_chain(4)), key_chain(4))
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))

    assert office.count("a", SlotState.QUARANTINED) == 4
    assert office.forgotten == [scheduler]
    assert office.error(office.hello(FakePeer(3)), peer=TWO) is ErrorCode.POOL_BUSY
    shard.dead = True
    office.service.peer_lost(shard)
    assert office.cache.pools["a"].free == SLOTS


def test_shard_joins_with_the_session_token_only() -> None:
    """The right token gets the shard's descriptors; a wrong one, an unknown session and a missing shard get none."""
    office = Office()
    welcome = office.enter(FakePeer(1))
    session, shard = SessionId(welcome.session), ShardIndex(1)

    joined, descriptors = office.service.join(FakePeer(2), session, welcome.token, shard)
    assert isinstance(joined, Joined)
    assert (joined.shard, joined.pool_bytes, descriptors) == (1, LAYOUT.pool_bytes(SLOTS), (1001, 2001))
    for wrong_session, token, wrong_shard, code in (
        (session, bytes(32), shard, "no_session"),
        (SessionId(99), welcome.token, shard, "no_session"),
        (session, welcome.token, ShardIndex(2), "bad_value"),
    ):
        with pytest.raises(RequestError, match=code):
            office.service.join(FakePeer(3), wrong_session, token, wrong_shard)


def test_slots_wait_for_the_last_process_of_a_group() -> None:
    """When the scheduler dies its slots are quarantined; when the last shard process is dead they are free."""
    office, scheduler, shard = Office(), FakePeer(1), FakePeer(2)
    welcome = office.enter(scheduler)
    office.service.join(shard, SessionId(welcome.session), welcome.token, ShardIndex(0))
    office.ask(office.acquire(key_chain(4)), key_chain(4))
    scheduler.dead = True
    office.service.peer_lost(scheduler)

    assert office.count("a", SlotState.QUARANTINED) == 4
    assert office.error(office.hello(FakePeer(3)), peer=TWO) is ErrorCode.POOL_BUSY
    shard.dead = True
    office.service.peer_lost(shard)
    assert office.cache.pools["a"].free == SLOTS
    assert {peer.pid for peer in office.forgotten} == {1, 2}


def test_closed_connection_is_not_death() -> None:
    """A member whose attach connection closed is watched on, and its session works on."""
    office, process = Office(), FakePeer(1)
    office.enter(process)

    assert office.service.peer_closed(process)
    assert not office.service.peer_closed(FakePeer(2))
    office.store(key_chain(2))


def test_retry_with_the_same_id_has_one_effect() -> None:
    """The same request id gets the same reply and the same frames, and takes nothing twice."""
    office = Office()
    office.enter(FakePeer(1))
    request = office.acquire(key_chain(4))
    first = office.ask(request, key_chain(4))
    lease = first.header.lease  # type: ignore[attr-defined]
    release = wire.Release(id=office.next_id(), epoch=EPOCH, lease=lease)

    assert office.ask(request, key_chain(4)) == first
    assert office.cache.pools["a"].free == SLOTS - 4
    assert office.ask(release) == office.ask(release)
    assert office.cache.pools["a"].free == SLOTS


def test_refusal_is_kept_for_a_retry_too() -> None:
    """A retry of a refused allocate gets the refusal again, though there would be room now."""
    office = Office()
    office.enter(FakePeer(1))
    first = office.ask(office.acquire(key_chain(10), "first"), key_chain(10)).header
    second = office.ask(office.acquire(key_chain(6, seed=1), "second"), key_chain(6, seed=1)).header
    allocate = wire.Allocate(id=office.next_id(), epoch=EPOCH, lease=first.lease, blocks=2)  # type: ignore[attr-defined]
    refusal = office.ask(allocate)
    release = wire.Release(id=office.next_id(), epoch=EPOCH, lease=second.lease)  # type: ignore[attr-defined]
    office.ask(release)

    assert isinstance(refusal.header, wire.ErrorReply)
    assert office.ask(allocate) == refusal
    assert office.cache.pools["a"].free == 6


def test_last_answer_of_a_lease_is_kept_while_it_lives() -> None:
    """An engine may repeat a lease's last request after any number of others: it gets the same answer."""
    office = Office()
    office.enter(FakePeer(1))
    granted = [office.ask(office.acquire(key_chain(1, seed), str(seed)), key_chain(1, seed)) for seed in range(2)]
    leases = [each.header.lease for each in granted]  # type: ignore[attr-defined]
    allocate = wire.Allocate(id=office.next_id(), epoch=EPOCH, lease=leases[0], blocks=2)
    commit = wire.Commit(id=office.next_id(), epoch=EPOCH, lease=leases[1], start=0)
    asked: list[tuple[wire.Request, tuple[bytes, ...]]] = [
        (allocate, ()),
        (commit, (key_chain(1, seed=1), granted[1].frames[1])),
    ]
    answers = [office.ask(request, *frames) for request, frames in asked]
    for _ in range(40):  # more than are kept of a session
        office.error(wire.Release(id=office.next_id(), epoch=EPOCH, lease=99))

    assert [office.ask(request, *frames) for request, frames in asked] == answers
    assert isinstance(answers[1].header, wire.Committed)
    for lease in leases:
        office.expect(wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=lease))
    for _ in range(40):
        office.error(wire.Release(id=office.next_id(), epoch=EPOCH, lease=99))
    assert office.error(allocate) is ErrorCode.ALREADY_RELEASED


def test_answer_of_one_verb_is_not_given_to_another() -> None:
    """A request id used again for another verb is another request."""
    office = Office()
    office.enter(FakePeer(1))
    header = office.ask(office.acquire(key_chain(1)), key_chain(1)).header
    allocate = wire.Allocate(id=70, epoch=EPOCH, lease=header.lease, blocks=1)  # type: ignore[attr-defined]
    office.expect(wire.Allocated, allocate)

    office.expect(wire.Goodbye, wire.Bye(id=70))
    assert office.cache.pools["a"].free == SLOTS


def test_second_release_under_a_new_id_is_refused() -> None:
    """A release that is no retry, of a lease that is gone, is the caller's mistake."""
    office = Office()
    office.enter(FakePeer(1))
    header = office.ask(office.acquire(key_chain(1)), key_chain(1)).header
    first = wire.Release(id=office.next_id(), epoch=EPOCH, lease=header.lease)  # type: ignore[attr-defined]
    second = wire.Release(id=office.next_id(), epoch=EPOCH, lease=first.lease)
    office.ask(first)

    assert office.error(second) is ErrorCode.ALREADY_RELEASED


def test_kept_answers_are_bounded() -> None:
    """Only the last answers are kept for retries."""
    office = Office()
    welcome = office.enter(FakePeer(1))
    for _ in range(40):
        office.store(key_chain(1))  # one acquire, one release

    group = office.service._groups.of_session(SessionId(welcome.session))
    assert group is not None
    assert len(group.answers) == 16


def test_one_way_release_gets_no_reply_and_takes_effect() -> None:
    """With reply=false nothing is sent, not even an error."""
    office = Office()
    office.enter(FakePeer(1))
    header = office.ask(office.acquire(key_chain(4)), key_chain(4)).header
    answers: list[Answer] = []
    for request_id in (901, 902):
        release = wire.Release(id=request_id, epoch=EPOCH, lease=header.lease, reply=False)  # type: ignore[attr-defined]
        office.service.submit(ONE, release, [], answers.append)

    assert answers == []
    assert office.cache.pools["a"].free == SLOTS


def test_finish_message_commits_and_releases() -> None:
    """A release that carries keys and slots makes them matchable and gives the lease back."""
    office = Office()
    office.enter(FakePeer(1))
    header, (_, ranges) = office.ask(office.acquire(key_chain(4)), key_chain(4))
    finish = wire.Release(id=office.next_id(), epoch=EPOCH, lease=header.lease, start=0)  # type: ignore[attr-defined]
    done = office.expect(wire.Released, finish, key_chain(4), ranges)

    assert (done.adopted, done.duplicates) == (4, 0)
    assert (office.count("a", SlotState.FREE), office.count("a", SlotState.CACHED)) == (SLOTS - 4, 4)


def test_answer_names_hit_slots_then_exclusive_ones() -> None:
    """An acquire's frames are the hit's slots and then the fresh ones, packed in block order."""
    office = Office()
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    keys = key_chain(5)
    header, (hit, fresh) = office.ask(office.acquire(keys), keys)

    assert header.hit == 3  # type: ignore[attr-defined]
    assert (unpack_ranges(hit), unpack_ranges(fresh)) == ([(0, 3)], [(3, 2)])


@pytest.mark.parametrize("ranges", [[(0, 0)], [(-1, 1)], [(0, -4)], [(2_000_000_000, 2_000_000_000)]])
def test_impossible_slot_ranges_are_refused(ranges: list[tuple[int, int]]) -> None:
    """Empty, negative and overflowing ranges get a typed error and change nothing."""
    office = Office()
    office.enter(FakePeer(1))
    header = office.ask(office.acquire(key_chain(1)), key_chain(1)).header
    commit = wire.Commit(id=office.next_id(), epoch=EPOCH, lease=header.lease, start=0)  # type: ignore[attr-defined]

    assert office.error(commit, key_chain(1), pack_ranges(ranges)) in {ErrorCode.BAD_VALUE, ErrorCode.UNKNOWN_SLOT}
    assert check(office.cache) == []


def test_expiry_is_told_and_ends_with_the_process() -> None:
    """A session without heartbeats is refused by name; a heartbeat with the right token would have kept it."""
    office, process = Office(), FakePeer(1)
    welcome = office.enter(process)
    beat = wire.Heartbeat(id=500, session=welcome.session, token=welcome.token)
    for now_ms in (1, 450, 900):
        office.service.on_event(Ticked(now_ms))
    office.now_ms = 900
    assert office.expect(wire.Alive, beat, peer=b"another connection").epoch == EPOCH
    for now_ms in (1300, 1700, 1900):
        office.service.on_event(Ticked(now_ms))
    office.store(key_chain(1))
    office.service.on_event(Ticked(1901))

    assert office.error(office.acquire(key_chain(1)), key_chain(1)) is ErrorCode.SESSION_EXPIRED
    assert office.error(beat) is ErrorCode.SESSION_EXPIRED
    refused = office.ask(beat).header
    assert isinstance(refused, wire.ErrorReply)
    assert refused.message == f"session {welcome.session} sent no heartbeat for {office.cache.session_ttl_ms} ms"
    wrong = wire.Heartbeat(id=501, session=welcome.session, token=bytes(32))
    assert office.error(wrong) is ErrorCode.NO_SESSION


@pytest.mark.interpreted
def test_internal_error_is_one_reply_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the core becomes one typed reply that says whose fault it is."""
    office = Office()
    office.enter(FakePeer(1))

    def explode(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(office.cache.managed, "acquire", explode)
    reply = office.expect(wire.ErrorReply, office.acquire(key_chain(1)), key_chain(1))

    assert (reply.code, reply.fault) == (ErrorCode.INTERNAL, "daemon")


def health(office: Office) -> wire.HealthReport:
    """The answer to a health request."""
    return asyncio.run(office.health())


def test_health_tells_of_a_service_manager_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While messages wait for the manager, memory that was made since is not kept: the check fails, and says so."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setattr(notify, "WAIT_S", 0.01)
    office = Office()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        while notify.notify_now("X=1"):
            pass
        notify.notify(notify.READY)
        report = health(office)
        assert [(part.part, part.detail[:19]) for part in report.parts if not part.ok] == [
            ("manager", "1 message waits for")
        ]
        manager.recv(100)
        notify.send_unsent()
        assert health(office).ok


def test_health_takes_slots_like_an_engine_and_leaves_nothing() -> None:
    """Every step is reported; afterwards no slot, session or run is left."""
    office = Office("a", "b")
    report = health(office)

    steps = ["acquire", "workers", "commit", "match", "release"]
    assert report.ok
    assert [part.part for part in report.parts] == [f"{name}/{step}" for name in "ab" for step in steps] + ["counts"]
    assert [len(workers.probes) for workers in office.workers.values()] == [1, 1]
    assert (office.cache.managed.sessions, office.cache.pools["a"].free, office.cache.trees[0].run_count) == (
        {},
        SLOTS,
        0,
    )


def test_health_says_which_part_failed() -> None:
    """A failing worker is named, with its words; the other replica is still checked."""
    office = Office("a", "b")
    office.workers["a"].failure = "shard 1: bytes differ"
    report = health(office)

    assert not report.ok
    (failed,) = [part for part in report.parts if not part.ok]
    assert (failed.part, failed.detail) == ("a/workers", "shard 1: bytes differ")
    assert office.cache.pools["a"].free == SLOTS


def test_health_asks_all_replicas_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose workers are slow holds up no other one's check, so that hung ones do not add up their waits."""
    office = Office("a", "b")
    slow, other = office.workers["a"], office.workers["b"]
    slow.answers = False
    probe = other.probe

    def answer_both(first: int, second: int) -> asyncio.Future[None]:
        slow.pending[0].set_result(None)
        return probe(first, second)

    monkeypatch.setattr(other, "probe", answer_both)

    assert health(office).ok


def test_health_does_not_wait_for_a_hung_worker() -> None:
    """A worker that says nothing fails the check at once enough; its slots stay taken until it has answered."""
    office = Office()
    office.workers["a"].answers = False

    async def check_twice() -> list[str]:
        checks = HealthChecks(office.cache)
        (replica,) = office.service._replicas.values()
        details = [(await checks.check(replica, 0, 0.01))[-1].detail for _ in range(2)]
        assert office.cache.pools["a"].free == SLOTS - 2
        office.workers["a"].pending[0].set_result(None)
        await asyncio.sleep(0)
        return details

    assert asyncio.run(check_twice()) == [
        "no answer for 0.01 s: shard 0 (process 7) waits, or hangs",
        "the probe of an earlier check is still unanswered: shard 0 (process 7) waits, or hangs",
    ]
    assert office.cache.pools["a"].free == SLOTS


def test_pool_is_in_doubt_unless_its_workers_have_shown_that_it_serves() -> None:
    """One that could not be asked is in doubt, too, as are one whose workers fail, are lost, or say nothing."""
    names = ("well", "full", "failing", "lost", "hung", "asleep")
    office = Office(*names)
    cache, workers, health_requests = office.cache, office.workers, office.service.health
    full = cache.open_session("full", 0)
    cache.managed.acquire(full.id, full.pool.epoch, "all", key_chain(SLOTS), SLOTS * 4, 0, full=False)
    workers["failing"].failure, workers["hung"].answers = "the device is lost", False
    office.service.on_event(WorkerDied("lost"))
    cache.sleeps.asleep("asleep")

    doubts = asyncio.run(health_requests.doubts(office.service._replicas.values(), 0.01))

    steps = [doubt.partition(": ")[0] for doubt in doubts]
    assert steps == ["full/acquire", "failing/workers", "lost/workers", "hung/workers"]
    assert ("the device is lost" in doubts[1], "no answer for 0.01 s" in doubts[3]) == (True, True)
    assert workers["asleep"].probes == []


def test_health_tells_of_workers_that_die_again_and_again() -> None:
    """A degraded replica is ill, though its workers answer just now, and is so named."""
    office = Office("a", "b")
    office.workers["b"].is_degraded, office.workers["b"].last_loss = True, "ECC"
    report = health(office)
    assert not report.ok
    assert [(part.part, part.detail) for part in report.parts if not part.ok] == [
        (
            "b/restarts",
            "degraded: its workers have died again and again; see the daemon's log. The last loss: ECC",
        )
    ]
    office.workers["b"].is_degraded = False
    assert health(office).ok


def test_stats_tell_of_restarted_workers() -> None:
    """Stats say of each replica how often its workers were replaced, and of what they die if that is too often."""
    office = Office("a", "b")
    for name in ("a", "b"):
        office.workers[name].last_loss = "ECC"
    office.workers["b"].restarts, office.workers["b"].is_degraded = 5, True
    pools = office.expect(wire.StatsReport, wire.Stats(id=77), peer=b"cli").pools
    assert [(pool.replica, pool.restarts, pool.degraded, pool.healthy, pool.trouble) for pool in pools] == [
        ("a", 0, False, True, ""),
        ("b", 5, True, True, "ECC"),
    ]


def test_health_and_stats_tell_what_devices_reach() -> None:
    """Health and stats say how much of the host pool devices reach directly; a refused part is no illness."""
    office = Office("a", "b")
    told = office.workers["b"].registered = (
        wire.HostRegistration(shard=0, registered_bytes=8, size_bytes=8),
        wire.HostRegistration(shard=1, registered_bytes=4, size_bytes=8, error="refused"),
    )
    report = health(office)
    pools = office.expect(wire.StatsReport, wire.Stats(id=77), peer=b"cli").pools

    assert report.ok
    assert {part.part: part.detail for part in report.parts if part.part.endswith("/registered")} == {
        "b/registered": "shard 0: 8 of 8 bytes of the host pool; "
        "shard 1: 4 of 8 bytes of the host pool, copies of the rest are slower: refused"
    }
    assert [pool.registered for pool in pools] == [(), told]


def test_health_counts_nowhere() -> None:
    """Checks leave the engines' counters alone."""
    office = Office()
    health(office)

    assert {name: count for name, count in office.cache.counters.items() if count} == {"requests": 1}


def test_estimates_are_of_what_engines_ask_for_alone() -> None:
    """The keys of a health check, which nobody asks for again, are not in what `what-if` estimates from."""
    office = Office(host_slabs=2)
    tree = office.cache.tree_of("a")
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    assert tree.reuse is not None
    assert office.cache._reuse is not None
    before = tree.reuse.asked_blocks, office.cache._reuse.pending_blocks
    assert health(office).ok
    assert (tree.reuse.asked_blocks, office.cache._reuse.pending_blocks) == before == (3, 6)


def test_health_of_a_replica_that_lost_its_worker() -> None:
    """A pool without workers is unhealthy and says so."""
    office = Office()
    office.service.on_event(WorkerDied("a"))

    report = health(office)

    assert [(part.part, part.ok) for part in report.parts] == [("a/workers", False), ("counts", True)]


def test_busy_pool_is_not_ill() -> None:
    """When every slot is leased the check skips the replica and says so."""
    office = Office()
    office.enter(FakePeer(1))
    office.ask(office.acquire(key_chain(SLOTS)), key_chain(SLOTS))

    report = health(office)

    assert report.ok
    assert report.parts[0].detail.startswith("skipped: ")


def test_stats_add_up() -> None:
    """The states of a pool add up to its slots, and counters say what was done."""
    office = Office()
    office.enter(FakePeer(1))
    office.store(key_chain(4))
    keys = key_chain(6)
    office.ask(office.acquire(keys), keys)
    report = office.expect(wire.StatsReport, wire.Stats(id=77), peer=b"cli")

    (pool,) = report.pools
    assert pool.states == {"free": SLOTS - 6, "leased": 2, "cached": 4, "fenced": 0, "quarantined": 0, "filling": 0}
    assert report.hosts == ()
    assert sum(pool.states.values()) == pool.slots
    assert (pool.leases, pool.evictable, report.counters["hit_blocks"]) == (1, 0, 4)


def test_check_reports_a_broken_invariant() -> None:
    """The live checker finds a slot that was lost, and finds nothing in a sound cache."""
    office = Office()
    office.enter(FakePeer(1))
    office.store(key_chain(2))
    assert office.expect(wire.CheckReport, wire.Check(id=1), peer=b"cli").ok
    (run,) = office.cache.trees[0].runs()
    assert run.segments[0] is not None
    run.segments[0].ranges = array("i", (0, 1))

    report = office.expect(wire.CheckReport, wire.Check(id=2), peer=b"cli")

    assert not report.ok
    assert any("slots belong to nobody" in violation for violation in report.violations)
