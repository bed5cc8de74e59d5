"""An engine rejoins, and answers are lost by a deadline or its daemon's death: it rejoins again, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcached_client.aio import AsyncClient
from kvcached_client.errors import DeadlineExceeded
from kvcached_client.protocol import engine as wire
from kvcached_client.transport.session import SessionChannel
from kvcached_client.types import FenceSequence
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_rejoin import HOST, RESERVE, Engine, pool_of

#: The requests of an engine with a reserve and one lease that rejoins.
STEPS = ("rejoin", "declare the reserve", "declare the lease", "declare_over")


class LostAnswer:
    """The answer to one request of a rejoin does not arrive; where `daemon` is given, because that has died."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int, daemon: Supervised | None = None) -> None:
        ask, self.asked = SessionChannel.ask, 0

        def lose(channel: SessionChannel, request: Any, *rest: Any) -> Any:
            answer = ask(channel, request, *rest)
            if isinstance(request, wire.Rejoin | wire.Declare | wire.DeclareOver):
                self.asked += 1
                if self.asked == step + 1:
                    if daemon is not None:
                        daemon.kill_and_wait()
                    raise DeadlineExceeded("no answer in time")
            return answer

        patch.setattr(SessionChannel, "ask", lose)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Supervised]:
    with supervised(tmp_path, CONFIG + HOST) as running:
        yield running


@pytest.fixture
def engine(daemon: Supervised) -> Iterator[Engine]:
    with ExitStack() as parts:
        yield Engine(daemon.run_dir, parts)


@pytest.mark.parametrize("how", ["deadline", "killed"])
@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
def test_lost_answer_costs_no_lease(
    daemon: Supervised, engine: Engine, monkeypatch: pytest.MonkeyPatch, step: int, how: str
) -> None:
    """Whichever answer is lost, the engine goes on with its lease, its reserve and its bytes, and all else is free."""
    chain, done = engine.chain(0, 4), engine.chain(100, 2)
    with engine.client.acquire("done", done) as other:
        engine.compute(other, done)
        other.finish(8)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.commit(8)
    daemon.kill_and_wait()
    lost = LostAnswer(monkeypatch, step, daemon if how == "killed" else None)
    with pytest.raises(DeadlineExceeded):
        engine.client.rejoin()
    assert lost.asked == step + 1
    while_away = engine.client.acquire("in the reserve", engine.chain(200, 1))
    assert while_away.granted
    engine.client.rejoin()

    lease.commit(16)
    hit = engine.client.acquire("s", chain, full=True)
    assert (hit.hit_blocks, engine.is_right(hit, chain)) == (4, True)
    again = engine.client.acquire("t", done, full=True)
    assert (again.hit_blocks, engine.is_right(again, done)) == (2, True)
    for each in (lease, while_away, hit, again):
        each.release()
    pool = pool_of(daemon)
    assert (pool.leases, pool.states["free"], pool.states["cached"]) == (1, 16 - RESERVE - 6, 6)


@pytest.mark.parametrize("how", ["deadline", "killed"])
def test_engine_that_has_heard_goes_on_by_its_new_name(daemon: Supervised, engine: Engine, how: str) -> None:
    """After all answers the new session counts, for this daemon and for the next one."""
    lease = engine.client.acquire("r", engine.chain(0, 4))
    for _ in range(2):
        daemon.kill_and_wait()
        engine.client.rejoin()
    if how == "killed":
        daemon.kill_and_wait()
        engine.client.rejoin()
    engine.client.rejoin()  # this daemon has the session already
    lease.allocate(20)
    assert lease.granted


def test_queued_work_is_waited_for_after_a_lost_answer(
    daemon: Supervised, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that wait for a fence are not the engine's after it has given them back, whether it heard that or not."""
    chain = engine.chain(0, 2)
    lease = engine.client.acquire("r", chain)
    lease.commit(8, fence=FenceSequence(5))
    daemon.kill()
    engine.client.acquire("in the reserve", engine.chain(100, 1)).release(fence=FenceSequence(6))
    daemon.await_ready()
    LostAnswer(monkeypatch, 3)
    with pytest.raises(DeadlineExceeded):
        engine.client.rejoin()
    engine.client.signal_fence(FenceSequence(6))
    assert not engine.client.acquire("one too many", engine.chain(200, RESERVE)).granted
    engine.client.rejoin()
    engine.client.signal_fence(FenceSequence(6))
    while pool_of(daemon).states["fenced"]:
        engine.client.match(chain)
    lease.release()
    assert engine.client.match(chain, full=True) == 2
    assert pool_of(daemon).states["free"] == 16 - (RESERVE - 1) - 2  # the reserve is filled up by the next rejoin


def test_async_client_rejoins_again(daemon: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of an event loop keeps its leases, too."""

    async def play() -> None:
        async with await AsyncClient.connect(daemon.run_dir, deadline_ms=10_000, failures="miss") as client:
            lease = await client.acquire("r", client.chain(range(16)))
            await asyncio.to_thread(daemon.kill_and_wait)
            LostAnswer(monkeypatch, 2)
            with pytest.raises(DeadlineExceeded):
                await client.rejoin()
            await client.rejoin()
            await lease.commit(16)
            assert await client.match(client.chain(range(16)), full=True) == 4

    asyncio.run(play())
