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

#: The first pause: a worker that died by chance is soon replaced.
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


class BackOff:
    """How long to wait before the next try."""

    def __init__(
        self,
        *,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        healthy_after_s: float = HEALTHY_AFTER_S,
    ) -> None:
        self.longest_s = longest_s
        self.healthy_after_s = healthy_after_s
        self._first_s = first_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """The next pause. The one after it is twice as long, up to the longest."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self.longest_s)
        return pause_s

    def lived(self, seconds: float) -> None:
        """What was started lived for so long: long enough, and pauses begin anew."""
        if seconds >= self.healthy_after_s:
            self._next_s = self._first_s


class Breaker:
    """Opens after many short lives in a row, failed starts among them, and closes after a long one."""

    def __init__(self, *, healthy_after_s: float = HEALTHY_AFTER_S, losses_max: int = BREAKER_LOSSES) -> None:
        self._healthy_after_s = healthy_after_s
        self._losses_max = losses_max
        self._losses = 0

    @property
    def is_open(self) -> bool:
        """Whether to try as rarely as possible."""
        return self._losses >= self._losses_max

    def ended(self, lived_s: float) -> None:
        """A life ended after so long, 0 where the start failed."""
        self._losses = 1 if lived_s >= self._healthy_after_s else self._losses + 1

    def close(self) -> None:
        """A life has been long enough by now."""
        self._losses = 0
