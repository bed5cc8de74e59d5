"""Failures as misses: errors become misses if the engine wants that, with the reason why nothing was granted.

If the daemon hangs, every call would wait for its full deadline. Therefore the first missed deadline opens a circuit:
from then on calls are misses at once, until the daemon answers a probe that was sent when the circuit opened::

    CLOSED ──▶ DOUBTED ──▶ OPEN ──▶ CLOSED
       │          └──────▶ CLOSED     ▲
       └──────────────────▶ OPEN ─────┘

The state is DOUBTED after a missed deadline of a request that the daemon answers only when something has happened, such
as the end of a load, because that may just take long. The next call then waits briefly for the reply to the probe.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum, StrEnum
from types import TracebackType
from typing import Final, Literal, Protocol

from kvcached_client.errors import (
    CircuitOpen,
    DaemonFailure,
    DaemonUnreachable,
    DeadlineExceeded,
    KvcachedError,
    NoCapacity,
    RequestError,
    Stale,
)

Failures = Literal["raise", "miss"]

#: How long the first call in the state DOUBTED waits for the reply to the probe. A healthy daemon takes a millisecond
#: or two, and some tens of milliseconds on a busy machine.
PROBE_GRACE_NS: Final = 50_000_000
#: If a circuit opens again this soon after it was closed, the daemon is slow rather than gone. The circuit then stays
#: open for a pause, ...
RELAPSE_NS: Final = 10_000_000_000
#: ... of at first this length; each further pause is twice as long, up to the maximum: one deadline in half a minute.
PAUSE_NS_MIN: Final = 1_000_000_000
PAUSE_NS_MAX: Final = 30_000_000_000

_log: Final = logging.getLogger("kvcached_client")


class FailureReason(StrEnum):
    """Why a call did nothing, with ``failures="miss"``."""

    NO_CAPACITY = "no_capacity"  #: the pool is full, which is load and not a failure
    DEADLINE = "deadline"  #: no reply within the deadline
    CIRCUIT_OPEN = "circuit_open"  #: not sent: the daemon has not replied since an earlier deadline
    UNREACHABLE = "unreachable"  #: the daemon is gone; see `Client.rejoin`
    STALE = "stale"  #: session or pool is over: close and connect again
    UNAVAILABLE = "unavailable"  #: the daemon does not serve this now: a worker is lost, or the daemon drains
    REFUSED = "refused"  #: the request was refused, by the daemon or before it was sent: a mistake of the caller


_REASONS: Final[tuple[tuple[type[KvcachedError], FailureReason], ...]] = (
    (NoCapacity, FailureReason.NO_CAPACITY),
    (CircuitOpen, FailureReason.CIRCUIT_OPEN),
    (DeadlineExceeded, FailureReason.DEADLINE),
    (DaemonUnreachable, FailureReason.UNREACHABLE),
    (Stale, FailureReason.STALE),
    (DaemonFailure, FailureReason.UNAVAILABLE),
)


def reason_of(error: KvcachedError) -> FailureReason:
    """The reason for an error."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), FailureReason.REFUSED)


class MissPolicy:
    """``with policy:`` lets errors pass, or counts them and continues after the block, as configured.

    A full pool is not a failure: it is neither counted nor logged.

    Attributes:
        is_on: whether failures become misses.
        count: failures that became misses.
        last_failure: the last of these failures.
        last_reason: reason of the last block that did not succeed, including a full pool.
    """

    def __init__(self, failures: Failures) -> None:
        self.is_on = failures == "miss"
        self.count = 0
        self.last_failure: KvcachedError | None = None
        self.last_reason: FailureReason | None = None
        #: Kinds of failure already logged: there are few, and one line of each is enough.
        self._logged: set[str] = set()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not self.is_on or not isinstance(error, KvcachedError):
            return False
        self.last_reason = reason_of(error)
        if not isinstance(error, NoCapacity):
            self.count += 1
            self.last_failure = error
            self._log_once(error)
        return True

    def _log_once(self, error: KvcachedError) -> None:
        if isinstance(error, (CircuitOpen, DeadlineExceeded)):
            return  # the circuit says so when it opens
        name = error.code.value if isinstance(error, RequestError) else type(error).__name__
        if name not in self._logged:
            self._logged.add(name)
            _log.warning(
                "kvcached failed, continuing without cached blocks (logged once per kind of failure): %s", error
            )


class HasReason(Protocol):
    """What keeps why its last call was a miss; None where it was none."""

    reason: FailureReason | None


class NotedMisses:
    """As `MissPolicy`, for the length of a ``with`` statement; `owner` keeps why it was a miss.

    A class, because a generator in its place would cost each call three times as much.
    """

    __slots__ = ("_owner", "_policy")

    def __init__(self, owner: HasReason, policy: MissPolicy) -> None:
        self._owner, self._policy = owner, policy

    def __enter__(self) -> None:
        self._owner.reason = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        is_miss = error is not None and self._policy.__exit__(kind, error, traceback)
        if is_miss:
            self._owner.reason = self._policy.last_reason
        return is_miss


class CircuitState(Enum):
    """Whether requests are sent to the daemon."""

    CLOSED = "closed"  #: they are sent
    DOUBTED = "doubted"  #: they are sent once the daemon has answered a probe
    OPEN = "open"  #: they are not sent


_S = CircuitState
_NEXT: Final[Mapping[CircuitState, frozenset[CircuitState]]] = {
    _S.CLOSED: frozenset({_S.DOUBTED, _S.OPEN}),
    _S.DOUBTED: frozenset({_S.CLOSED, _S.OPEN}),
    _S.OPEN: frozenset({_S.CLOSED}),
}


class Circuit:
    """Decides whether requests are sent, on the caller's clock. Sends nothing itself.

    Attributes:
        state: the present one.
    """

    def __init__(self) -> None:
        self.state = _S.CLOSED
        self._since_ns = 0  #: when the present state began
        self._closed_ns: int | None = None  #: when it was last closed after having been open
        self._pause_ns = 0
        self._misses = 0  #: calls since it is open

    @property
    def probe_grace_end_ns(self) -> int:
        """Until when a call waits for the reply to the probe."""
        return self._since_ns + PROBE_GRACE_NS

    def is_resting(self, now_ns: int) -> bool:
        """Whether it stays open even if the probe was answered."""
        return self.state is _S.OPEN and now_ns < self._since_ns + self._pause_ns

    def doubt(self, now_ns: int) -> None:
        """A request that may take long got no reply."""
        self._go(_S.DOUBTED, now_ns)

    def open(self, now_ns: int, why: str) -> None:
        """A request that is answered at once got no reply, or the probe got none."""
        is_relapse = self._closed_ns is not None and now_ns - self._closed_ns < RELAPSE_NS
        self._pause_ns = min(max(2 * self._pause_ns, PAUSE_NS_MIN), PAUSE_NS_MAX) if is_relapse else 0
        self._misses = 0
        self._go(_S.OPEN, now_ns)
        _log.warning("kvcached does not reply; calls are misses at once until it does: %s", why)

    def note_miss(self) -> None:
        """Count a call that was not sent."""
        self._misses += 1

    def close(self, now_ns: int) -> None:
        """The probe was answered."""
        if self.state is _S.OPEN:
            self._closed_ns = now_ns
            seconds = (now_ns - self._since_ns) / 1e9
            _log.info("kvcached replies again after %.1f s; %d calls were misses meanwhile", seconds, self._misses)
        self._go(_S.CLOSED, now_ns)

    def _go(self, state: CircuitState, now_ns: int) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"circuit: {self.state.value} to {state.value}")
        self.state, self._since_ns = state, now_ns
