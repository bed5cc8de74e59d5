"""Every error of kvcached, whose fault it is, and what to do about it.

::

    KvcachedError
    ├── RequestError            the daemon answered with a typed error
    │   ├── BadRequest          fault "caller":  the message breaks the protocol or its limits
    │   ├── Refused             fault "caller":  well formed, not allowed (credentials, foreign lease, …)
    │   ├── Stale               fault "epoch":   the daemon, pool or session it speaks of is gone: attach again
    │   ├── NoCapacity          fault "load":    nothing free and nothing evictable; release, or try later
    │   └── DaemonFailure       fault "daemon":  kvcached failed, or does not serve this now; not the caller's doing
    ├── TransportError          no answer came
    │   ├── DaemonUnreachable   nothing listens there, or the attach socket closed
    │   │   └── DaemonSilent    a process listens there and takes no request
    │   └── DeadlineExceeded    the deadline of the call passed
    └── LoadFailed              a shard's wait for a layer: the load failed; `Lease.wait_loaded` says what is left

A miss is not an error: `match` and `acquire` answer it with zero blocks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    """The code field of an error reply. A code never changes its meaning; new ones may be added."""

    # the message itself
    MALFORMED = "malformed"
    UNKNOWN_VERB = "unknown_verb"
    OVERSIZE = "oversize"
    BAD_FRAMES = "bad_frames"
    UNSUPPORTED_VERSION = "unsupported_version"
    BAD_VALUE = "bad_value"
    # what it asks for
    UNAUTHENTICATED = "unauthenticated"
    NO_SESSION = "no_session"
    UNKNOWN_REPLICA = "unknown_replica"
    POOL_BUSY = "pool_busy"
    WRONG_LAYOUT = "wrong_layout"
    UNKNOWN_LEASE = "unknown_lease"
    FOREIGN_LEASE = "foreign_lease"
    ALREADY_RELEASED = "already_released"
    REQUEST_CONFLICT = "request_conflict"
    UNKNOWN_SLOT = "unknown_slot"
    OUT_OF_ORDER = "out_of_order"
    STILL_LOADING = "still_loading"
    HIT_GONE = "hit_gone"
    LIMIT = "limit"
    # the world moved on
    STALE_EPOCH = "stale_epoch"
    SESSION_EXPIRED = "session_expired"
    # load
    NO_CAPACITY = "no_capacity"
    CAPACITY_PENDING = "capacity_pending"
    # ours
    WORKER_LOST = "worker_lost"
    DEADLINE = "deadline"
    DRAINING = "draining"
    PAUSED = "paused"
    CLEARING = "clearing"
    INTERNAL = "internal"


class Fault(StrEnum):
    """Whose doing an error is."""

    CALLER = "caller"
    EPOCH = "epoch"
    LOAD = "load"
    DAEMON = "daemon"


class KvcachedError(Exception):
    """Root of everything this package raises on purpose."""


class RequestError(KvcachedError):
    """The daemon (or the SDK before sending) refused a request.

    Attributes:
        code: what went wrong.
        fault: whose doing it is.
        message: one sentence with the offending values.
        fix: one sentence that says what to do.
    """

    fault: ClassVar[Fault] = Fault.CALLER

    def __init__(self, code: ErrorCode, message: str, fix: str) -> None:
        super().__init__(f"{code}: {message} ({fix})")
        self.code = code
        self.message = message
        self.fix = fix


class BadRequest(RequestError):
    """The message breaks the protocol or one of its limits. Sending it again gives the same answer."""


class Refused(RequestError):
    """The message is well formed, but this peer may not do that, or not to this object."""


class Stale(RequestError):
    """The request speaks of a daemon, pool or session that is gone. Attach again; the cache may be cold."""

    fault = Fault.EPOCH


class NoCapacity(RequestError):
    """Not enough free and evictable slots. Nothing was taken and nothing was evicted.

    The code `CAPACITY_PENDING` says that copies under way will make more of them evictable.
    """

    fault = Fault.LOAD


class DaemonFailure(RequestError):
    """kvcached or one of its workers failed, or does not serve this at present. Nothing of the request outlives it."""

    fault = Fault.DAEMON


class TransportError(KvcachedError):
    """No answer came. Whether the request took effect is unknown; a retry with its id is safe."""


class DaemonUnreachable(TransportError):
    """Nothing answers at the socket, or the peer closed it."""


class DaemonSilent(DaemonUnreachable):
    """A process listens at the socket and took no request in time: it is stopped, hangs, or is overloaded."""


class DeadlineExceeded(TransportError):
    """The deadline passed before the answer came."""


class CircuitOpen(TransportError):
    """The daemon was not asked: an earlier call's deadline passed, and it has not answered since.

    Only where failures are misses, and so never raised to a caller: it is what `Client.last_failure` shows.
    """


class LoadFailed(KvcachedError):
    """A load from host memory failed, or was cut short. `Lease.wait_loaded` says what of the hit is there."""


_CLASS_OF: dict[ErrorCode, type[RequestError]] = {
    ErrorCode.MALFORMED: BadRequest,
    ErrorCode.UNKNOWN_VERB: BadRequest,
    ErrorCode.OVERSIZE: BadRequest,
    ErrorCode.BAD_FRAMES: BadRequest,
    ErrorCode.UNSUPPORTED_VERSION: BadRequest,
    ErrorCode.BAD_VALUE: BadRequest,
    ErrorCode.UNAUTHENTICATED: Refused,
    ErrorCode.NO_SESSION: Stale,
    ErrorCode.UNKNOWN_REPLICA: Refused,
    ErrorCode.POOL_BUSY: Refused,
    ErrorCode.WRONG_LAYOUT: Refused,
    ErrorCode.UNKNOWN_LEASE: Refused,
    ErrorCode.FOREIGN_LEASE: Refused,
    ErrorCode.ALREADY_RELEASED: Refused,
    ErrorCode.REQUEST_CONFLICT: Refused,
    ErrorCode.UNKNOWN_SLOT: Refused,
    ErrorCode.OUT_OF_ORDER: Refused,
    ErrorCode.STILL_LOADING: Refused,
    ErrorCode.HIT_GONE: Refused,
    ErrorCode.LIMIT: Refused,
    ErrorCode.STALE_EPOCH: Stale,
    ErrorCode.SESSION_EXPIRED: Stale,
    ErrorCode.NO_CAPACITY: NoCapacity,
    ErrorCode.CAPACITY_PENDING: NoCapacity,
    ErrorCode.WORKER_LOST: DaemonFailure,
    ErrorCode.DEADLINE: DaemonFailure,
    ErrorCode.DRAINING: DaemonFailure,
    ErrorCode.PAUSED: DaemonFailure,
    ErrorCode.CLEARING: DaemonFailure,
    ErrorCode.INTERNAL: DaemonFailure,
}


def request_error(code: ErrorCode, message: str, fix: str) -> RequestError:
    """The exception that stands for an error code; both sides build theirs here."""
    return _CLASS_OF[code](code, message, fix)
