"""The sans-IO session: no socket, no clock."""

from __future__ import annotations

import pytest

from kvcached_client.errors import BadRequest, DaemonSilent, ErrorCode, Fault, Refused
from kvcached_client.protocol.engine import (
    BLOCKS_PER_MESSAGE_MAX,
    Acquire,
    Acquired,
    ErrorReply,
    Header,
    Heartbeat,
    Match,
    Matched,
    Release,
    decode_request,
    encode,
)
from kvcached_client.transport import calls
from kvcached_client.transport.calls import PENDING_MAX, Answer, PendingCalls
from kvcached_client.types import LeaseId, RequestId

KEY = b"k" * 16


def match_request(session: PendingCalls) -> Match:
    return Match(id=session.next_id(), epoch=1, tokens=8)


def acquire_request(session: PendingCalls, name: str = "r") -> Acquire:
    return Acquire(id=session.next_id(), epoch=1, request=name, tokens=8)


def reply(header: Header, *frames: bytes) -> list[bytes]:
    return [encode(header), *frames]


def test_session_pairs_replies_with_requests_in_any_order() -> None:
    """Each request gets its own reply, whatever order they come in."""
    session = PendingCalls()
    first, second = match_request(session), match_request(session)
    for request in (first, second):
        session.send(request, (KEY,), deadline_ns=10)
    assert session.receive(reply(Matched(id=second.id, device=2))) == second.id
    assert session.take(RequestId(first.id)) is None
    assert session.receive(reply(Matched(id=first.id, device=1))) == first.id
    assert session.take(RequestId(first.id)) == Answer(Matched(id=first.id, device=1), [])
    assert session.take(RequestId(second.id)) == Answer(Matched(id=second.id, device=2), [])
    assert session.pending_count == 0


def test_session_message_is_header_and_frames() -> None:
    """A message is the encoded request and then its frames, untouched."""
    session = PendingCalls()
    request = match_request(session)
    header, *frames = session.send(request, (KEY,), deadline_ns=10)
    assert decode_request(header) == request
    assert frames == [KEY]


def test_session_ignores_a_reply_to_an_abandoned_request() -> None:
    """A late reply changes nothing and is counted."""
    session = PendingCalls()
    request = match_request(session)
    session.send(request, (KEY,), deadline_ns=10)
    session.abandon(RequestId(request.id))
    assert session.receive(reply(Matched(id=request.id, device=1))) is None
    assert session.take(RequestId(request.id)) is None
    assert (session.unpaired_count, session.pending_count) == (1, 0)


def test_session_ignores_a_second_reply() -> None:
    """Only the first of two replies to one request counts."""
    session = PendingCalls()
    request = match_request(session)
    session.send(request, (KEY,), deadline_ns=10)
    session.receive(reply(Matched(id=request.id, device=1)))
    assert session.receive(reply(Matched(id=request.id, device=2))) is None
    assert session.take(RequestId(request.id)) == Answer(Matched(id=request.id, device=1), [])


def test_session_expires_only_what_is_due_and_unanswered() -> None:
    """A deadline abandons its own request, unless the answer is already here."""
    session = PendingCalls()
    due, answered, later = (match_request(session) for _ in range(3))
    session.send(due, (KEY,), deadline_ns=10)
    session.send(answered, (KEY,), deadline_ns=10)
    session.send(later, (KEY,), deadline_ns=11)
    session.receive(reply(Matched(id=answered.id, device=1)))
    assert session.expire(9) == []
    assert session.expire(10) == [due.id]
    assert session.take(RequestId(answered.id)) is not None
    assert session.pending_count == 1


def test_session_late_grant_is_an_orphan() -> None:
    """A lease granted to an acquire that was given up is to be released, until that is done."""
    session = PendingCalls()
    request = acquire_request(session)
    session.send(request, (KEY,), deadline_ns=10)
    session.expire(10)
    session.receive(reply(Acquired(id=request.id, lease=7, hit=0, ready=0), b"", b""))
    assert session.orphans() == session.orphans() == [(7, 0)]
    session.drop_orphan(LeaseId(7))
    assert session.orphans() == []


def test_session_grant_that_came_before_abandoning_is_an_orphan() -> None:
    """A grant that nobody took is given back, too."""
    session = PendingCalls()
    request = acquire_request(session)
    session.send(request, (KEY,), deadline_ns=10)
    session.receive(reply(Acquired(id=request.id, lease=7, hit=0, ready=0), b"", b""))
    session.abandon(RequestId(request.id))
    assert session.orphans() == [(7, 0)]


