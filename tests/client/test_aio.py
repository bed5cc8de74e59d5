"""The client in an event loop: calls of tasks side by side, cancelled tasks, and the daemon's silence and death."""

from __future__ import annotations

import asyncio
import itertools
import select
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from kvcached_client import BadRequest, DaemonUnreachable, DeadlineExceeded, FailureReason
from kvcached_client.aio import AsyncClient, AsyncLease
from kvcached_client.protocol.engine import (
    Acquire,
    Acquired,
    Commit,
    Header,
    LoadTicket,
    Match,
    Prefetch,
    Prefetched,
    Release,
    Request,
)
from kvcached_client.types import pack_ranges
from tests.client.fake_daemon import BLOCK_SIZE, SILENCE, FakeDaemon

T = TypeVar("T")
Answer = tuple[Header, list[bytes]] | None

WAIT_S = 20
#: More than a socket takes at once.
LONG_PROMPT = BLOCK_SIZE * 60_000


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
            await lease.finish(10)
        return lease.block_table.tolist(), lease.depth, await client.match(chain)

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
    commits = daemon.of(Commit)
    assert [each.start for each in commits if isinstance(each, Commit)] == [0, 2]
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


def test_late_lease_of_a_cancelled_task_is_given_back(daemon: FakeDaemon) -> None:
    """A lease that is granted after its task was cancelled is released with the next call."""

    async def work(client: AsyncClient) -> None:
        daemon.replies_together = 2
        has_come = arrival(daemon, Acquire)
        waiting = asyncio.create_task(client.acquire("r", client.chain(range(8))))
        assert await has_come()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.match(client.chain(range(8)))  # brings the late grant
        daemon.replies_together = 1
        await client.match(client.chain(range(8)))

    run(daemon, work)
    (released,) = daemon.of(Release)
    assert isinstance(released, Release)
    assert released.lease == 7


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


def test_message_that_the_socket_does_not_take_at_once(daemon: FakeDaemon) -> None:
    """The end of a long message is sent when the daemon reads; calls behind it wait for that, no longer."""

    async def work(client: AsyncClient) -> tuple[bool, int]:
        long = client.acquire("long", client.chain(range(LONG_PROMPT)))
        lease, hit = await asyncio.gather(long, client.match(client.chain(range(8))))
        return lease.granted, hit

    assert run(daemon, work) == (True, 2)


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

    async def with_client() -> tuple[tuple[int, ...], list[bool]]:
        client = await AsyncClient.connect(daemon.run_dir, heartbeat=False)
        async with client:
            await client.match(client.chain(range(8)))
            watched = client._channel.descriptors()
        loop = asyncio.get_running_loop()
        left = [loop.remove_reader(descriptor) for descriptor in watched]
        with pytest.raises(DaemonUnreachable):
            await client.match(client.chain(range(8)))
        return watched, left

    watched, left = asyncio.run(with_client())
    assert len(watched) == 2
    assert left == [False, False]


def awaited(call: Awaitable[T]) -> T:
    """The result of one call, in a loop of its own."""

    async def wait() -> T:
        return await call

    return asyncio.run(wait())


def test_connect_needs_a_daemon(tmp_path: Any) -> None:
    """Without a daemon `connect` raises what the blocking form raises."""
    with pytest.raises(DaemonUnreachable):
        awaited(AsyncClient.connect(tmp_path))


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
