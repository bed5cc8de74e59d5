"""The client in an event loop with more calls than may be under way: they wait for their turn, and none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcached_client import DaemonUnreachable
from kvcached_client.aio import AsyncClient
from kvcached_client.aio import client as aio_client
from kvcached_client.protocol.engine import Acquire, Match, Release
from kvcached_client.transport.calls import PendingCalls
from tests.client.fake_daemon import SILENCE, FakeDaemon
from tests.client.test_aio import arrival, held_reply, leases_of, run


def test_calls_without_a_place_wait_for_one_in_their_order(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """More calls in one turn of the loop than may be under way are sent when others are over; none of them fails."""
    monkeypatch.setattr(aio_client, "CALLS_MAX", 3)
    sent, counts = PendingCalls.send, []

    def send(pending: PendingCalls, *args: Any, **options: Any) -> list[bytes]:
        parts = sent(pending, *args, **options)
        counts.append(pending.pending_count)
        return parts

    async def work(client: AsyncClient) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(PendingCalls, "send", send)
            daemon.replies_together = 3
            leases = await leases_of(client, 9)
            await asyncio.gather(*(lease.finish(8) for lease in leases))
        daemon.replies_together = 1
        return [str(lease) for lease in leases]

    assert all("released" in lease for lease in run(daemon, work))
    assert max(counts) == 3
    assert [each.request for each in daemon.of(Acquire) if isinstance(each, Acquire)] == [*map(str, range(9))]
    assert len(daemon.of(Release)) == 9


def test_release_that_is_cancelled_before_it_has_a_place_is_sent(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease is given back although its task is cancelled while all places are taken."""
    monkeypatch.setattr(aio_client, "CALLS_MAX", 1)

    async def work(client: AsyncClient) -> bool:
        lease = await client.acquire("r", client.chain(range(16)))
        has_come, reply, is_released = arrival(daemon, Match), held_reply(daemon, Match), arrival(daemon, Release)
        waiting = asyncio.create_task(client.match(client.chain(range(8))))
        assert await has_come()
        leaving = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        reply.set()
        await waiting
        return await is_released()

    assert run(daemon, work)


def test_client_closes_although_all_places_are_taken(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The goodbye does not wait until another call is over."""
    monkeypatch.setattr(aio_client, "CALLS_MAX", 1)
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Match) else None

    async def work(client: AsyncClient) -> None:
        has_come = arrival(daemon, Match)
        waiting = asyncio.create_task(client.match(client.chain(range(8))))
        assert await has_come()
        await asyncio.wait_for(client.aclose(), 2)
        with pytest.raises(DaemonUnreachable):
            await waiting

    run(daemon, work)
