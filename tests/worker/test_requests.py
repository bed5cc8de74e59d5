from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import no_ranges
from kvcached.worker.messages import REQUESTS_IN_FLIGHT_MAX, Hurry, Probe, Store
from kvcached.worker.results import ShardResult
from kvcached_client.errors import DaemonFailure, ErrorCode, NoCapacity, RequestError
from kvcached_client.types import ShardIndex
from tests.worker.groups import (
    SLOTS,
    RunLoop,
    Told,
    odd_worker,
    process_exists,
    running,
    tiny_pool,
    workers_of,
)

SHARD_0, SHARD_1 = ShardIndex(0), ShardIndex(1)
COMMAND = "kvcached.worker.group.WORKER_COMMAND"


def store_of(blocks: int) -> Store:
    """A command of 16 bytes a block and a few more, which no worker can carry out."""
    span = Span(0, b"", bytes(16 * blocks), no_ranges(), no_ranges())
    return Store(transfer=1, epoch=1, generation=0, spans=(span,), urgent=False)


PROBE = Probe(source=0, target=1, seed=3)
#: Refused where there is no host pool; a few of these fill the socket's buffer.
LONG_STORE = store_of(7000)


def test_group_probe_proves_every_shard(run: RunLoop, run_dir: str) -> None:
    """A probe of working shards passes; one of slots that do not exist fails with the reason of each shard."""

    async def main() -> None:
        async with running(tiny_pool(2), run_dir) as (workers, _):
            await workers.submit(Probe(source=0, target=1, seed=7))

            with pytest.raises(DaemonFailure, match="shard 0: ValueError: slot") as caught:
                await workers.submit(Probe(source=0, target=SLOTS, seed=7))
            assert "shard 1: ValueError: slot" in caught.value.message

    run(main())


def test_group_command_fails_with_the_workers_reason(run: RunLoop, run_dir: str) -> None:
    """A command that a shard cannot carry out fails with that shard's reason, and the group goes on."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, losses):
            with pytest.raises(DaemonFailure, match="shard 0: ValueError: this worker has no host pool") as caught:
                await workers.submit(store_of(1))
            await workers.submit(PROBE)

            assert caught.value.code is ErrorCode.INTERNAL
            assert not losses.reasons

    run(main())


def test_group_tells_of_a_killed_worker(run: RunLoop, run_dir: str) -> None:
    """A worker that is SIGKILLed is reported within a second, with the end of its log, and its commands fail."""

    async def main() -> None:
        async with running(tiny_pool(2), run_dir) as (workers, losses):
            os.kill(workers.pid(SHARD_1), signal.SIGSTOP)
            under_way = workers.submit(PROBE)
            os.kill(workers.pid(SHARD_1), signal.SIGKILL)
            await asyncio.wait_for(losses.happened.wait(), 1)

            assert list(losses.reasons) == [1]
            assert "worker default/1 was ended by SIGKILL" in losses.reasons[1]
            assert "INFO worker default/1: pool of" in losses.reasons[1]
            with pytest.raises(DaemonFailure, match="default/1 was ended by SIGKILL") as caught:
                await under_way
            assert caught.value.code is ErrorCode.WORKER_LOST
            with pytest.raises(DaemonFailure, match="default/1 was ended by SIGKILL"):
                workers.submit(PROBE)

    run(main())


def test_order_tells_of_each_shard_once(run: RunLoop, run_dir: str) -> None:
    """Every shard's result comes once, with its own error, and none before the order was taken."""

    async def main() -> None:
        async with running(tiny_pool(2), run_dir) as (workers, _):
            results: Told[ShardResult] = Told()
            workers.order(Probe(source=0, target=1, seed=7), results.append)
            workers.order(Probe(source=0, target=SLOTS, seed=7), results.append)
            assert results == []
            await workers.submit(PROBE)  # it is acknowledged behind them
            await results.until(4)

            assert sorted((result.shard, bool(result.error)) for result in results) == [
                (0, False), (0, True), (1, False), (1, True)
            ]  # fmt: skip
            assert not any(result.is_lost for result in results)

    run(main())


def test_order_takes_results_in_any_order(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may acknowledge a later command first; each result goes to its own command, corrupt blocks with it."""
    monkeypatch.setattr(COMMAND, odd_worker("in threes, backwards"))

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, losses):
            told: Told[tuple[int, ShardResult]] = Told()
            for number in (1, 2, 3):
                workers.order(PROBE, lambda result, number=number: told.append((number, result)))  # type: ignore[misc]
            await told.until(3)

            assert told == [(number, ShardResult(SHARD_0, "", (number, 7))) for number in (3, 2, 1)]
            assert not losses.reasons

    run(main())


def test_group_kills_a_worker_that_acknowledges_twice(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acknowledgement of what is over ends its worker: nobody knows what it works on. The first counted once."""
    monkeypatch.setattr(COMMAND, odd_worker("twice"))

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, losses):
            results: Told[ShardResult] = Told()
            workers.order(PROBE, results.append)
            await losses.happened.wait()

            assert "acknowledged command 1, which it was not given" in losses.reasons[0]
            assert results == [ShardResult(SHARD_0, "", (1, 7))]

    run(main())


