"""The seam between sockets and decisions: a typed request in, one reply out.

One method per verb, each a straight line: who asks, what the core says, the reply. Nothing in here waits. `health`
asks the workers, and answers when they have; `load` and `vacancy` are answered when the core knows.

Between requests the core has its own business: copies to plan, transfers to start. That comes after the reply.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from kvcached.admin_verbs import AdminVerbs, Left
from kvcached.admission import Admission
from kvcached.answers import Answer, KeptAnswers, Respond, internal_error
from kvcached.attached_admission import AttachedAdmission, HostShare, Shape
from kvcached.attached_verbs import AttachedVerbs
from kvcached.awaiting import Awaiting, Later, later
from kvcached.books import Books, Shelf
from kvcached.core.cache import Cache
from kvcached.core.effects import (
    AbandonLoad,
    Effect,
    HurryTransfer,
    LoadsEnded,
    NamespaceCleared,
    SessionEnded,
    SessionExpired,
    SlabLent,
    SlotsHandedOut,
    StartTransfer,
)
from kvcached.core.events import Event, MemberLost, MembersDied, PoolRestored, ShardSettled, WorkerDied
from kvcached.deferred import DeferredAnswers
from kvcached.health import HealthRequests
from kvcached.host_notes import Headers, HostNotes
from kvcached.membership import FoundSession, Group, Membership, Peer
from kvcached.modes import Modes
from kvcached.renewals import Renewals
from kvcached.replica import Replica
from kvcached.report_verbs import ReportVerbs
from kvcached.reports import NAMESPACE_SHOWN_BYTES
from kvcached.return_verbs import ReturnVerbs
from kvcached.storage_verbs import StorageVerbs
from kvcached_client import protocol as wire
from kvcached_client.attach_protocol import Identified, Joined, JoinedHost
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.types import FenceSequence, LeaseId, SessionId, ShardIndex, TransferId

log = logging.getLogger(__name__)

#: Requests whose answers are kept, so that a retry has one effect. `Acquire` is idempotent by its own request id, and
#: its answers are large; so is `Load` by its lease. What `Acquire` answers while loads are under way is kept, too: it
#: may come again when the lease is over, and would make another.
_KEPT = (
    wire.Hello,
    wire.HelloAttached,
    wire.Rejoin,
    wire.Declare,
    wire.DeclareOver,
    wire.Allocate,
    wire.Commit,
    wire.Release,
    wire.PrepareLoad,
    wire.PrepareStore,
    wire.Clear,
)


class PeerWatch(Protocol):
    """Who watches processes for their death."""

    def watch(self, peer: Any) -> None:  # noqa: ANN401 - as below
        """Tell of a process's death, until it is forgotten."""

    def forget(self, peer: Any) -> None:  # noqa: ANN401 - the same peers that it brought, whatever class they have
        """Stop watching a process that no session needs any more."""


