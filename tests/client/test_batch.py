"""Batches: many calls in one round trip, carried out once and in order, each with an error of its own."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

import pytest

from kvcached_client import (
    BadRequest,
    Client,
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    FailureReason,
    Lease,
    NoCapacity,
    Refused,
    Stale,
)
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import (
    Acquire,
    Allocate,
    Bye,
    Commit,
    Header,
    Release,
    Request,
    SlotsAvailable,
    WaitForSlots,
    error_reply,
)
from kvcached_client.transport.steps import CALLS_UNDER_WAY_MAX, BatchedCall
from tests.client.fake_daemon import SILENCE, FakeDaemon

WAIT_S = 20
Connect = Callable[..., Client]
Answer = tuple[Header, list[bytes]] | None


def leases_of(client: Client, count: int, tokens: int = 8) -> list[Lease]:
    return [client.acquire(f"request-{number}", client.chain(range(tokens))) for number in range(count)]


def commit_all(client: Client, leases: list[Lease], tokens: int) -> None:
    with client.batch() as batch:
        for lease in leases:
            batch.commit(lease, tokens)


def refusing(kind: type[Header], number: int, code: ErrorCode) -> Callable[[Request, list[bytes]], Answer]:
    """A daemon that refuses one request of a kind, counted from 0."""
    came: list[int] = []

    def script(request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, kind):
            came.append(request.id)
            if len(came) == number + 1:
                return error_reply(request.id, request_error(code, "not this one", "choose another")), []
        return None

    return script


def test_calls_are_sent_before_any_reply(daemon: FakeDaemon, connect: Connect) -> None:
    """A daemon that keeps its replies until all calls have come serves a batch; the calls come in their order."""
    client = connect()
    leases = leases_of(client, 4)
    sent = len(daemon.requests)
    daemon.replies_together = 5
    with client.batch() as batch:
        batch.finish(leases[0], 8)
        batch.commit(leases[1], 8)
        batch.release(leases[2])
        acquired = batch.acquire("next", client.chain(range(8)), reserve_tokens=4)
        batch.allocate(leases[3], 16)
    daemon.replies_together = 1
    came = [type(request) for request, _ in daemon.requests[sent:]]
    assert came == [Release, Commit, Release, Acquire, Allocate]
    assert [lease.declaration() is None for lease in leases] == [True, False, True, False]
    assert (leases[1].depth, leases[3].capacity_tokens, acquired.result().capacity_tokens) == (2, 16, 12)


def test_work_can_be_done_before_the_replies_are_taken(connect: Connect) -> None:
    """A lease is what it was until the reply is taken, which has come even if the deadline has passed since."""
    client = connect()
    (lease,) = leases_of(client, 1)
    with client.batch() as batch:
        client._channel.deadline_ms = 0
        call = batch.commit(lease, 8)
        client._channel.deadline_ms = 2000
        assert select.select([client._channel._connection.fileno()], [], [], WAIT_S)[0]
        assert (call.is_over, lease.depth) == (False, 0)
    assert (call.is_over, lease.depth) == (True, 2)


def test_chain_may_grow_before_the_lease_is_there(daemon: FakeDaemon, connect: Connect) -> None:
    """The prompt is what the chain held at the call: tokens that were added since are output, and not findable."""
    client = connect()
    chain = client.chain(range(8))
    with client.batch() as batch:
        acquired = batch.acquire("a", chain, cache="prompt", reserve_tokens=8)
        chain.extend(range(8, 16))
    lease = acquired.result()
    lease.commit(16)
    assert (lease.depth, len(lease.block_table)) == (2, 4)


@pytest.mark.parametrize("kind", [Commit, Release])
def test_error_of_a_call_is_raised_at_the_end_and_concerns_nobody_else(
    daemon: FakeDaemon, connect: Connect, kind: type[Header]
) -> None:
    """All other calls take effect, and the lease of the refused call can be used on."""
    client = connect()
    leases = leases_of(client, 6)
    daemon.script = refusing(kind, 1, ErrorCode.OUT_OF_ORDER)
    calls: list[BatchedCall[None]] = []

    def commit_and_finish() -> None:
        with client.batch() as batch:
            calls.extend(batch.commit(lease, 8) for lease in leases[:3])
            calls.extend(batch.finish(lease, 8) for lease in leases[3:])

    with pytest.raises(Refused, match="not this one"):
        commit_and_finish()
    assert all(call.is_over for call in calls)
    refused = 1 if kind is Commit else 4
    with pytest.raises(Refused, match="not this one"):
        calls[refused].result()
    assert [lease.depth for lease in leases[:3]] == ([2, 0, 2] if kind is Commit else [2, 2, 2])
    leases[refused].finish(8)
    assert len(daemon.of(Release)) == 4
    for lease in leases[:3]:
        lease.release()
    assert len(daemon.of(Release)) == 4 + (2 if kind is Commit else 3)


def test_first_error_is_raised(daemon: FakeDaemon, connect: Connect) -> None:
    """Where several calls fail, the end of the batch raises the error of the first of them."""
    client = connect()
    leases = leases_of(client, 3)
    codes = iter((None, ErrorCode.OUT_OF_ORDER, ErrorCode.INTERNAL))
    daemon.script = lambda request, _: (
        (error_reply(request.id, request_error(code, "no", "no")), [])
        if isinstance(request, Commit) and (code := next(codes))
        else None
    )
    with pytest.raises(Refused):
        commit_all(client, leases, 8)
    assert [lease.depth for lease in leases] == [2, 0, 0]


def test_full_pool_is_told_by_the_result_only(daemon: FakeDaemon, connect: Connect) -> None:
    """A shortage of slots is an answer to `acquire` and `allocate`, not an error of the batch."""
    client = connect()
    (lease,) = leases_of(client, 1)
    full = request_error(ErrorCode.NO_CAPACITY, "full", "wait")
    daemon.script = lambda request, _: (
        (error_reply(request.id, full), []) if isinstance(request, Acquire | Allocate) else None
    )
    with client.batch() as batch:
        grown = batch.allocate(lease, 64)
        acquired = batch.acquire("b", client.chain(range(8)))
    for call in (grown, acquired):
        with pytest.raises(NoCapacity):
            call.result()
    assert lease.capacity_tokens == 8


def test_exception_of_the_statement_is_the_one_that_leaves_it(daemon: FakeDaemon, connect: Connect) -> None:
    """What was sent before an exception is carried out, its replies are taken, and the exception stays the same."""
    client = connect()
    first, second = leases_of(client, 2)
    daemon.script = refusing(Commit, 0, ErrorCode.OUT_OF_ORDER)

    def go_wrong() -> None:
        with client.batch() as batch:
            batch.commit(first, 8)
            batch.commit(second, 4)
            batch.commit(second, 1 << 20)

    with pytest.raises(BadRequest):
        go_wrong()
    assert (first.depth, second.depth, client._channel._calls.pending_count) == (0, 1, 0)


def test_calls_of_one_lease_wait_for_each_other(daemon: FakeDaemon, connect: Connect) -> None:
    """Every call starts from what the one before it has left, whether it is in a batch or not."""
    client = connect()
    lease = client.acquire("a", client.chain(range(12)), reserve_tokens=4)
    with client.batch() as batch:
        batch.commit(lease, 4)
        batch.commit(lease, 8)
        lease.commit(12)
        batch.allocate(lease, 20)
        assert lease.capacity_tokens == 16
        batch.finish(lease, 12)
        assert lease.capacity_tokens == 20
        lease.release()
    assert [request.start for request in daemon.of(Commit) if isinstance(request, Commit)] == [0, 1, 2]
    assert (len(daemon.of(Allocate)), len(daemon.of(Release))) == (1, 1)


def test_only_so_many_calls_wait_at_the_same_time(daemon: FakeDaemon, connect: Connect) -> None:
    """A longer batch takes the replies of its first calls before it sends on; all are carried out."""
    client = connect()
    leases = leases_of(client, 3 * CALLS_UNDER_WAY_MAX)
    most = 0
    with client.batch() as batch:
        for lease in leases:
            batch.commit(lease, 8)
            most = max(most, client._channel._calls.pending_count)
    assert most == CALLS_UNDER_WAY_MAX
    assert {lease.depth for lease in leases} == {2}
    assert client._channel._calls.pending_count == 0


def test_batch_ends_with_its_statement(connect: Connect) -> None:
    """A call after the end of the statement is a mistake that says so, and sends nothing."""
    client = connect()
    (lease,) = leases_of(client, 1)
    with client.batch() as batch:
        pass
    for call in (lambda: batch.commit(lease, 8), lambda: batch.acquire("b", client.chain(range(8)))):
        with pytest.raises(RuntimeError, match="has ended"):
            call()
    assert lease.depth == 0


def test_client_may_be_closed_before_its_batch_ends(daemon: FakeDaemon, connect: Connect) -> None:
    """What was sent before is carried out; what comes after raises; the end of the statement takes what has come."""
    client = connect()
    first, second = leases_of(client, 2)
    with client.batch() as batch:
        call = batch.commit(first, 8)
        client.close()
        with pytest.raises(DaemonUnreachable, match="closed"):
            batch.commit(second, 8)
    assert (call.result(), first.depth) == (None, 2)
    assert [type(request) for request, _ in daemon.requests[-2:]] == [Commit, Bye]


def test_missed_deadline_in_a_batch_is_settled_by_the_next_call(daemon: FakeDaemon, connect: Connect) -> None:
    """Calls without a reply are sent again with their ids by the next call of their lease; nothing is done twice."""
    client = connect(deadline_ms=300)
    leases = leases_of(client, 4)
    came: list[int] = []

    def script(request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, Commit):
            came.append(request.id)
            if len(came) in {2, 3}:
                return SILENCE, []
        return None

    daemon.script = script
    with pytest.raises(DeadlineExceeded):
        commit_all(client, leases, 4)
    assert [lease.depth for lease in leases] == [1, 0, 0, 1]
    with client.batch() as batch:
        for lease in leases:
            batch.finish(lease, 8)
    assert came == [*came[:4], came[1], came[2]]
    assert [request.start for request in daemon.of(Release) if isinstance(request, Release)] == [1, 1, 1, 1]


def test_daemon_that_dies_in_a_batch_is_the_error_of_what_it_left(daemon: FakeDaemon, connect: Connect) -> None:
    """Calls with a reply have succeeded, all others raise at once, and leases that were given back are over."""
    client = connect()
    leases = leases_of(client, 3)
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Release | Acquire) else None
    calls: list[BatchedCall[Lease] | BatchedCall[None]] = []

    def die_in_a_batch() -> None:
        with client.batch() as batch:
            batch.commit(leases[0], 8).result()
            calls.append(batch.finish(leases[1], 8))
            calls.append(batch.acquire("b", client.chain(range(8))))
            daemon.stop()

    with pytest.raises(DaemonUnreachable):
        die_in_a_batch()
    for call in calls:
        with pytest.raises(DaemonUnreachable):
            call.result()
    assert leases[0].depth == 2
    assert [lease.declaration() is None for lease in leases] == [False, True, False]


def test_failures_in_a_batch_are_misses_where_failures_are(daemon: FakeDaemon, connect: Connect) -> None:
    """A dead daemon makes a batch do nothing: no exception, a reason for each lease, and every failure is counted."""
    client = connect(failures="miss")
    leases = leases_of(client, 3)
    daemon.stop()
    with client.batch() as batch:
        batch.commit(leases[0], 8)
        batch.finish(leases[1], 8)
        batch.allocate(leases[2], 80)
        acquired = batch.acquire("b", client.chain(range(8)))
    lease = acquired.result()
    assert not lease.granted
    assert {each.reason for each in (*leases, lease)} == {FailureReason.UNREACHABLE}
    assert client.failure_count == 4


def test_finish_that_is_refused_releases_where_failures_are_misses(daemon: FakeDaemon, connect: Connect) -> None:
    """The slots go back without the commit, within the same batch."""
    client = connect(failures="miss")
    first, second = leases_of(client, 2)
    daemon.script = refusing(Release, 0, ErrorCode.OUT_OF_ORDER)
    with client.batch() as batch:
        batch.finish(first, 8)
        batch.finish(second, 8)
    assert [len(frames) for request, frames in daemon.requests if isinstance(request, Release)] == [2, 2, 0]
    assert (first.reason, second.reason, client.failure_count) == (FailureReason.REFUSED, None, 1)


def test_daemon_that_hangs_costs_a_batch_one_deadline(daemon: FakeDaemon, connect: Connect) -> None:
    """The first missed deadline opens the circuit: what waits behind it is a miss at once, and asks nothing more."""
    client = connect(failures="miss", deadline_ms=250)
    leases = leases_of(client, 4)
    daemon.script = lambda *_: (SILENCE, [])
    with client.batch() as batch:
        for lease in leases:
            batch.commit(lease, 8)
    assert [lease.reason for lease in leases] == [FailureReason.DEADLINE, *3 * [FailureReason.CIRCUIT_OPEN]]


def test_acquire_in_a_batch_waits_for_room_that_comes(daemon: FakeDaemon, connect: Connect) -> None:
    """If copies in flight free slots, the acquire is repeated when they have, also from a batch."""
    client = connect()
    pending = request_error(ErrorCode.CAPACITY_PENDING, "full", "wait")
    is_full = [True]

    def script(request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, WaitForSlots):
            is_full.clear()
            return SlotsAvailable(id=request.id, available=4), []
        return (error_reply(request.id, pending), []) if isinstance(request, Acquire) and is_full else None

    daemon.script = script
    with client.batch() as batch:
        calls = [batch.acquire(name, client.chain(range(8))) for name in ("a", "b")]
    assert [call.result().granted for call in calls] == [True, True]


def test_lease_that_nobody_can_take_any_more_is_given_back(daemon: FakeDaemon, connect: Connect) -> None:
    """A batch that is dropped before its end gives the leases of its acquires back, with the next request."""
    client = connect()
    client.batch().acquire("a", client.chain(range(8)))
    assert client.match(client.chain(range(8))) == 2
    assert client.match(client.chain(range(8))) == 2
    assert [request.lease for request in daemon.of(Release) if isinstance(request, Release)] == [7]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_leaves_the_replies_to_its_parent(daemon: FakeDaemon, connect: Connect) -> None:
    """A child that leaves the statement raises, and takes none of the replies that its parent waits for."""
    client = connect()
    first, second = leases_of(client, 2)
    daemon.replies_together = 3
    with client.batch() as batch:
        calls = [batch.commit(first, 8), batch.commit(second, 8)]
        child = os.fork()
        if child == 0:
            try:
                calls[0].result()
            except RuntimeError:
                os._exit(3)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        daemon.replies_together = 1
        assert client.match(client.chain(range(8))) == 2
    assert (os.waitstatus_to_exitcode(status), first.depth, second.depth) == (3, 2, 2)


def test_stale_session_in_a_batch_is_noted(daemon: FakeDaemon, connect: Connect) -> None:
    """The end of the session is the error of every call, and the client is not alive any more."""
    client = connect()
    leases = leases_of(client, 2)
    stale = request_error(ErrorCode.SESSION_EXPIRED, "over", "connect again")
    daemon.script = lambda request, _: (error_reply(request.id, stale), []) if isinstance(request, Commit) else None
    with pytest.raises(Stale):
        commit_all(client, leases, 8)
    assert not client.is_alive
    for lease in leases:
        lease.release()
    assert daemon.of(Release) == []
