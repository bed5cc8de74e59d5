"""The requests by which people change what the daemon does and keeps.

Pause and resume copies, drain and stop; clear a namespace or set its weights version; pin prefixes, or remove them; set
a write policy.
A pause, a drain or a stop is answered when it is complete, or at its deadline with what is left; it holds in both
cases. A clear is answered when the new generation is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import DaemonState
from kvcached.service.admin.clears import Clears
from kvcached.service.admin.removals import PrefixRemovals
from kvcached.service.admission import DrainState
from kvcached.service.pending import Answer, LateVerb, PendingReplies, PendingReply, Respond, Verb, Wait
from kvcached.service.replica import NAMESPACE_SHOWN_BYTES, Replica, check_replica, resolve_namespace
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.fields import RESERVE_REQUEST_PREFIX

#: Requests of engines, or of people, that a drain waits for.
_DRAINED: Final = (Wait.LOAD, Wait.SLOTS, Wait.HEALTH, Wait.CLEAR)

_log: Final = logging.getLogger(__name__)


class Left(NamedTuple):
    """What keeps the daemon from being idle."""

    leases: int
    copies: int
    requests: int


class AdminVerbs:
    """Serves them.

    Args:
        clears: serves those that clear namespaces.
        removals: serves the one that removes a prefix.

    Attributes:
        by_type: what serves the verbs that are answered at once.
        late_by_type: what serves the others.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        drain_state: DrainState,
        pending: PendingReplies,
        clears: Clears,
        removals: PrefixRemovals,
        now_ms: Callable[[], int],
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._drain_state = drain_state
        self._pending = pending
        self._now_ms = now_ms
        self.by_type: dict[type[wire.Header], Verb] = {
            wire.Resume: self._resume,
            wire.SetPolicy: self._set_policy,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
        }
        self.late_by_type: dict[type[wire.Header], LateVerb] = {
            wire.Pause: self._pause,
            wire.Drain: self._drain,
            wire.Clear: clears.clear_own,
            wire.ClearNamespace: clears.clear,
            wire.SetWeights: clears.set_weights,
            wire.ForgetPrefix: removals.forget,
        }

    def left(self) -> Left:
        """What is held and under way now."""
        names = [name for session in self._cache.managed.sessions.values() for name in session.leases.by_request]
        names += [name for session in self._cache.offload.sessions.values() for name in session.leases.by_request]
        return Left(
            leases=sum(not name.startswith(RESERVE_REQUEST_PREFIX) for name in names),
            copies=self._cache.copies_under_way(),
            requests=self._pending.count(*_DRAINED),
        )

    def stop(self, deadline_ms: int, stopped: Callable[[Left], None]) -> None:
        """Take no new work, and say when nothing is left, or at the deadline what is."""
        self._drain_state.enter(DaemonState.STOPPING)

        def ask(*, is_last: bool) -> Answer | None:
            left = self.left()
            if any(left) and not is_last:
                return None
            return Answer(_drained(0, left, holds=True))

        def respond(_: Answer) -> None:
            stopped(self.left())

        answer = self._pending.wait(PendingReply(Wait.STOP, wire.Drain(id=0), respond, ask), deadline_ms)
        if answer is not None:
            respond(answer)

    def _pause(self, _: bytes, request: wire.Pause, __: list[bytes], respond: Respond) -> Answer | None:
        check_replica(request.replica, self._replicas)
        self._cache.pause(request.replica)

        def ask(*, is_last: bool) -> Answer | None:
            holds, under_way = self._cache.is_paused(request.replica), self._cache.copies_under_way(request.replica)
            if under_way and holds and not is_last:
                return None
            return Answer(wire.Paused(id=request.id, under_way=under_way, holds=holds))

        return self._pending.wait(PendingReply(Wait.OPERATOR, request, respond, ask), request.deadline_ms)

    def _resume(self, _: bytes, request: wire.Resume, __: list[bytes]) -> Answer:
        check_replica(request.replica, self._replicas)
        self._cache.resume(request.replica)
        if not request.replica:
            self._drain_state.enter(DaemonState.SERVING)
        return Answer(wire.Resumed(id=request.id, state=self._drain_state.state))

    def _drain(self, _: bytes, request: wire.Drain, __: list[bytes], respond: Respond) -> Answer | None:
        self._drain_state.enter(DaemonState.DRAINING)

        def ask(*, is_last: bool) -> Answer | None:
            left, holds = self.left(), not self._drain_state.takes_work
            if any(left) and holds and not is_last:
                return None
            return Answer(_drained(request.id, left, holds=holds))

        return self._pending.wait(PendingReply(Wait.OPERATOR, request, respond, ask), request.deadline_ms)

    def _set_policy(self, _: bytes, request: wire.SetPolicy, __: list[bytes]) -> Answer:
        namespace = resolve_namespace(self._cache, self._replicas, request.target)
        before = namespace.tree.write_policy
        self._cache.set_write_policy(namespace.tree, request.policy)
        shown = namespace.root[:NAMESPACE_SHOWN_BYTES].hex()
        fields = {"namespace": shown, "policy": request.policy, "before": before}
        _log.info("write policy of namespace %(namespace)s: %(policy)s, was %(before)s", fields)
        return Answer(
            wire.PolicySet(
                id=request.id,
                replicas=namespace.replicas,
                namespace=shown,
                label=namespace.label,
                policy=request.policy,
                before=before,
            )
        )

    def _pin(self, _: bytes, request: wire.Pin, frames: list[bytes]) -> Answer:
        tree, pool = self._place(request.target, frames[0])
        pin = self._cache.pins.pin(tree, pool, frames[0], self._now_ms() + request.ttl_ms)
        return Answer(wire.Pinned(id=request.id, device=pin.device.depth, host=pin.host.depth))

    def _unpin(self, _: bytes, request: wire.Unpin, frames: list[bytes]) -> Answer:
        tree, pool = self._place(request.target, frames[0])
        return Answer(wire.Unpinned(id=request.id, was_pinned=self._cache.pins.unpin(tree, pool, frames[0])))

    def _place(self, target: str, keys: bytes) -> tuple[PrefixTree, DevicePool | None]:
        """The tree, and for a replica its own pool."""
        if not keys:
            raise request_error(ErrorCode.BAD_VALUE, "a prefix of no blocks", "send the keys of its full blocks")
        tree = resolve_namespace(self._cache, self._replicas, target).tree
        pool = self._cache.pools.get(target)
        if pool is None and tree.host is None:
            raise request_error(
                ErrorCode.BAD_VALUE, f"{target!r} has no host pool to pin in", "name one of its replicas"
            )
        return tree, pool


def _drained(request_id: int, left: Left, *, holds: bool) -> wire.Drained:
    return wire.Drained(id=request_id, leases=left.leases, copies=left.copies, requests=left.requests, holds=holds)