class Service:
    """Requests and events of one daemon."""

    def __init__(
        self,
        cache: Cache,
        replicas: list[Replica],
        *,
        now_ms: Callable[[], int],
        endpoint: str,
        heartbeat_interval_ms: int,
        answers_kept_per_session: int,
        share: HostShare | None = None,
        headers: Headers | None = None,
        shelf: Shelf | None = None,
        later: Later = later,
    ) -> None:
        self._cache = cache
        self._replicas = {replica.name: replica for replica in replicas}
        self._now_ms = now_ms
        self._endpoint = endpoint
        self._membership = Membership()
        self._admission = Admission(cache, self._replicas, self._membership, heartbeat_interval_ms)
        self._attached_admission = AttachedAdmission(cache, self._membership, share, heartbeat_interval_ms)
        self._attached = AttachedVerbs(cache, self._membership, self._attached_admission, now_ms)
        self._returns = ReturnVerbs(cache, self._membership, self._admission, now_ms)
        self._answers = KeptAnswers(answers_kept_per_session)
        self._deferred = DeferredAnswers(self.refused)
        self._modes = Modes()
        self.storage = StorageVerbs(cache, self._membership, self._replicas, self._attached_admission, later)
        self._health = HealthRequests(
            cache, self._replicas, now_ms, settle=self._settle, refused=self.refused, modes=self._modes,
            more=self.storage.health,
        )  # fmt: skip
        self._awaiting = Awaiting(self.refused, later)
        self._renewals = Renewals(cache, self._replicas, self._awaiting, self._modes)
        self._admin = AdminVerbs(
            cache, self._replicas, self._modes, self._awaiting, self._renewals, self._waiting_requests, now_ms
        )
        reports = ReportVerbs(cache, self._replicas, self._attached_admission.info(), now_ms, self._modes)
        self._host_notes = HostNotes(headers, self._replicas, self._attached_admission, cache.epoch)
        self._books = Books(cache, self._replicas, self._membership, self._attached_admission, shelf)
        self.watch: PeerWatch | None = None
        self._verbs: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.Hello: self._hello,
            wire.Match: self._match,
            wire.Acquire: self._acquire,
            wire.Allocate: self._allocate,
            wire.Commit: self._commit,
            wire.Release: self._release,
            wire.Heartbeat: self._heartbeat,
            wire.Bye: self._bye,
            wire.HelloAttached: self._hello_attached,
            wire.Rejoin: self._rejoin,
            **self._returns.by_type,
            **self._attached.by_type,
            **reports.by_type,
            **self._admin.by_type,
        }
        self._late_verbs: dict[type[wire.Header], Callable[[bytes, Any, Respond], Answer | None]] = {
            wire.Load: self._load,
            wire.Vacancy: self._vacancy,
            wire.Health: self._health.start,
            **self._admin.late_by_type,
            **self.storage.late_by_type,
        }

    # --- the line from a request to its reply -----------------------------------------------------------------------

    def submit(self, peer: bytes, request: wire.Request, frames: list[bytes], respond: Respond) -> None:
        """Serve one request: exactly one answer goes to `respond`, or none where the request asked for none.

        `peer` is the routing id of the connection it came from; `frames` are as many as the verb takes, of sizes that
        fit it.
        """
        self.count("requests")
        answer: Answer | None
        try:
            failpoint("daemon.request")
            late = self._late_verbs.get(type(request))
            if isinstance(request, wire.Prefetch):
                answer = self.storage.prefetch(peer, request, frames[0], respond)
                self.carry_out()
            elif late is not None:
                answer = late(peer, request, respond)
            else:
                answer = self._kept_answer(peer, request) or self._serve(peer, request, frames)
                self.carry_out()
        except RequestError as error:
            answer = Answer(wire.error_reply(request.id, self.refused(error)))
        except Exception:
            log.exception("internal error while serving %s", type(request).__name__)
            answer = Answer(wire.error_reply(request.id, self.refused(internal_error())))
        if answer is not None and getattr(request, "reply", True):
            failpoint("daemon.reply")
            respond(answer)
        self._settle()

    def stop(self, deadline_ms: int, stopped: Callable[[Left], None]) -> None:
        """Take no new work, and say when nothing is held and under way, or at the deadline what is left."""
        self._admin.stop(deadline_ms, stopped)

    def close(self) -> None:
        """Answer every request that waits: nothing more will come about."""
        self._deferred.close(self._modes.refusal())
        self._health.close(self._modes.refusal())
        self._awaiting.close()
        self.storage.close()

    def _waiting_requests(self) -> int:
        return self._deferred.waiting + self._health.waiting

    def refused(self, error: RequestError) -> RequestError:
        """Count an error by its code."""
        self.count(f"errors_{error.code}")
        return error

    def count(self, what: str) -> None:
        """Count something that happened."""
        self._cache.counters[what] += 1

    def _serve(self, peer: bytes, request: wire.Request, frames: list[bytes]) -> Answer:
        try:
            answer = self._verbs[type(request)](peer, request, frames)
        except RequestError as error:
            if not isinstance(request, _KEPT):
                raise
            answer = Answer(wire.error_reply(request.id, self.refused(error)))
        group = self._membership.of_connection(peer)
        is_kept = isinstance(request, _KEPT) or (isinstance(answer.header, wire.Acquired) and answer.header.loads)
        if is_kept and group is not None:
            self._answers.keep(group.session, request, answer)
        return answer

    def _kept_answer(self, peer: bytes, request: wire.Request) -> Answer | None:
        """The answer that this request already got, so that a retry has one effect and one answer."""
        group = self._membership.of_connection(peer)
        return self._answers.find(group.session, request) if group is not None else None

    def _group(self, peer: bytes) -> Group:
        group = self._membership.of_connection(peer)
        if group is None:
            raise request_error(
                ErrorCode.NO_SESSION,
                "this connection has no session, or none any more: it was silent for too long, or a worker was lost",
                "close the client and connect again",
            )
        return group

    # --- what the core wants done -----------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Do what the core has asked for."""
        effects = self._cache.effects
        while effects:
            effect = effects.pop(0)
            if not self.storage.takes(effect):
                self._carry_out(effect)
        self._books.keep()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SlabLent() | SlotsHandedOut():
                self._host_notes.write(effect)
            case StartTransfer():
                self._books.keep()
                workers = self._replicas[effect.pool].workers
                workers.start(effect, partial(self._on_settled, effect.transfer))
            case HurryTransfer():
                self._replicas[effect.pool].workers.hurry(effect)
            case AbandonLoad():
                self._replicas[effect.pool].workers.abandon(effect)
            case NamespaceCleared():
                self._renewals.finish(effect)
            case LoadsEnded():
                self._deferred.lease_changed(effect.session, effect.lease)
            case SessionExpired():
                log.log(
                    logging.WARNING if effect.quarantined_slots else logging.INFO,
                    "session %d is over: %d slots are set aside until its processes are dead",
                    effect.session,
                    effect.quarantined_slots,
                )
                self._deferred.session_changed(effect.session)
            case SessionEnded():
                if self._membership.of_session(effect.session) is not None:
                    log.info("session %d ended: %d slots are free again", effect.session, effect.freed_slots)
                self._deferred.session_changed(effect.session)
                self._answers.close(effect.session)
                self._attached_admission.forget(effect.session)
                self._forget(self._membership.close(effect.session))

    def _settle(self) -> None:
        """Let the core do what can wait until a reply is out, and carry that out."""
        try:
            self._cache.settle()
            self.carry_out()
            self._deferred.vacancy_changed()
            self.carry_out()
            self._awaiting.look()
        except Exception:
            log.exception("internal error between two requests")
            self.count("errors_internal")

    def _on_settled(self, transfer: TransferId, shard: ShardIndex, error: str, corrupt: tuple[int, ...]) -> None:
        """A shard is through with a transfer. Never raises: the workers' other messages come by the same way."""
        if error:
            log.warning("transfer %d failed on shard %d: %s", transfer, shard, error)
        if corrupt:
            log.warning("%d stored blocks changed since; shard %d, load %d: dropped", len(corrupt), shard, transfer)
        try:
            self.on_event(ShardSettled(transfer, shard, error, corrupt))
        except Exception:
            log.exception("internal error at the end of transfer %d on shard %d", transfer, shard)
            self.count("errors_internal")

    def on_event(self, event: Event) -> None:
        """What arrived by itself: time, deaths, workers."""
        self._cache.handle(event)
        if isinstance(event, WorkerDied | PoolRestored):
            self._books.note_workers()
        self.carry_out()
        self._settle()

    # --- attach socket ----------------------------------------------------------------------------------------------

    def identify(self, peer: Peer) -> Identified:
        """A scheduler process presents itself."""
        token = self._membership.identify(peer)
        return Identified(member=token, endpoint=self._endpoint, daemon_epoch=self._cache.epoch)

    def join(
        self, peer: Peer, session_id: SessionId, token: bytes, shard: ShardIndex
    ) -> tuple[Joined | JoinedHost, tuple[int, ...]]:
        """A shard process asks for its memory: the answer and the descriptors to pass on.

        Raises:
            RequestError: no such session or not its token, expired, no such shard, or it has no worker now.
        """
        if not self._attached.owns(session_id):
            joined_pool = self._admission.join(peer, session_id, token, shard)
            self._books.keep()
            return joined_pool
        joined = self._attached_admission.join(peer, session_id, token, shard)
        self.carry_out()
        self._forget_departed()
        return joined

    def take_in(self, shapes: Mapping[bytes, Shape], sessions: Iterable[FoundSession]) -> None:
        """Engines of before a restart, of which nothing is awaited but their introduction or their deaths."""
        self._attached_admission.shapes.update(shapes)
        for found in sessions:
            self._membership.restore(found)
            for peer, _ in found.members:
                if self.watch is not None and peer.identity is not None:
                    self.watch.watch(peer)
        self.carry_out()

    def peer_lost(self, peer: Peer) -> None:
        """A process is dead: its groups are over, and their slots free once nobody of them lives."""
        self._membership.retire(peer)
        for group in self._membership.of_peer(peer):
            living = group.living()
            log.info("process %d of session %d is dead, %d live", peer.pid, group.session, len(living))
            self.on_event(MemberLost(group.session) if living else MembersDied(group.session))

    def peer_closed(self, peer: Peer) -> bool:
        """A process closed its connection, which is not death. Whether a session needs it watched."""
        self._membership.retire(peer)
        return bool(self._membership.of_peer(peer))

    def _forget(self, peers: list[Peer]) -> None:
        for peer in peers:
            self._membership.retire(peer)
            if self.watch is not None:
                self.watch.forget(peer)

    # --- verbs ------------------------------------------------------------------------------------------------------

    def _hello(self, connection: bytes, request: wire.Hello, _: list[bytes]) -> Answer:
        self._modes.check()
        welcome, peer = self._admission.hello(connection, request, self._now_ms())
        self._answers.open(SessionId(welcome.session))
        log.info("session %d: process %d on replica %s", welcome.session, peer.pid, request.replica)
        return Answer(welcome)

    def _rejoin(self, connection: bytes, request: wire.Rejoin, _: list[bytes]) -> Answer:
        welcome, peer = self._returns.rejoin(connection, request)
        self._answers.open(SessionId(welcome.session))
        log.info("session %d: process %d is back with what it held before the restart", welcome.session, peer.pid)
        return Answer(welcome)

    def _hello_attached(self, connection: bytes, request: wire.HelloAttached, _: list[bytes]) -> Answer:
        self._modes.check()
        welcome, peer = self._attached_admission.hello(connection, request, self._now_ms())
        self._answers.open(SessionId(welcome.session))
        self._forget_departed()
        log.info(
            "session %d: process %d, %s, in namespace %s (%s)",
            welcome.session,
            peer.pid,
            request.engine,
            welcome.namespace[:NAMESPACE_SHOWN_BYTES].hex(),
            request.label,
        )
        return Answer(welcome)

    def _forget_departed(self) -> None:
        self._forget(self._attached_admission.departed)
        self._attached_admission.departed.clear()

    def _match(self, peer: bytes, request: wire.Match, frames: list[bytes]) -> Answer:
        group = self._group(peer)
        if self._attached.owns(group.session):
            return self._attached.match(group, request, frames[0])
        device, host = self._cache.match(group.session, request.epoch, frames[0], request.tokens, full=request.full)
        return Answer(wire.Matched(id=request.id, device=device, host=host))

    def _acquire(self, peer: bytes, request: wire.Acquire, frames: list[bytes]) -> Answer:
        group = self._group(peer)
        if not self._holds(group.session, request.request):
            self._modes.check()
        if self._attached.owns(group.session):
            return self._attached.acquire(group, request, frames[0])
        asked = (request.epoch, request.request, frames[0], request.tokens, request.reserve)
        grant = self._cache.acquire(group.session, *asked, full=request.full, priority=request.priority)
        loads = tuple(wire.LoadTicket(transfer, progress) for transfer, progress in grant.loads)
        header = wire.Acquired(id=request.id, lease=grant.lease, hit=grant.hit, ready=grant.ready, loads=loads)
        return Answer(header, (grant.hit_ranges, grant.ranges))

    def _holds(self, session: SessionId, request: str) -> bool:
        """Whether a request has a lease already, so that its acquire is a retry."""
        found = self._cache.sessions.get(session) or self._cache.attached.sessions.get(session)
        return found is not None and request in found.requests

    def _allocate(self, peer: bytes, request: wire.Allocate, _: list[bytes]) -> Answer:
        group = self._group(peer)
        ranges = self._cache.allocate(group.session, request.epoch, LeaseId(request.lease), request.blocks)
        return Answer(wire.Allocated(id=request.id, blocks=request.blocks), (ranges,))

    def _commit(self, peer: bytes, request: wire.Commit, frames: list[bytes]) -> Answer:
        group = self._group(peer)
        done = self._cache.commit(
            group.session,
            request.epoch,
            LeaseId(request.lease),
            request.start,
            frames[0],
            _slot_ranges(frames[1]),
            FenceSequence(request.fence),
        )
        return Answer(wire.Committed(id=request.id, depth=done.depth, adopted=done.adopted, duplicates=done.duplicates))

    def _release(self, peer: bytes, request: wire.Release, frames: list[bytes]) -> Answer:
        group = self._group(peer)
        if self._attached.owns(group.session):
            return self._attached.release(group, request, frames)
        session, lease, fence = group.session, LeaseId(request.lease), FenceSequence(request.fence)
        if frames:
            keys, slots = frames[0], _slot_ranges(frames[1])
            done = self._cache.finish(session, request.epoch, lease, request.start, keys, slots, fence)
            answer = Answer(wire.Released(id=request.id, adopted=done.adopted, duplicates=done.duplicates))
        else:
            self._cache.release(session, request.epoch, lease, fence)
            answer = Answer(wire.Released(id=request.id))
        self._deferred.lease_changed(session, lease)
        return answer

    def _load(self, peer: bytes, request: wire.Load, respond: Respond) -> Answer | None:
        session, lease = self._group(peer).session, LeaseId(request.lease)

        def ask() -> Answer | None:
            loaded = self._cache.load(session, request.epoch, lease)
            return None if loaded is None else Answer(wire.Loaded(id=request.id, hit=loaded.hit), (loaded.ranges,))

        return self._deferred.load(session, lease, request, ask, respond)

    def _vacancy(self, peer: bytes, request: wire.Vacancy, respond: Respond) -> Answer | None:
        session = self._group(peer).session

        def ask() -> Answer | None:
            available = self._cache.vacancy(session, request.epoch, request.blocks)
            return None if available is None else Answer(wire.Vacant(id=request.id, available=available))

        return self._deferred.vacancy(session, request, ask, respond)

    def _heartbeat(self, _: bytes, request: wire.Heartbeat, __: list[bytes]) -> Answer:
        group = self._membership.authenticate(SessionId(request.session), request.token)
        if self._attached.owns(group.session):
            return self._attached.heartbeat(group, request)
        session = self._cache.heartbeat(group.session, FenceSequence(request.fence), self._now_ms())
        generation = self._replicas[session.pool.name].generation
        return Answer(wire.Alive(id=request.id, epoch=session.pool.epoch, generation=generation))

    def _bye(self, peer: bytes, request: wire.Bye, _: list[bytes]) -> Answer:
        group = self._group(peer)
        if self._attached.owns(group.session):
            self._attached_admission.part(group)
            self._forget_departed()
            return Answer(wire.Goodbye(id=request.id))
        if group.living(beside=group.scheduler):
            # Its shard processes may write yet: their slots wait for their deaths.
            self._cache.handle(MemberLost(group.session))
            self._forget(self._membership.part(group, group.scheduler))
        else:
            self._cache.close_session(group.session)
        return Answer(wire.Goodbye(id=request.id))


def _slot_ranges(frame: bytes) -> array[int]:
    ranges = array("i", frame)
    if ranges and (min(ranges[1::2]) <= 0 or min(ranges[::2]) < 0):
        raise request_error(ErrorCode.BAD_VALUE, "a slot range is empty or negative", "send (first slot, count >= 1)")
    return ranges
