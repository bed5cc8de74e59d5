"""Clients and leases that are dropped without `aclose` or a release: what is warned of, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvcached_client import Client, ErrorCode, Lease
from kvcached_client.aio import AsyncClient
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import Acquire, Match, Release, error_reply
from tests.client.fake_daemon import SILENCE, FakeDaemon
from tests.client.test_aio import continue_session, run
from tests.client.test_forked_mappings import FORKS, in_child

Connect = Callable[..., Client]

_AT_EXIT = """
import sys
from kvcached_client import Client
client = Client.connect(sys.argv[1], heartbeat=False)
lease = client.acquire("r", client.chain(range(8)))
"""


def open_fds(descriptors: tuple[int, ...]) -> list[int]:
    """Those of these descriptors that are open."""
    return [descriptor for descriptor in descriptors if Path(f"/proc/self/fd/{descriptor}").exists()]


def is_warned_of(lease: Lease) -> bool:
    """Whether there is a warning when nobody has the lease any more. It is what the caller has left of it."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        lease.__del__()
    return any(issubclass(each.category, ResourceWarning) for each in caught)


async def used(daemon: FakeDaemon) -> tuple[AsyncClient, tuple[int, ...]]:
    """A client that the loop watches, and its descriptors."""
    client = AsyncClient.open(daemon.run_dir, heartbeat=False)
    await client.match(client.chain(range(8)))
    return client, client._channel.descriptors()


def drop(clients: list[tuple[AsyncClient, tuple[int, ...]]]) -> None:
    """Have nobody refer to them any more."""
    clients.clear()
    gc.collect()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_dropped_client_leaves_nothing_in_the_loop(daemon: FakeDaemon, is_elsewhere: bool) -> None:
    """The loop closes its sockets, whatever thread drops it, and watches another client that gets their numbers."""

    async def work() -> list[int]:
        clients = [await used(daemon)]
        descriptors = clients[0][1]
        with pytest.warns(ResourceWarning, match=r"a client of .* was dropped without aclose"):
            await asyncio.to_thread(drop, clients) if is_elsewhere else drop(clients)
        await asyncio.sleep(0)
        left = open_fds(descriptors)
        async with await AsyncClient.connect(daemon.run_dir, heartbeat=False) as another:
            assert await another.match(another.chain(range(8))) == 2
        return left

    assert asyncio.run(work()) == []


def test_client_that_is_dropped_after_its_loop_leaves_nothing(daemon: FakeDaemon) -> None:
    """Where no loop is left, its sockets are closed at once."""
    clients = [asyncio.run(used(daemon))]
    descriptors = clients[0][1]
    with pytest.warns(ResourceWarning, match="dropped without aclose"):
        drop(clients)
    assert open_fds(descriptors) == []


def test_dropped_lease_is_warned_of_and_not_given_back(daemon: FakeDaemon, connect: Connect) -> None:
    """The warning names the request; the engine may have queued work for its slots, so that nothing is released."""
    client = connect()
    with pytest.warns(ResourceWarning, match=r"lease 7 of request 'first' was dropped without a release, and holds 2 "):
        client.acquire("first", client.chain(range(8)))
    with client.batch() as batch:
        call = batch.acquire("second", client.chain(range(8)))
    with pytest.warns(ResourceWarning, match="of request 'second'"):
        del call
    assert client.match(client.chain(range(8))) == 2
    assert daemon.of(Release) == []


def test_dropped_lease_of_an_event_loop_is_warned_of(daemon: FakeDaemon) -> None:
    """So is one of the client of an event loop."""

    async def work(client: AsyncClient) -> None:
        with pytest.warns(ResourceWarning, match="of request 'r'"):
            await client.acquire("r", client.chain(range(8)))

    run(daemon, work)
    assert daemon.of(Release) == []


def silence_and_release(daemon: FakeDaemon, client: Client, lease: Lease) -> None:
    """Release a lease; the daemon does not reply."""
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Release) else None
    lease.release()
    assert client.failure_count == 1


def rejoin(daemon: FakeDaemon, client: Client, lease: Lease) -> None:
    """Continue the session with the next daemon, without the lease, whose release had no reply."""
    silence_and_release(daemon, client, lease)
    daemon.script = partial(continue_session, daemon)
    client._channel.is_stale = True  # as the daemon has said
    client.rejoin()
    assert client.is_alive


def kill(daemon: FakeDaemon, client: Client, _: Lease) -> None:
    """End the daemon, and let the client notice."""
    daemon.stop()
    assert client.match(client.chain(range(8))) == 0


def end_session(daemon: FakeDaemon, client: Client, _: Lease) -> None:
    """Let the daemon say that the session is over."""
    over = request_error(ErrorCode.NO_SESSION, "silent for too long", "attach again")
    daemon.script = lambda request, _: (error_reply(request.id, over), []) if isinstance(request, Match) else None
    assert client.match(client.chain(range(8))) == 0


ENDS: dict[str, Callable[[FakeDaemon, Client, Lease], object]] = {
    "released": lambda _, __, lease: lease.release(),
    "finished": lambda _, __, lease: lease.finish(8),
    "released without a wait": lambda _, __, lease: lease.release(wait=False),
    "released without a reply": silence_and_release,
    "its client rejoined without it": rejoin,
    "its client was closed": lambda _, client, __: client.close(),
    "its session is over": end_session,
    "its daemon is dead": kill,
}


@pytest.mark.parametrize("end", ENDS)
def test_lease_that_has_ended_is_not_warned_of(daemon: FakeDaemon, connect: Connect, end: str) -> None:
    """However it ended: by a release, heard or not, or with its session."""
    client = connect(deadline_ms=300, failures="miss")
    lease = client.acquire("r", client.chain(range(8)))
    assert is_warned_of(lease)
    ENDS[end](daemon, client, lease)
    assert not is_warned_of(lease)


def test_lease_that_was_not_granted_is_not_warned_of(daemon: FakeDaemon, connect: Connect) -> None:
    """It holds nothing."""
    client = connect(failures="miss")
    daemon.stop()
    assert not is_warned_of(client.acquire("r", client.chain(range(8))))


def test_reserve_of_a_dropped_client_is_not_warned_of(connect: Connect) -> None:
    """Nobody has asked for its lease by name."""
    client = connect(reserve_blocks=4)
    reserve = client._reserve
    assert reserve is not None
    assert not is_warned_of(reserve._keeper)


@FORKS
def test_forked_child_does_not_warn(connect: Connect) -> None:
    """The leases are its parent's."""
    lease = (client := connect()).acquire("r", client.chain(range(8)))
    assert in_child(lambda: 7 if not is_warned_of(lease) else 8) == 7
    assert is_warned_of(lease)


@FORKS
def test_forked_child_does_not_warn_of_a_client(daemon: FakeDaemon) -> None:
    """The session of an event loop's client goes on in its parent; the child closes its copies of the sockets."""

    async def work() -> int:
        clients = [await used(daemon)]
        descriptors = clients[0][1]

        def drop_it() -> int:
            with warnings.catch_warnings(record=True, action="always") as caught:
                drop(clients)
            return 7 if not caught and not open_fds(descriptors) else 8

        told = in_child(drop_it)
        async with clients[0][0] as client:
            assert await client.match(client.chain(range(8))) == 2
        return told

    assert asyncio.run(work()) == 7


def test_interpreter_that_exits_does_not_warn_of_leases(daemon: FakeDaemon) -> None:
    """Its session ends with it."""
    command = [sys.executable, "-W", "always", "-c", _AT_EXIT, str(daemon.run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert daemon.of(Acquire)
    assert "was dropped" not in ended.stderr
