"""Requests for device memory on the attach socket: their answers may take a while."""

from __future__ import annotations

import asyncio
import os

import msgspec

from kvcached.server.attach import AttachServer
from kvcached_client.protocol.attach import ClaimedPool, ClaimPool, Identify
from tests.attach.peers import IDENTIFIED, Handler, client_in, own_pidfd, serving
from tests.worker.groups import RunLoop

CLAIM = ClaimPool(
    name="n", claim="c", ranks=1, rank=0, rank_bytes=1, blocks=1, device="GPU-00000001-0000-4000-8000-000000000000"
)


async def no_claims(server: AttachServer) -> None:
    """Until no request for memory is under way."""
    await asyncio.gather(*server._claims, return_exceptions=True)


def test_others_are_served_while_memory_is_made(run: RunLoop, run_dir: str) -> None:
    """The handler gets the process that asks; everybody else is answered at once, and the answer comes at its time."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            with client_in(run_dir) as asking, client_in(run_dir) as other:
                asking.send(CLAIM, own_pidfd())
                process = await handler.claiming.get()
                assert process.pid == os.getpid()
                assert not process.is_dead()
                assert await other.ask(Identify()) == IDENTIFIED
                handler.may_claim.set()
                answer = await asking.receive()
                assert answer is not None
                assert isinstance(answer[0], ClaimedPool)
                process.close()

    run(main())


def test_memory_on_the_cpu_needs_no_process(run: RunLoop, run_dir: str) -> None:
    """Locks tell of its writers: the sender may send no pidfd, and none is kept. So it is with the table alone."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            for wanted in ({"device": ""}, {"rank": None}):
                with client_in(run_dir) as client:
                    assert isinstance(await client.ask(msgspec.structs.replace(CLAIM, **wanted)), ClaimedPool)
            assert handler.claiming.empty()

    run(main())


def test_answer_for_a_connection_that_is_closed_goes_nowhere(run: RunLoop, run_dir: str) -> None:
    """Whoever does not wait for the answer costs no connection and no error; the server goes on."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler) as server:
            with client_in(run_dir) as client:
                client.send(CLAIM, own_pidfd())
                process = await handler.claiming.get()
            with client_in(run_dir) as other:
                assert await other.ask(Identify()) == IDENTIFIED
            handler.may_claim.set()
            await no_claims(server)
            assert not server.refusals
            process.close()

    run(main())


def test_server_that_closes_waits_for_no_memory(run: RunLoop, run_dir: str) -> None:
    """What is being made is given up with the server."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler) as server:
            with client_in(run_dir) as client:
                client.send(CLAIM, own_pidfd())
                process = await handler.claiming.get()
                claims = list(server._claims)
        assert await asyncio.gather(*claims, return_exceptions=True) != [None]
        assert [each.cancelled() for each in claims] == [True]
        process.close()

    run(main())
