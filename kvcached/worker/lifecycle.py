"""The states of a replica's workers, the allowed transitions, and when repeated losses make a replica degraded.

::

    idle ─▶ starting ─▶ running ─▶ lost ─▶ waiting ─▶ starting …
                │           ▲        │
                │           │        └──▶ degraded ─▶ starting …     after BREAKER_LOSSES short lives in a row
                └─▶ probation ─▶ lost …                              running again, and not yet trusted

``stopping`` may follow each state, and ``stopped`` follows ``stopping``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from kvcached.process.backoff import BackOff, Breaker
from kvcached_client.errors import RequestError

#: The pause before the second restart. The first restart, after a death that may be chance, comes at once.
FIRST_PAUSE_S: Final = 0.5
#: The longest pause. A failed start costs a process per shard and two log lines, which is harmless every four seconds;
#: a longer pause would cost the replica's engines their hits for longer than necessary.
LONGEST_PAUSE_S: Final = 4.0
#: A group that lived this long was healthy: the next loss has another cause.
HEALTHY_AFTER_S: Final = 60.0
#: This many short lives in a row have one cause, which lasts until somebody removes it.
BREAKER_LOSSES: Final = 5
#: A device that does not know its memory at so many starts in a row has lost it; one refusal may pass.
GONE_AFTER: Final = 3


class WorkersState(Enum):
    """The state of a replica's workers. The device pool serves in `RUNNING` and `PROBATION` only."""

    IDLE = "idle"  #: not started yet
    STARTING = "starting"  #: being started
    RUNNING = "running"
    PROBATION = "probation"  #: running, but after many short lives not yet trusted
    LOST = "lost"  #: one worker died; the daemon kills the others and waits for their deaths
    WAITING = "waiting"  #: all are dead; the next start comes after a pause
    DEGRADED = "degraded"  #: as WAITING, after many short lives in a row: the pause is the longest
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
    """A transition that is not allowed: a bug in the caller."""


class FailedStarts:
    """Starts of a replica's workers that have failed since workers ran last.

    Attributes:
        why: what the last one failed of; empty if none has.
    """

    def __init__(self) -> None:
        self.why = ""
        self._gone = 0  #: in a row, at which the device did not know the memory

    def add(self, error: Exception, *, is_memory_gone: bool) -> bool:
        """One more; returns whether the memory has to be given up now.

        Args:
            error: of the start; where a worker has ended, its message ends with the worker's log.
            is_memory_gone: the device works, and has not known the memory.
        """
        message, fix = (error.message, f" ({error.fix})") if isinstance(error, RequestError) else (str(error), "")
        self.why = in_a_line(message or type(error).__name__, fix)
        self._gone = self._gone + 1 if is_memory_gone else 0
        return self._gone == GONE_AFTER

    def end(self) -> None:
        """Workers run."""
        self.why, self._gone = "", 0


def in_a_line(ending: str, fix: str = "") -> str:
    """How a worker ended, with the end of its log, in one line.

    It is what a worker says last before it ends by itself; one that was killed, or is late, has said other things.
    """
    lines = ending.splitlines()
    return lines[-1].partition(" ERROR ")[2] or lines[0].removesuffix(" ends:") + fix


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
        """Change to a state.

        Raises:
            IllegalTransition: the state may not follow the present one.
        """
        if state not in _NEXT[self._state]:
            raise IllegalTransition(f"workers of replica {self._replica}: {self._state.value} to {state.value}")
        self._state = state


def restart_pauses() -> BackOff:
    """The pauses before lost workers are restarted: none after the first death, longer ones after repeated deaths."""
    return BackOff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, healthy_after_s=HEALTHY_AFTER_S, spares_first=True)


def breaker(healthy_after_s: float = HEALTHY_AFTER_S) -> Breaker:
    """The breaker that opens when workers have died again and again."""
    return Breaker(healthy_after_s=healthy_after_s, losses_max=BREAKER_LOSSES)
