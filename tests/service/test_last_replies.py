"""What a server has received when it is closed is served, and its replies leave."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from pathlib import Path

import zmq

from kvcached.process.access import Access
from kvcached.server.local import LocalDoor
from kvcached.server.rpc import RpcServer
from kvcached.service.pending import Answer
from kvcached_client.errors import RequestError
from kvcached_client.protocol.engine import Bye, Goodbye, Request, decode_reply, encode

REQUESTS = 300
PATIENCE_S = 20


class Handler:
    """Answers every request at once."""

    def __init__(self) -> None:
        self.served: list[int] = []

    def submit(self, _: bytes, request: Request, __: list[bytes], respond: Callable[[Answer], None]) -> None:
        self.served.append(request.id)
        respond(Answer(Goodbye(id=request.id)))

    def refused(self, error: RequestError) -> RequestError:
        return error

    def count(self, _: str) -> None: ...


def test_requests_in_the_socket_are_answered_before_it_closes(tmp_path: Path) -> None:
    """Requests that came while the loop did something else are served at the end, and all replies arrive."""
    handler = Handler()
    context = zmq.Context[zmq.Socket[bytes]]()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)

    async def close_with_requests_waiting() -> None:
        server = RpcServer(LocalDoor(tmp_path / "rpc.sock", Access()), handler)
        server.start(asyncio.get_running_loop())
        with dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connected:
            dealer.connect(server.endpoint)
            assert await asyncio.to_thread(connected.poll, PATIENCE_S * 1000)
            dealer.disable_monitor()
        for number in range(REQUESTS):
            dealer.send(encode(Bye(id=number)))
        (connection,) = server._connections
        assert select.select([connection.socket], [], [], PATIENCE_S)[0]  # the loop does not run: nobody served them
        server.serve_rest()
        server.close()

    asyncio.run(close_with_requests_waiting())
    assert handler.served
    assert [decode_reply(dealer.recv()).id for _ in handler.served] == handler.served
    dealer.close(linger=0)
    context.term()
