"""Leases whose hit is on its way from host memory: what they say, what waiting for it changes, what may fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcached_client import (
    BadRequest,
    Client,
    DeadlineExceeded,
    ErrorCode,
    LoadTicket,
    NoCapacity,
    Refused,
    RequestError,
    Stale,
)
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import (
    Acquire,
    Acquired,
    Allocate,
    Commit,
    Header,
    Load,
    Loaded,
    Release,
    Request,
    error_reply,
)
from kvcached_client.types import pack_ranges, unpack_ranges
from tests.client.fake_daemon import SILENCE, FakeDaemon

Connect = Callable[..., Client]
Answer = tuple[Header, list[bytes]] | None
TICKETS = (LoadTicket(8, 0), LoadTicket(9, 3))
#: A prompt of five blocks, of which four are a hit, of which one is ready.
PROMPT = range(20)
TABLE = [40, 41, 42, 43, 10]


def refusal(request: Request, code: ErrorCode) -> Answer:
    return error_reply(request.id, request_error(code, "no", "stop")), []


class LoadingDaemon:
    """Grants the lease above; `loaded` answers a `Load`."""

    def __init__(self, daemon: FakeDaemon, loaded: Callable[[Load], Answer]) -> None:
        self.loaded = loaded
        daemon.script = self

    def __call__(self, request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, Acquire):
            acquired = Acquired(id=request.id, lease=7, hit=4, ready=1, loads=TICKETS)
            return acquired, [pack_ranges([(40, 4)]), pack_ranges([(10, 1)])]
        return self.loaded(request) if isinstance(request, Load) else None


def loaded(hit: int, *slots: tuple[int, int]) -> Callable[[Load], Answer]:
    """Answers that the hit has `hit` blocks now, with `slots` for the others."""
    return lambda request: (Loaded(id=request.id, hit=hit), [pack_ranges(list(slots))])


def test_loading_lease_says_what_is_ready_and_what_to_wait_for(daemon: FakeDaemon, connect: Connect) -> None:
    """The hit counts in full, for nobody computes it; the loads are for the shard processes."""
    LoadingDaemon(daemon, loaded(4))
    client = connect()
    lease = client.acquire("a", client.chain(PROMPT))
    assert (lease.hit_blocks, lease.ready_blocks, lease.hit_tokens, lease.depth) == (4, 1, 16, 4)
    assert (lease.loads, lease.is_loading) == (TICKETS, True)
    assert lease.block_table.tolist() == TABLE


def test_lease_without_loads_waits_for_nothing(daemon: FakeDaemon, connect: Connect) -> None:
    """Where everything is ready, and where nothing was granted, no message is sent."""
    client = connect(failures="miss")
    lease = client.acquire("a", client.chain(PROMPT))
    assert (lease.is_loading, lease.wait_loaded(), lease.ready_blocks) == (False, 0, 0)
    daemon.script = lambda request, _: refusal(request, ErrorCode.NO_CAPACITY)
    lease = client.acquire("b", client.chain(PROMPT))
    assert (lease.granted, lease.is_loading, lease.loads, lease.wait_loaded()) == (False, False, (), 0)
    assert daemon.of(Load) == []


def test_wait_behind_which_an_interrupt_came_is_sent_again_with_its_id(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt right behind the sending of `wait_loaded` leaves a request whose reply the next call gets again."""
    LoadingDaemon(daemon, loaded(2, (50, 2)))
    client = connect()
    lease = client.acquire("a", client.chain(PROMPT))
    send = client._channel.send

    def interrupt(*args: Any, **options: Any) -> None:
        send(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._channel, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lease.wait_loaded()

    assert lease.wait_loaded() == 8
    lease.release()  # comes behind both
    first, second = daemon.of(Load)
    assert first == second


def test_wait_loaded_ends_the_loading_once(daemon: FakeDaemon, connect: Connect) -> None:
    """When the loads have ended well the lease is as any other, and waiting again asks nobody."""
    LoadingDaemon(daemon, loaded(4))
    client = connect()
    chain = client.chain(PROMPT)
    lease = client.acquire("a", chain)
    assert [lease.wait_loaded(), lease.wait_loaded()] == [16, 16]
    assert [(request.lease, request.epoch) for request in daemon.of(Load) if isinstance(request, Load)] == [(7, 1)]
    assert (lease.is_loading, lease.loads, lease.ready_blocks, lease.hit_blocks) == (False, (), 4, 4)
    assert lease.block_table.tolist() == TABLE
    lease.finish(20)
    assert daemon.requests[-1][1] == [chain.key_range(4, 5), pack_ranges([(10, 1)])]


@pytest.mark.parametrize(
    ("hit", "slots", "table"),
    [
        (3, [(20, 1)], [40, 41, 42, 20, 10]),
        (1, [(20, 2), (5, 1)], [40, 20, 21, 5, 10]),
        (0, [(20, 4)], [20, 21, 22, 23, 10]),
    ],
)
def test_shorter_hit_comes_with_slots_to_compute(
    daemon: FakeDaemon, connect: Connect, hit: int, slots: list[tuple[int, int]], table: list[int]
) -> None:
    """Blocks that could not be loaded get slots of the lease's own in their places, and are committed like others."""
    LoadingDaemon(daemon, loaded(hit, *slots))
    client = connect()
    chain = client.chain(PROMPT)
    lease = client.acquire("a", chain)
    before = lease.block_table
    assert lease.wait_loaded() == lease.hit_tokens == 4 * hit
    assert (lease.hit_blocks, lease.ready_blocks, lease.depth, lease.is_loading) == (hit, hit, hit, False)
    assert lease.block_table.tolist() == table
    assert before.tolist() == TABLE
    with pytest.raises(ValueError, match="read-only"):
        lease.block_table[0] = 1
    lease.commit(20)
    (commit,), (_, frames) = daemon.of(Commit), daemon.requests[-1]
    assert isinstance(commit, Commit)
    assert (commit.start, frames[0]) == (hit, chain.key_range(hit, 5))
    assert [slot for first, count in unpack_ranges(frames[1]) for slot in range(first, first + count)] == table[hit:]


def test_slots_that_were_allocated_meanwhile_stay(daemon: FakeDaemon, connect: Connect) -> None:
    """A lease may grow while it loads; the shorter hit changes the blocks of the hit only."""
    LoadingDaemon(daemon, loaded(2, (20, 2)))
    client = connect()
    lease = client.acquire("a", client.chain(PROMPT))
    lease.allocate(28)
    assert lease.block_table.tolist() == [*TABLE, 0, 1]
    assert lease.wait_loaded() == 8
    assert lease.block_table.tolist() == [40, 41, 20, 21, 10, 0, 1]


@pytest.mark.parametrize(("hit", "slots"), [(5, []), (4, [(20, 1)]), (3, []), (3, [(20, 2)]), (3, [(-1, 1)])], ids=str)
def test_answer_that_does_not_add_up_changes_nothing(
    daemon: FakeDaemon, connect: Connect, hit: int, slots: list[tuple[int, int]]
) -> None:
    """A longer hit, or slots that do not fit the blocks that were cut off, never gets into the block table."""
    LoadingDaemon(daemon, loaded(hit, *slots))
    client = connect()
    lease = client.acquire("a", client.chain(PROMPT))
    with pytest.raises(BadRequest) as caught:
        lease.wait_loaded()
    assert caught.value.code == ErrorCode.MALFORMED
    assert (lease.hit_blocks, lease.is_loading, lease.block_table.tolist()) == (4, True, TABLE)


@pytest.mark.parametrize(("hit", "ready", "loads"), [(4, 5, TICKETS), (4, 3, ()), (6, 6, ())])
def test_grant_that_does_not_add_up_is_refused(
    daemon: FakeDaemon, connect: Connect, hit: int, ready: int, loads: tuple[LoadTicket, ...]
) -> None:
    """More ready than hit, blocks that nothing loads, and a hit beyond the prompt are no grants."""
    daemon.script = lambda request, _: (
        (
            Acquired(id=request.id, lease=7, hit=hit, ready=ready, loads=loads),
            [pack_ranges([(40, hit)]), pack_ranges([(10, 1)])],
        )
        if isinstance(request, Acquire)
        else None
    )
    client = connect()
    with pytest.raises(BadRequest, match="a hit of"):
        client.acquire("a", client.chain(PROMPT))


@pytest.mark.parametrize("end", ["commit", "finish"])
def test_nothing_is_committed_before_the_loads_are_known_to_have_ended(
    daemon: FakeDaemon, connect: Connect, end: str
) -> None:
    """A commit on top of a hit that may turn out shorter is refused, and nothing is sent; afterwards it works."""
    LoadingDaemon(daemon, loaded(4))
    client = connect()
    lease = client.acquire("a", client.chain(PROMPT))
    with pytest.raises(Refused, match="wait_loaded") as caught:
        getattr(lease, end)(20)
    assert caught.value.code == ErrorCode.STILL_LOADING
    assert daemon.of(Commit) == daemon.of(Release) == []
    lease.wait_loaded()
    getattr(lease, end)(20)
    assert len(daemon.of(Commit) + daemon.of(Release)) == 1


def test_loading_lease_is_released_without_waiting(daemon: FakeDaemon, connect: Connect) -> None:
    """Whoever no longer wants the request gives it back at once, and a wait after that is refused."""
    LoadingDaemon(daemon, lambda _: (SILENCE, []))
    client = connect(deadline_ms=250)
    with client.acquire("a", client.chain(PROMPT)) as lease, pytest.raises(DeadlineExceeded):
        lease.wait_loaded()
    assert (len(daemon.of(Release)), len(daemon.of(Load))) == (1, 1)
    with pytest.raises(Refused) as caught:
        lease.wait_loaded()
    assert caught.value.code == ErrorCode.ALREADY_RELEASED


def test_wait_that_was_not_answered_is_asked_again_with_its_id(daemon: FakeDaemon, connect: Connect) -> None:
    """Loads that take longer than a call may are waited for by calling again; nothing is granted twice."""
    answers = LoadingDaemon(daemon, lambda _: (SILENCE, []))
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(PROMPT))
    with pytest.raises(DeadlineExceeded):
        lease.wait_loaded()
    assert lease.is_loading
    answers.loaded = loaded(3, (20, 1))
    assert lease.wait_loaded() == 12
    first, second = daemon.of(Load)
    assert first == second


