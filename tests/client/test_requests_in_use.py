"""A request id has one lease at a time: a second one would be on the same slots, and both holders would write them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from kvcached_client import Client, DaemonUnreachable, DeadlineExceeded, FailureReason, Refused
from kvcached_client.offload import OffloadClient
from kvcached_client.protocol.engine import Acquire, Header, Release, Request
from kvcached_client.types import LeaseId
from tests.client.fake_daemon import SILENCE, FakeDaemon
from tests.client.test_aio import run
from tests.client.test_offload import Script, missed_deadline
from tests.client.test_offload import connect as connect_offload

Connect = Callable[..., Client]
IN_USE = "request_conflict: request 'a' has a lease that is not released.*an id of its own"
UNDER_WAY = "request_conflict: request 'a' is being acquired"


def test_request_with_a_lease_gets_no_second_one(daemon: FakeDaemon, connect: Connect) -> None:
    """While a lease lives, its request is refused before anything is sent; once it is released, it is served."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))

    with pytest.raises(Refused, match=IN_USE):
        client.acquire("a", client.chain(range(8)))
    assert len(daemon.of(Acquire)) == 1
    lease.commit(8)
    lease.release()
    assert client.acquire("a", client.chain(range(8))).granted


@pytest.mark.parametrize("ending", ["finish", "release"])
def test_request_is_free_once_its_release_is_sent(connect: Connect, ending: str) -> None:
    """A posted end, and one of the same batch, is carried out before the acquire behind it."""
    client = connect()
    end: dict[str, Callable[..., Any]] = {
        "finish": lambda lease, **options: lease.finish(8, **options),
        "release": lambda lease, **options: lease.release(**options),
    }
    lease = client.acquire("a", client.chain(range(8)))
    end[ending](lease, wait=False)
    lease = client.acquire("a", client.chain(range(8)))
    with client.batch() as batch:
        (batch.finish(lease, 8) if ending == "finish" else batch.release(lease))
        again = batch.acquire("a", client.chain(range(8)))

    assert again.result().granted


def test_request_is_free_once_nobody_has_its_lease(connect: Connect) -> None:
    """A lease that was dropped without a release can be had again."""
    client = connect()
    client.acquire("a", client.chain(range(8)))
    gc.collect()

    assert client.acquire("a", client.chain(range(8))).granted


def test_request_without_a_reply_may_be_repeated(daemon: FakeDaemon, connect: Connect) -> None:
    """After a missed deadline, the same call is sent again."""
    client = connect(deadline_ms=250)
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Acquire) else None
    with pytest.raises(DeadlineExceeded):
        client.acquire("a", client.chain(range(8)))
    daemon.script = None

    assert client.acquire("a", client.chain(range(8))).granted


def test_batch_acquires_a_request_once(daemon: FakeDaemon, connect: Connect) -> None:
    """Of two acquires of one request in a batch, the second raises at once, and the first is served."""
    client = connect()
    with client.batch() as batch:
        first = batch.acquire("a", client.chain(range(8)))
        with pytest.raises(Refused, match=UNDER_WAY):
            batch.acquire("a", client.chain(range(8)))

    assert first.result().granted
    assert len(daemon.of(Acquire)) == 1


def test_tasks_acquire_a_request_once(daemon: FakeDaemon) -> None:
    """Of two tasks that acquire one request at the same time, as a retry by HTTP does, one gets the lease."""

    async def work(client: Any) -> list[Any]:
        acquires = (client.acquire("a", client.chain(range(8))) for _ in range(2))
        return await asyncio.gather(*acquires, return_exceptions=True)

    lease, error = run(daemon, work)

    assert lease.granted
    assert isinstance(error, Refused)
    assert error.code == "request_conflict"


def test_second_lease_of_a_request_is_a_miss_where_failures_are(connect: Connect) -> None:
    """With failures as misses, the second holder has no lease, and the first one's is still its own."""
    client = connect(failures="miss")
    lease = client.acquire("a", client.chain(range(8)))

    for _ in range(2):
        second = client.acquire("a", client.chain(range(8)))
        assert (second.granted, second.reason) == (False, FailureReason.REFUSED)
    assert (lease.granted, lease.is_held) == (True, True)


def test_reserve_gives_a_request_no_second_lease(daemon: FakeDaemon, connect: Connect) -> None:
    """While the daemon is away, too, a request has one lease: the next daemon would refuse two of one name."""
    client = connect(reserve_blocks=8)
    lease = client.acquire("a", client.chain(range(8)))
    daemon.stop()
    with pytest.raises(Refused, match=IN_USE):
        client.acquire("a", client.chain(range(8)))

    assert client.acquire("b", client.chain(range(8))).granted
    assert lease.is_held


def test_closed_client_says_so(connect: Connect) -> None:
    """A client that is closed does not speak of leases."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    client.close()
    with pytest.raises(DaemonUnreachable, match="closed"):
        client.acquire("a", client.chain(range(8)))
    assert lease.granted


@pytest.fixture
def offload(daemon: FakeDaemon) -> OffloadClient:
    """A client in offload mode."""
    daemon.script = Script()
    return connect_offload(daemon, deadline_ms=10_000)


@pytest.mark.parametrize(
    "give_back",
    [
        OffloadClient.release,
        OffloadClient.post_release,
        lambda client, lease: client.begin_prepare_stores([], [lease]).result(),
    ],
    ids=["release", "post_release", "prepare_stores"],
)
def test_request_has_one_hold(
    daemon: FakeDaemon, offload: OffloadClient, give_back: Callable[[OffloadClient, LeaseId], object]
) -> None:
    """In offload mode, too, a request is refused until its lease is given back, in whatever way."""
    with offload as client:
        hold = client.acquire("a", bytes(80), 81)
        with pytest.raises(Refused, match=IN_USE):
            client.begin_acquire("a", bytes(80), 81)
        give_back(client, hold.lease)
        again = client.acquire("a", bytes(80), 81)
        assert len(daemon.of(Acquire)) == 2
        client.release(again.lease)
        assert (client._holds._leases, client._holds._requests) == ({}, {})


def test_hold_without_a_reply_may_be_asked_for_again(daemon: FakeDaemon, offload: OffloadClient) -> None:
    """A request that is being acquired is refused; after a missed deadline, the same call is sent again."""
    assert isinstance(daemon.script, Script)
    daemon.script.silent = {Acquire}
    with offload as client:
        with missed_deadline(client):
            pending = client.begin_acquire("a", bytes(80), 81)
            with pytest.raises(Refused, match=UNDER_WAY):
                client.begin_acquire("a", bytes(80), 81)
            pending.result()
        assert client.acquire("a", bytes(80), 81).hit == 2


def test_release_that_was_not_answered_frees_its_request(daemon: FakeDaemon, connect: Connect) -> None:
    """The daemon carries a release out before an acquire behind it, whether it was answered in time or not."""
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(range(8)))
    silent = [True]

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        return (SILENCE, []) if isinstance(request, Release) and silent else None

    daemon.script = script
    with pytest.raises(DeadlineExceeded):
        lease.release()
    silent.clear()
    assert client.acquire("a", client.chain(range(8))).granted