def test_session_late_grant_is_no_orphan_when_asked_for_again() -> None:
    """The daemon answers a repeated acquire with the same lease, so the late reply must not release it."""
    session = PendingCalls()
    first, second = acquire_request(session), acquire_request(session)
    session.send(first, (KEY,), deadline_ns=10)
    session.expire(10)
    session.send(second, (KEY,), deadline_ns=20)
    session.receive(reply(Acquired(id=first.id, lease=7, hit=0, ready=0), b"", b""))
    session.receive(reply(Acquired(id=second.id, lease=7, hit=0, ready=0), b"", b""))
    assert session.orphans() == []
    assert session.take(RequestId(second.id)) is not None
    assert session.orphans() == []


def test_session_grant_that_comes_after_its_repetitions_is_no_orphan() -> None:
    """Whichever of two replies comes first: the lease is the caller's, and a different one is not."""
    session = PendingCalls()
    first, second = acquire_request(session), acquire_request(session)
    for request in (first, second):
        session.send(request, (KEY,), deadline_ns=10)
        session.expire(10)
    repetition = acquire_request(session)
    session.send(repetition, (KEY,), deadline_ns=20)
    session.receive(reply(Acquired(id=repetition.id, lease=7, hit=0, ready=0), b"", b""))
    assert session.take(RequestId(repetition.id)) is not None
    session.receive(reply(Acquired(id=first.id, lease=7, hit=0, ready=0), b"", b""))
    assert session.orphans() == []
    session.receive(reply(Acquired(id=second.id, lease=6, hit=0, ready=0), b"", b""))
    assert session.orphans() == [(6, 0)]


def test_session_late_grant_is_an_orphan_when_its_repetition_is_refused() -> None:
    """A repetition with other tokens gets an error, so nobody holds the late lease, and it must be released."""
    session = PendingCalls()
    first, second = acquire_request(session), acquire_request(session)
    session.send(first, (KEY,), deadline_ns=10)
    session.expire(10)
    session.send(second, (KEY,), deadline_ns=20)
    session.receive(reply(Acquired(id=first.id, lease=7, hit=0, ready=0), b"", b""))
    conflict = ErrorReply(
        id=second.id, code=ErrorCode.REQUEST_CONFLICT, fault=Fault.CALLER, message="other tokens", fix="another name"
    )
    session.receive(reply(conflict))
    assert session.orphans() == []
    assert session.take(RequestId(second.id)) == Answer(conflict, [])
    assert session.orphans() == [(7, 0)]


def test_session_request_can_be_sent_again_after_it_was_abandoned() -> None:
    """The late reply to a request answers its repetition with the same id."""
    session = PendingCalls()
    request = match_request(session)
    parts = session.send(request, (KEY,), deadline_ns=10)
    session.expire(10)
    assert session.send(request, (KEY,), deadline_ns=20) == parts
    assert session.receive(reply(Matched(id=request.id, device=1))) == request.id


def test_session_requests_without_reply_are_not_pending() -> None:
    """One-way requests leave no trace."""
    session = PendingCalls()
    session.send(Release(id=session.next_id(), epoch=1, lease=1, reply=False), deadline_ns=0)
    session.send(Heartbeat(id=session.next_id(), session=1, token=b"t" * 32, reply=False), deadline_ns=0)
    assert session.pending_count == 0


def test_session_pending_table_is_bounded() -> None:
    """More requests at once than the limit are refused before they are sent."""
    session = PendingCalls()
    for _ in range(PENDING_MAX):
        session.send(match_request(session), (KEY,), deadline_ns=10)
    with pytest.raises(Refused) as caught:
        session.send(match_request(session), (KEY,), deadline_ns=10)
    assert caught.value.code == ErrorCode.LIMIT
    assert session.pending_count == PENDING_MAX


def test_session_forgets_no_acquire_that_may_be_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """While too many acquires have no reply, no other is sent; each that is granted late is an orphan."""
    monkeypatch.setattr(calls, "ACQUIRES_MAX", 3)
    session = PendingCalls()
    requests = [acquire_request(session, str(number)) for number in range(3)]
    for request in requests:
        session.send(request, (KEY,), deadline_ns=10)
    session.expire(10)
    another = acquire_request(session, "another")
    with pytest.raises(DaemonSilent, match="3 earlier acquires"):
        session.send(another, (KEY,), deadline_ns=20)
    session.send(match_request(session), (KEY,), deadline_ns=20)
    for request in requests:
        session.receive(reply(Acquired(id=request.id, lease=request.id, hit=0, ready=0), b"", b""))
    assert [orphan.lease for orphan in session.orphans()] == [request.id for request in requests]
    for _ in range(5):  # none of these is sent
        session.send(another, (KEY,), deadline_ns=20)
        session.take_back(RequestId(another.id))