def test_nothing_but_wait_loaded_takes_its_answer_over(daemon: FakeDaemon, connect: Connect) -> None:
    """An unanswered wait does not shorten the hit behind the caller's back in the middle of another call."""
    answers = LoadingDaemon(daemon, lambda _: (SILENCE, []))
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(PROMPT))
    with pytest.raises(DeadlineExceeded):
        lease.wait_loaded()
    answers.loaded = loaded(3, (20, 1))
    lease.allocate(24)
    with pytest.raises(Refused):
        lease.commit(20)
    assert (lease.hit_blocks, lease.is_loading, len(daemon.of(Load))) == (4, True, 1)
    assert lease.wait_loaded() == 12


def test_unanswered_growth_is_settled_before_the_wait(daemon: FakeDaemon, connect: Connect) -> None:
    """A lease of which nobody knows whether it has grown is asked about that first."""
    LoadingDaemon(daemon, loaded(4))
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(PROMPT))
    script, daemon.script = daemon.script, lambda *_: (SILENCE, [])
    with pytest.raises(DeadlineExceeded):
        lease.allocate(24)
    daemon.script = script
    assert lease.wait_loaded() == 16
    assert lease.capacity_tokens == 24
    assert [type(request) for request, _ in daemon.requests[-3:]] == [Allocate, Allocate, Load]


