"""The workers of one replica: started together, ordered together, replaced together.

A command goes to every shard under one number and is over when no shard works on it any more: each has acknowledged it
or is dead. So slots named by a failed command are as free of writers as those of a finished one. A worker that misses a
command's deadline is killed to make that true. With one worker the whole group is lost: the others are killed, so that
all begin anew with nothing under way. A lost group is not started again; `kvcached.worker.restart` makes a new one, on
the same memory, which is the daemon's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import HostMemory
from kvcached.memory.sealed import PRETOUCH_BYTES_MAX
from kvcached.worker.commands import CommandsInFlight, Joined, ShardResult
from kvcached.worker.messages import MESSAGE_SIZE_BYTES_MAX, Command, Shutdown, Work, WorkerConfig, encode
from kvcached.worker.process import WorkerProcess
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.types import ShardIndex

READY_DEADLINE_S: Final = 10.0
COMMAND_DEADLINE_S: Final = 30.0
STOP_DEADLINE_S: Final = 4.0
#: After SIGKILL only the kernel's own work is left.
KILL_DEADLINE_S: Final = 5.0
#: As much of a namespace as the header of a stored block has room for.
HEADER_NAMESPACE_BYTES: Final = 16
#: It becomes part of file names.
_REPLICA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """What the workers of a replica map.

    Attributes:
        replica: name of the replica, part of file names.
        layout: shape of a block on one shard; says how many shards there are.
        slots: slots of the pool, the same on every shard.
        namespace: 32 bytes, root of the keys; what workers put into the host pool carries it.
        memory: of each shard. Whoever made it closes it, after the workers.
        host: the host pool, or None where there is none.
        pretouch_bytes: memory made resident at the start, all shards together; at most 1 GiB counts.
        ready_deadline_s: how long the start of all shards may take.
    """

    replica: str
    layout: Layout
    slots: int
    namespace: bytes
    memory: tuple[ShardMemory, ...]
    host: HostMemory | None = None
    pretouch_bytes: int = 0
    ready_deadline_s: float = READY_DEADLINE_S


class WorkerGroup:
    """One worker per shard. Made, used and stopped in one event loop's thread.

    Args:
        pool: what they hold.
        run_dir: where their logs and locks are; must exist.
        on_lost: called once, when the first worker dies after a successful start and before `stop`, with the reason
            and the end of its log. By then the others are being killed. Whoever waits for a command is told after
            that. `bury` or `stop` has to be called still.
    """

    def __init__(self, pool: ReplicaPool, run_dir: str, on_lost: Callable[[ShardIndex, str], None]) -> None:
        self._pool = pool
        self._run_dir = run_dir
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._workers: list[WorkerProcess] = []
        self._loss = ""  #: how the first worker ended that was lost
        self._commands = CommandsInFlight(self._kill)
        self._running = False

    async def start(self) -> None:
        """Start all workers in parallel, and wait until each is ready. On an error none is left.

        Raises:
            BadRequest: the replica's name cannot be a file name.
            DaemonFailure: a worker ended or was late; the message has the end of its log.
        """
        self._workers = [self._worker(config) for config in self._configs()]
        await self._all_ready([worker.start(self._pool.ready_deadline_s) for worker in self._workers])
        self._running = True

    def kill(self) -> None:
        """End every worker by SIGKILL, now: for a daemon that has no time to stop them in order."""
        for worker in self._workers:
            worker.kill("the daemon ends at once")

    def pid(self, shard: ShardIndex) -> int:
        """Process id of a shard's worker.

        Raises:
            IndexError: there is no such worker.
        """
        return self._workers[shard].pid

    def submit(self, work: Work, *, deadline_s: float = COMMAND_DEADLINE_S) -> asyncio.Future[None]:
        """Send a command to every shard and join the results. As `order` otherwise.

        Returns:
            A future that is done when no shard works on the command any more. It fails with DaemonFailure where a
            shard failed or died. To cancel it stops nothing.
        """
        self._check_room(work)
        joined = Joined(f"{type(work).__name__} on replica {self._pool.replica}")
        joined.waiting = self._send(work, joined.settle, deadline_s)
        return joined.done

    def order(
        self, work: Work, on_settled: Callable[[ShardResult], None], *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> None:
        """Send a command to every shard. Commands arrive in the order of their submission, and may end in another.

        Args:
            work: what to do.
            on_settled: called once per shard when it does not work on the command any more, never before this returns.
            deadline_s: a shard that has not acknowledged the command by then is killed, unless it has acknowledged
                another one since that was not carried out at once: then the time starts anew.

        Raises:
            BadRequest: the command is too large for one message.
            NoCapacity: `COMMANDS_IN_FLIGHT_MAX` are under way.
            DaemonFailure: a worker is lost, or the group is not running.
        """
        self._check_room(work)

        def settle(result: ShardResult) -> None:
            self._loop.call_soon(on_settled, result)

        self._send(work, settle, deadline_s)

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the workers: `Shutdown` behind the commands in flight, SIGTERM after half the time, SIGKILL after all.

        Workers of a lost group, and of one that was not started to the end, are killed at once. Commands that are still
        in flight then fail. The logs stay. Does nothing the second time.
        """
        was_running, self._running = self._running, False
        if was_running and not self._loss:
            # The processes' ends are what counts, not this answer.
            self._send(Shutdown(), lambda _: None, deadline_s)
            if not await self._all_ended(deadline_s / 2):
                for worker in self._workers:
                    worker.terminate()
                await self._all_ended(deadline_s / 2)
        await self._end()

    async def bury(self) -> None:
        """Wait for the kernel's word that all workers of a lost group are dead.

        It waits as long as it takes: until then something may write into the pools.
        """
        while not await self._all_ended(KILL_DEADLINE_S):
            self._log_survivors()
        await self._end()
        self._running = False

    async def _all_ready(self, greetings: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Wait until every worker is ready. On an error none is left."""
        tasks = [asyncio.ensure_future(greeting) for greeting in greetings]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()
            raise
        if self._loss:
            await self._end()
            raise self._not_running()

    def _configs(self) -> list[WorkerConfig]:
        pool = self._pool
        if not _REPLICA_NAME.fullmatch(pool.replica):
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"replica name {pool.replica!r}",
                "use letters, digits, '.', '_' and '-', at most 64, a letter or digit first",
            )
        geometry = pool_geometry(pool.layout, pool.slots)
        shards = pool.layout.shards
        host = None
        if pool.host is not None:
            host = HostGeometry(
                slabs=pool.host.slabs,
                slab_bytes=pool.host.slab_bytes,
                shards=shards,
                block_bytes=geometry.slot_bytes,
                replicated=pool.layout.replicated,
            )
        return [
            WorkerConfig(
                replica=pool.replica,
                shard=shard,
                device="cpu",
                geometry=geometry,
                pretouch_bytes=min(pool.pretouch_bytes, PRETOUCH_BYTES_MAX) // shards,
                host=host,
                namespace=pool.namespace[:HEADER_NAMESPACE_BYTES],
                fingerprint=bytes.fromhex(pool.layout.fingerprint()),
            )
            for shard in range(shards)
        ]

    def _worker(self, config: WorkerConfig) -> WorkerProcess:
        shard, pool = config.shard, self._pool
        return WorkerProcess(
            config,
            (*pool.memory[shard].for_worker, *(() if pool.host is None else (pool.host.descriptor,))),
            self._run_dir,
            on_ack=lambda ack: self._commands.acknowledge(shard, ack),
            on_exit=lambda ending, log_tail: self._on_exit(ShardIndex(shard), ending, log_tail),
        )

    def _check_room(self, work: Work) -> None:
        if self._loss or not self._running:
            raise self._not_running()
        self._commands.check_room(work)

    def _send(self, work: Work, on_settled: Callable[[ShardResult], None], deadline_s: float) -> set[int]:
        """Send a command to the shards that live; returns which."""
        message = encode(Command(sequence=self._commands.next_sequence, work=work))
        if len(message) > MESSAGE_SIZE_BYTES_MAX:
            raise request_error(
                ErrorCode.LIMIT, f"a command of {len(message)} bytes; {MESSAGE_SIZE_BYTES_MAX} are possible", "split it"
            )
        alive = {shard for shard, worker in enumerate(self._workers) if worker.is_alive}
        self._commands.add(work, alive, on_settled, deadline_s)
        for shard in alive:
            self._workers[shard].send(message)
        return alive

    def _kill(self, shard: int, reason: str) -> None:
        self._workers[shard].kill(reason)

    def _on_exit(self, shard: ShardIndex, ending: str, log_tail: str) -> None:
        first, self._loss = not self._loss, self._loss or ending
        self._commands.lose(shard, ending)
        if not first or not self._running:
            return
        for worker in self._workers:
            worker.kill(f"its group has lost shard {shard}")
        # Those who wait for commands hear of it later, from the loop.
        self._on_lost(shard, f"{ending}; {log_tail}")

    def _not_running(self) -> RequestError:
        reason = self._loss or "its workers do not run"
        return request_error(ErrorCode.WORKER_LOST, f"replica {self._pool.replica}: {reason}", "try again later")

    async def _all_ended(self, deadline_s: float) -> bool:
        return all(await asyncio.gather(*(worker.wait_exit(deadline_s) for worker in self._workers)))

    async def _end(self) -> None:
        for worker in self._workers:
            worker.kill()
        if not await self._all_ended(KILL_DEADLINE_S):
            self._log_survivors()

    def _log_survivors(self) -> None:
        names = [worker.name for worker in self._workers if worker.is_alive]
        _log.error("%s did not end %g s after SIGKILL", ", ".join(names), KILL_DEADLINE_S)
