"""The requests of engines: one method each, a straight line of who asks, what the core says, the reply.

Nothing here waits: `load` and `wait_for_slots` are answered when the core knows (`kvcached.service.pending`).
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import Piece
from kvcached.core.messages import MemberLost, TransferKind
from kvcached.core.refusals import Refusal
from kvcached.core.restart.rejoin import Rejoin
from kvcached.core.slots.ranges import Ranges, no_ranges, slot_count
from kvcached.core.transfers.engine_copies import StorePlan
from kvcached.monitoring.timing import CopyTimes, Executor
from kvcached.service.admission import Admission, DrainState
from kvcached.service.offload_admission import OffloadAdmission
from kvcached.service.pending import Answer, LateVerb, PendingReplies, PendingReply, Respond, Verb, Wait
from kvcached.service.refusals import in_words
from kvcached.service.replica import NAMESPACE_SHOWN_BYTES, Replica
from kvcached.service.sessions import EngineGroup, EngineGroups, Peer
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.fields import slot_ranges
from kvcached_client.types import KEY_SIZE_BYTES, FenceSequence, LeaseId, SessionId, TransferId

log = logging.getLogger(__name__)


class EngineVerbs:
    """Requests that engines with a device pool make; those that others make, too, go on to `OffloadVerbs`.

    Args:
        forget: stops watching processes that are in no session.

    Attributes:
        by_type: what serves each verb.
        late_by_type: the same of those that may be answered later.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        groups: EngineGroups,
        admission: Admission,
        offload: OffloadVerbs,
        *,
        pending: PendingReplies,
        drain_state: DrainState,
        now_ms: Callable[[], int],
        forget: Callable[[list[Peer]], None],
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._groups = groups
        self._admission = admission
        self._offload = offload
        self._pending = pending
        self._drain_state = drain_state
        self._now_ms = now_ms
        self._forget = forget
        self._declarations = Rejoin(cache)
        self.by_type: dict[type[wire.Header], Verb] = {
            wire.Hello: self._hello,
            wire.HelloOffload: self._hello_offload,
            wire.Rejoin: self._rejoin,
            wire.Declare: self._declare,
            wire.DeclareOver: self._declare_over,
            wire.Match: self._match,
            wire.Acquire: self._acquire,
            wire.Allocate: self._allocate,
            wire.Commit: self._commit,
            wire.Release: self._release,
            wire.Heartbeat: self._heartbeat,
            wire.Bye: self._bye,
            **offload.by_type,
        }
        self.late_by_type: dict[type[wire.Header], LateVerb] = {
            wire.Load: self._load,
            wire.WaitForSlots: self._wait_for_slots,
        }

    def _hello(self, connection: bytes, request: wire.Hello, _: list[bytes]) -> Answer:
        self._drain_state.check()
        welcome, peer = self._admission.hello(connection, request, self._now_ms())
        log.info("session %d: process %d on replica %s", welcome.session, peer.pid, request.replica)
        return Answer(welcome)

    def _rejoin(self, connection: bytes, request: wire.Rejoin, _: list[bytes]) -> Answer:
        group, peer = self._admission.find_earlier(connection, request)
        session = self._declarations.resume(group.session, self._now_ms(), FenceSequence(request.fence))
        self._groups.resume(group, connection, peer)
        welcome = self._admission.welcome_back(request, session, group)
        log.info("session %d: process %d rejoined with its leases from before the restart", welcome.session, peer.pid)
        return Answer(welcome)

    def _declare(self, connection: bytes, request: wire.Declare, frames: list[bytes]) -> Answer:
        keys, held, own = frames
        lease = self._declarations.declare(
            self._groups.owner(connection).session,
            request.epoch,
            request.request,
            request.tokens,
            request.hit,
            keys,
            array("i", held),
            array("i", own),
        )
        return Answer(wire.Declared(id=request.id, lease=lease))

    def _declare_over(self, connection: bytes, request: wire.DeclareOver, _: list[bytes]) -> Answer:
        freed = self._declarations.over(self._groups.owner(connection).session, request.epoch)
        return Answer(wire.DeclareEnded(id=request.id, freed=freed))

    def _hello_offload(self, connection: bytes, request: wire.HelloOffload, _: list[bytes]) -> Answer:
        self._drain_state.check()
        welcome, peer = self._offload.admission.hello(connection, request, self._now_ms())
        self._forget(self._offload.admission.take_departed())
        log.info(
            "session %d: process %d, %s, in namespace %s (%s)",
            welcome.session,
            peer.pid,
            request.engine,
            welcome.namespace[:NAMESPACE_SHOWN_BYTES].hex(),
            request.label,
        )
        return Answer(welcome)

    def _match(self, peer: bytes, request: wire.Match, frames: list[bytes]) -> Answer:
        group = self._groups.owner(peer)
        if self._offload.owns(group.session):
            return self._offload.match(group, request, frames[0])
        device, host = self._cache.managed.match(
            group.session, request.epoch, frames[0], request.tokens, full=request.full
        )
        return Answer(wire.Matched(id=request.id, device=device, host=host))

    def _acquire(self, peer: bytes, request: wire.Acquire, frames: list[bytes]) -> Answer:
        group = self._groups.owner(peer)
        if not self._drain_state.takes_work and not self._holds(group.session, request.request):
            self._drain_state.check()
        keys = group.prompts.whole(request.known, frames[0])
        answer = self._acquire_keys(group, request, keys)
        group.prompts.keep(keys, request.known)
        return answer

    def _acquire_keys(self, group: EngineGroup, request: wire.Acquire, keys: bytes) -> Answer:
        if self._offload.owns(group.session):
            return self._offload.acquire(group, request, keys)
        asked = (request.epoch, request.request, keys, request.tokens, request.reserve)
        grant = self._cache.managed.acquire(group.session, *asked, full=request.full, priority=request.priority)
        loads = tuple(wire.LoadTicket(transfer, progress) for transfer, progress in grant.loads)
        header = wire.Acquired(id=request.id, lease=grant.lease, hit=grant.hit, ready=grant.ready, loads=loads)
        return Answer(header, (grant.hit_ranges, grant.ranges))

    def _holds(self, session: SessionId, request: str) -> bool:
        """Whether a request already has a lease: its `acquire` is then a retry."""
        found = self._cache.managed.sessions.get(session) or self._cache.offload.sessions.get(session)
        return found is not None and request in found.leases.by_request

    def _allocate(self, peer: bytes, request: wire.Allocate, _: list[bytes]) -> Answer:
        group = self._groups.owner(peer)
        ranges = self._cache.managed.allocate(group.session, request.epoch, LeaseId(request.lease), request.blocks)
        return Answer(wire.Allocated(id=request.id, blocks=request.blocks), (ranges,))

    def _commit(self, peer: bytes, request: wire.Commit, frames: list[bytes]) -> Answer:
        group = self._groups.owner(peer)
        done = self._cache.managed.commit(
            group.session,
            request.epoch,
            LeaseId(request.lease),
            request.start,
            frames[0],
            slot_ranges(frames[1]),
            FenceSequence(request.fence),
        )
        return Answer(wire.Committed(id=request.id, depth=done.depth, adopted=done.adopted, duplicates=done.duplicates))

    def _release(self, peer: bytes, request: wire.Release, frames: list[bytes]) -> Answer:
        group = self._groups.owner(peer)
        if self._offload.owns(group.session):
            return self._offload.release(group, request, frames)
        session, lease, fence = group.session, LeaseId(request.lease), FenceSequence(request.fence)
        if frames:
            keys, slots = frames[0], slot_ranges(frames[1])
            done = self._cache.managed.finish(session, request.epoch, lease, request.start, keys, slots, fence)
            answer = Answer(wire.Released(id=request.id, adopted=done.adopted, duplicates=done.duplicates))
        else:
            self._cache.managed.release(session, request.epoch, lease, fence)
            answer = Answer(wire.Released(id=request.id))
        self._pending.look(Wait.LOAD, session=session, subject=lease)
        return answer

    def _load(self, peer: bytes, request: wire.Load, _: list[bytes], respond: Respond) -> Answer | None:
        session, lease = self._groups.owner(peer).session, LeaseId(request.lease)

        def ask(*, is_last: bool) -> Answer | None:
            del is_last
            loaded = self._cache.managed.load(session, request.epoch, lease)
            return None if loaded is None else Answer(wire.Loaded(id=request.id, hit=loaded.hit), (loaded.ranges,))

        return self._pending.wait(PendingReply(Wait.LOAD, request, respond, ask, session, lease))

    def _wait_for_slots(
        self, peer: bytes, request: wire.WaitForSlots, _: list[bytes], respond: Respond
    ) -> Answer | None:
        session = self._groups.owner(peer).session

        def ask(*, is_last: bool) -> Answer | None:
            del is_last
            available = self._cache.managed.retry_when_freed(session, request.epoch, request.blocks)
            return None if available is None else Answer(wire.SlotsAvailable(id=request.id, available=available))

        return self._pending.wait(PendingReply(Wait.SLOTS, request, respond, ask, session))

    def _heartbeat(self, _: bytes, request: wire.Heartbeat, __: list[bytes]) -> Answer:
        group = self._groups.authenticate(SessionId(request.session), request.token)
        if self._offload.owns(group.session):
            return self._offload.heartbeat(group, request)
        session = self._cache.managed.heartbeat(group.session, FenceSequence(request.fence), self._now_ms())
        generation = self._replicas[session.pool.name].generation
        return Answer(wire.Alive(id=request.id, epoch=session.pool.epoch, generation=generation))

    def _bye(self, peer: bytes, request: wire.Bye, _: list[bytes]) -> Answer:
        group = self._groups.owner(peer)
        if self._offload.owns(group.session):
            self._offload.admission.part(group)
            self._forget(self._offload.admission.take_departed())
            return Answer(wire.Goodbye(id=request.id))
        if group.living(beside=group.scheduler):
            # Its shard processes may still write: their slots are free when the processes are dead.
            self._cache.handle(MemberLost(group.session))
            self._forget(self._groups.part(group, group.scheduler))
        else:
            self._cache.close_session(group.session)
        return Answer(wire.Goodbye(id=request.id))


