"""The client in an event loop: calls of tasks side by side, cancelled tasks, and the daemon's silence and death."""

from __future__ import annotations

import asyncio
import itertools
import select
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest

from kvcached_client import BadRequest, DaemonUnreachable, DeadlineExceeded, FailureReason
from kvcached_client.aio import AsyncClient, AsyncLease
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.engine import (
    Acquire,
    Acquired,
    Bye,
    Commit,
    DeclareEnded,
    DeclareOver,
    Header,
    LoadTicket,
    Match,
    Prefetch,
    Prefetched,
    Rejoin,
    Release,
    Request,
    error_reply,
)
from kvcached_client.types import FenceSequence, pack_ranges
from tests.client.fake_daemon import BLOCK_SIZE, SILENCE, FakeDaemon

T = TypeVar("T")
Answer = tuple[Header, list[bytes]] | None

WAIT_S = 20


def run(daemon: FakeDaemon, work: Callable[[AsyncClient], Coroutine[Any, Any, T]], **options: Any) -> T:
    """What `work` returns with a client, in an event loop of its own."""

    async def with_client() -> T:
        settings = {"deadline_ms": 5000, "heartbeat": False, **options}
        async with await AsyncClient.connect(daemon.run_dir, **settings) as client:
            return await asyncio.wait_for(work(client), WAIT_S)

    return asyncio.run(with_client())


async def leases_of(client: AsyncClient, count: int, tokens: int = 8) -> list[AsyncLease]:
    return await asyncio.gather(*(client.acquire(str(number), client.chain(range(tokens))) for number in range(count)))


def arrival(daemon: FakeDaemon, kind: type[Header], count: int = 1) -> Callable[[], Awaitable[bool]]:
    """A wait for so many requests of a kind, during which other tasks run. The daemon's script stays what it is."""
    came, answer, numbers = threading.Event(), daemon.script, itertools.count(1)

    def script(request: Request, frames: list[bytes]) -> Answer:
        if isinstance(request, kind) and next(numbers) == count:
            came.set()
        return answer(request, frames) if answer else None

    daemon.script = script
    return lambda: asyncio.to_thread(came.wait, WAIT_S)


def held_reply(daemon: FakeDaemon, kind: type[Header]) -> threading.Event:
    """What lets the daemon reply to requests of a kind; until then it does nothing. The script stays what it is."""
    go_on, answer = threading.Event(), daemon.script

    def script(request: Request, frames: list[bytes]) -> Answer:
        reply = answer(request, frames) if answer else None
        assert not isinstance(request, kind) or go_on.wait(WAIT_S)
        return reply

    daemon.script = script
    return go_on


def is_readable(client: AsyncClient) -> bool:
    """Wait until a message has arrived, while the loop stands still."""
    return bool(select.select([client._channel.descriptors()[0]], [], [], WAIT_S)[0])


def test_a_request_from_acquire_to_finish(daemon: FakeDaemon) -> None:
    """Each call of a lease has the effect of its blocking form."""

    async def work(client: AsyncClient) -> tuple[list[int], int, int]:
        chain = client.chain(range(10))
        async with await client.acquire("r", chain, reserve_tokens=2) as lease:
            assert (lease.granted, lease.hit_tokens, lease.capacity_tokens) == (True, 0, 12)
            await lease.allocate(20)
            await lease.commit(4)
            table = lease.block_table.tolist()
            await lease.finish(10)
        return table, lease.depth, await client.match(chain)

    assert run(daemon, work) == ([0, 1, 2, 3, 4], 1, 2)
    assert [type(request).__name__ for request, _ in daemon.requests] == [
        *("Hello", "Acquire", "Allocate", "Commit", "Release", "Match", "Bye")
    ]


def test_calls_of_tasks_are_under_way_together(daemon: FakeDaemon) -> None:
    """A daemon that replies only when twenty requests have come serves twenty tasks."""

    async def work(client: AsyncClient) -> int:
        daemon.replies_together = 20
        leases = await leases_of(client, 20)
        await asyncio.gather(*(lease.finish(8) for lease in leases))
        daemon.replies_together = 1
        return len(leases)

    assert run(daemon, work) == 20


