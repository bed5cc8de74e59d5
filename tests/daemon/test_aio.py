"""An engine in an event loop, beside a real daemon: tasks side by side, and a daemon that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvcached_client import Client, DaemonUnreachable, map_pool
from kvcached_client.aio import AsyncClient
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised

DEADLINE_MS = 10_000
#: With room for all blocks of all requests: which of them would be evicted depends on which task ends first. A session
#: outlives the silence of an engine that a busy machine keeps waiting.
ROOMY = CONFIG.replace("slots = 16", "slots = 64").replace("session_ttl_ms = 600", "session_ttl_ms = 20_000")


async def serve(client: AsyncClient, number: int) -> int:
    """One request of five blocks, the first two of which another request has as well."""
    chain = client.chain([number % 3] * 8 + [100 + number] * 12)
    async with await client.acquire(f"request {number}", chain) as lease:
        await lease.wait_loaded()
        await lease.commit(8)
        await lease.finish(20)
    return lease.hit_blocks


def test_tasks_beside_each_other_serve_requests(tmp_path: Path) -> None:
    """Requests of many tasks at a time are granted, committed and found, and leave nothing behind."""

    async def work(run_dir: Path) -> tuple[list[int], list[int], int]:
        async with await AsyncClient.connect(run_dir, deadline_ms=DEADLINE_MS) as client:
            cold = await asyncio.gather(*(serve(client, number) for number in range(3)))
            warm = await asyncio.gather(*(serve(client, number) for number in range(3, 6)))
            return cold, warm, await client.match(client.chain([2] * 8 + [105] * 12), full=True)

    with supervised(tmp_path, ROOMY) as running:
        cold, warm, found = asyncio.run(work(running.run_dir))
        with Client.connect(running.run_dir, deadline_ms=DEADLINE_MS) as after:  # the session has ended
            report = after.stats()
    assert (cold, warm, found) == ([0] * 3, [2] * 3, 5)
    assert (report.pools[0].leases, report.pools[0].states["quarantined"]) == (0, 0)


def test_prompts_for_a_stopped_daemon_are_matched_when_it_continues(tmp_path: Path) -> None:
    """Tasks whose prompts no longer fit into the socket keep no other task from letting the daemon continue."""

    async def work(run_dir: Path, daemon_pid: int) -> list[int]:
        async with await AsyncClient.connect(run_dir, deadline_ms=DEADLINE_MS) as client:
            await serve(client, 0)
            chains = [client.chain([0] * 8 + [number] * 100_000) for number in range(6)]
            os.kill(daemon_pid, signal.SIGSTOP)
            try:
                matches = [asyncio.create_task(client.match(chain)) for chain in chains]
                await asyncio.sleep(0)  # each has made its call
            finally:
                os.kill(daemon_pid, signal.SIGCONT)
            return await asyncio.gather(*matches)

    with supervised(tmp_path, ROOMY) as running:
        assert asyncio.run(work(running.run_dir, running.daemon_pid)) == [2] * 6


@pytest.mark.parametrize("failures", ["raise", "miss"])
def test_leases_go_on_over_a_restart(tmp_path: Path, failures: str) -> None:
    """A lease of a client in an event loop goes on with the next daemon, and its blocks are found."""

    async def work(daemon: Supervised) -> tuple[int, int]:
        client = await AsyncClient.connect(daemon.run_dir, deadline_ms=DEADLINE_MS, failures=failures)  # type: ignore[arg-type]
        with map_pool(client.session, 0, deadline_ms=DEADLINE_MS):
            async with client:
                chain = client.chain(range(16))
                lease = await client.acquire("r", chain)
                await lease.commit(8)
                await asyncio.to_thread(daemon.kill)
                if failures == "miss":
                    await lease.commit(12)
                else:
                    with pytest.raises(DaemonUnreachable):
                        await lease.commit(12)
                await asyncio.to_thread(daemon.await_ready)
                await client.rejoin()
                await lease.finish(16)
                return lease.hit_blocks, await client.match(chain, full=True)

    with supervised(tmp_path, CONFIG) as running:
        assert asyncio.run(work(running)) == (0, 4)
