"""The workers of one replica, which are started together and lost together.

If one worker dies, the others are killed, so that the next group starts with no transfer under way. A lost group is not
restarted: `kvcached.worker.client` creates a new group on the same memory, which belongs to the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import HostMemory
from kvcached.memory.sealed import PRETOUCH_BYTES_MAX
from kvcached.process.child import KILL_DEADLINE_S, ChildProcess
from kvcached.process.identity import state_of
from kvcached.worker.exits import DEVICE_FAILED
from kvcached.worker.messages import (
    REPLY_SIZE_BYTES_MAX,
    Done,
    HostRegistered,
    Ready,
    Report,
    WorkerConfig,
    decode_report,
    encode,
)
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.reports import HostRegistration
from kvcached_client.types import ShardIndex

MODULE: Final = "kvcached.worker.main"
#: The number of the inherited descriptor follows. Nothing on the command line is secret or needs quoting.
WORKER_COMMAND: Final = (sys.executable, "-P", "-m", MODULE)
#: The names of the lock files of all workers in a run directory.
LOCK_PATTERN: Final = "worker-*.lock"
READY_DEADLINE_S: Final = 10.0
#: How many bytes of a namespace fit into the header of a stored block.
HEADER_NAMESPACE_BYTES: Final = 16
#: A replica's name, which becomes part of file names.
_REPLICA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """The memory that the workers of a replica map.

    Attributes:
        replica: the replica's name, part of file names.
        layout: the layout of a block on one shard, and the number of shards.
        slots: the slots of the pool, the same on every shard.
        namespace: 32 bytes, the root of the keys; headers of stored blocks carry it.
        memory: the memory of each shard. Its creator closes it, after the workers have ended.
        host: the host pool; None without one.
        pretouch_bytes: how much memory to make resident at the start, on all shards together; at most 1 GiB counts.
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

    def configs(self) -> list[WorkerConfig]:
        """The configuration of each shard's worker.

        Raises:
            BadRequest: the replica's name cannot be a file name.
        """
        if not _REPLICA_NAME.fullmatch(self.replica):
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"replica name {self.replica!r}",
                "use letters, digits, '.', '_' and '-', at most 64, a letter or digit first",
            )
        geometry = pool_geometry(self.layout, self.slots)
        shards = self.layout.shards
        host = None
        if self.host is not None:
            host = HostGeometry(
                slabs=self.host.slabs,
                slab_bytes=self.host.slab_bytes,
                shards=shards,
                block_bytes=geometry.slot_bytes,
                replicated=self.layout.replicated,
            )
        return [
            WorkerConfig(
                replica=self.replica,
                shard=shard,
                device=self.memory[shard].device,
                geometry=geometry,
                pretouch_bytes=min(self.pretouch_bytes, PRETOUCH_BYTES_MAX) // shards,
                host=host,
                namespace=self.namespace[:HEADER_NAMESPACE_BYTES],
                fingerprint=bytes.fromhex(self.layout.block_fingerprint()),
            )
            for shard in range(shards)
        ]