def test_calls_of_one_lease_keep_their_order(daemon: FakeDaemon) -> None:
    """A call of a lease is sent when the one before it is over: a commit begins where the last one has ended."""

    async def work(client: AsyncClient) -> None:
        lease = await client.acquire("r", client.chain(range(16)))
        await asyncio.gather(lease.commit(8), lease.commit(16), lease.release())

    run(daemon, work)
    assert [each.start for each in daemon.of(Commit) if isinstance(each, Commit)] == [0, 2]
    assert isinstance(daemon.requests[-2][0], Release)


def test_other_tasks_run_while_a_call_waits(daemon: FakeDaemon) -> None:
    """While the daemon does not reply, the loop goes on, and the call ends at its deadline."""
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Match) else None

    async def work(client: AsyncClient) -> int:
        steps = 0
        waiting = asyncio.create_task(client.match(client.chain(range(8))))
        while not waiting.done():
            steps += 1
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded):
            await waiting
        return steps

    assert run(daemon, work, deadline_ms=200) > 10


@pytest.mark.parametrize("is_read", [False, True])
def test_late_lease_of_a_cancelled_task_is_given_back(daemon: FakeDaemon, is_read: bool) -> None:
    """A lease whose grant comes after its task was cancelled, or was read just before, is released without a call."""

    async def work(client: AsyncClient) -> bool:
        has_come, grant, is_released = arrival(daemon, Acquire), held_reply(daemon, Acquire), arrival(daemon, Release)
        waiting = asyncio.create_task(client.acquire("r", client.chain(range(8))))
        assert await has_come()
        if is_read:
            grant.set()
            assert is_readable(client)
            client._channel.over([])  # reads it, as a call of another task would
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        grant.set()
        return await is_released()

    assert run(daemon, work)
    assert [request.lease for request in daemon.of(Release) if isinstance(request, Release)] == [7]


def test_refused_acquire_of_a_cancelled_task_leaves_nothing(daemon: FakeDaemon) -> None:
    """A task that is cancelled when its refusal has been read waits for no lease: nothing is remembered of it."""
    full = request_error(ErrorCode.NO_CAPACITY, "no", "stop")
    daemon.script = lambda request, _: (error_reply(request.id, full), []) if isinstance(request, Acquire) else None

    async def work(client: AsyncClient) -> bool:
        has_come, refusal = arrival(daemon, Acquire), held_reply(daemon, Acquire)
        waiting = asyncio.create_task(client.acquire("r", client.chain(range(8))))
        assert await has_come()
        refusal.set()
        assert is_readable(client)
        client._channel.over([])  # reads it, as a call of another task would
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return client._channel._calls.may_grant_late

    assert not run(daemon, work)


def test_release_that_is_cancelled_before_its_turn_is_sent(daemon: FakeDaemon) -> None:
    """A lease is given back once its call under way is over, though the task that leaves it is cancelled again."""

    async def work(client: AsyncClient) -> bool:
        lease, leaves = await client.acquire("r", client.chain(range(16))), asyncio.Event()
        has_come, reply, is_released = arrival(daemon, Commit), held_reply(daemon, Commit), arrival(daemon, Release)

        async def leave() -> None:
            async with lease:
                leaves.set()

        commits = [asyncio.create_task(lease.commit(tokens)) for tokens in (8, 16)]
        assert await has_come()
        leaving = asyncio.create_task(leave())
        await leaves.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        reply.set()
        await asyncio.gather(*commits)
        return await is_released()

    assert run(daemon, work)
    assert [type(request) for request, _ in daemon.requests[-4:-1]] == [Commit, Commit, Release]


