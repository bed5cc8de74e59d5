"""The verbs of engines in attached mode: one method each, as in `kvcached.service`."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kvcached.answers import Answer
from kvcached.attached_admission import AttachedAdmission
from kvcached.core.cache import Cache
from kvcached.core.ranges import Ranges
from kvcached.membership import Group, Membership
from kvcached_client import protocol as wire
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import LeaseId, SessionId, TransferId


class AttachedVerbs:
    """Requests of engines in attached mode.

    Attributes:
        by_type: what serves each verb that only they have; `submit` of the service knows who asks.
    """

    def __init__(
        self, cache: Cache, membership: Membership, admission: AttachedAdmission, now_ms: Callable[[], int]
    ) -> None:
        self._cache = cache
        self._core = cache.attached
        self._membership = membership
        self._admission = admission
        self._now_ms = now_ms
        self.by_type: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.PrepareLoad: self._prepare_load,
            wire.PrepareStore: self._prepare_store,
            wire.CommitStore: self._commit_store,
            wire.CompleteLoad: self._complete_load,
            wire.Clear: self._clear,
        }

    def owns(self, session: SessionId) -> bool:
        """Whether a session is one of an engine in attached mode."""
        return session in self._core.sessions

    # --- verbs that engines on device pools have, too ---------------------------------------------------------------

    def match(self, group: Group, request: wire.Match, keys: bytes) -> Answer:
        """How many leading blocks the host pool holds."""
        self._check_epoch(request.epoch)
        blocks = self._core.match(group.session, keys, request.tokens, full=request.full)
        return Answer(wire.Matched(id=request.id, device=0, host=blocks))

    def acquire(self, group: Group, request: wire.Acquire, keys: bytes) -> Answer:
        """Pin what the host pool holds of a prompt."""
        self._check_epoch(request.epoch)
        if request.reserve:
            raise request_error(
                ErrorCode.BAD_VALUE, "in attached mode there are no slots to reserve", "leave reserve at 0"
            )
        lease = self._core.acquire(
            group.session, request.request, keys, request.tokens, full=request.full, priority=request.priority
        )
        return Answer(wire.Held(id=request.id, lease=lease.id, hit=lease.hit))

    def release(self, group: Group, request: wire.Release, frames: list[bytes]) -> Answer:
        """Give a lease back."""
        self._check_epoch(request.epoch)
        if frames:
            raise request_error(
                ErrorCode.BAD_FRAMES, "in attached mode a release commits nothing", "store blocks with prepare_store"
            )
        self._core.release(group.session, LeaseId(request.lease))
        return Answer(wire.Released(id=request.id))

    def heartbeat(self, group: Group, request: wire.Heartbeat) -> Answer:
        """The session lives."""
        session = self._core.heartbeat(group.session, self._now_ms())
        return Answer(wire.Alive(id=request.id, epoch=self._cache.epoch, generation=session.space.generation))

    # --- verbs of their own -----------------------------------------------------------------------------------------

    def _prepare_load(self, peer: bytes, request: wire.PrepareLoad, _: list[bytes]) -> Answer:
        session = self._own_session(peer, request.epoch)
        plan = self._core.prepare_load(session, LeaseId(request.lease), request.start, request.blocks)
        header = wire.LoadPrepared(id=request.id, transfer=plan.transfer, generation=plan.generation)
        return Answer(header, (plan.slots.tobytes(),))

    def _prepare_store(self, peer: bytes, request: wire.PrepareStore, frames: list[bytes]) -> Answer:
        session = self._own_session(peer, request.epoch)
        plan = self._core.prepare_store(session, LeaseId(request.lease), request.start, frames[0])
        header = wire.StorePrepared(id=request.id, transfer=plan.transfer, depth=plan.depth, generation=plan.generation)
        pieces: Ranges[int] = array("i", [number for start, end in plan.pieces for number in (start, end - start)])
        return Answer(header, (pieces.tobytes(), plan.slots.tobytes()))

    def _commit_store(self, _: bytes, request: wire.CommitStore, __: list[bytes]) -> Answer:
        session = self._shard_session(request.session, request.token)
        self._core.commit_store(session, TransferId(request.transfer), request.shard, request.error)
        return Answer(wire.Settled(id=request.id))

    def _complete_load(self, _: bytes, request: wire.CompleteLoad, frames: list[bytes]) -> Answer:
        session = self._shard_session(request.session, request.token)
        corrupt = tuple(array("i", frames[0]))
        self._core.complete_load(session, TransferId(request.transfer), request.shard, request.error, corrupt)
        return Answer(wire.Settled(id=request.id))

    def _clear(self, peer: bytes, request: wire.Clear, _: list[bytes]) -> Answer:
        generation, blocks = self._core.clear(self._own_session(peer, request.epoch))
        return Answer(wire.Cleared(id=request.id, generation=generation, blocks=blocks))

    def _own_session(self, connection: bytes, epoch: int) -> SessionId:
        group = self._membership.of_connection(connection)
        if group is None or not self.owns(group.session):
            raise request_error(
                ErrorCode.NO_SESSION,
                "this connection has no session in attached mode, or none any more",
                "close the client and connect again",
            )
        self._check_epoch(epoch)
        return group.session

    def _shard_session(self, session: int, token: bytes) -> SessionId:
        return self._admission.member(SessionId(session), token)[0].session

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._cache.epoch:
            raise request_error(
                ErrorCode.STALE_EPOCH,
                f"epoch {epoch} of the host pool is over, it is {self._cache.epoch} now",
                "attach and say hello again",
            )
