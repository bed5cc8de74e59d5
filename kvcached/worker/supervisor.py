"""The workers of one replica: started together, ordered together, ended together.

A command goes to every shard under one number and is over when no shard works on it any more: each has acknowledged it
or is dead. So slots named by a failed command are as free of writers as those of a finished one. A worker that misses a
command's deadline is killed to make that true.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvcached.worker.available import NotEnoughMemory, check_available
from kvcached.worker.geometry import pool_geometry
from kvcached.worker.memory import PRETOUCH_BYTES_MAX
from kvcached.worker.messages import (
    COMMANDS_IN_FLIGHT_MAX,
    MESSAGE_SIZE_BYTES_MAX,
    Ack,
    Command,
    Shutdown,
    Work,
    WorkerConfig,
    encode,
)
from kvcached.worker.process import WorkerProcess
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.layout import Layout
from kvcached_client.rundir import socket_path
from kvcached_client.types import ShardIndex

READY_DEADLINE_S: Final = 10.0
COMMAND_DEADLINE_S: Final = 30.0
STOP_DEADLINE_S: Final = 4.0
#: After SIGKILL only the kernel's own work is left, which is the freeing of the pool.
_KILL_DEADLINE_S: Final = 5.0
#: It becomes part of file names.
_REPLICA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """What the workers of a replica hold.

    Attributes:
        replica: name of the replica, part of file names.
        layout: shape of a block on one shard; says how many shards there are.
        slots: slots of the pool, the same on every shard.
        pretouch_bytes: memory made resident at the start, all shards together; at most 1 GiB counts.
        ready_deadline_s: how long the start of all shards may take.
    """

    replica: str
    layout: Layout
    slots: int
    pretouch_bytes: int = 0
    ready_deadline_s: float = READY_DEADLINE_S


@dataclass(slots=True)
class _InFlight:
    """A command that some shard still works on."""

    done: asyncio.Future[None]
    waiting: set[int]  # shards that have neither acknowledged it nor died
    failures: list[tuple[ErrorCode, str]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class WorkerGroup:
    """One worker per shard. Made, used and stopped in one event loop's thread.

    Args:
        pool: what they hold.
        run_dir: where their sockets and logs are; must exist.
        on_lost: called once per worker that dies after a successful start and before `stop`, with the reason and the
            end of its log. Whoever awaits a command that it had not acknowledged is told after that.
    """

    def __init__(self, pool: ReplicaPool, run_dir: str, on_lost: Callable[[ShardIndex, str], None]) -> None:
        self._pool = pool
        self._run_dir = run_dir
        self._on_lost = on_lost
        self._workers: list[WorkerProcess] = []
        self._lost: dict[int, str] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._sequence = 0
        self._running = False

    async def start(self) -> None:
        """Start all workers in parallel and wait until each is ready. On an error none is left.

        Raises:
            BadRequest: the replica's name cannot be a file name, or a socket's path is too long.
            DaemonFailure: the memory is not there, or a worker ended or was late; the message has the end of its log.
        """
        self._workers = [self._worker(config) for config in self._configs()]
        starts = [asyncio.ensure_future(worker.start(self._pool.ready_deadline_s)) for worker in self._workers]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._end()
            raise
        if self._lost:
            await self._end()
            raise self._not_running()
        self._running = True

    def memory_fd(self, shard: ShardIndex) -> int:
        """The sealed memfd of a shard's pool, to be sent on and never mapped. Open until `stop`; do not close it.

        Raises:
            DaemonFailure: there is no such worker, or none that was ready.
        """
        if not 0 <= shard < len(self._workers) or self._workers[shard].memory_fd < 0:
            raise request_error(
                ErrorCode.WORKER_LOST, f"replica {self._pool.replica}: no memory of shard {shard}", "attach again later"
            )
        return self._workers[shard].memory_fd

    def pid(self, shard: ShardIndex) -> int:
        """Process id of a shard's worker.

        Raises:
            IndexError: there is no such worker.
        """
        return self._workers[shard].pid

    def submit(self, work: Work, *, deadline_s: float = COMMAND_DEADLINE_S) -> asyncio.Future[None]:
        """Send a command to every shard. Commands are carried out in the order of their submission.

        Returns:
            A future that is done when no shard works on the command any more. It fails with DaemonFailure where a
            shard failed, died, or was killed because it had not acknowledged within `deadline_s`. To cancel it stops
            nothing.

        Raises:
            BadRequest: the command is too large for one message.
            NoCapacity: `COMMANDS_IN_FLIGHT_MAX` are under way.
            DaemonFailure: a worker is lost, or the group is not running.
        """
        if self._lost or not self._running:
            raise self._not_running()
        if len(self._in_flight) >= COMMANDS_IN_FLIGHT_MAX:
            raise request_error(
                ErrorCode.NO_CAPACITY, f"{COMMANDS_IN_FLIGHT_MAX} commands are in flight", "wait for one to end"
            )
        return self._send(work, deadline_s)

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the workers: `Shutdown` behind the commands in flight, SIGTERM after half the time, SIGKILL after all.

        Commands that are still in flight then fail. Afterwards descriptors are closed and sockets removed; the logs
        stay. Does nothing the second time.
        """
        if not self._running:
            return
        self._running = False
        if any(worker.is_alive for worker in self._workers):
            # The processes' ends are what counts, not this answer.
            self._send(Shutdown(), deadline_s).cancel()
        if not await self._all_ended(deadline_s / 2):
            for worker in self._workers:
                worker.terminate()
            await self._all_ended(deadline_s / 2)
        await self._end()

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
        try:
            check_available(shards * geometry.size_bytes, f"replica {pool.replica} ({shards} shards)")
        except NotEnoughMemory as error:
            raise request_error(ErrorCode.INTERNAL, str(error), "see the replica's slots") from None
        return [
            WorkerConfig(
                replica=pool.replica,
                shard=shard,
                device="cpu",
                geometry=geometry,
                socket_path=socket_path(self._run_dir, f"worker-{pool.replica}-{shard}.sock"),
                pretouch_bytes=min(pool.pretouch_bytes, PRETOUCH_BYTES_MAX) // shards,
                daemon_pidfd=0,
            )
            for shard in range(shards)
        ]

    def _worker(self, config: WorkerConfig) -> WorkerProcess:
        shard = config.shard
        log_path = Path(self._run_dir) / f"worker-{config.replica}-{shard}.log"
        return WorkerProcess(
            config,
            str(log_path),
            on_ack=lambda ack: self._on_ack(shard, ack),
            on_exit=lambda ending, log_tail: self._on_exit(ShardIndex(shard), ending, log_tail),
        )

    def _send(self, work: Work, deadline_s: float) -> asyncio.Future[None]:
        self._sequence += 1
        message = encode(Command(sequence=self._sequence, work=work))
        if len(message) > MESSAGE_SIZE_BYTES_MAX:
            self._sequence -= 1
            raise request_error(
                ErrorCode.LIMIT, f"a command of {len(message)} bytes; {MESSAGE_SIZE_BYTES_MAX} are possible", "split it"
            )
        loop = asyncio.get_running_loop()
        alive = {shard for shard, worker in enumerate(self._workers) if worker.is_alive}
        command = _InFlight(loop.create_future(), alive)
        command.timer = loop.call_later(deadline_s, self._on_overdue, self._sequence, deadline_s)
        self._in_flight[self._sequence] = command
        for shard in alive:
            self._workers[shard].send(message)
        return command.done

    def _on_ack(self, shard: int, ack: Ack) -> None:
        command = self._in_flight.get(ack.sequence)
        if command is None or shard not in command.waiting:
            self._workers[shard].kill(f"it acknowledged command {ack.sequence}, which it was not given")
            return
        self._settle(shard, ack.sequence, ErrorCode.INTERNAL, f"shard {shard}: {ack.error}" if ack.error else "")

    def _on_exit(self, shard: ShardIndex, ending: str, log_tail: str) -> None:
        self._lost[shard] = ending
        for sequence in [number for number, command in self._in_flight.items() if shard in command.waiting]:
            self._settle(shard, sequence, ErrorCode.WORKER_LOST, ending)
        if self._running:
            self._on_lost(shard, f"{ending}; {log_tail}")

    def _on_overdue(self, sequence: int, deadline_s: float) -> None:
        for shard in self._in_flight[sequence].waiting:
            self._workers[shard].kill(f"it had not acknowledged command {sequence} after {deadline_s:g} s")

    def _settle(self, shard: int, sequence: int, code: ErrorCode, failure: str) -> None:
        """Note that one shard is through with a command, and how it failed if it did."""
        command = self._in_flight[sequence]
        command.waiting.discard(shard)
        if failure:
            command.failures.append((code, failure))
        if command.waiting:
            return
        del self._in_flight[sequence]
        if command.timer is not None:
            command.timer.cancel()
        if command.done.done():
            return
        if command.failures:
            reasons = "; ".join(reason for _, reason in command.failures)
            message = f"command {sequence} of replica {self._pool.replica}: {reasons}"
            command.done.set_exception(request_error(command.failures[0][0], message, "see the worker's log"))
        else:
            command.done.set_result(None)

    def _not_running(self) -> RequestError:
        reason = "; ".join(self._lost.values()) or "it is not running"
        return request_error(
            ErrorCode.WORKER_LOST, f"replica {self._pool.replica}: {reason}", "its workers have to be started again"
        )

    async def _all_ended(self, deadline_s: float) -> bool:
        return all(await asyncio.gather(*(worker.wait_exit(deadline_s) for worker in self._workers)))

    async def _end(self) -> None:
        for worker in self._workers:
            worker.kill()
        if not await self._all_ended(_KILL_DEADLINE_S):
            names = [worker.name for worker in self._workers if worker.is_alive]
            _log.error("%s did not end %g s after SIGKILL", ", ".join(names), _KILL_DEADLINE_S)
        for worker in self._workers:
            worker.close()
