"""The requests of engines: one method each, a straight line of who asks, what the core says, the reply.

Nothing here waits: `load` and `wait_for_slots` are answered when the core knows (`kvcached.service.pending`).
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Mapping

from kvcached.core.cache import Cache
from kvcached.core.messages import MemberLost
from kvcached.core.restart.rejoin import Rejoin
from kvcached.events.token_book import TokenBook
from kvcached.service.admission import Admission, DrainState
from kvcached.service.offload.verbs import OffloadVerbs
from kvcached.service.pending import Answer, LateVerb, PendingReplies, PendingReply, Respond, Verb, Wait
from kvcached.service.replica import NAMESPACE_SHOWN_BYTES, Replica
from kvcached.service.sessions import EarlierName, EngineGroup, EngineGroups, Peer
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.fields import slot_ranges
from kvcached_client.types import FenceSequence, LeaseId, SessionId

log = logging.getLogger(__name__)


class EngineVerbs:
    """Requests that engines with a device pool make; those that others make, too, go on to `OffloadVerbs`.

    Args:
        forget: stops watching processes that are in no session.
        book: the tokens that routers may know.

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
        book: TokenBook | None,
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
        self._book = book
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
        fields = {"session": welcome.session, "pid": peer.pid, "replica": request.replica}
        log.info("session %(session)d: process %(pid)d on replica %(replica)s", fields)
        return Answer(welcome)

    def _rejoin(self, connection: bytes, request: wire.Rejoin, _: list[bytes]) -> Answer:
        group, peer = self._admission.find_earlier(connection, request)
        session = self._declarations.resume(group.session, self._now_ms(), FenceSequence(request.fence))
        name = EarlierName((request.daemon_epoch, request.session), hashlib.sha256(request.token).digest())
        departed = self._groups.resume(group, connection, peer, name)
        welcome = self._admission.welcome_back(request, session, group)
        words = "session %(session)d: process %(pid)d rejoined with its leases from before the restart"
        log.info(words, {"session": welcome.session, "pid": peer.pid})
        self._forget(departed)
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
        namespace = welcome.namespace[:NAMESPACE_SHOWN_BYTES].hex()
        fields = {"session": welcome.session, "pid": peer.pid, "engine": request.engine, "namespace": namespace}
        words = "session %(session)d: process %(pid)d, %(engine)s, in namespace %(namespace)s (%(label)s)"
        log.info(words, {**fields, "label": request.label})
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
        if request.load_from is not None:
            raise request_error(
                ErrorCode.BAD_VALUE, "an engine on a device pool announces no loads", "leave load_from out"
            )
        asked = (request.epoch, request.request, keys, request.tokens, request.reserve)
        grant = self._cache.managed.acquire(
            group.session, *asked, full=request.full, priority=request.priority, tenant=request.tenant
        )
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
        self._check_tokens(group.session, frames)
        done = self._cache.managed.commit(
            group.session,
            request.epoch,
            LeaseId(request.lease),
            request.start,
            frames[0],
            slot_ranges(frames[1]),
            FenceSequence(request.fence),
        )
        self._note_tokens(group.session, frames)
        return Answer(wire.Committed(id=request.id, depth=done.depth, adopted=done.adopted, duplicates=done.duplicates))

    def _release(self, peer: bytes, request: wire.Release, frames: list[bytes]) -> Answer:
        group = self._groups.owner(peer)
        if self._offload.owns(group.session):
            return self._offload.release(group, request, frames)
        if request.call_off:
            raise request_error(
                ErrorCode.BAD_VALUE, "an engine on a device pool announces no loads", "leave call_off out"
            )
        session, lease, fence = group.session, LeaseId(request.lease), FenceSequence(request.fence)
        if frames:
            self._check_tokens(session, frames)
            keys, slots = frames[0], slot_ranges(frames[1])
            done = self._cache.managed.finish(session, request.epoch, lease, request.start, keys, slots, fence)
            self._note_tokens(session, frames)
            answer = Answer(wire.Released(id=request.id, adopted=done.adopted, duplicates=done.duplicates))
        else:
            self._cache.managed.release(session, request.epoch, lease, fence)
            answer = Answer(wire.Released(id=request.id))
        self._pending.look(Wait.LOAD, session=session, subject=lease)
        return answer

    def _check_tokens(self, session: SessionId, frames: list[bytes]) -> None:
        """Refuse tokens that do not fit the blocks beside which an engine sends them."""
        if self._book is not None and len(frames) == 3:  # noqa: PLR2004 - keys, slots, tokens
            self._book.check(self._cache.announced_to(session), frames[0], frames[2])

    def _note_tokens(self, session: SessionId, frames: list[bytes]) -> None:
        """Note the tokens of blocks that were committed, if an engine sends them. Routers hear of the blocks later."""
        if self._book is not None and len(frames) == 3:  # noqa: PLR2004 - as above
            self._book.note(self._cache.announced_to(session), frames[0], frames[2])

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
        if group.others():
            # Its shard processes may still write: their slots are free when the processes are dead.
            self._cache.handle(MemberLost(group.session))
            self._forget(self._groups.part(group, group.scheduler))
        else:
            self._cache.close_session(group.session)
        return Answer(wire.Goodbye(id=request.id))