def test_lease_whose_release_was_cancelled_is_not_declared(daemon: FakeDaemon) -> None:
    """A release that was sent ends its lease though its task is cancelled: the next daemon does not hear of it."""

    async def work(client: AsyncClient) -> bool:
        lease, chain = await client.acquire("r", client.chain(range(16))), client.chain(range(8))
        has_come, reply = arrival(daemon, Release), held_reply(daemon, Release)
        leaving = asyncio.create_task(lease.release())
        assert await has_come()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        reply.set()
        await client.match(chain)
        return lease.declaration() is None

    assert run(daemon, work)


def continue_session(daemon: FakeDaemon, request: Request, _: list[bytes]) -> Answer:
    """Accept whoever rejoins."""
    if isinstance(request, Rejoin):
        return daemon.welcome(request.id), []
    return (DeclareEnded(id=request.id, freed=0), []) if isinstance(request, DeclareOver) else None


async def abandoned_rejoin(daemon: FakeDaemon, client: AsyncClient) -> threading.Event:
    """What lets an attempt to rejoin go on, whose task was cancelled."""
    daemon.script = partial(continue_session, daemon)
    has_come, welcome = arrival(daemon, Rejoin), held_reply(daemon, Rejoin)
    client._channel.is_stale = True  # as the daemon has said
    rejoining = asyncio.create_task(client.rejoin())
    assert await has_come()
    rejoining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rejoining
    return welcome


def test_rejoin_goes_on_although_its_task_is_cancelled(daemon: FakeDaemon) -> None:
    """Calls that are made meanwhile wait for it, and the replies over the next connection wake their tasks."""

    async def work(client: AsyncClient) -> tuple[int, int]:
        await client.match(chain := client.chain(range(8)))
        welcome = await abandoned_rejoin(daemon, client)
        meanwhile = asyncio.gather(client.match(chain), client.rejoin())
        welcome.set()
        hit = (await meanwhile)[0]
        has_come, reply = arrival(daemon, Match), held_reply(daemon, Match)
        waiting = asyncio.create_task(client.match(chain))
        assert await has_come()
        reply.set()
        return hit, await waiting

    assert run(daemon, work) == (2, 2)
    assert len(daemon.of(Rejoin)) == 1


def test_fence_that_signals_during_a_rejoin_is_told_afterwards(daemon: FakeDaemon) -> None:
    """The thread of the rejoin alone uses the channels until it is over; then the fence is signalled to the next."""

    async def work(client: AsyncClient) -> tuple[int, list[int]]:
        await client.match(chain := client.chain(range(8)))
        welcome = await abandoned_rejoin(daemon, client)
        earlier = client._channel
        with pytest.raises(BadRequest):
            client.signal_fence(FenceSequence(-1))
        client.signal_fence(FenceSequence(7))
        noted = client._signalled
        welcome.set()
        await client.rejoin()
        await client.match(chain)
        assert client._channel is not earlier
        return noted, [beat.fence for beat in daemon.heartbeats]

    assert run(daemon, work) == (0, [7])


def test_rejoin_gives_up_the_calls_under_way(daemon: FakeDaemon) -> None:
    """A call whose reply the earlier connection has not brought ends as at its deadline, which is far."""
    answer = partial(continue_session, daemon)
    daemon.script = lambda request, frames: (SILENCE, []) if isinstance(request, Match) else answer(request, frames)

    async def work(client: AsyncClient) -> None:
        has_come = arrival(daemon, Match)
        waiting = asyncio.create_task(client.match(client.chain(range(8))))
        assert await has_come()
        client._channel.is_stale = True  # as the daemon has said
        await client.rejoin()
        with pytest.raises(DeadlineExceeded):
            await waiting

    run(daemon, work, deadline_ms=60_000)


