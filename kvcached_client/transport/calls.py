"""The client's side of the protocol, without sockets, threads or a clock.

A `PendingCalls` gives requests their ids, turns them into message parts, and pairs replies with requests. Rules:

* What it encodes, a daemon accepts: each header is read back by the daemon's own decoder before it leaves.
* A request is *pending* until its reply is taken or it is abandoned; there are at most `PENDING_MAX` of them.
* A reply to an abandoned request changes nothing here, except that slots granted by it have to be given back: the lease
  is then an *orphan*, unless the caller has asked for the same request name again and so got the same lease. While
  such a repetition waits for its reply, nobody knows which, and the lease stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvcached_client.errors import ErrorCode, RequestError, request_error
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
from kvcached_client.protocol.frames import check_frames, check_reply_frames
from kvcached_client.types import LeaseId, RequestId

#: A caller that runs more requests at once than this has lost the daemon; ZeroMQ's own queues stay as short.
PENDING_MAX: Final = 1024
#: Timed-out acquires whose late grants are still told from other late replies.
ABANDONED_MAX: Final = 1024


class Answer(NamedTuple):
    """A reply with its frames."""

    reply: Reply
    frames: list[bytes]


class _GivenUp(NamedTuple):
    """An acquire that nobody waits for: its name, and the lease that a repetition of it got."""

    name: str
    repeated: LeaseId | None


class PendingCalls:
    """Pairs the replies of one connection with its requests."""

    def __init__(self) -> None:
        self._last_id = 0
        #: Requests that wait for a reply, by id, each with the time at which it is given up.
        self._deadlines_ns: dict[RequestId, int] = {}
        #: Acquires that wait for a reply, by id: the name that makes them idempotent.
        self._acquire_names: dict[RequestId, str] = {}
        #: Replies, or what was wrong with them, that nobody has taken yet. Their requests are still pending.
        self._answers: dict[RequestId, Answer | RequestError] = {}
        #: Acquires that were given up, by id: their grants may still come. The oldest are forgotten first.
        self._abandoned: dict[RequestId, _GivenUp] = {}
        #: Leases granted to acquires that were given up, with the acquires' names.
        self._orphans: dict[LeaseId, str] = {}
        #: Messages that no pending request waits for: late, duplicate, or answers to nothing.
        self.unpaired_count = 0

    @property
    def pending_count(self) -> int:
        """Requests without an answer that was taken."""
        return len(self._deadlines_ns)

    def is_pending(self, request_id: RequestId) -> bool:
        """Whether its answer is waited for, or is there and was not taken."""
        return request_id in self._deadlines_ns

    def is_answered(self, request_id: RequestId) -> bool:
        """Whether its answer is there."""
        return request_id in self._answers

    def deadline_ns(self, request_id: RequestId) -> int:
        """When a pending request is given up, on the caller's clock."""
        return self._deadlines_ns[request_id]

    def next_id(self) -> RequestId:
        """An id that this session has not used."""
        self._last_id += 1
        return RequestId(self._last_id)

    def send(self, request: Request, frames: Sequence[bytes] = (), *, deadline_ns: int) -> list[bytes]:
        """The parts of a request's message. From now on it is pending, unless it asks for no reply.

        A request may be sent again with its id: the daemon answers as before and does nothing twice.

        Raises:
            BadRequest: no message can say it, or the daemon would refuse it unread: a field or frame is out of its
                limits.
            Refused: `PENDING_MAX` requests are pending.
        """
        header = _encode(request)
        decode_request(header)
        check_frames(request, frames)
        if not isinstance(request, (Heartbeat, Release)) or request.reply:
            if len(self._deadlines_ns) >= PENDING_MAX:
                raise request_error(ErrorCode.LIMIT, f"{PENDING_MAX} requests are pending", "wait for their replies")
            request_id = RequestId(request.id)
            self._deadlines_ns[request_id] = deadline_ns
            if isinstance(request, Acquire):
                self._acquire_names[request_id] = request.request
        return [header, *frames]

    def receive(self, parts: Sequence[bytes]) -> RequestId | None:
        """Take in a message of the daemon; the id of the request that it answers, None where nobody waits for it."""
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
        lease = _granted(answer)
        if given_up is not None and lease is not None and lease != given_up.repeated:
            self._orphans[lease] = given_up.name
        return None

    def take(self, request_id: RequestId) -> Answer | None:
        """The answer to a pending request, which is then no longer pending; None while there is none.

        Raises:
            BadRequest: the daemon's reply is unreadable.
        """
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return None
        name, lease = self._forget(request_id), _granted(answer)
        if name is not None and lease is not None:
            self._adopt(name, lease)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def abandon(self, request_id: RequestId) -> None:
        """Wait no longer for a reply. A pending acquire's late grant becomes an orphan."""
        name = self._forget(request_id)
        lease = _granted(self._answers.pop(request_id, None))
        if name is None:
            return
        if lease is not None:
            self._orphans[lease] = name
            return
        while len(self._abandoned) >= ABANDONED_MAX:
            del self._abandoned[next(iter(self._abandoned))]
        self._abandoned[request_id] = _GivenUp(name, None)

    def expire(self, now_ns: int) -> list[RequestId]:
        """Abandon the unanswered requests whose deadline has passed, and name them."""
        passed = [
            request_id
            for request_id, deadline_ns in self._deadlines_ns.items()
            if deadline_ns <= now_ns and request_id not in self._answers
        ]
        for request_id in passed:
            self.abandon(request_id)
        return passed

    def orphans(self) -> list[LeaseId]:
        """Leases that were granted too late for anybody to want them; to be released, and dropped once that is sent."""
        asked_again = set(self._acquire_names.values())
        return [lease for lease, name in self._orphans.items() if name not in asked_again]

    def drop_orphan(self, lease: LeaseId) -> None:
        """An orphan is released."""
        del self._orphans[lease]

    def _forget(self, request_id: RequestId) -> str | None:
        self._deadlines_ns.pop(request_id, None)
        return self._acquire_names.pop(request_id, None)

    def _adopt(self, name: str, lease: LeaseId) -> None:
        """The caller holds a lease: what it gave up under the same name is no orphan if it is the same one."""
        self._orphans.pop(lease, None)
        for request_id, given_up in self._abandoned.items():
            if given_up.name == name:
                self._abandoned[request_id] = _GivenUp(name, lease)


def _encode(request: Request) -> bytes:
    try:
        return encode(request)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise request_error(
            ErrorCode.BAD_VALUE, f"{type(request).__name__}: {error}", "see the fields in docs/protocol.md"
        ) from None


def _granted(answer: Answer | RequestError | None) -> LeaseId | None:
    if isinstance(answer, Answer) and isinstance(answer.reply, (Acquired, Held)):
        return LeaseId(answer.reply.lease)
    return None


def _read(parts: Sequence[bytes]) -> Answer:
    if not 1 <= len(parts) <= FRAME_COUNT_MAX:
        raise request_error(
            ErrorCode.BAD_FRAMES, f"a reply of {len(parts)} parts", "client and daemon differ in version"
        )
    reply = decode_reply(parts[0])
    frames = list(parts[1:])
    check_reply_frames(reply, frames)
    return Answer(reply, frames)
