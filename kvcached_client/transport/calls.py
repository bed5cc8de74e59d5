"""The client's side of the protocol, without sockets, threads or a clock.

A `PendingCalls` gives requests their ids, turns them into message parts, and pairs replies with requests. Rules:

* Every header is read back by the daemon's own decoder before it is sent, so that the daemon accepts it.
* A request is *pending* until its reply is taken or it is abandoned; there are at most `PENDING_MAX` of them.
* No acquire that was sent is forgotten before its reply has come: nobody would release what it grants. So with
  `ACQUIRES_MAX` of them without a reply, no other is sent.
* No two acquires of one name are pending: the daemon would give both the same lease.
* A reply to an abandoned request changes nothing here, but if it grants a lease, that lease must be released: it is an
  *orphan*, unless the caller has repeated the acquire with the same name and so got the same lease. While such a
  repetition waits for its reply, it is unknown which lease it gets, and the orphan stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcached_client.errors import (
    BadRequest,
    DaemonSilent,
    ErrorCode,
    RequestError,
    bad_reply,
    bad_value,
    request_error,
    request_in_use,
)
from kvcached_client.protocol.engine import (
    FRAME_COUNT_MAX,
    Acquire,
    Acquired,
    Heartbeat,
    Held,
    Release,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
    salvage_id,
)
from kvcached_client.protocol.fields import check_frames, check_reply_frames
from kvcached_client.transport.wording import about_argument, method_of
from kvcached_client.types import LeaseId, RequestId, TransferId

#: With more requests pending, the daemon is lost. ZeroMQ's own queues are as short.
PENDING_MAX: Final = 1024
#: Acquires that are pending or abandoned, whose grants may all come late. It is room for an outage of some deadlines.
ACQUIRES_MAX: Final = 4 * PENDING_MAX


class Answer(NamedTuple):
    """A reply with its frames."""

    reply: Reply
    frames: list[bytes]


class Orphan(NamedTuple):
    """A lease that was granted too late, and the load that was announced with it; 0 for none."""

    lease: LeaseId
    load: TransferId


@dataclass(slots=True)
class _GivenUp:
    """Abandoned acquires of one name: how many have no reply, and the lease that the next repetition of them got."""

    name: str
    count: int = 0
    repeated: LeaseId | None = None


class PendingCalls:
    """Pairs the replies of one connection with its requests."""

    def __init__(self) -> None:
        self._last_id = 0
        #: Pending requests by id, with their deadlines.
        self._deadlines_ns: dict[RequestId, int] = {}
        #: Pending acquires by id, with the name that makes them idempotent; and by that name.
        self._acquire_names: dict[RequestId, str] = {}
        self._acquires: dict[str, RequestId] = {}
        #: Replies that were not taken yet, or the error of an unreadable one. Their requests are still pending.
        self._answers: dict[RequestId, Answer | RequestError] = {}
        #: Abandoned acquires by id, whose grants may still arrive; and by name, those that no repetition has followed.
        self._abandoned: dict[RequestId, _GivenUp] = {}
        self._unrepeated: dict[str, _GivenUp] = {}
        #: What was granted to abandoned acquires by lease, with the acquires' names.
        self._orphans: dict[LeaseId, tuple[Orphan, str]] = {}
        #: Messages without a pending request: late, duplicate, or unexpected.
        self.unpaired_count = 0

    @property
    def pending_count(self) -> int:
        """Number of pending requests."""
        return len(self._deadlines_ns)

    @property
    def has_orphans(self) -> bool:
        """Whether a lease was granted too late, and its release was not sent."""
        return bool(self._orphans)

    @property
    def has_answers(self) -> bool:
        """Whether a reply has arrived that was not taken."""
        return bool(self._answers)

    @property
    def may_grant_late(self) -> bool:
        """Whether there are abandoned acquires without a reply."""
        return bool(self._abandoned)

    def is_pending(self, request_id: RequestId) -> bool:
        """Whether a request is pending: its reply was not taken, and it was not abandoned."""
        return request_id in self._deadlines_ns

    def is_answered(self, request_id: RequestId) -> bool:
        """Whether the reply of a request has arrived."""
        return request_id in self._answers

    def deadline_ns(self, request_id: RequestId) -> int:
        """The deadline of a pending request, on the caller's clock."""
        return self._deadlines_ns[request_id]

    def next_id(self) -> RequestId:
        """An id that this session has not used."""
        self._last_id += 1
        return RequestId(self._last_id)

    def send(self, request: Request, frames: Sequence[bytes] = (), *, deadline_ns: int) -> list[bytes]:
        """The parts of a request's message. The request is pending from now on, unless it asks for no reply.

        A request may be sent again with its id: the daemon repeats its reply and does nothing twice.

        Raises:
            BadRequest: the request cannot be encoded, or a field or frame is out of its limits.
            Refused: `PENDING_MAX` requests are pending, or another acquire of the same name is.
            DaemonSilent: `ACQUIRES_MAX` acquires have no reply, and this is another one.
        """
        header = _encode(request)
        try:
            decode_request(header)
        except BadRequest as error:
            raise about_argument(request, error) from None
        check_frames(request, frames)
        if not isinstance(request, (Heartbeat, Release)) or request.reply:
            if len(self._deadlines_ns) >= PENDING_MAX:
                raise request_error(ErrorCode.LIMIT, f"{PENDING_MAX} requests are pending", "wait for their replies")
            if isinstance(request, Acquire) and len(self._acquire_names) + len(self._abandoned) >= ACQUIRES_MAX:
                raise DaemonSilent(f"the daemon has not replied to {ACQUIRES_MAX} earlier acquires", fix="see its log")
            request_id = RequestId(request.id)
            if isinstance(request, Acquire):
                if self._acquires.setdefault(request.request, request_id) != request_id:
                    raise request_in_use(request.request, "is being acquired")
                self._acquire_names[request_id] = request.request
            self._deadlines_ns[request_id] = deadline_ns
        return [header, *frames]

    def receive(self, parts: Sequence[bytes]) -> RequestId | None:
        """Read a message of the daemon; returns the id of its pending request, None if there is none."""
        answer: Answer | RequestError
        try:
            answer = _read(parts)
            request_id = RequestId(answer.reply.id)
        except RequestError as error:
            answer = error
            request_id = RequestId(salvage_id(parts[0]) if parts else 0)
        if request_id in self._deadlines_ns and request_id not in self._answers:
            self._answers[request_id] = answer
            return request_id
        self.unpaired_count += 1
        given_up = self._abandoned.pop(request_id, None)
        if given_up is not None:
            self._note_late(given_up, _granted(answer))
        return None

    def take(self, request_id: RequestId) -> Answer | None:
        """Take the reply to a request, which is then no longer pending; None while there is none.

        Raises:
            BadRequest: the daemon's reply is unreadable.
        """
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return None
        name = self._forget(request_id)
        if name is not None and (granted := _granted(answer)) is not None:
            self._adopt(name, granted.lease)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def abandon(self, request_id: RequestId) -> None:
        """Stop waiting for a reply. The late grant of a pending acquire becomes an orphan."""
        name, answer = self._forget(request_id), self._answers.pop(request_id, None)
        if name is None:
            return
        granted = _granted(answer)
        if granted is not None:
            self._orphans[granted.lease] = granted, name
        elif answer is None:  # else it was refused, and nothing will come
            given_up = self._unrepeated.setdefault(name, _GivenUp(name))
            given_up.count += 1
            self._abandoned[request_id] = given_up

    def take_back(self, request_id: RequestId) -> None:
        """Forget a request that was not sent after all: nothing comes of it."""
        self._forget(request_id)

    def expire(self, now_ns: int) -> list[RequestId]:
        """Abandon the requests without a reply whose deadline has passed, and return their ids."""
        passed = [
            request_id
            for request_id, deadline_ns in self._deadlines_ns.items()
            if deadline_ns <= now_ns and request_id not in self._answers
        ]
        for request_id in passed:
            self.abandon(request_id)
        return passed

    def orphans(self) -> list[Orphan]:
        """Leases that were granted too late. The caller releases each, then drops it."""
        return [orphan for orphan, name in self._orphans.values() if name not in self._acquires]

    def drop_orphan(self, lease: LeaseId) -> None:
        """Forget an orphan whose release was sent."""
        del self._orphans[lease]

    def _forget(self, request_id: RequestId) -> str | None:
        self._deadlines_ns.pop(request_id, None)
        name = self._acquire_names.pop(request_id, None)
        if name is not None:
            del self._acquires[name]
        return name

    def _adopt(self, name: str, lease: LeaseId) -> None:
        """The caller holds this lease: an abandoned acquire of the same name makes it no orphan."""
        self._orphans.pop(lease, None)
        given_up = self._unrepeated.pop(name, None)
        if given_up is not None:
            given_up.repeated = lease

    def _note_late(self, given_up: _GivenUp, granted: Orphan | None) -> None:
        """An abandoned acquire has its reply."""
        given_up.count -= 1
        if not given_up.count and self._unrepeated.get(given_up.name) is given_up:
            del self._unrepeated[given_up.name]
        if granted is not None and granted.lease != given_up.repeated:
            self._orphans[granted.lease] = granted, given_up.name


def _encode(request: Request) -> bytes:
    try:
        return encode(request)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise bad_value(f"{method_of(request)}: {error}", "correct this argument") from None


def _granted(answer: Answer | RequestError | None) -> Orphan | None:
    """What nobody would hold if the reply were dropped."""
    if isinstance(answer, Answer):
        reply = answer.reply
        if isinstance(reply, Acquired):
            return Orphan(LeaseId(reply.lease), TransferId(0))
        if isinstance(reply, Held):
            return Orphan(LeaseId(reply.lease), TransferId(reply.transfer))
    return None


def _read(parts: Sequence[bytes]) -> Answer:
    if not 1 <= len(parts) <= FRAME_COUNT_MAX:
        raise bad_reply(f"a reply of {len(parts)} parts", ErrorCode.BAD_FRAMES)
    reply = decode_reply(parts[0])
    frames = list(parts[1:])
    check_reply_frames(reply, frames)
    return Answer(reply, frames)
