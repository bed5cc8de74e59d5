"""The workers of one replica from their start to their death: started together, lost together.

With one worker the whole group is lost: the others are killed, so that all begin anew with nothing under way. A lost
group is not started again; `kvcached.worker.client` makes a new one, on the same memory, which is the daemon's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import HostMemory
from kvcached.memory.sealed import PRETOUCH_BYTES_MAX
from kvcached.process.child import ChildProcess
from kvcached.worker.messages import REPLY_SIZE_BYTES_MAX, Report, WorkerConfig, decode_report, encode
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.types import ShardIndex

MODULE: Final = "kvcached.worker.main"
#: The number of the inherited descriptor follows; nothing that is secret or needs quoting is on the command line.
WORKER_COMMAND: Final = (sys.executable, "-m", MODULE)
#: The locks of all workers of a run directory.
LOCK_PATTERN: Final = "worker-*.lock"
READY_DEADLINE_S: Final = 10.0
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

    def configs(self) -> list[WorkerConfig]:
        """What the worker of each shard is told.

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
                fingerprint=bytes.fromhex(self.layout.fingerprint()),
            )
            for shard in range(shards)
        ]


class WorkerProcess(ChildProcess[Report]):
    """The process of one shard.

    Args:
        config: what it is told.
        memory: descriptors that go with the configuration, see `WorkerConfig`. They stay the caller's.
        run_dir: where its log and its lock are.
        on_report: called with every message.
        on_loss: called once with how it ended and with the end of its log, if it was ready before. Whatever it sent
            before its end was told first.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        config: WorkerConfig,
        memory: tuple[int, ...],
        run_dir: str,
        on_report: Callable[[Report], None],
        on_loss: Callable[[str, str], None],
    ) -> None:
        self.name = worker_name(config)
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
            on_message=on_report,
            on_exit=self._on_end,
        )

    async def ready(self, deadline_s: float) -> None:
        """Wait until it is ready.

        Raises:
            DaemonFailure: it ended, or was not ready within `deadline_s`; the message ends with its log.
        """
        try:
            async with asyncio.timeout(deadline_s):
                is_ready = await asyncio.shield(self._ready)
        except TimeoutError:
            raise self._failure(ErrorCode.DEADLINE, f"was not ready within {deadline_s:g} s") from None
        if not is_ready or not self.is_alive:
            raise self._failure(ErrorCode.WORKER_LOST, f"{self.ending()} before it was ready")

    def note_ready(self) -> None:
        """It says that it is ready."""
        if not self._ready.done():
            self._ready.set_result(True)

    def _on_end(self) -> None:
        if not self._ready.done():
            self._ready.set_result(False)
        else:
            self._on_loss(f"{self.name} {self.ending()}", self._end_of_log())

    def _failure(self, code: ErrorCode, what: str) -> RequestError:
        return request_error(
            code, f"{self.name} {what}; {self._end_of_log()}", "correct what its log names, then start again"
        )

    def _end_of_log(self) -> str:
        lines = self.log_tail()
        return "\n".join([f"{self._path}.log ends:", *lines]) if lines else f"its log {self._path}.log is empty"


class WorkerGroup:
    """One worker per shard. Made, used and stopped in one event loop's thread.

    Args:
        pool: what they map.
        run_dir: where their logs and locks are; must exist.
        on_report: called with every message of a shard's worker.
        on_dead: called when a shard's worker is dead: it works on nothing any more.
        on_lost: called once, when the first worker dies after a successful start and before `stop`, with the reason
            and the end of its log. By then the others are being killed. `bury` or `stop` has to be called still.

    Attributes:
        workers: of each shard.
        loss: how the first worker ended that was lost; empty while none is.
        is_running: they were all started, and are not to be stopped.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        run_dir: str,
        on_report: Callable[[ShardIndex, Report], None],
        on_dead: Callable[[ShardIndex, str], None],
        on_lost: Callable[[ShardIndex, str], None],
    ) -> None:
        self.workers: list[WorkerProcess] = []
        self.loss = ""
        self.is_running = False
        self._pool = pool
        self._run_dir = run_dir
        self._on_report = on_report
        self._on_dead = on_dead
        self._on_lost = on_lost

    async def start(self) -> None:
        """Start all workers in parallel, and wait until each is ready. On an error none is left.

        Raises:
            BadRequest: the replica's name cannot be a file name.
            DaemonFailure: a worker ended or was late; the message has the end of its log.
        """
        try:
            for config in self._pool.configs():
                self.workers.append(self._worker(config))
            await self._all_ready()
        except BaseException:
            await self.end()
            raise
        self.is_running = True

    def refusal(self) -> RequestError | None:
        """Why they take no requests; None where they do."""
        if self.is_running and not self.loss:
            return None
        reason = self.loss or "its workers do not run"
        return request_error(ErrorCode.WORKER_LOST, f"replica {self._pool.replica}: {reason}", "try again later")

    def kill(self, reason: str) -> None:
        """End every worker by SIGKILL, now."""
        for worker in self.workers:
            worker.kill(reason)

    async def wind_down(self, deadline_s: float) -> None:
        """Wait for workers that were asked to end: SIGTERM after half the time, SIGKILL after all."""
        if not await self._all_ended(deadline_s / 2):
            for worker in self.workers:
                worker.terminate()
            await self._all_ended(deadline_s / 2)

    async def bury(self) -> None:
        """Wait for the kernel's word that all workers of a lost group are dead.

        It waits as long as it takes: until then something may write into the pools.
        """
        while not await self._all_ended(KILL_DEADLINE_S):
            self._log_survivors()
        await self.end()
        self.is_running = False

    async def end(self) -> None:
        """Kill whoever is left."""
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
                on_report=partial(self._on_report, shard),
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
    """What messages call the worker of a shard."""
    return f"worker {config.replica}/{config.shard}"
