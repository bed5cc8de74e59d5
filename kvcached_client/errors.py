"""All errors of kvcached, with whose fault they are and what to do.

::

    KvcachedError
    ├── RequestError            the daemon answered with a typed error
    │   ├── BadRequest          fault "caller":  the message breaks the protocol or its limits
    │   ├── Refused             fault "caller":  well formed, not allowed (credentials, foreign lease, …)
    │   ├── Stale               fault "epoch":   the daemon, pool or session no longer exists: connect again
    │   ├── NoCapacity          fault "load":    no slot is free or evictable; release a lease, or try later
    │   └── DaemonFailure       fault "daemon":  kvcached failed, or does not serve this now; not the caller's fault
    ├── TransportError          no reply came
    │   ├── DaemonUnreachable   nothing listens there, or the attach socket closed
    │   │   └── DaemonSilent    a process listens there, but accepts no request
    │   └── DeadlineExceeded    the deadline of the call passed
    ├── DeviceError             a device refused work, or is not there; of processes that copy
    └── LoadFailed              a shard's wait for a layer: the load failed; `Lease.wait_loaded` says what is left

A miss is not an error: `match` and `acquire` return zero blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    """The code of an error reply. Codes never change their meaning; new ones may be added."""

    # the message itself
    MALFORMED = "malformed"
    UNKNOWN_VERB = "unknown_verb"
    OVERSIZE = "oversize"
    BAD_FRAMES = "bad_frames"
    UNSUPPORTED_VERSION = "unsupported_version"
    BAD_VALUE = "bad_value"
    # what it asks for
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NO_SESSION = "no_session"
    UNKNOWN_REPLICA = "unknown_replica"
    POOL_BUSY = "pool_busy"
    WRONG_LAYOUT = "wrong_layout"
    UNKNOWN_LEASE = "unknown_lease"
    FOREIGN_LEASE = "foreign_lease"
    ALREADY_RELEASED = "already_released"
    REQUEST_CONFLICT = "request_conflict"
    UNKNOWN_PREFIX = "unknown_prefix"
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
    ASLEEP = "asleep"
    INTERNAL = "internal"


class Fault(StrEnum):
    """Whose fault an error is."""

    CALLER = "caller"
    EPOCH = "epoch"
    LOAD = "load"
    DAEMON = "daemon"


class KvcachedError(Exception):
    """Base class of all errors that this package raises.

    Attributes:
        code: what went wrong, where the daemon or the SDK refused a request; None for every other error.
        message: what is wrong.
        fix: what to do; "" where the text alone can say.
    """

    code: ErrorCode | None = None

    def __init__(self, message: str = "", *, fix: str = "") -> None:
        super().__init__(f"{message}; {fix}" if fix else message)
        self.message = message
        self.fix = fix


class RequestError(KvcachedError):
    """The daemon (or the SDK before sending) refused a request.

    Attributes:
        code: what went wrong.
        fault: whose fault it is.
        message: what is wrong, with the values at fault.
        fix: what to do.
    """

    fault: ClassVar[Fault] = Fault.CALLER

    def __init__(self, code: ErrorCode, message: str, fix: str) -> None:
        super().__init__(f"{code}: {message} ({fix})")
        self.code: ErrorCode = code
        self.message = message
        self.fix = fix

    def __reduce__(self) -> tuple[type[RequestError], tuple[ErrorCode, str, str]]:
        """For pickle, which would call it with the text alone: a shard's error reaches the scheduler's process."""
        return type(self), (self.code, self.message, self.fix)


class BadRequest(RequestError):
    """The message breaks the protocol or one of its limits. Sending it again gives the same reply."""


class Refused(RequestError):
    """The message is well formed, but not allowed for this peer or this object."""


class Stale(RequestError):
    """The request names a daemon, pool or session that no longer exists. Connect again; the cache may be cold."""

    fault = Fault.EPOCH


class NoCapacity(RequestError):
    """Not enough free and evictable slots. Nothing was taken and nothing was evicted.

    The code `CAPACITY_PENDING` means that copies in flight will make more slots evictable.
    """

    fault = Fault.LOAD


class DaemonFailure(RequestError):
    """kvcached or one of its workers failed, or does not serve this now. The request has had no effect."""

    fault = Fault.DAEMON


class TransportError(KvcachedError):
    """No reply came. Whether the request took effect is unknown; a retry with its id is safe."""


class DaemonUnreachable(TransportError):
    """Nothing listens at the socket, or the peer closed it."""


class DaemonSilent(DaemonUnreachable):
    """A process listens at the socket, but took no request in time, or let nobody in: it is stopped, or hangs."""


class DeadlineExceeded(TransportError):
    """The deadline passed before the reply came."""


class CircuitOpen(TransportError):
    """The request was not sent, because the daemon has not replied since an earlier call missed its deadline.

    Never raised to a caller: it exists only with ``failures="miss"``, in `Client.last_failure`.
    """


class DeviceError(KvcachedError):
    """A device refused work, or is not there.

    Attributes:
        is_lost: it is there, and does nothing any more.
    """

    is_lost: bool = False


class LoadFailed(KvcachedError):
    """A load from host memory failed, or was cut short. `Lease.wait_loaded` returns what is left of the hit."""


_CLASS_OF: dict[ErrorCode, type[RequestError]] = {
    ErrorCode.MALFORMED: BadRequest,
    ErrorCode.UNKNOWN_VERB: BadRequest,
    ErrorCode.OVERSIZE: BadRequest,
    ErrorCode.BAD_FRAMES: BadRequest,
    ErrorCode.UNSUPPORTED_VERSION: BadRequest,
    ErrorCode.BAD_VALUE: BadRequest,
    ErrorCode.UNAUTHENTICATED: Refused,
    ErrorCode.FORBIDDEN: Refused,
    ErrorCode.NO_SESSION: Stale,
    ErrorCode.UNKNOWN_REPLICA: Refused,
    ErrorCode.POOL_BUSY: Refused,
    ErrorCode.WRONG_LAYOUT: Refused,
    ErrorCode.UNKNOWN_LEASE: Refused,
    ErrorCode.FOREIGN_LEASE: Refused,
    ErrorCode.ALREADY_RELEASED: Refused,
    ErrorCode.REQUEST_CONFLICT: Refused,
    ErrorCode.UNKNOWN_PREFIX: Refused,
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
    ErrorCode.ASLEEP: DaemonFailure,
    ErrorCode.INTERNAL: DaemonFailure,
}


def request_error(code: ErrorCode, message: str, fix: str) -> RequestError:
    """The exception for an error code; client and daemon both build their errors here."""
    return _CLASS_OF[code](code, message, fix)


def bad_reply(message: str, code: ErrorCode = ErrorCode.MALFORMED) -> RequestError:
    """The exception for a reply that this version of the protocol does not allow."""
    return request_error(code, message, "client and daemon must be at most one version apart")


def bad_value(message: str, fix: str) -> RequestError:
    """The exception for an argument that the SDK refuses before it sends anything."""
    return request_error(ErrorCode.BAD_VALUE, message, fix)


def request_in_use(name: str, state: str) -> RequestError:
    """The exception for an `acquire` under the id of a request that is not over: both would hold the same lease."""
    return request_error(
        ErrorCode.REQUEST_CONFLICT,
        f"request {name!r} {state}, and a second lease would be on the same slots",
        "give each request an id of its own, also a retry of your client's; "
        "repeat an acquire with its id only after it got no reply",
    )


def stores_called_off(transfers: Sequence[int]) -> RequestError:
    """The exception for stores that a shard has made in slots that were others' by then."""
    return request_error(
        ErrorCode.ALREADY_RELEASED,
        f"stores that were called off before this shard had made them: {', '.join(map(str, transfers))}. Their slots "
        "were free for other stores: blocks there may be damaged now, and are then found bad by whoever loads them",
        "cancel a store only when each shard has refused its job, or has ended it",
    )