def test_loss_settles_every_shard_of_every_order(run: RunLoop, run_dir: str) -> None:
    """One killed worker ends its group: each order in flight is settled once per shard, after the loss was told."""

    async def main() -> None:
        told: Told[str | ShardResult] = Told()
        lost = asyncio.Event()

        def note_lost(shard: ShardIndex, reason: str) -> None:
            told.append(f"lost {shard}")
            lost.set()

        workers = workers_of(tiny_pool(2), run_dir, note_lost)
        await workers.open()
        for shard in (SHARD_0, SHARD_1):
            os.kill(workers.pid(shard), signal.SIGSTOP)
        for _ in range(2):
            workers.order(PROBE, told.append)
        os.kill(workers.pid(SHARD_1), signal.SIGKILL)
        await lost.wait()
        await told.until(5)

        assert told[0] == "lost 1"
        results = [result for result in told if isinstance(result, ShardResult)]
        assert sorted(result.shard for result in results) == [0, 0, 1, 1]
        assert all(result.is_lost for result in results)
        assert {result.error for result in results} == {
            "worker default/0 was killed: its group has lost shard 1",
            "worker default/1 was ended by SIGKILL",
        }
        for shard in (SHARD_0, SHARD_1):
            assert not process_exists(workers.pid(shard))
        await workers.close()

    run(main())


def test_deadline_starts_anew_while_the_worker_gets_on(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that waits behind others is not late while these are acknowledged, and is once none is any more."""
    monkeypatch.setattr(COMMAND, odd_worker("forgets the first"))

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, losses):
            results: Told[ShardResult] = Told()
            start_s = asyncio.get_running_loop().time()
            workers.order(PROBE, results.append, deadline_s=1)
            while asyncio.get_running_loop().time() < start_s + 1.5:
                await workers.submit(PROBE)
            assert not losses.reasons
            await losses.happened.wait()

            assert "it had not acknowledged command 1 after 1 s" in losses.reasons[0]
            await results.until(1)

    run(main())


def test_deadline_is_not_moved_by_what_is_carried_out_at_once(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledging commands that need no copying does not show that copies get on."""
    monkeypatch.setattr(COMMAND, odd_worker("forgets the first"))

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, losses):
            workers.order(PROBE, lambda _: None, deadline_s=0.3)
            while not losses.reasons:
                with suppress(DaemonFailure):
                    await workers.submit(Hurry(transfer=1))

            assert "it had not acknowledged command 1 after 0.3 s" in losses.reasons[0]

    run(main())


def test_commands_carried_out_at_once_have_room_of_their_own(run: RunLoop, run_dir: str) -> None:
    """When no more copies are taken, what cannot wait behind them is taken still, up to a limit as well."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, _):
            os.kill(workers.pid(SHARD_0), signal.SIGSTOP)
            taken = [workers.submit(PROBE) for _ in range(REQUESTS_IN_FLIGHT_MAX)]
            taken += [workers.submit(Hurry(transfer=1)) for _ in range(REQUESTS_IN_FLIGHT_MAX)]
            with pytest.raises(NoCapacity):
                workers.submit(Hurry(transfer=1))
            os.kill(workers.pid(SHARD_0), signal.SIGCONT)
            await asyncio.gather(*taken)

    run(main())


def test_group_kills_a_worker_that_misses_a_deadline(run: RunLoop, run_dir: str) -> None:
    """A command fails for lateness only once the late worker is dead, so that nobody writes to its slots any more."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, losses):
            os.kill(workers.pid(SHARD_0), signal.SIGSTOP)
            with pytest.raises(DaemonFailure, match=r"was killed: it had not acknowledged command 1 after 0\.1 s"):
                await workers.submit(PROBE, deadline_s=0.1)

            assert "had not acknowledged" in losses.reasons[0]
            assert not process_exists(workers.pid(SHARD_0))

    run(main())


def test_group_bounds_commands_in_flight(run: RunLoop, run_dir: str) -> None:
    """Commands beyond the limit are refused; all those taken are carried out once the worker goes on."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, _):
            os.kill(workers.pid(SHARD_0), signal.SIGSTOP)
            taken = [workers.submit(PROBE) for _ in range(REQUESTS_IN_FLIGHT_MAX)]
            with pytest.raises(NoCapacity):
                workers.submit(PROBE)
            os.kill(workers.pid(SHARD_0), signal.SIGCONT)
            await asyncio.gather(*taken)
            await workers.submit(PROBE)

    run(main())


def test_group_keeps_what_the_socket_cannot_hold(run: RunLoop, run_dir: str) -> None:
    """Commands larger than the socket's buffer in all arrive in order once the worker reads."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, _):
            os.kill(workers.pid(SHARD_0), signal.SIGSTOP)
            taken = [workers.submit(work) for work in (LONG_STORE, LONG_STORE, LONG_STORE, PROBE)]
            os.kill(workers.pid(SHARD_0), signal.SIGCONT)
            results = await asyncio.gather(*taken, return_exceptions=True)

            assert ["no host pool" in str(result) for result in results] == [True, True, True, False]
            assert results[3] is None

    run(main())


def test_group_refuses_a_command_too_large_for_a_message(run: RunLoop, run_dir: str) -> None:
    """A command that no message can hold is refused here, and the next one is served."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, _):
            with pytest.raises(RequestError, match="a command of") as caught:
                workers.submit(store_of(9000))
            await workers.submit(PROBE)

            assert caught.value.code is ErrorCode.LIMIT

    run(main())


def test_group_cancelled_command_harms_nobody(run: RunLoop, run_dir: str) -> None:
    """A caller that no longer waits for a command does not disturb the next one."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, losses):
            workers.submit(PROBE).cancel()
            await workers.submit(PROBE)

            assert not losses.reasons

    run(main())
