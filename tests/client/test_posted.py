"""Calls that nobody waits for: carried out once and in order, their replies taken later, their errors told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from kvcached_client import BadRequest, Client, DaemonUnreachable, DeadlineExceeded, ErrorCode, FailureReason, Refused
from kvcached_client.aio import AsyncClient
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import Acquire, Bye, Commit, Header, Match, Release, Request
from kvcached_client.transport.steps import CALLS_UNDER_WAY_MAX, Steps
from kvcached_client.types import FenceSequence
from tests.client.fake_daemon import SILENCE, FakeDaemon
from tests.client.test_aio import arrival, held_reply, is_readable, run
from tests.client.test_batch import leases_of, refusing

Connect = Callable[..., Client]
Answer = tuple[Header, list[bytes]] | None


def test_call_without_a_wait_returns_before_its_reply(daemon: FakeDaemon, connect: Connect) -> None:
    """A daemon that keeps its replies until three calls have come serves them; the calls come in their order."""
    client = connect()
    first, second = leases_of(client, 2)
    sent = len(daemon.requests)
    daemon.replies_together = 3
    first.commit(8, wait=False)
    second.finish(8, wait=False)
    third = client.acquire("next", client.chain(range(8)))

    assert [type(request) for request, _ in daemon.requests[sent:]] == [Commit, Release, Acquire]
    daemon.replies_together = 1
    client.settle()
    assert (first.depth, second.declaration(), third.granted) == (2, None, True)


def test_next_call_of_the_lease_starts_where_the_posted_one_ended(daemon: FakeDaemon, connect: Connect) -> None:
    """A commit waits for the commit before it; the end of a `with` statement does not wait for a posted finish."""
    client = connect()
    with client.acquire("a", client.chain(range(12))) as lease:
        lease.commit(4, wait=False)
        assert lease.depth == 0
        lease.commit(8, wait=False)
        assert lease.depth == 1
        client.settle()
        daemon.replies_together = 2
        lease.finish(12, wait=False)  # the end of the statement does not wait for its reply
    assert client.match(client.chain(range(8))) == 2
    daemon.replies_together = 1
    assert [request.start for request in daemon.of(Commit) if isinstance(request, Commit)] == [0, 1]
    assert len(daemon.of(Release)) == 1


def test_replies_are_taken_by_later_calls(connect: Connect) -> None:
    """An engine that never settles keeps no more than the calls whose replies have not come."""
    client = connect()
    for lease in leases_of(client, 20):
        lease.finish(8, wait=False)
        client.match(client.chain(range(8)))

    assert (client._channel._calls.pending_count, len(client._channel.posted._calls)) == (1, 1)


def test_only_so_many_replies_are_awaited(daemon: FakeDaemon, connect: Connect) -> None:
    """A daemon that is slow to reply makes the call after so many wait for the oldest; all are carried out."""
    client = connect()
    leases = leases_of(client, CALLS_UNDER_WAY_MAX + 3)
    most = 0
    daemon.replies_together = CALLS_UNDER_WAY_MAX + 1
    for lease in leases:
        lease.commit(8, wait=False)
        most = max(most, client._channel._calls.pending_count)
    daemon.replies_together = 1
    client.match(client.chain(range(8)))
    client.settle()

    assert most == CALLS_UNDER_WAY_MAX
    assert {lease.depth for lease in leases} == {2}


@pytest.mark.parametrize("kind", [Commit, Release])
def test_refusal_is_logged_raised_by_settle_once_and_loses_no_slot(
    daemon: FakeDaemon, connect: Connect, caplog: pytest.LogCaptureFixture, kind: type[Header]
) -> None:
    """A commit that is refused leaves the lease as it was; a finish that is refused gives the slots back without it."""
    client = connect()
    first, second = leases_of(client, 2)
    daemon.script = refusing(kind, 0, ErrorCode.OUT_OF_ORDER)
    with caplog.at_level(logging.WARNING, logger="kvcached_client"):
        if kind is Commit:
            first.commit(8, wait=False)
        else:
            first.finish(8, wait=False)
        second.finish(8, wait=False)
        with pytest.raises(Refused, match="not this one"):
            client.settle()
    client.settle()

    assert "a call that nobody waits for failed: out_of_order: not this one" in caplog.text
    frames = [len(frames) for request, frames in daemon.requests if isinstance(request, Release)]
    assert frames == ([2] if kind is Commit else [2, 2, 0])
    if kind is Commit:
        first.finish(8)
    assert (first.declaration(), second.declaration()) == (None, None)


def test_mistake_of_the_caller_is_raised_at_once(daemon: FakeDaemon, connect: Connect) -> None:
    """What cannot be sent is no posted call, and the lease is released at the end of its statement as ever."""
    client = connect()

    def finish_too_much() -> None:
        with client.acquire("a", client.chain(range(8))) as lease:
            lease.finish(1 << 20, wait=False)

    with pytest.raises(BadRequest):
        finish_too_much()
    assert [len(frames) for request, frames in daemon.requests if isinstance(request, Release)] == [0]
    client.settle()


def test_missed_deadline_is_settled_by_the_next_call_of_the_lease(daemon: FakeDaemon, connect: Connect) -> None:
    """A commit without a reply is sent again with its id, and nothing is done twice."""
    client = connect(deadline_ms=300)
    (lease,) = leases_of(client, 1)
    came: list[int] = []

    def script(request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, Commit):
            came.append(request.id)
            if len(came) == 1:
                return SILENCE, []
        return None

    daemon.script = script
    lease.commit(4, wait=False)
    with pytest.raises(DeadlineExceeded):
        client.settle()
    lease.finish(8)
    assert came == [came[0]] * 2
    assert [request.start for request in daemon.of(Release) if isinstance(request, Release)] == [1]


@pytest.mark.parametrize("failures", ["raise", "miss"])
@pytest.mark.parametrize("wait", [False, True])
def test_lease_whose_release_was_not_heard_is_not_declared(
    daemon: FakeDaemon, connect: Connect, failures: str, wait: bool
) -> None:
    """The daemon may carry a release out after its deadline, with a commit or without: its lease is over."""
    client = connect(deadline_ms=300, failures=failures)
    leases = leases_of(client, 2)
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Release) else None
    for call in (partial(leases[0].release, wait=wait), partial(leases[1].finish, 8, wait=wait)):
        with suppress(DeadlineExceeded):
            call()
    with suppress(DeadlineExceeded):
        client.settle()
    assert [lease.declaration() for lease in leases] == [None, None]
    sent = len(daemon.requests)
    leases[0].release()
    leases[1].finish(8)  # it ended with its daemon
    assert len(daemon.requests) == sent


@pytest.mark.parametrize("failures", ["raise", "miss"])
def test_posted_finish_without_a_reply_is_followed_by_a_release(
    daemon: FakeDaemon, connect: Connect, failures: str
) -> None:
    """A finish that the daemon refuses when nobody listens any longer does not leave its lease behind."""
    client = connect(deadline_ms=300, failures=failures)
    (lease,) = leases_of(client, 1)
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Release) and request.reply else None
    lease.finish(8, fence=FenceSequence(3), wait=False)
    with suppress(DeadlineExceeded):
        client.settle()
    daemon.script = None
    client.match(client.chain(range(8)))
    releases = [(len(frames), each.reply, each.fence) for each, frames in daemon.requests if isinstance(each, Release)]
    assert releases == [(2, True, 3), (0, False, 3)]


def test_repeated_release_that_was_done_succeeds(daemon: FakeDaemon, connect: Connect) -> None:
    """A daemon that carried a release out and has forgotten its reply says so: the caller has what it asked for."""
    client = connect(deadline_ms=300)
    (lease,) = leases_of(client, 1)
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Release) else None
    with pytest.raises(DeadlineExceeded):
        lease.release()
    daemon.script = refusing(Release, 0, ErrorCode.ALREADY_RELEASED)
    lease.release()
    assert lease.declaration() is None


def test_daemon_that_dies_ends_posted_calls(daemon: FakeDaemon, connect: Connect) -> None:
    """A lease whose finish has no reply is over, and is not declared to the next daemon; one with a commit is."""
    client = connect()
    first, second = leases_of(client, 2)
    daemon.script = lambda *_: (SILENCE, [])
    first.finish(8, wait=False)
    second.commit(8, wait=False)
    daemon.stop()
    with pytest.raises(DaemonUnreachable):
        client.settle()
    assert (first.declaration() is None, second.declaration() is None, second.depth) == (True, False, 0)


def test_failures_of_posted_calls_are_misses_where_failures_are(daemon: FakeDaemon, connect: Connect) -> None:
    """With a dead daemon nothing raises, `reason` says why, and every failure is counted."""
    client = connect(failures="miss")
    first, second = leases_of(client, 2)
    daemon.stop()
    first.commit(8, wait=False)
    second.finish(8, wait=False)
    client.settle()
    assert {first.reason, second.reason} == {FailureReason.UNREACHABLE}
    assert client.failure_count == 2


def test_close_takes_the_replies_to_what_was_sent(daemon: FakeDaemon, connect: Connect) -> None:
    """What was posted before `close` is carried out before the goodbye."""
    client = connect()
    (lease,) = leases_of(client, 1)
    lease.finish(8, wait=False)
    client.close()
    assert [type(request) for request, _ in daemon.requests[-2:]] == [Release, Bye]
    assert lease.declaration() is None
    assert [type(request) for request, _ in daemon.requests].count(Match) == 0


@pytest.mark.parametrize("is_refused", [True, False])
def test_task_whose_reply_a_call_that_is_not_sent_has_read_goes_on(daemon: FakeDaemon, is_refused: bool) -> None:
    """In an event loop, a posted call that sends nothing in the end wakes the tasks whose replies came meanwhile."""

    async def work(client: AsyncClient) -> bool:
        def sending_nothing() -> Steps[None]:
            client._channel._poll(0)  # reads what has come
            if is_refused:
                raise request_error(ErrorCode.LIMIT, "too many", "wait")
            yield from ()

        has_come, reply = arrival(daemon, Match), held_reply(daemon, Match)
        waiting = asyncio.ensure_future(client.match(client.chain(range(8))))
        assert await has_come()
        reply.set()
        assert is_readable(client)  # and the loop has not seen it
        client.post(sending_nothing())
        done, _ = await asyncio.wait([waiting], timeout=1)
        return waiting in done

    assert run(daemon, work)
