"""The requests by which people change what the daemon does and keeps.

Pause and resume copies, drain and stop; clear a namespace or set its weights version; pin prefixes; set a write policy.
A pause, a drain or a stop is answered when it is complete, or at its deadline with what is left; it holds in both
cases. A clear is answered when the new generation is recorded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from kvcached.core.cache import Cache
from kvcached.core.generations import Edition
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import ClearingEnded
from kvcached.core.namespaces import Namespace
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import DaemonState
from kvcached.recovery.recorder import Recorder
from kvcached.service.admission import DrainState
from kvcached.service.pending import Answer, LateVerb, PendingReplies, PendingReply, Respond, Verb, Wait
from kvcached.service.replica import NAMESPACE_SHOWN_BYTES, NamedNamespace, Replica, check_replica, resolve_namespace
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.fields import RESERVE_REQUEST_PREFIX
from kvcached_client.types import SessionId

#: Clears whose outcome is kept for retries, the latest of all connections.
CLEARS_KEPT: Final = 256

#: Requests of engines, or of people, that a drain waits for.
_DRAINED: Final = (Wait.LOAD, Wait.SLOTS, Wait.HEALTH, Wait.CLEAR)

_ClearRequest: TypeAlias = wire.Clear | wire.ClearNamespace | wire.SetWeights

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


@dataclass(slots=True, eq=False)
class _Clear:
    """One of them.

    Attributes:
        replicas: that share the namespace; none where engines in offload mode do.
        namespace: root of its keys from then on.
        label: what engines in offload mode call it.
        blocks: that the namespace held before; None until it is done.
        version: of the record of generations that says so.
    """

    replicas: tuple[str, ...]
    generation: int
    weights_version: str
    namespace: bytes
    label: str = ""
    blocks: int | None = None
    version: int = -1

    def told_to(self, request: _ClearRequest) -> Answer | None:
        """The answer to a request, once there is one."""
        if self.blocks is None:
            return None
        if isinstance(request, wire.Clear):
            return Answer(wire.Cleared(id=request.id, generation=self.generation, blocks=self.blocks))
        return Answer(
            wire.NamespaceCleared(
                id=request.id,
                replicas=self.replicas,
                generation=self.generation,
                namespace=self.namespace,
                label=self.label,
                weights_version=self.weights_version,
                blocks=self.blocks,
            )
        )


class Clears:
    """Serves the verbs `clear_namespace` and `set_weights`, and `clear` of engines in offload mode.

    Args:
        recorder: of generations: what it has not written yet is not told.
        own_session: the session in offload mode that a connection owns, in an epoch of the host pool.
        carry_out: does what the core asks for.
        cleared: told which roots of namespaces of engines in offload mode are cleared.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        pending: PendingReplies,
        recorder: Recorder,
        *,
        own_session: Callable[[bytes, int], SessionId],
        carry_out: Callable[[], None],
        cleared: Callable[[Callable[[bytes], bool]], None],
    ) -> None:
        recorder.settled = partial(pending.look, Wait.CLEAR)
        self._recorder = recorder
        self._carry_out = carry_out
        self._cache = cache
        self._replicas = replicas
        self._pending = pending
        self._own_session = own_session
        self._cleared = cleared
        self._under_way: list[_Clear] = []
        self._of_request: OrderedDict[tuple[bytes, type[wire.Header], int], _Clear] = OrderedDict()

    def clear(self, connection: bytes, request: wire.ClearNamespace, _: list[bytes], respond: Respond) -> Answer | None:
        """Clear a namespace, or wait with others for a clear that is under way: nothing can have come in between.

        Raises:
            RequestError: not exactly one namespace is meant, or too many requests wait.
        """
        clear = self._known(connection, request)
        if clear is None:
            target = resolve_namespace(self._cache, self._replicas, request.target)
            clear = self._of_replicas(target) if target.replicas else self._of_engines(target)
        return self._answer(connection, request, clear, respond)

    def set_weights(
        self, connection: bytes, request: wire.SetWeights, _: list[bytes], respond: Respond
    ) -> Answer | None:
        """The same with a version of weights; where the replicas have that already, nothing is done.

        Raises:
            RequestError: not exactly one namespace is meant, it is one of engines in offload mode, another clear is
                under way, or too many requests wait.
        """
        clear = self._known(connection, request)
        if clear is None:
            clear = self._with_weights(resolve_namespace(self._cache, self._replicas, request.target), request.version)
        return self._answer(connection, request, clear, respond)

    def clear_own(self, connection: bytes, request: wire.Clear, _: list[bytes], respond: Respond) -> Answer | None:
        """Clear the namespace of an engine in offload mode.

        Raises:
            RequestError: its session is over, or read-only, or too many requests wait.
        """
        session = self._own_session(connection, request.epoch)
        if self._cache.offload.sessions[session].read_only:
            why, fix = "this session is read-only, and a clear takes blocks from others", "use kvcached clear"
            raise request_error(ErrorCode.FORBIDDEN, why, fix)
        clear = self._known(connection, request)
        if clear is None:
            self._tell_cleared(self._cache.offload.sessions[session].namespace)
            generation, blocks = self._cache.offload.clear(session)
            clear = self._done(_Clear((), generation, "", b"", blocks=blocks))
        return self._answer(connection, request, clear, respond)

    def finish(self, cleared: ClearingEnded) -> None:
        """The core is through: from now on the replicas are of the new generation."""
        clear = next(each for each in self._under_way if each.namespace == cleared.namespace)
        self._under_way.remove(clear)
        before = self._replicas[cleared.pools[0]].namespace
        edition = Edition(clear.generation, clear.weights_version)
        self._cache.generations.replace(before, clear.namespace, edition)
        clear.version = self._recorder.version
        for name in cleared.pools:
            replica = self._replicas[name]
            replica.namespace, replica.generation = clear.namespace, clear.generation
            replica.weights_version = clear.weights_version
            replica.workers.generation = clear.generation
        clear.blocks = cleared.blocks
        fields = {"replicas": ", ".join(clear.replicas), "blocks": cleared.blocks, "generation": clear.generation}
        words = "cleared: %(replicas)s, %(blocks)d blocks; generation %(generation)d, weights %(weights)r"
        _log.info(words, {**fields, "weights": clear.weights_version})

    def _known(self, connection: bytes, request: _ClearRequest) -> _Clear | None:
        return self._of_request.get((connection, type(request), request.id))

    def _of_engines(self, target: NamedNamespace) -> _Clear:
        """Nothing is awaited: copies under way keep their slots, and what they complete is not found."""
        space = self._cache.offload.namespaces.by_root[target.root]
        self._tell_cleared(space)
        blocks = self._cache.offload.namespaces.clear(space)
        shown = target.root[:NAMESPACE_SHOWN_BYTES].hex()
        fields = {"label": target.label, "namespace": shown, "blocks": blocks, "generation": space.generation}
        _log.info("cleared: %(label)s (%(namespace)s), %(blocks)d blocks; generation %(generation)d", fields)
        return self._done(_Clear((), space.generation, "", target.root, target.label, blocks))

    def _tell_cleared(self, namespace: Namespace) -> None:
        """Tell of all namespaces that are cleared together. One that is forgotten may have been of them."""
        spec, by_root = namespace.spec, self._cache.offload.namespaces.by_root

        def is_cleared(root: bytes) -> bool:
            known = by_root.get(root)
            return bool(spec.canonical_root) if known is None else known.spec.storage_root == spec.storage_root

        self._cleared(is_cleared)

    def _done(self, clear: _Clear) -> _Clear:
        clear.version = self._recorder.version
        self._carry_out()
        return clear

    def _of_replicas(self, target: NamedNamespace) -> _Clear:
        replica = self._replicas[target.replicas[0]]
        return self._begun(target) or self._begin(target, replica, replica.weights_version)

    def _with_weights(self, target: NamedNamespace, version: str) -> _Clear:
        if not target.replicas:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"namespace {target.label!r} is of engines that name its weights themselves: no version can be set",
                "use `kvcached clear` when they have other weights, or start them with another weights_version",
            )
        replica, clear = self._replicas[target.replicas[0]], self._begun(target)
        if clear is None and replica.weights_version == version:
            return _Clear(
                target.replicas,
                replica.generation,
                version,
                replica.namespace,
                blocks=0,
                version=self._recorder.version,
            )
        if clear is None:
            return self._begin(target, replica, version)
        if clear.weights_version != version:
            raise request_error(
                ErrorCode.CLEARING,
                f"the namespace of replica {replica.name!r} is being cleared",
                "try again in a moment",
            )
        return clear

    def _begun(self, target: NamedNamespace) -> _Clear | None:
        return next((each for each in self._under_way if each.replicas == target.replicas), None)

    def _begin(self, target: NamedNamespace, replica: Replica, weights_version: str) -> _Clear:
        generation = self._cache.generations.fresh(replica.generation)
        namespace = replica.root_of(generation, weights_version)
        clear = _Clear(target.replicas, generation, weights_version, namespace)
        self._under_way.append(clear)
        self._cache.clearings.begin(target.tree, namespace, generation)
        return clear

    def _answer(self, connection: bytes, request: _ClearRequest, clear: _Clear, respond: Respond) -> Answer | None:
        self._recorder.again()
        self._of_request[connection, type(request), request.id] = clear
        if len(self._of_request) > CLEARS_KEPT:
            self._of_request.popitem(last=False)

        def ask(*, is_last: bool) -> Answer | None:
            del is_last
            answer = clear.told_to(request)
            if answer is None or not self._recorder.check(clear.version):
                return None
            failpoint("daemon.renewed")
            return answer

        return self._pending.wait(PendingReply(Wait.CLEAR, request, respond, ask))


def _drained(request_id: int, left: Left, *, holds: bool) -> wire.Drained:
    return wire.Drained(id=request_id, leases=left.leases, copies=left.copies, requests=left.requests, holds=holds)