class OffloadVerbs:
    """Requests of engines that keep their own device memory: in offload mode.

    Attributes:
        admission: opens their sessions.
        by_type: what serves each verb that only they have.
    """

    def __init__(
        self,
        cache: Cache,
        groups: EngineGroups,
        admission: OffloadAdmission,
        now_ms: Callable[[], int],
        copy_times: CopyTimes,
    ) -> None:
        self._cache = cache
        self._core = cache.offload
        self._groups = groups
        self.admission = admission
        self._now_ms = now_ms
        self._copy_times = copy_times
        self.by_type: dict[type[wire.Header], Verb] = {
            wire.PrepareLoad: self._prepare_load,
            wire.PrepareStore: self._prepare_store,
            wire.PrepareStores: self._prepare_stores,
            wire.TransferDone: self._transfer_done,
        }

    def owns(self, session: SessionId) -> bool:
        """Whether a session is one of an engine in offload mode."""
        return session in self._core.sessions

    # --- verbs that engines on device pools have, too ---------------------------------------------------------------

    def match(self, group: EngineGroup, request: wire.Match, keys: bytes) -> Answer:
        """How many leading blocks the host pool holds."""
        self._check_epoch(request.epoch)
        blocks = self._core.match(group.session, keys, request.tokens, full=request.full)
        return Answer(wire.Matched(id=request.id, device=0, host=blocks))

    def acquire(self, group: EngineGroup, request: wire.Acquire, keys: bytes) -> Answer:
        """Lock the prompt's prefix that the host pool holds."""
        self._check_epoch(request.epoch)
        if request.reserve:
            raise request_error(
                ErrorCode.BAD_VALUE, "in offload mode there are no slots to reserve", "leave reserve at 0"
            )
        lease = self._core.acquire(
            group.session, request.request, keys, request.tokens, full=request.full, priority=request.priority
        )
        return Answer(wire.Held(id=request.id, lease=lease.id, hit=lease.hit, filling=lease.filling))

    def release(self, group: EngineGroup, request: wire.Release, frames: list[bytes]) -> Answer:
        """Give a lease back."""
        self._check_epoch(request.epoch)
        if frames:
            raise request_error(
                ErrorCode.BAD_FRAMES, "in offload mode a release commits nothing", "store blocks with prepare_store"
            )
        self._core.release(group.session, LeaseId(request.lease))
        return Answer(wire.Released(id=request.id))

    def heartbeat(self, group: EngineGroup, request: wire.Heartbeat) -> Answer:
        """The session lives."""
        session = self._core.heartbeat(group.session, self._now_ms())
        return Answer(wire.Alive(id=request.id, epoch=self._cache.epoch, generation=session.namespace.generation))

    # --- verbs of their own -----------------------------------------------------------------------------------------

    def _prepare_load(self, peer: bytes, request: wire.PrepareLoad, _: list[bytes]) -> Answer:
        session = self.own_session(peer, request.epoch)
        plan = self._core.prepare_load(session, LeaseId(request.lease), request.start, request.blocks)
        self._note_begun(session, plan.transfer, TransferKind.LOAD, request.blocks)
        header = wire.LoadPrepared(id=request.id, transfer=plan.transfer, generation=plan.generation)
        return Answer(header, (plan.slots.tobytes(),))

    def _prepare_store(self, peer: bytes, request: wire.PrepareStore, frames: list[bytes]) -> Answer:
        session = self.own_session(peer, request.epoch)
        plan = self._store(session, LeaseId(request.lease), request.start, frames[0])
        header = wire.StorePrepared(id=request.id, transfer=plan.transfer, depth=plan.depth, generation=plan.generation)
        return Answer(header, (_packed(plan.pieces).tobytes(), plan.slots.tobytes()))

    def _prepare_stores(self, peer: bytes, request: wire.PrepareStores, frames: list[bytes]) -> Answer:
        session, keys = self.own_session(peer, request.epoch), frames[0]
        if (blocks := sum(offer.blocks for offer in request.offers)) * KEY_SIZE_BYTES != len(keys):
            raise request_error(
                ErrorCode.BAD_FRAMES, f"{len(keys)} bytes of keys for {blocks} blocks", "send 16 bytes for each block"
            )
        outcomes, pieces, slots, at = [], no_ranges(), no_ranges(), 0
        for offer in request.offers:
            end = at + offer.blocks * KEY_SIZE_BYTES
            try:
                plan = self._store(session, LeaseId(offer.lease), offer.start, keys[at:end])
            except Refusal as refusal:
                error = in_words(refusal)
                self._cache.counters[f"errors_{error.code}"] += 1
                outcomes.append(wire.StoreOutcome(0, offer.start, 0, 0, error.code, error.message[:1024]))
            else:
                outcomes.append(wire.StoreOutcome(plan.transfer, plan.depth, plan.generation, len(plan.pieces)))
                pieces += _packed(plan.pieces)
                slots += plan.slots
            at = end
        for lease in request.releases:
            with contextlib.suppress(Refusal):
                self._core.release(session, LeaseId(lease))
        header = wire.StoresPrepared(id=request.id, outcomes=tuple(outcomes))
        return Answer(header, (pieces.tobytes(), slots.tobytes()))

    def _transfer_done(self, _: bytes, request: wire.TransferDone, frames: list[bytes]) -> Answer:
        session = self._groups.authenticate(SessionId(request.session), request.token).session
        corrupt = tuple(array("i", frames[0])) if frames else ()
        kind, transfer = TransferKind(request.kind), TransferId(request.transfer)
        for number, bad in ((transfer, corrupt), *((TransferId(more), ()) for more in request.more)):
            state = self._core.transfer_done(session, kind, number, request.shard, request.error, bad)
            self._copy_times.reported(number, state)
        return Answer(wire.Settled(id=request.id))

    def _store(self, session: SessionId, lease: LeaseId, start: int, keys: bytes) -> StorePlan:
        plan = self._core.prepare_store(session, lease, start, keys)
        if plan.transfer:
            self._note_begun(session, plan.transfer, TransferKind.STORE, slot_count(plan.slots))
        return plan

    def _note_begun(self, session: SessionId, transfer: TransferId, kind: TransferKind, blocks: int) -> None:
        geometry = self.admission.geometry(self._core.sessions[session].namespace.spec.root)
        self._copy_times.begin(transfer, Executor.ENGINE, kind, blocks, geometry.block_bytes * geometry.parts, session)

    def own_session(self, connection: bytes, epoch: int) -> SessionId:
        """The session in offload mode that a connection owns.

        Raises:
            RequestError: it has none, or names another epoch of the host pool.
        """
        group = self._groups.of_connection(connection)
        if group is None or not self.owns(group.session):
            raise request_error(
                ErrorCode.NO_SESSION,
                "this connection has no session in offload mode, or none any more",
                "close the client and connect again",
            )
        self._check_epoch(epoch)
        return group.session

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._cache.epoch:
            raise request_error(
                ErrorCode.STALE_EPOCH,
                f"epoch {epoch} of the host pool is over, it is {self._cache.epoch} now",
                "attach and say hello again",
            )


def _packed(pieces: Sequence[Piece]) -> Ranges[int]:
    """Pieces as they are sent: depth and number of blocks."""
    return array("i", [number for start, end in pieces for number in (start, end - start)])