def test_rejoin_while_all_is_well_does_nothing(daemon: FakeDaemon) -> None:
    """The daemon is not asked, and a call that is under way gets its reply, also where that has just arrived."""

    async def work(client: AsyncClient) -> tuple[int, bool]:
        await client.rejoin()  # before the first call
        has_come, reply = arrival(daemon, Match), held_reply(daemon, Match)
        waiting = asyncio.create_task(client.match(client.chain(range(8))))
        assert await has_come()
        await client.rejoin()
        reply.set()
        assert is_readable(client)  # and the loop has not seen it
        await client.rejoin()
        return await waiting, client.is_alive

    assert run(daemon, work) == (2, True)
    assert daemon.of(Rejoin) == []


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_closed_client_that_rejoins_leaves_no_session(daemon: FakeDaemon, is_cancelled: bool) -> None:
    """A client that is closed during an attempt to rejoin ends the session that it gets, whatever it is told."""

    async def work(client: AsyncClient) -> tuple[bool, bool]:
        welcome = await abandoned_rejoin(daemon, client)
        earlier, closing = client._channel, asyncio.create_task(client.aclose())
        await asyncio.sleep(0)  # it waits
        if is_cancelled:
            closing.cancel()
            await asyncio.wait([closing])
        welcome.set()
        await asyncio.wait([closing])
        said_bye = await asyncio.to_thread(daemon.bye_came.wait, WAIT_S)
        return said_bye, client._channel.is_closed and client._channel is not earlier

    assert run(daemon, work) == (True, True)


@pytest.mark.parametrize("is_answered", [True, False])
def test_cancelled_commit_is_asked_for_again(daemon: FakeDaemon, is_answered: bool) -> None:
    """What a cancelled commit did is found out by the next call of the lease, with the same request."""

    async def work(client: AsyncClient) -> int:
        lease = await client.acquire("r", client.chain(range(16)))
        has_come, reply = arrival(daemon, Commit), held_reply(daemon, Commit)
        waiting = asyncio.create_task(lease.commit(8))
        assert await has_come()
        if is_answered:
            reply.set()
            assert is_readable(client)  # and the loop has not seen it
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        reply.set()
        await lease.commit(16)
        return lease.depth

    assert run(daemon, work) == 4
    first, again, then = (request.id for request in daemon.of(Commit))
    assert first == again != then


def test_death_of_the_daemon_ends_all_waits(daemon: FakeDaemon) -> None:
    """When the daemon dies, each waiting task is told, and the loop watches no dead descriptor."""
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Match) else None

    async def work(client: AsyncClient) -> list[BaseException | int]:
        have_come = arrival(daemon, Match, 3)
        matches = [asyncio.create_task(client.match(client.chain(range(8)))) for _ in range(3)]
        assert await have_come()
        await asyncio.to_thread(daemon.stop)
        ends = await asyncio.gather(*matches, return_exceptions=True)
        with pytest.raises(DaemonUnreachable):
            await client.match(client.chain(range(8)))
        assert not client.is_alive
        return ends

    assert [type(each) for each in run(daemon, work)] == [DaemonUnreachable] * 3


def test_failures_are_misses_where_asked_for(daemon: FakeDaemon) -> None:
    """With ``failures="miss"`` a daemon that died is an empty cache, and the lease says why."""

    async def work(client: AsyncClient) -> tuple[int, bool, FailureReason | None]:
        await asyncio.to_thread(daemon.stop)
        lease = await client.acquire("r", client.chain(range(8)))
        await lease.finish(8)
        return await client.match(client.chain(range(8))), lease.granted, lease.reason

    assert run(daemon, work, failures="miss") == (0, False, FailureReason.UNREACHABLE)


def test_refusal_is_raised_by_its_own_call(daemon: FakeDaemon) -> None:
    """A call that fails leaves those beside it alone."""

    async def work(client: AsyncClient) -> Sequence[Any]:
        good, empty = client.acquire("good", client.chain(range(8))), client.acquire("empty", client.chain())
        return await asyncio.gather(good, empty, return_exceptions=True)

    good, empty = run(daemon, work)
    assert good.granted
    assert isinstance(empty, BadRequest)