def test_without_slots_for_what_was_cut_off_the_lease_waits_on(daemon: FakeDaemon, connect: Connect) -> None:
    """Where the lost blocks cannot be replaced the lease stays as it is; asking again is a new request."""
    answers = LoadingDaemon(daemon, lambda request: refusal(request, ErrorCode.NO_CAPACITY))
    client = connect()
    lease = client.acquire("a", client.chain(PROMPT))
    with pytest.raises(NoCapacity):
        lease.wait_loaded()
    assert (lease.hit_blocks, lease.is_loading, lease.block_table.tolist()) == (4, True, TABLE)
    answers.loaded = loaded(3, (20, 1))
    assert lease.wait_loaded() == 12
    first, second = daemon.of(Load)
    assert first.id != second.id


@pytest.mark.parametrize(
    ("code", "raised"), [(ErrorCode.STALE_EPOCH, Stale), (ErrorCode.UNKNOWN_LEASE, Refused)], ids=str
)
def test_wait_for_a_lease_that_is_gone_says_so(
    daemon: FakeDaemon, connect: Connect, code: ErrorCode, raised: type[RequestError]
) -> None:
    """When pool or lease were lost meanwhile there is nothing left to give back."""
    LoadingDaemon(daemon, lambda request: refusal(request, code))
    client = connect()
    with pytest.raises(raised), client.acquire("a", client.chain(PROMPT)) as lease:
        lease.wait_loaded()
    assert daemon.of(Release) == []


@pytest.mark.parametrize("kind", ["silence", "error", "death"])
def test_failed_wait_is_a_shorter_hit_where_failures_are_misses(
    daemon: FakeDaemon, connect: Connect, kind: str
) -> None:
    """The engine hears of the tokens that are there for sure, sees that the lease still loads, and commits nothing."""
    LoadingDaemon(
        daemon, lambda request: (SILENCE, []) if kind == "silence" else refusal(request, ErrorCode.WORKER_LOST)
    )
    client = connect(deadline_ms=250, failures="miss")
    lease = client.acquire("a", client.chain(PROMPT))
    if kind == "death":
        daemon.stop()
    assert (lease.wait_loaded(), lease.is_loading, client.failure_count) == (4, True, 1)
    lease.commit(20)
    assert daemon.of(Commit) == []
    lease.finish(20)
    assert [frames for request, frames in daemon.requests if isinstance(request, Release)] in ([], [[]])
    assert client.failure_count >= 3
