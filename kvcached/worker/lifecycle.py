"""The states of a replica's workers, which one may follow which, and when so many losses are no chance any more.

::

    idle ─▶ starting ─▶ running ─▶ lost ─▶ waiting ─▶ starting …
                │           ▲        │
                │           │        └──▶ degraded ─▶ starting …     after BREAKER_LOSSES short lives in a row
                └─▶ probation ─▶ lost …                              running again, and not yet trusted

From each of them ``stopping`` follows, and then ``stopped``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from kvcached.process.backoff import BackOff, Breaker

#: The first pause after a worker that died by chance, and was replaced at once, has died again.
FIRST_PAUSE_S: Final = 0.5
#: The longest. A start that fails costs a process per shard and two log lines, which nobody minds every four seconds;
#: a replica that is down longer than it must be costs every engine of it all its hits.
LONGEST_PAUSE_S: Final = 4.0
#: A group that lived this long was healthy: the next loss has a cause of its own.
HEALTHY_AFTER_S: Final = 60.0
#: So many short lives in a row have one cause, which stays until somebody sees to it.
BREAKER_LOSSES: Final = 5


class WorkersState(Enum):
    """What the workers of a replica do. The device pool serves in `RUNNING` and `PROBATION` only."""

    IDLE = "idle"  #: not started yet
    STARTING = "starting"  #: being started
    RUNNING = "running"
    PROBATION = "probation"  #: running, after so many short lives that this one may be short, too
    LOST = "lost"  #: one died; the others are killed, and the kernel's word is waited for
    WAITING = "waiting"  #: all are dead; the next start comes after a pause
    DEGRADED = "degraded"  #: the same, after many short lives in a row: the pause is the longest
    STOPPING = "stopping"
    STOPPED = "stopped"


_S = WorkersState
_NEXT: Final[Mapping[WorkersState, frozenset[WorkersState]]] = {
    _S.IDLE: frozenset({_S.STARTING, _S.STOPPING}),
    _S.STARTING: frozenset({_S.RUNNING, _S.PROBATION, _S.WAITING, _S.DEGRADED, _S.STOPPING}),
    _S.RUNNING: frozenset({_S.LOST, _S.STOPPING}),
    _S.PROBATION: frozenset({_S.RUNNING, _S.LOST, _S.STOPPING}),
    _S.LOST: frozenset({_S.WAITING, _S.DEGRADED, _S.STOPPING}),
    _S.WAITING: frozenset({_S.STARTING, _S.STOPPING}),
    _S.DEGRADED: frozenset({_S.STARTING, _S.STOPPING}),
    _S.STOPPING: frozenset({_S.STOPPED}),
    _S.STOPPED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A bug in whoever drives a `Lifecycle`."""


class Lifecycle:
    """The state of one replica's workers."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._state = WorkersState.IDLE

    @property
    def state(self) -> WorkersState:
        """The present state."""
        return self._state

    def go(self, state: WorkersState) -> None:
        """Pass into a state.

        Raises:
            IllegalTransition: it does not follow the present one.
        """
        if state not in _NEXT[self._state]:
            raise IllegalTransition(f"workers of replica {self._replica}: {self._state.value} to {state.value}")
        self._state = state


def restart_pauses() -> BackOff:
    """Pauses before lost workers are started again: none after a death by chance, longer ones after repeated deaths."""
    return BackOff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, healthy_after_s=HEALTHY_AFTER_S, spares_first=True)


def breaker(healthy_after_s: float = HEALTHY_AFTER_S) -> Breaker:
    """It opens when workers have died again and again."""
    return Breaker(healthy_after_s=healthy_after_s, losses_max=BREAKER_LOSSES)