def test_loads_and_prefetches_are_awaited(daemon: FakeDaemon) -> None:
    """While a load goes on, the loop asks for a prefetch: a daemon that waits for both requests gets both."""

    def script(request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, Acquire):
            frames: list[bytes] = [pack_ranges([(4, 2)]), pack_ranges([(6, 1)])]
            return Acquired(id=request.id, lease=7, hit=2, ready=0, loads=(LoadTicket(5, 0),)), frames
        if isinstance(request, Prefetch):
            return Prefetched(id=request.id, blocks=3, fetched=1, is_over=True, reason="fetched"), []
        return None

    daemon.script, daemon.hit = script, 2

    async def work(client: AsyncClient) -> tuple[int, int]:
        chain = client.chain(range(12))
        lease = await client.acquire("r", chain)
        assert lease.is_loading
        daemon.replies_together = 2
        loaded, fetched = await asyncio.gather(lease.wait_loaded(), client.prefetch(chain))
        daemon.replies_together = 1
        return loaded, fetched.blocks

    assert run(daemon, work) == (2 * BLOCK_SIZE, 3)


def test_closed_client_leaves_nothing_in_the_loop(daemon: FakeDaemon) -> None:
    """After the end of the statement no descriptor is watched, and calls say that the client is closed."""

    async def with_client() -> list[bool]:
        client = await AsyncClient.connect(daemon.run_dir, heartbeat=False)
        async with client:
            await client.match(client.chain(range(8)))
            watched = client._channel.descriptors()
        loop = asyncio.get_running_loop()
        left = [loop.remove_reader(descriptor) for descriptor in watched]
        with pytest.raises(DaemonUnreachable):
            await client.match(client.chain(range(8)))
        return left

    assert asyncio.run(with_client()) == [False, False]


@pytest.mark.parametrize("end", ["no reply", "hung up", "no session"])
def test_close_ends_the_calls_under_way(daemon: FakeDaemon, end: str) -> None:
    """Calls that wait while their client is closed say that it is, and blame neither the daemon nor a deadline."""

    def script(request: Request, _: list[bytes]) -> Answer:
        if end == "hung up" and isinstance(request, Bye):
            daemon.detach()
        if end == "no session" and isinstance(request, Match):
            return error_reply(request.id, request_error(ErrorCode.NO_SESSION, "silent for too long", "see")), []
        return (SILENCE, []) if isinstance(request, Match) else None

    daemon.script = script

    async def work(client: AsyncClient) -> None:
        daemon.replies_together = 2 if end == "no session" else 1  # with the goodbye's
        has_come = arrival(daemon, Match)
        waiting = asyncio.create_task(client.match(client.chain(range(8))))
        assert await has_come()
        await client.aclose()
        with pytest.raises(DaemonUnreachable, match=r"this client of .* is closed"):
            await waiting

    run(daemon, work, deadline_ms=60_000)


def test_connect_needs_a_daemon(tmp_path: Any) -> None:
    """Without a daemon `connect` raises what the blocking form raises."""
    with pytest.raises(DaemonUnreachable):
        asyncio.run(AsyncClient.connect(tmp_path))


def test_reply_that_another_call_reads_wakes_its_task(daemon: FakeDaemon) -> None:
    """A reply that was read while another task sent its request reaches the task that waits for it."""
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Match) else None

    async def work(client: AsyncClient) -> int:
        lease = await client.acquire("r", client.chain(range(8)))
        has_come, reply = arrival(daemon, Commit), held_reply(daemon, Commit)
        committed = asyncio.create_task(lease.commit(8))
        assert await has_come()
        reply.set()
        assert is_readable(client)  # and the loop does not see it before the next call sends its request
        me = asyncio.current_task()
        assert me is not None
        committed.add_done_callback(lambda _: me.cancel())
        with pytest.raises(asyncio.CancelledError):
            await client.match(client.chain(range(8)))
        return lease.depth

    assert run(daemon, work, deadline_ms=60_000) == 2


def test_client_of_a_loop_that_is_closed_can_be_closed_in_another(daemon: FakeDaemon) -> None:
    """It says goodbye there, as it would have done in its own."""

    async def connected() -> AsyncClient:
        client = await AsyncClient.connect(daemon.run_dir, heartbeat=False)
        await client.match(client.chain(range(8)))
        return client

    client = asyncio.run(connected())
    asyncio.run(client.aclose())
    assert len(daemon.of(Bye)) == 1