def test_session_forgets_an_acquire_that_was_refused_before_it_was_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease comes of it any more, so that however many there were, another acquire is sent."""
    monkeypatch.setattr(calls, "ACQUIRES_MAX", 3)
    session = PendingCalls()
    for _ in range(4):
        request = acquire_request(session)
        session.send(request, (KEY,), deadline_ns=10)
        session.receive(
            reply(ErrorReply(id=request.id, code=ErrorCode.NO_CAPACITY, fault=Fault.CALLER, message="m", fix="f"))
        )
        session.abandon(RequestId(request.id))
    assert (session.may_grant_late, session.orphans()) == (False, [])


def test_session_adopts_a_lease_for_the_acquires_before_its_own() -> None:
    """One that was sent behind the repetition that got a lease, and is given up, is a lease that nobody has."""
    session = PendingCalls()
    first, repetition, later = (acquire_request(session) for _ in range(3))
    session.send(first, (KEY,), deadline_ns=10)
    session.expire(10)
    session.send(repetition, (KEY,), deadline_ns=20)
    session.receive(reply(Acquired(id=repetition.id, lease=7, hit=0, ready=0), b"", b""))
    assert session.take(RequestId(repetition.id)) is not None
    session.send(later, (KEY,), deadline_ns=20)
    session.expire(20)
    session.receive(reply(Acquired(id=later.id, lease=7, hit=0, ready=0), b"", b""))
    assert session.orphans() == [(7, 0)]
    session.receive(reply(Acquired(id=first.id, lease=7, hit=0, ready=0), b"", b""))
    assert (session.orphans(), session.may_grant_late) == ([(7, 0)], False)


def test_session_unreadable_reply_fails_its_request() -> None:
    """A reply whose id can be read but whose rest cannot raises in its own request only."""
    session = PendingCalls()
    request, other = match_request(session), match_request(session)
    for each in (request, other):
        session.send(each, (KEY,), deadline_ns=10)
    garbled = encode(Matched(id=request.id, device=1)).replace(b"device", b"devise")
    assert session.receive([garbled]) == request.id
    with pytest.raises(BadRequest):
        session.take(RequestId(request.id))
    assert session.pending_count == 1


@pytest.mark.parametrize("parts", [[], [b""], [b"\xff"], [b"\x91" * 9000], [b"\xa0"] * 9])
def test_session_survives_noise(parts: list[bytes]) -> None:
    """Messages that answer nothing are counted and change nothing."""
    session = PendingCalls()
    request = match_request(session)
    session.send(request, (KEY,), deadline_ns=10)
    assert session.receive(parts) is None
    assert (session.unpaired_count, session.pending_count) == (1, 1)


def test_session_refuses_a_reply_with_missing_frames() -> None:
    """An acquire's reply without its slots is an error, not a lease without slots."""
    session = PendingCalls()
    request = acquire_request(session)
    session.send(request, (KEY,), deadline_ns=10)
    session.receive(reply(Acquired(id=request.id, lease=7, hit=0, ready=0)))
    with pytest.raises(BadRequest) as caught:
        session.take(RequestId(request.id))
    assert caught.value.code == ErrorCode.BAD_FRAMES


@pytest.mark.parametrize(
    ("request_", "frames"),
    [
        (Match(id=1, epoch=1, tokens=(1 << 20) + 1), (KEY,)),
        (Match(id=1, epoch=1, tokens=8), ()),
        (Match(id=1, epoch=1, tokens=8), (KEY[:-1],)),
        (Match(id=1, epoch=1, tokens=8), (KEY * (BLOCKS_PER_MESSAGE_MAX + 1),)),
        (Acquire(id=1, epoch=1, request="", tokens=8), (KEY,)),
        (Acquire(id=1, epoch=1, request="n" * 257, tokens=8), (KEY,)),
        (Acquire(id=1, epoch=1, request="\ud800", tokens=8), (KEY,)),
        (Acquire(id=1, epoch=1 << 63, request="r", tokens=8), (KEY,)),
        (Acquire(id=1, epoch=1 << 64, request="r", tokens=8), (KEY,)),
        (Acquire(id=1, epoch=1, request="r", tokens=object()), (KEY,)),  # type: ignore[arg-type]
    ],
    ids=[
        *("tokens", "no keys", "ragged keys", "too many keys", "no name", "long name", "name that is no text"),
        *("64 bits", "65 bits", "no number"),
    ],
)
def test_session_refuses_what_the_daemon_would_refuse(request_: Match | Acquire, frames: tuple[bytes, ...]) -> None:
    """A request outside the protocol's limits fails here and is not pending."""
    session = PendingCalls()
    with pytest.raises(BadRequest):
        session.send(request_, frames, deadline_ns=10)
    assert session.pending_count == 0


def test_session_error_reply_without_id_answers_nothing() -> None:
    """An error for an unreadable request has id 0, which no request has."""
    session = PendingCalls()
    request = match_request(session)
    session.send(request, (KEY,), deadline_ns=10)
    error = ErrorReply(id=0, code=ErrorCode.MALFORMED, fault=Fault.CALLER, message="m", fix="f")
    assert session.receive(reply(error)) is None
    assert session.pending_count == 1