class WorkerProcess(ChildProcess[Report]):
    """The worker process of one shard.

    Args:
        config: its configuration.
        memory: the descriptors that go with the configuration, see `WorkerConfig`. The caller still owns them.
        run_dir: the directory of its log and its lock.
        on_done: called when a request is over.
        on_loss: called once if the process ends after it was ready, with how it ended and the end of its log. All
            messages from before its end are delivered first.

    Attributes:
        registered: how much of the host pool its device reaches; None where it has said nothing of it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        config: WorkerConfig,
        memory: tuple[int, ...],
        run_dir: str,
        on_done: Callable[[Done], None],
        on_loss: Callable[[str, str], None],
    ) -> None:
        self.name = worker_name(config)
        self.registered: HostRegistered | None = None
        self._on_done = on_done
        self._path, self._on_loss = f"{run_dir}/worker-{config.replica}-{config.shard}", on_loss
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  #: False: it ended before
        super().__init__(
            (*WORKER_COMMAND, "{}", f"{config.replica}/{config.shard}"),
            encode(config),
            memory,
            f"{self._path}.lock",
            f"{self._path}.log",
            decode_report,
            REPLY_SIZE_BYTES_MAX,
            on_message=self._on_report,
            on_exit=self._on_end,
        )

    async def ready(self, deadline_s: float) -> None:
        """Wait until the process is ready.

        Raises:
            DaemonFailure: it ended, or was not ready within `deadline_s`; the message ends with its log.
        """
        try:
            async with asyncio.timeout(deadline_s):
                is_ready = await asyncio.shield(self._ready)
        except TimeoutError:
            fix = "if its log names no fault, allow more time: worker_ready_deadline_ms in the configuration"
            raise self._failure(ErrorCode.DEADLINE, f"was not ready within {deadline_s:g} s", fix) from None
        if not is_ready or not self.is_alive:
            raise self._failure(ErrorCode.WORKER_LOST, f"{self.ending()} before it was ready")

    def ending(self) -> str:
        """How it ended, in words."""
        return "ended, as its device has failed" if self.status == DEVICE_FAILED else super().ending()

    def _on_report(self, report: Report) -> None:
        match report:
            case Done():
                self._on_done(report)
            case HostRegistered():
                self.registered = report
            case Ready() if not self._ready.done():
                self._ready.set_result(True)

    def _on_end(self) -> None:
        if not self._ready.done():
            self._ready.set_result(False)
        else:
            self._on_loss(f"{self.name} {self.ending()}", self._end_of_log())

    def _failure(
        self, code: ErrorCode, what: str, fix: str = "correct what its log names, then start again"
    ) -> RequestError:
        return request_error(code, f"{self.name} {what}; {self._end_of_log()}", fix)

    def _end_of_log(self) -> str:
        lines = self.log_tail()
        return "\n".join([f"its log {self._path}.log ends:", *lines]) if lines else f"its log {self._path}.log is empty"


class WorkerGroup:
    """One worker per shard. Created, used and stopped in the thread of one event loop.

    Args:
        pool: the memory that the workers map.
        run_dir: the directory of their logs and locks; must exist.
        on_done: called when a shard's worker is through with a request.
        on_dead: called when a shard's worker is dead and copies nothing any more.
        on_lost: called once, when the first worker dies after a successful start and before `stop`, with the reason
            and the end of its log. The other workers are then being killed; `bury` or `stop` must still be called.

    Attributes:
        workers: the worker of each shard.
        loss: how the first lost worker ended; empty while none is lost.
        is_running: all workers have started, and the group is not being stopped.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        run_dir: str,
        on_done: Callable[[ShardIndex, Done], None],
        on_dead: Callable[[ShardIndex, str], None],
        on_lost: Callable[[ShardIndex, str], None],
    ) -> None:
        self.workers: list[WorkerProcess] = []
        self.loss = ""
        self.is_running = False
        self._pool = pool
        self._run_dir = run_dir
        self._on_done = on_done
        self._on_dead = on_dead
        self._on_lost = on_lost

    async def start(self) -> None:
        """Start all workers in parallel, and wait until each is ready. After an error none is running.

        Raises:
            BadRequest: the replica's name cannot be a file name.
            DaemonFailure: a worker ended or was too slow; the message has the end of its log.
        """
        try:
            for config in self._pool.configs():
                self.workers.append(self._worker(config))
            await self._all_ready()
        except BaseException:
            await self.end()
            raise
        self.is_running = True

    def registered(self) -> tuple[HostRegistration, ...]:
        """How much of the host pool the devices of the shards reach, of those whose workers have said so."""
        return tuple(
            HostRegistration(
                shard=shard, registered_bytes=said.registered_bytes, size_bytes=said.size_bytes, error=said.error
            )
            for shard, worker in enumerate(self.workers)
            if (said := worker.registered) is not None
        )

    def in_words(self, shards: Iterable[int]) -> str:
        """The processes of shards, and what they do."""
        workers = ((shard, self.workers[shard].pid) for shard in shards)
        return "; ".join(f"shard {shard} (process {pid}) {state_of(pid)}" for shard, pid in workers)

    @property
    def exits(self) -> set[int | None]:
        """The exit statuses of workers that have ended; see `kvcached.worker.exits`."""
        return {worker.status for worker in self.workers}

    def refusal(self) -> RequestError | None:
        """Why the workers take no requests; None if they do."""
        if self.is_running and not self.loss:
            return None
        reason = self.loss or "its workers do not run"
        return request_error(ErrorCode.WORKER_LOST, f"replica {self._pool.replica}: {reason}", "try again later")

    def kill(self, reason: str) -> None:
        """End every worker by SIGKILL, now."""
        for worker in self.workers:
            worker.kill(reason)

    async def wind_down(self, deadline_s: float) -> None:
        """Wait for workers that were asked to end. They get SIGTERM after half the time, and SIGKILL at its end."""
        if not await self._all_ended(deadline_s / 2):
            for worker in self.workers:
                worker.terminate()
            await self._all_ended(deadline_s / 2)

    async def bury(self) -> None:
        """Wait until the kernel has confirmed that all workers of a lost group are dead.

        There is no deadline: a worker that is not dead may still write to the pools.
        """
        while not await self._all_ended(KILL_DEADLINE_S):
            self._log_survivors()
        await self.end()
        self.is_running = False

    async def end(self) -> None:
        """Kill the workers that still run."""
        self.kill("")
        if not await self._all_ended(KILL_DEADLINE_S):
            self._log_survivors()

    async def _all_ready(self) -> None:
        tasks = [asyncio.ensure_future(each.ready(self._pool.ready_deadline_s)) for each in self.workers]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        if self.loss and (refusal := self.refusal()):
            raise refusal

    def _worker(self, config: WorkerConfig) -> WorkerProcess:
        shard, pool = ShardIndex(config.shard), self._pool
        try:
            return WorkerProcess(
                config,
                (*pool.memory[shard].for_worker, *(() if pool.host is None else (pool.host.descriptor,))),
                self._run_dir,
                on_done=partial(self._on_done, shard),
                on_loss=partial(self._on_loss, shard),
            )
        except OSError as error:
            failure = f"{worker_name(config)} cannot be started: {error}"
            raise request_error(ErrorCode.INTERNAL, failure, "correct what it names, then start again") from error

    def _on_loss(self, shard: ShardIndex, ending: str, log_tail: str) -> None:
        first, self.loss = not self.loss, self.loss or ending
        self._on_dead(shard, ending)
        if first and self.is_running:
            self.kill(f"its group has lost shard {shard}")
            self._on_lost(shard, f"{ending}; {log_tail}")

    async def _all_ended(self, deadline_s: float) -> bool:
        return all(await asyncio.gather(*(worker.wait_exit(deadline_s) for worker in self.workers)))

    def _log_survivors(self) -> None:
        names = [worker.name for worker in self.workers if worker.is_alive]
        _log.error("%s did not end %g s after SIGKILL", ", ".join(names), KILL_DEADLINE_S)


def worker_name(config: WorkerConfig) -> str:
    """The name of a shard's worker in messages."""
    return f"worker {config.replica}/{config.shard}"
