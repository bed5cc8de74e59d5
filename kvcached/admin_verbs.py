"""The verbs by which people change what the daemon does: pause and resume copies, drain, and the stop.

They answer when it has happened, or at their deadline with what is left; what was asked for holds all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvcached.admission import unknown_replica
from kvcached.answers import Answer, Respond
from kvcached.awaiting import Awaiting
from kvcached.core.cache import Cache
from kvcached.core.pauses import copies_under_way, is_paused, pause, resume
from kvcached.core.states import DaemonState
from kvcached.modes import Modes
from kvcached.pin_verbs import PinVerbs
from kvcached.policy_verbs import PolicyVerbs
from kvcached.renewals import Renewals
from kvcached.replica import Replica
from kvcached_client import protocol as wire
from kvcached_client.protocol_fields import RESERVE_REQUEST_PREFIX


class Left(NamedTuple):
    """What keeps the daemon from being idle."""

    leases: int
    copies: int
    requests: int


class AdminVerbs:
    """Serves them.

    Args:
        waiting_requests: how many requests of engines wait for their answers.

    Attributes:
        by_type: what serves the verbs that are answered at once.
        late_by_type: what serves the others.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        modes: Modes,
        awaiting: Awaiting,
        renewals: Renewals,
        waiting_requests: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._modes = modes
        self._awaiting = awaiting
        self._renewals = renewals
        self._waiting_requests = waiting_requests
        self.by_type: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.Resume: self._resume,
            **PolicyVerbs(cache, replicas).by_type,
            **PinVerbs(cache, replicas, now_ms).by_type,
        }
        self.late_by_type: dict[type[wire.Header], Callable[[bytes, Any, Respond], Answer | None]] = {
            wire.Pause: self._pause,
            wire.Drain: self._drain,
            wire.ClearReplica: renewals.clear,
            wire.SetWeights: renewals.set_weights,
        }

    def left(self) -> Left:
        """What is held and under way now."""
        names = [name for session in self._cache.sessions.values() for name in session.requests]
        names += [name for session in self._cache.attached.sessions.values() for name in session.requests]
        return Left(
            leases=sum(not name.startswith(RESERVE_REQUEST_PREFIX) for name in names),
            copies=copies_under_way(self._cache),
            requests=self._waiting_requests() + self._renewals.waiting,
        )

    def stop(self, deadline_ms: int, stopped: Callable[[Left], None]) -> None:
        """Take no new work, and say when nothing is left, or at the deadline what is."""
        self._modes.go(DaemonState.STOPPING)

        def ask(*, is_last: bool) -> Answer | None:
            left = self.left()
            if any(left) and not is_last:
                return None
            return Answer(_drained(0, left, holds=True))

        self._awaiting.answer(wire.Drain(id=0), ask, lambda _: stopped(self.left()), deadline_ms)

    def _pause(self, _: bytes, request: wire.Pause, respond: Respond) -> None:
        self._check_replica(request.replica)
        pause(self._cache, request.replica)

        def ask(*, is_last: bool) -> Answer | None:
            holds, under_way = is_paused(self._cache, request.replica), copies_under_way(self._cache, request.replica)
            if under_way and holds and not is_last:
                return None
            return Answer(wire.Paused(id=request.id, under_way=under_way, holds=holds))

        self._awaiting.answer(request, ask, respond, request.deadline_ms)

    def _resume(self, _: bytes, request: wire.Resume, __: list[bytes]) -> Answer:
        self._check_replica(request.replica)
        resume(self._cache, request.replica)
        if not request.replica:
            self._modes.go(DaemonState.SERVING)
        return Answer(wire.Resumed(id=request.id, state=self._modes.state))

    def _drain(self, _: bytes, request: wire.Drain, respond: Respond) -> None:
        self._modes.go(DaemonState.DRAINING)

        def ask(*, is_last: bool) -> Answer | None:
            left, holds = self.left(), not self._modes.takes_work
            if any(left) and holds and not is_last:
                return None
            return Answer(_drained(request.id, left, holds=holds))

        self._awaiting.answer(request, ask, respond, request.deadline_ms)

    def _check_replica(self, name: str) -> None:
        if name and name not in self._replicas:
            raise unknown_replica(name, self._replicas)


def _drained(request_id: int, left: Left, *, holds: bool) -> wire.Drained:
    return wire.Drained(id=request_id, leases=left.leases, copies=left.copies, requests=left.requests, holds=holds)
