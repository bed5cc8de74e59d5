"""The requests of engines in offload mode, which keep their own device memory: one method each."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence

from kvcached.core.cache import Cache
from kvcached.core.index.pieces import Piece
from kvcached.core.messages import MembersDied, TransferKind
from kvcached.core.refusals import Refusal
from kvcached.core.slots.ranges import Ranges, no_ranges, slot_count
from kvcached.core.slots.states import TransferState
from kvcached.core.transfers.engine_copies import EVERY_SHARD, StorePlan
from kvcached.events.token_book import TokenBook
from kvcached.monitoring.timing import CopyTimes, Executor
from kvcached.service.offload.admission import OffloadAdmission
from kvcached.service.pending import Answer, Verb
from kvcached.service.refusals import in_words
from kvcached.service.sessions import EngineGroup, EngineGroups, Peer
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, SessionId, TransferId


class OffloadVerbs:
    """Requests of engines in offload mode.

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
        book: TokenBook | None,
    ) -> None:
        self._cache = cache
        self._core = cache.offload
        self._groups = groups
        self.admission = admission
        self._now_ms = now_ms
        self._copy_times = copy_times
        self._book = book
        self.by_type: dict[type[wire.Header], Verb] = {
            wire.PrepareLoad: self._prepare_load,
            wire.PrepareStore: self._prepare_store,
            wire.PrepareStores: self._prepare_stores,
            wire.TransferDone: self._transfer_done,
        }

    def owns(self, session: SessionId) -> bool:
        """Whether a session is one of an engine in offload mode."""
        return session in self._core.sessions

    def leave(self, group: EngineGroup, peer: Peer) -> None:
        """A shard process has left a session, which goes on without it. Where it was the last process, it ends."""
        shard = self.admission.leave(group, peer)
        if shard is not None:
            for transfer in self._core.shard_left(group.session, shard):
                self._copy_times.reported(transfer, TransferState.FAILED)
        if not group.living():
            self._cache.handle(MembersDied(group.session))

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
            group.session,
            request.request,
            keys,
            request.tokens,
            full=request.full,
            priority=request.priority,
            tenant=request.tenant,
            load_from=request.load_from,
        )
        load = self._core.announced_load(group.session, lease) if lease.load else None
        if load is None:
            return Answer(wire.Held(id=request.id, lease=lease.id, hit=lease.hit, filling=lease.filling))
        self._note_begun(group.session, load.transfer, TransferKind.LOAD, slot_count(load.slots))
        held = wire.Held(
            id=request.id, lease=lease.id, hit=lease.hit, transfer=load.transfer, generation=load.generation
        )
        return Answer(held, (load.slots.tobytes(),))

    def release(self, group: EngineGroup, request: wire.Release, frames: list[bytes]) -> Answer:
        """Give a lease back."""
        self._check_epoch(request.epoch)
        if frames:
            raise request_error(
                ErrorCode.BAD_FRAMES, "in offload mode a release commits nothing", "store blocks with prepare_store"
            )
        if request.call_off:
            called_off = TransferId(request.call_off)
            state = self._core.transfer_done(group.session, TransferKind.LOAD, called_off, EVERY_SHARD)
            self._copy_times.reported(called_off, state)
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
        session, keys = self.own_session(peer, request.epoch), frames[0]
        tokens = self._checked_tokens(session, frames)
        plan = self._store(session, LeaseId(request.lease), request.start, keys)
        self._note_tokens(session, keys, tokens)
        header = wire.StorePrepared(id=request.id, transfer=plan.transfer, depth=plan.depth, generation=plan.generation)
        return Answer(header, (_packed(plan.pieces).tobytes(), plan.slots.tobytes()))

    def _prepare_stores(self, peer: bytes, request: wire.PrepareStores, frames: list[bytes]) -> Answer:
        session, keys = self.own_session(peer, request.epoch), frames[0]
        if (blocks := sum(offer.blocks for offer in request.offers)) * KEY_SIZE_BYTES != len(keys):
            raise request_error(
                ErrorCode.BAD_FRAMES, f"{len(keys)} bytes of keys for {blocks} blocks", "send 16 bytes for each block"
            )
        tokens = self._checked_tokens(session, frames)
        told_bytes = len(tokens) // blocks if blocks else 0
        outcomes, pieces, slots, first = [], no_ranges(), no_ranges(), 0
        for offer in request.offers:
            end = first + offer.blocks
            offered = keys[first * KEY_SIZE_BYTES : end * KEY_SIZE_BYTES]
            try:
                plan = self._store(session, LeaseId(offer.lease), offer.start, offered)
            except Refusal as refusal:
                error = in_words(refusal)
                self._cache.counters[f"errors_{error.code}"] += 1
                outcomes.append(wire.StoreOutcome(0, offer.start, 0, 0, error.code, error.message[:1024]))
            else:
                self._note_tokens(session, offered, tokens[first * told_bytes : end * told_bytes])
                outcomes.append(wire.StoreOutcome(plan.transfer, plan.depth, plan.generation, len(plan.pieces)))
                pieces += _packed(plan.pieces)
                slots += plan.slots
            first = end
        for lease in request.releases:
            with contextlib.suppress(Refusal):
                self._core.release(session, LeaseId(lease))
        header = wire.StoresPrepared(id=request.id, outcomes=tuple(outcomes))
        return Answer(header, (pieces.tobytes(), slots.tobytes()))

    def _transfer_done(self, _: bytes, request: wire.TransferDone, frames: list[bytes]) -> Answer:
        session = self._groups.authenticate(SessionId(request.session), request.token).session
        corrupt = tuple(array("i", frames[0])) if frames else ()
        kind, transfer = TransferKind(request.kind), TransferId(request.transfer)
        ended: list[TransferId] = []
        refused: list[Refusal] = []
        for number, bad in ((transfer, corrupt), *((TransferId(more), ()) for more in request.more)):
            try:
                state = self._core.transfer_done(session, kind, number, request.shard, request.error, bad)
            except Refusal as refusal:
                refused.append(refusal)  # a load's slots are free all the same, and so are those of the copies to come
                continue
            self._copy_times.reported(number, state)
            if state is None:
                ended.append(number)
        if refused:
            raise refused[0]
        # What was written into slots that were others' already; a late load or failure harms nobody.
        has_written = kind is TransferKind.STORE and request.shard != EVERY_SHARD and not request.error
        return Answer(wire.Settled(id=request.id, ended=tuple(ended) if has_written else ()))

    def _store(self, session: SessionId, lease: LeaseId, start: int, keys: bytes) -> StorePlan:
        plan = self._core.prepare_store(session, lease, start, keys)
        if plan.transfer:
            self._note_begun(session, plan.transfer, TransferKind.STORE, slot_count(plan.slots))
        return plan

    def _note_begun(self, session: SessionId, transfer: TransferId, kind: TransferKind, blocks: int) -> None:
        geometry = self.admission.geometry(self._core.sessions[session].namespace.spec.root)
        self._copy_times.begin(transfer, Executor.ENGINE, kind, blocks, geometry.block_bytes * geometry.parts, session)

    def _checked_tokens(self, session: SessionId, frames: list[bytes]) -> bytes:
        """The tokens of blocks that are about to be stored; none where an engine sends none, or nobody is told.

        Raises:
            RequestError: they do not fit the blocks.
        """
        if self._book is None or len(frames) == 1:
            return b""
        self._book.check(self._cache.announced_to(session), *frames)
        return frames[1]

    def _note_tokens(self, session: SessionId, keys: bytes, tokens: bytes) -> None:
        """Note the tokens of an offer that was accepted."""
        if self._book is not None and tokens:
            self._book.note(self._cache.announced_to(session), keys, tokens)

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
                "close the client and connect again",
            )


def _packed(pieces: Sequence[Piece]) -> Ranges[int]:
    """Pieces as they are sent: depth and number of blocks."""
    return array("i", [number for start, end in pieces for number in (start, end - start)])
