"""Turns of connections to the attach socket."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise

from kvcached.process.peer import PeerProcess
from kvcached_client.protocol.attach import Identified, Identify
from tests.attach.peers import IDENTIFIED, PATIENCE_S, Handler, client_in, serving
from tests.worker.groups import RunLoop

#: Between two requests, the loop has served somebody else.
OTHERS = 0


class Counting(Handler):
    """Notes whose request it serves, by process handle, and when the loop gets to something else."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self._order = order
        self._all = asyncio.Event()
        self._expected = 0

    def identify(self, peer: PeerProcess) -> Identified:
        self._order.append(id(peer))
        asyncio.get_running_loop().call_soon(self._order.append, OTHERS)
        if len(self._order) - self._order.count(OTHERS) == self._expected:
            self._all.set()
        return super().identify(peer)

    async def until(self, served: int) -> None:
        """Until so many requests are served."""
        self._expected = served
        await asyncio.wait_for(self._all.wait(), PATIENCE_S)


def test_connections_of_a_user_take_turns_with_everybody_else(run: RunLoop, run_dir: str) -> None:
    """Of many connections that ask at once, the loop serves one at a time, each in turn, and others in between."""

    async def main() -> None:
        order: list[int] = []
        async with serving(run_dir, handler := Counting(order)):
            with ExitStack() as stack:
                clients = [stack.enter_context(client_in(run_dir)) for _ in range(8)]
                for client in clients:
                    assert await client.ask(Identify()) == IDENTIFIED
                order.clear()
                for client in clients * 2:
                    client.send(Identify())
                await handler.until(16)
        served = [each for each in order if each != OTHERS]
        assert all(OTHERS in pair for pair in pairwise(order))
        assert Counter(served[:8]) == Counter(served[8:]) == dict.fromkeys(served, 1)

    run(main())
