"""The seam between sockets and decisions: a typed request in, one reply out.

One method per verb, each a straight line: who asks, what the core says, the reply. Nothing in here waits. `health`
asks the workers, and answers when they have; `load` and `wait_for_slots` are answered when the core knows.

Between requests the core has its own business: copies to plan, transfers to start. That comes after the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter_ns
from typing import get_args

from kvcached.core.cache import Cache
from kvcached.core.messages import (
    AbandonLoad,
    ClearingEnded,
    Effect,
    Event,
    ForgetStored,
    HurryTransfer,
    LoadsEnded,
    MemberLost,
    MembersDied,
    PoolEmptied,
    PrefetchOver,
    QueryStorage,
    SessionEnded,
    SessionExpired,
    SlabAllocated,
    SlotsHandedOut,
    SlotsReclaimed,
    StartBackup,
    StartFetch,
    StartTransfer,
)
from kvcached.core.refusals import Refusal
from kvcached.events.token_book import TokenBook
from kvcached.monitoring.timing import CopyTimes, RequestTimes
from kvcached.process.access import Grants
from kvcached.recovery.engine_pools import Claimed, EnginePools
from kvcached.recovery.engine_writers import WriterProcess
from kvcached.service.admin.clears import Clears
from kvcached.service.admin.removals import PrefixRemovals
from kvcached.service.admin.verbs import AdminVerbs, Left
from kvcached.service.admission import Admission, DrainState
from kvcached.service.engine_verbs import EngineVerbs
from kvcached.service.health import HealthRequests, HostMemoryCheck
from kvcached.service.offload.admission import HostShare, OffloadAdmission, Shape
from kvcached.service.offload.verbs import OffloadVerbs
from kvcached.service.pending import Answer, Later, LateVerb, PendingReplies, Respond, Verb, Wait, later
from kvcached.service.refusals import REFUSED, in_words, internal_error
from kvcached.service.replica import Replica
from kvcached.service.report_verbs import ReportVerbs
from kvcached.service.sessions import EngineGroups, FoundSession, Peer, PeerWatch
from kvcached.service.sleep_verbs import SleepVerbs
from kvcached.service.state_writer import DeviceBlocks, Headers, HostClaims, StatePlace, StateWriter
from kvcached.service.storage_verbs import StorageVerbs
from kvcached.service.stories import RequestStories
from kvcached_client.errors import RequestError
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import ClaimPool, Identified, Joined, JoinedHost
from kvcached_client.types import SessionId, ShardIndex, TransferId

log = logging.getLogger(__name__)

#: Requests whose answers are kept, so that a retry has one effect. `Acquire` is idempotent by its own request id, and
#: its answers are large; so is `Load` by its lease. What `Acquire` answers while loads are under way is kept, too: it
#: may come again when the lease is over, and would make another.
_KEPT = frozenset({
    wire.Hello,
    wire.HelloOffload,
    wire.Rejoin,
    wire.Declare,
    wire.DeclareOver,
    wire.Allocate,
    wire.Commit,
    wire.Release,
    wire.PrepareLoad,
    wire.PrepareStore,
    wire.PrepareStores,
})  # fmt: skip


class Service:
    """Requests and events of one daemon. `request_times` and `copy_times` say how long both take.

    Attributes:
        reports, health: what only reads the daemon's state, and what checks it.
        watch: watches processes; set once there is somebody who does.
        index_changed: called when the core has something for routers.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: list[Replica],
        *,
        now_ms: Callable[[], int],
        endpoint: str,
        heartbeat_interval_ms: int,
        answers_kept_per_session: int,
        known_blocks_min: int = wire.KNOWN_BLOCKS_MIN,
        share: HostShare | None = None,
        headers: Headers | None = None,
        state_place: StatePlace | None = None,
        engine_pools: EnginePools | None = None,
        book: TokenBook | None = None,
        later: Later = later,
    ) -> None:
        self._cache, self._counters = cache, cache.counters
        self._replicas = {replica.name: replica for replica in replicas}
        self._now_ms, self._endpoint = now_ms, endpoint
        self.request_times, self.copy_times = RequestTimes(get_args(wire.Request)), CopyTimes()
        self._groups, self._drain_state = EngineGroups(answers_kept_per_session, known_blocks_min), DrainState()
        self._device_blocks = DeviceBlocks(cache, self._replicas)
        self._pending = PendingReplies(self.refused, later, before_reply=self._device_blocks.write)
        self.waiting = self._pending.by_wait
        self._stories = RequestStories(self._groups)
        self._admission = Admission(cache, self._replicas, self._groups, heartbeat_interval_ms, book)
        self._offload_admission = OffloadAdmission(cache, self._groups, share, heartbeat_interval_ms, book)
        self.state_writer = StateWriter(
            cache, self._replicas, self._groups, self._offload_admission, state_place, later
        )
        self._claims = HostClaims(headers, self._replicas, self._offload_admission, cache)
        host_memory = HostMemoryCheck(cache, headers, self._replicas, self._claims.geometry)
        self.storage = StorageVerbs(
            cache, self._groups, self._replicas, self._offload_admission, self._pending, self.copy_times, book
        )
        self.health = HealthRequests(
            cache, self._replicas, self._pending, now_ms, settle=self._settle, drain_state=self._drain_state,
            more=lambda: [*host_memory.parts(), *self.storage.health(), *self.state_writer.health()],
            before_probe=self._device_blocks.write,
        )  # fmt: skip
        self._offload = OffloadVerbs(cache, self._groups, self._offload_admission, now_ms, self.copy_times, book)
        engines = EngineVerbs(
            cache, self._replicas, self._groups, self._admission, self._offload,
            pending=self._pending, drain_state=self._drain_state, now_ms=now_ms, forget=self._forget, book=book,
        )  # fmt: skip
        self._engine_pools = engine_pools or EnginePools(0)
        self.clears = Clears(
            cache, self._replicas, self._pending, self.state_writer.recorder,
            own_session=self._offload.own_session, carry_out=self.carry_out, check=self.state_writer.check_clear,
            cleared=self._engine_pools.cleared, in_device_memory=self._engine_pools.namespaces,
        )  # fmt: skip
        removals = PrefixRemovals(cache, self._replicas, self._pending, self._claims, self.storage.delete, book)
        self._admin = AdminVerbs(cache, self._replicas, self._drain_state, self._pending, self.clears, removals, now_ms)
        self._sleeps = SleepVerbs(
            cache, self._replicas, self._groups, self._pending, now_ms, carry_out=self.carry_out, settle=self._settle
        )
        self.reports = ReportVerbs(
            cache, self._replicas, self._offload_admission.info(), now_ms,
            self._drain_state, self._engine_pools, self.copy_times,
        )  # fmt: skip
        self.watch: PeerWatch | None = None
        self.index_changed: Callable[[], None] = lambda: None
        self._verbs: dict[type[wire.Header], Verb] = {
            **engines.by_type,
            **self.reports.by_type,
            **self._admin.by_type,
            **self._stories.by_type,
        }
        self._late_verbs: dict[type[wire.Header], LateVerb] = {
            wire.Health: self.health.start,
            **engines.late_by_type,
            **self._admin.late_by_type,
            **self._sleeps.late_by_type,
            **self.storage.late_by_type,
        }

    # --- the line from a request to its reply -----------------------------------------------------------------------

    def submit(self, peer: bytes, request: wire.Request, frames: list[bytes], respond: Respond) -> None:
        """Serve one request: exactly one answer goes to `respond`, or none where the request asked for none.

        `peer` is the routing id of the connection it came from; `frames` are as many as the verb takes, of sizes that
        fit it.
        """
        began_ns, verb = perf_counter_ns(), type(request)
        self._counters["requests"] += 1
        answer: Answer | None
        respond = self._stories.begin(peer, request, respond)
        try:
            failpoint("daemon.request")
            late = self._late_verbs.get(verb)
            if late is not None:
                answer = late(peer, request, frames, self.request_times.timed(respond, verb, began_ns))
            else:
                group = self._groups.of_connection(peer)  # a request that comes again gets the answer of the first
                kept = None if group is None else group.answers.find(request)
                answer = kept or self._serve(peer, request, frames)
            if answer is not None:  # an error below would be a second reply to a request whose reply is pending
                self.carry_out()
        except REFUSED as error:
            answer = Answer(wire.error_reply(request.id, self.refused(error)))
        except Exception:
            log.exception("internal error while serving %s", verb.__name__)
            answer = Answer(wire.error_reply(request.id, self.refused(internal_error())))
        if answer is not None:
            if getattr(request, "reply", True):
                failpoint("daemon.reply")
                respond(answer)
            self.request_times.by_verb[verb].note(perf_counter_ns() - began_ns)
        self._settle()

    def stop(self, deadline_ms: int, stopped: Callable[[Left], None]) -> None:
        """Take no new work, and say when nothing is held and under way, or at the deadline what is left."""
        self._admin.stop(deadline_ms, stopped)

    def close(self) -> None:
        """Answer every pending request with a refusal: the daemon ends."""
        self._pending.close(self._drain_state.refusal())
        self.health.close()

    def refused(self, error: RequestError | Refusal) -> RequestError:
        """Count an error by its code, and put it into words."""
        self.count(f"errors_{error.code}")
        return in_words(error)

    def count(self, what: str) -> None:
        """Count something that happened."""
        self._counters[what] += 1

    def _serve(self, peer: bytes, request: wire.Request, frames: list[bytes]) -> Answer:
        verb = type(request)
        is_kept = verb in _KEPT
        try:
            answer = self._verbs[verb](peer, request, frames)
        except REFUSED as error:
            if not is_kept:
                raise
            answer = Answer(wire.error_reply(request.id, self.refused(error)))
        is_kept = is_kept or (isinstance(answer.header, wire.Acquired) and bool(answer.header.loads))
        if is_kept and (group := self._groups.of_connection(peer)) is not None:
            group.answers.keep(request, answer)
        return answer

    # --- what the core wants done -----------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Do what the core has asked for."""
        effects = self._cache.effects
        self._device_blocks.write()
        while effects:
            self._carry_out(effects.pop(0))
            self._device_blocks.write()
        self.state_writer.keep()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SlabAllocated() | SlotsHandedOut() | SlotsReclaimed():
                self._claims.write(effect)
            case StartTransfer():
                self.state_writer.keep()
                replica = self._replicas[effect.pool]
                self.copy_times.ordered(effect, replica.layout.bytes_per_block() * replica.layout.shards)
                replica.workers.start(effect, partial(self._on_settled, effect.transfer))
            case HurryTransfer():
                self._replicas[effect.pool].workers.hurry(effect)
            case AbandonLoad():
                self._replicas[effect.pool].workers.abandon(effect)
            case QueryStorage() | StartFetch() | StartBackup() | ForgetStored():
                self.storage.carry_out(effect)
            case PrefetchOver():
                self._pending.look(Wait.PREFETCH, subject=effect.prefetch)
            case ClearingEnded() | PoolEmptied():
                self._go_on(effect)
            case LoadsEnded():
                self._stories.loads_ended(effect)
                self._pending.look(Wait.LOAD, session=effect.session, subject=effect.lease)
            case SessionExpired() | SessionEnded():
                self._on_session_over(effect)

    def _go_on(self, effect: ClearingEnded | PoolEmptied) -> None:
        if isinstance(effect, ClearingEnded):
            self.clears.finish(effect)
        else:
            self._sleeps.emptied(effect)

    def _on_session_over(self, effect: SessionExpired | SessionEnded) -> None:
        session = effect.session
        self.copy_times.session_over(session)
        if isinstance(effect, SessionExpired):
            self._stories.expired(effect, may_return=self._admission.expired(session))
        elif self._groups.of_session(session) is not None:
            self._stories.ended(effect)
        self._pending.session_over(session)
        if isinstance(effect, SessionEnded):
            self._offload_admission.forget(session)
            self._forget(self._groups.close(session))

    def _settle(self) -> None:
        """After a reply: let the core plan copies, carry them out, and answer pending requests."""
        try:
            self._cache.settle()
            self.carry_out()
            if self._pending.is_owing:
                self._pending.look(Wait.SLOTS)
                self.carry_out()
                self._pending.look(Wait.CLEAR, Wait.OPERATOR, Wait.POOL, Wait.STOP)
            if self._cache.index_changes:
                self.index_changed()
        except Exception:
            log.exception("internal error between two requests")
            self.count("errors_internal")

    def _on_settled(self, transfer: TransferId, shard: ShardIndex, error: str, corrupt: tuple[int, ...]) -> None:
        """A shard is through with a transfer. Never raises: the workers' other messages come by the same way."""
        self._stories.settled(transfer, shard, error, len(corrupt))
        try:
            self.copy_times.reported(transfer, self._cache.worker_copies.shard_done(transfer, shard, error, corrupt))
            self.carry_out()
            self._settle()
        except Exception:
            log.exception("internal error at the end of transfer %(transfer)d", {"transfer": transfer})
            self.count("errors_internal")

    def on_event(self, event: Event) -> None:
        """An event that no request caused: time, deaths, workers."""
        self._cache.handle(event)
        self.copy_times.heard(event)
        self.state_writer.heard(event)
        self.carry_out()
        self._settle()

    def on_memory_gone(self, replica: str) -> None:
        """A device works, and has lost the memory of a replica's pool."""
        self._sleeps.memory_gone(replica)

    def wait_for_device(self, replica: str) -> None:
        """A start has found a replica's device lost: its pool gets memory when the device can make it."""
        self._sleeps.wait_for_device(replica)

    # --- attach socket ----------------------------------------------------------------------------------------------

    def identify(self, peer: Peer) -> Identified:
        """A scheduler process presents itself."""
        token = self._groups.identify(peer)
        return Identified(member=token, endpoint=self._endpoint, daemon_epoch=self._cache.epoch)

    def join(
        self, peer: Peer, session_id: SessionId, token: bytes, shard: ShardIndex
    ) -> tuple[Joined | JoinedHost, tuple[int, ...]]:
        """A shard process asks for its memory: the answer and the descriptors to pass on.

        Raises:
            RequestError: no such session or not its token, expired, no such shard, or it has no worker now.
        """
        if not self._offload.owns(session_id):
            joined_pool = self._admission.join(peer, session_id, token, shard)
            self.state_writer.keep()
            return joined_pool
        joined = self._offload_admission.join(peer, session_id, token, shard)
        self.carry_out()
        self._forget(self._offload_admission.take_departed())
        return joined

    async def claim_pool(self, request: ClaimPool, grants: Grants, process: WriterProcess | None = None) -> Claimed:
        """As `AttachHandler.claim_pool`: refused if no such memory is kept, has room, or is for this user."""
        if process is None:
            return self._engine_pools.claim(request, grants.owner_of_pools())
        return await self._engine_pools.claim_on_device(request, process, grants.owner_of_pools)

    def take_in(self, shapes: Mapping[bytes, Shape], sessions: Iterable[FoundSession]) -> None:
        """Take in sessions from before a restart: their engines may rejoin or say hello, or die."""
        self._offload_admission.shapes.update(shapes)
        for found in sessions:
            self._groups.restore(found)
            for peer, _ in found.members:
                if self.watch is not None and peer.is_seen:
                    self.watch.watch(peer)
        self.carry_out()

    def peer_lost(self, peer: Peer) -> None:
        """A process is dead: its sessions are over, and their slots are free when all their processes are dead."""
        self._groups.retire(peer)
        self._claims.trim()
        for group in self._groups.of_peer(peer):
            living = group.living()
            self._groups.end(group.session)
            words = "process %(pid)d of session %(session)d is dead, %(living)d live"
            log.info(words, {"pid": peer.pid, "session": group.session, "living": len(living)})
            self.on_event(MemberLost(group.session) if living else MembersDied(group.session))

    def leave(self, peer: Peer) -> None:
        """A shard process no longer uses its pool, or the host pool."""
        for group in self._groups.of_peer(peer):
            if self._offload.owns(group.session):
                self._offload.leave(group, peer)
        self._forget([*self._offload_admission.take_departed(), *self._admission.leave(peer)])
        self.carry_out()
        self._settle()

    def peer_closed(self, peer: Peer) -> bool:
        """A process closed its connection, but may live. Returns whether a session needs it watched."""
        self._groups.retire(peer)
        return bool(self._groups.of_peer(peer))

    def _forget(self, peers: list[Peer]) -> None:
        for peer in peers:
            self._groups.retire(peer)
            if self.watch is not None:
                self.watch.forget(peer)
