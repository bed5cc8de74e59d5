"""A client in an event loop belongs to that loop, and is closed by `async with` only."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvcached_client.aio import AsyncClient
from kvcached_client.protocol.engine import Bye, Match
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_aio import run


@pytest.mark.parametrize("call", ["match", "rejoin", "aclose"])
def test_call_in_a_second_loop_is_refused_before_it_is_sent(daemon: FakeDaemon, call: str) -> None:
    """A call in another loop than the first one's raises `RuntimeError` that says so; the client goes on in its own."""

    async def elsewhere(client: AsyncClient) -> None:
        arguments = (client.chain(range(8)),) if call == "match" else ()
        await getattr(client, call)(*arguments)

    async def work(client: AsyncClient) -> None:
        await client.match(client.chain(range(8)))
        with pytest.raises(RuntimeError, match="this client belongs to another event loop: nothing was sent"):
            await asyncio.to_thread(asyncio.run, elsewhere(client))
        assert (len(daemon.of(Match)), daemon.of(Bye)) == (1, [])
        assert await client.match(client.chain(range(8))) == 2

    run(daemon, work)
    assert len(daemon.of(Bye)) == 1


def test_call_behind_the_end_of_its_loop_says_so(daemon: FakeDaemon) -> None:
    """A client that is kept from one `asyncio.run` to the next is told that its loop is closed, and can be closed."""

    async def first() -> AsyncClient:
        client = await AsyncClient.connect(daemon.run_dir, heartbeat=False)
        await client.match(client.chain(range(8)))
        return client

    async def second(client: AsyncClient) -> None:
        with pytest.raises(RuntimeError, match="another event loop, which is closed"):
            await client.match(client.chain(range(8)))
        await client.aclose()

    asyncio.run(second(asyncio.run(first())))
    assert len(daemon.of(Bye)) == 1


def test_statement_without_async_is_refused(daemon: FakeDaemon) -> None:
    """`with` in place of `async with` fails at once, as for a lease, instead of a close that would block the loop."""

    async def work(client: AsyncClient) -> None:
        lease = await client.acquire("a", client.chain(range(8)))
        for each in (client, lease):
            with pytest.raises(TypeError, match="context manager"), cast("Any", each):
                pass

    run(daemon, work)
