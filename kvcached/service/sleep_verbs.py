"""The requests that take the memory of a device pool away for a while, and give it one again: sleep and wake.

A sleep is answered when the memory is given back, as far as the daemon and its service manager held it; a wake when the
pool has memory and workers again. The state file says that a pool sleeps before its memory goes, and that it is awake
when its new memory is there, so that a daemon that is killed in between finds a pool asleep, and never half a pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvcached.core.cache import Cache
from kvcached.core.messages import PoolEmptied
from kvcached.core.refusals import Refusal, Why
from kvcached.core.slots.states import PoolState
from kvcached.service.pending import Answer, LateVerb, PendingReplies, PendingReply, Respond, Wait
from kvcached.service.replica import HeldMemory, Replica, resolve_namespace
from kvcached.service.sessions import EngineGroups
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol import engine as wire

_log: Final = logging.getLogger(__name__)


class SleepVerbs:
    """Serves them.

    Args:
        carry_out: does what the core has asked for, and writes the state.
        settle: the same, after the core has decided what nobody waits for; then pending replies are looked at.

    Attributes:
        late_by_type: what serves the verbs.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        groups: EngineGroups,
        pending: PendingReplies,
        now_ms: Callable[[], int],
        *,
        carry_out: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._groups = groups
        self._pending = pending
        self._now_ms = now_ms
        self._carry_out = carry_out
        self._settle = settle
        self._emptied: dict[str, PoolEmptied] = {}  #: the last of each replica
        self._giving_back: set[str] = set()
        self._failures: dict[str, RequestError] = {}  #: why the last wake of a replica failed
        self.late_by_type: dict[type[wire.Header], LateVerb] = {wire.Sleep: self._sleep, wire.Wake: self._wake}

    def emptied(self, effect: PoolEmptied) -> None:
        """The core is through with a pool: its workers end, then its memory is given back."""
        self._emptied[effect.pool] = effect
        failpoint("daemon.emptied")
        self._replicas[effect.pool].holder.end_workers(partial(self._on_workers_ended, effect.pool))

    # --- memory that is lost ----------------------------------------------------------------------------------------

    def memory_gone(self, name: str) -> None:
        """A device works, and has lost a pool's memory: the pool is emptied, given back and made anew.

        Engines on it have lost what they had there, too. The pool waits until none has a session.
        """
        if self._state(name) is PoolState.AWAKE:
            words = "replica %(replica)s: the memory of its device pool is lost, and is made anew"
            _log.error(words, {"replica": name})
            self._replicas[name].waits_for_device = True
            self._cache.sleeps.begin(name, 0)
            self._settle()

    def wait_for_device(self, name: str) -> None:
        """A pool has no memory, and gets some when its devices can make it."""
        if self._state(name) is PoolState.AWAKE:  # a start that has found its device lost
            self._cache.sleeps.asleep(name)
        replica = self._replicas[name]
        replica.waits_for_device = True
        self._failures.pop(name, None)
        self._cache.sleeps.wake(name)
        replica.holder.make_when_possible(replica.generation, partial(self._on_made, name))

    # --- sleep ------------------------------------------------------------------------------------------------------

    def _sleep(self, _: bytes, request: wire.Sleep, __: list[bytes], respond: Respond) -> Answer | None:
        names = self._pools_meant(request.target)
        for name in names:
            self._check_can_sleep(name)
        for name in names:
            if self._state(name) is PoolState.AWAKE:
                self._cache.sleeps.begin(name, self._now_ms() + request.deadline_ms)
                words = "replica %(replica)s falls asleep: what the host pool lacks is stored first"
                _log.info(words, {"replica": name})
        ask = partial(self._slept, request, names)
        return self._pending.wait(PendingReply(Wait.POOL, request, respond, ask))

    def _slept(self, request: wire.Sleep, names: tuple[str, ...], *, is_last: bool) -> Answer | None:
        """The answer once all pools sleep and their memory is given back.

        Raises:
            Refusal: somebody has woken one meanwhile.
        """
        del is_last
        for name in names:
            if self._state(name) not in {PoolState.FALLING_ASLEEP, PoolState.ASLEEP}:
                raise Refusal(Why.POOL_NOT_ASLEEP, replica=name, state=self._state(name))
        if any(self._state(name) is not PoolState.ASLEEP or name in self._giving_back for name in names):
            return None
        emptied = [self._emptied[name] for name in names if name in self._emptied]
        return Answer(
            wire.Slept(
                id=request.id,
                replicas=names,
                blocks=sum(each.blocks for each in emptied),
                dropped=sum(each.dropped for each in emptied),
            )
        )

    def _on_workers_ended(self, name: str) -> None:
        """Nobody touches the memory of a pool any more."""
        replica = self._replicas[name]
        self._giving_back.add(name)
        self._cache.sleeps.asleep(name)
        self._carry_out()
        failpoint("daemon.asleep")
        replica.hold(None)
        replica.holder.give_back(partial(self._on_given_back, name))

    def _on_given_back(self, name: str) -> None:
        self._giving_back.discard(name)
        emptied = self._emptied[name]
        words = "replica %(replica)s is asleep: its memory is given back; of %(blocks)d blocks %(dropped)d are dropped"
        _log.info(words, {"replica": name, "blocks": emptied.blocks, "dropped": emptied.dropped})
        if self._replicas[name].waits_for_device and self._state(name) is PoolState.ASLEEP:  # nobody has woken it yet
            self.wait_for_device(name)
        self._settle()

    def _check_can_sleep(self, name: str) -> None:
        """Refuse what is in use, or wakes at this moment.

        Raises:
            RequestError: an engine has a session.
            Refusal: the pool is waking.
        """
        if self._state(name) is PoolState.WAKING:
            raise Refusal(Why.POOL_ASLEEP, replica=name, state=PoolState.WAKING)
        sessions = [each for each in self._cache.managed.sessions.values() if each.pool.name == name]
        for session in sessions:
            if (group := self._groups.of_session(session.id)) is not None:  # health checks have none, and end soon
                pids = sorted({member.pid for member in group.living()})
                raise request_error(
                    ErrorCode.POOL_BUSY,
                    f"{session.state} session {session.id} holds replica {name!r} for processes {pids}",
                    "close that session, or end its processes, then ask for sleep again",
                )

    # --- wake -------------------------------------------------------------------------------------------------------

    def _wake(self, _: bytes, request: wire.Wake, __: list[bytes], respond: Respond) -> Answer | None:
        names = self._pools_meant(request.target)
        for name in names:
            if self._state(name) is PoolState.FALLING_ASLEEP:
                raise Refusal(Why.POOL_NOT_ASLEEP, replica=name, state=PoolState.FALLING_ASLEEP)
        for name in names:
            if self._state(name) is PoolState.ASLEEP:
                self._begin_wake(name)
        return self._pending.wait(PendingReply(Wait.POOL, request, respond, partial(self._woken, request, names)))

    def _begin_wake(self, name: str) -> None:
        self._cache.sleeps.wake(name)
        self._failures.pop(name, None)
        _log.info("replica %(replica)s wakes: its memory is made anew", {"replica": name})
        replica = self._replicas[name]
        replica.holder.make(replica.generation, partial(self._on_made, name))

    def _woken(self, request: wire.Wake, names: tuple[str, ...], *, is_last: bool) -> Answer | None:
        """The answer once nothing is waking any more.

        Raises:
            RequestError: a pool could not wake, and sleeps again.
            Refusal: somebody has sent one to sleep again.
        """
        del is_last
        states = {name: self._state(name) for name in names}
        if PoolState.WAKING in states.values():
            return None
        for name, state in states.items():
            if name in self._failures:
                raise self._failures[name]
            if state is not PoolState.AWAKE:
                raise Refusal(Why.POOL_ASLEEP, replica=name, state=state)
        return Answer(wire.Woken(id=request.id, replicas=names))

    def _on_made(self, name: str, made: HeldMemory | RequestError) -> None:
        """The memory and the workers of a pool are there, or could not be made."""
        failpoint("daemon.made")
        if isinstance(made, RequestError):
            self._failures[name] = made
            self._cache.sleeps.asleep(name)
            fields = {"replica": name, "reason": made.message}
            _log.warning("replica %(replica)s stays asleep: %(reason)s", fields)
            if self._replicas[name].waits_for_device:
                self.wait_for_device(name)
        else:
            self._replicas[name].hold(made)
            self._replicas[name].waits_for_device = False
            self._cache.sleeps.awake(name)
            _log.info("replica %(replica)s is awake", {"replica": name})
        self._settle()

    # --- both -------------------------------------------------------------------------------------------------------

    def _state(self, name: str) -> PoolState:
        return self._cache.pools[name].state

    def _pools_meant(self, target: str) -> tuple[str, ...]:
        """The replica of this name, or all replicas of a namespace.

        Raises:
            RequestError: no namespace is meant, or one that has no device pool of the daemon.
        """
        if target in self._replicas:
            return (target,)
        namespace = resolve_namespace(self._cache, self._replicas, target)
        if not namespace.replicas:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"namespace {namespace.label!r} is of engines that have their own device memory",
                "let these engines give it back",
            )
        return namespace.replicas
