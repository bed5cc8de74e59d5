from __future__ import annotations

import asyncio

import pytest

from kvcached.server import attach as server_module
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol.attach import AttachRefused, Identify
from tests.attach.peers import (
    IDENTIFIED,
    JOIN,
    JOINED,
    PATIENCE_S,
    Handler,
    client_in,
    engine,
    printed,
    serving,
    tell,
)
from tests.worker.groups import RunLoop, open_descriptors


def test_server_bounds_watched_peers(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes over the limit are refused, also when the connections of the others are closed already."""
    monkeypatch.setattr(server_module, "PEERS_MAX", 2)

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler) as server:
            for _ in range(2):
                with client_in(run_dir) as client:
                    await client.ask(Identify())
                await handler.closed.get()
            with client_in(run_dir) as client:
                refusal = await client.ask(Identify())
                assert isinstance(refusal, AttachRefused)
                assert refusal.code is ErrorCode.LIMIT
            server.forget(handler.identified[0])
            with client_in(run_dir) as client:
                assert await client.ask(Identify()) == IDENTIFIED

    run(main())


def test_server_tells_of_death(run: RunLoop, run_dir: str) -> None:
    """The death of a process is told once, within a second, and nothing of it stays open."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            before = open_descriptors()
            with engine(run_dir) as process:
                assert int(await printed(process)) > 0
                process.kill()
                lost = await asyncio.wait_for(handler.lost.get(), 1)

            assert lost is handler.identified[0]
            assert lost.pid == process.pid
            assert lost.is_dead()
            assert lost.fileno() == -1
            assert handler.lost.empty()
            assert open_descriptors() == before

    run(main())


@pytest.mark.parametrize("option", [77, 9999], ids=["SO_PEERPIDFD", "sent pidfd"])
def test_server_watches_on_after_the_connection_closed(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch, option: int
) -> None:
    """A closed connection is told as closed; the death is told when it comes, not before."""
    monkeypatch.setattr("kvcached.process.peer._SO_PEERPIDFD", option)

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            with engine(run_dir) as process:
                await printed(process)
                tell(process, "close")
                closed = await asyncio.wait_for(handler.closed.get(), PATIENCE_S)
                assert await printed(process) == "closed"
                assert not closed.is_dead()
                assert handler.lost.empty()
                tell(process, "end")
                assert await asyncio.wait_for(handler.lost.get(), PATIENCE_S) is closed

    run(main())


def test_server_forgets_a_closed_peer_that_nobody_needs(run: RunLoop, run_dir: str) -> None:
    """Where the handler does not need a closed peer any more, its pidfd is closed and its death is not told."""

    async def main() -> None:
        handler = Handler(keeps_watching=False)
        async with serving(run_dir, handler):
            before = open_descriptors()
            with engine(run_dir) as process:
                await printed(process)
                tell(process, "close")
                closed = await asyncio.wait_for(handler.closed.get(), PATIENCE_S)
                await printed(process)

            assert closed.fileno() == -1
            assert open_descriptors() == before
            assert handler.lost.empty()

    run(main())


def test_server_hangs_up_on_a_forgotten_shard_process(run: RunLoop, run_dir: str) -> None:
    """Where a process is forgotten, the connections by which it joined end, and nothing more is told of it."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler) as server:
            before = open_descriptors()
            with client_in(run_dir) as shard, client_in(run_dir) as scheduler:
                assert await shard.ask(JOIN) == JOINED
                assert await scheduler.ask(Identify()) == IDENTIFIED
                server.forget(handler.joined[0])
                server.forget(handler.identified[0])

                assert await shard.receive() is None
                assert await scheduler.ask(Identify()) == IDENTIFIED
            assert await asyncio.wait_for(handler.closed.get(), PATIENCE_S) is handler.identified[1]
            assert handler.lost.empty()
            assert handler.closed.empty()
            server.forget(handler.identified[1])
            assert open_descriptors() == before

    run(main())


def test_server_takes_a_forgotten_peer_back(run: RunLoop, run_dir: str) -> None:
    """A forgotten process whose connection is still open can introduce itself again on it, as a new peer."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler) as server:
            with client_in(run_dir) as client:
                await client.ask(Identify())
                server.forget(handler.identified[0])
                server.forget(handler.identified[0])
                assert await client.ask(Identify()) == IDENTIFIED

                first, second = handler.identified
                assert first.fileno() == -1
                assert not second.is_dead()

    run(main())
