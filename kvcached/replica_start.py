"""A replica from its configuration: its memory, its workers, and what the service is told of them.

Its memory and its workers come and go together: at the start, when it falls asleep, and when it wakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from kvcached.config.replica import ReplicaConfig
from kvcached.config.schema import Config
from kvcached.config.tables import HostConfig
from kvcached.core.messages import Event, PoolRestored, WorkerDied
from kvcached.memory.available import NotEnoughMemory
from kvcached.memory.device_pool import DevicePool
from kvcached.memory.host_pool import HostMemory
from kvcached.recovery.device_pools import PoolMemory
from kvcached.recovery.generations import FIRST_GENERATION, Generation
from kvcached.service.replica import HeldMemory, Replica
from kvcached.service.service import Service
from kvcached.worker.client import WorkerPool
from kvcached.worker.group import ReplicaPool
from kvcached.worker.lifecycle import restart_pauses
from kvcached_client.blocks.header import NAMESPACE_BYTES
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.errors import DeviceError, ErrorCode, RequestError, request_error
from kvcached_client.types import ShardIndex, Verify, WritePolicy

#: Memory made resident before ready, all replicas together; the rest is touched when it is first used.
PRETOUCH_BYTES_MAX: Final = 1 << 30

_log: Final = logging.getLogger(__name__)


class Holder:
    """`PoolHolder`: a replica's memory and workers, and what makes and ends them.

    Args:
        replica: its name.
        memory: the memory of a start, kept or new; none if the replica sleeps.
        new_workers: for memory and a generation of the namespace; not started.
        end: ends workers as far as the daemon's own end leaves time.

    Attributes:
        workers: the present ones; not started, or ended, while the replica sleeps.
    """

    def __init__(
        self,
        replica: str,
        memory: PoolMemory,
        new_workers: Callable[[DevicePool | None, int], WorkerPool],
        end: Callable[[WorkerPool], Awaitable[None]],
        generation: int,
    ) -> None:
        self._replica = replica
        self._memory = memory
        self._new_workers = new_workers
        self._end = end
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost = "" if memory.lost is None else str(memory.lost)
        self.workers = new_workers(memory.pool, generation)

    @property
    def trouble(self) -> str:
        """Why it has no memory, or why no workers could be started on it; empty if it has both, or sleeps."""
        return self._lost or self.workers.failed_starts.why

    async def open(self) -> None:
        """Start the first workers, unless there is no memory for them.

        Those of a replica that has served on its CUDA devices before may come later: a device may be lost for a while.

        Raises:
            BadRequest, DaemonFailure: as `WorkerPool.open`.
        """
        if self._memory.pool is not None:
            await self.workers.open(retries=self._memory.has_served)

    async def close(self) -> None:
        """The daemon ends: break off what is under way, and end the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end(self.workers)

    def kill(self) -> None:
        """End the workers by SIGKILL, now."""
        self.workers.kill()

    def held(self) -> HeldMemory:
        """What the service is told of the present memory and workers."""
        pool = self._memory.pool
        if pool is None:
            return HeldMemory(self.workers)
        return HeldMemory(self.workers, pool.identities, pool.cuda_devices, pool.headers)

    # --- `PoolHolder` -----------------------------------------------------------------------------------------------

    def end_workers(self, ended: Callable[[], None]) -> None:
        """End the workers; they are not started again."""
        self._begin(self._end_workers(ended))

    def give_back(self, given: Callable[[], None]) -> None:
        """Clear the headers, have the service manager forget the memory, and close it."""
        self._begin(self._give_back(given))

    def make(self, generation: int, made: Callable[[HeldMemory | RequestError], None]) -> None:
        """Make new memory and start workers on it, for a generation of the namespace. On an error nothing is left."""
        self._begin(self._make(generation, made))

    def make_when_possible(self, generation: int, made: Callable[[HeldMemory], None]) -> None:
        """As `make`, again and again until the devices make memory, and workers run on it."""
        self._begin(self._make_when_possible(generation, made))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "internal error while replica %(replica)s falls asleep or wakes",
                {"replica": self._replica},
                exc_info=error,
            )

    async def _end_workers(self, ended: Callable[[], None]) -> None:
        async with self._turn:
            await self.workers.close()
        ended()

    async def _give_back(self, given: Callable[[], None]) -> None:
        async with self._turn:
            await self._memory.give_back()
        given()

    async def _make(self, generation: int, made: Callable[[HeldMemory | RequestError], None]) -> None:
        outcome = await self._try_to_make(generation)
        made(_no_memory(self._replica, outcome) if isinstance(outcome, str) else outcome)

    async def _make_when_possible(self, generation: int, made: Callable[[HeldMemory], None]) -> None:
        pauses = restart_pauses()
        while isinstance(outcome := await self._try_to_make(generation), str):
            pause_s = pauses.pause_s()
            fields = {"replica": self._replica, "pause_s": pause_s, "reason": outcome}
            _log.error("replica %(replica)s: no memory, the next try is in %(pause_s)g s: %(reason)s", fields)
            self._lost = outcome
            await asyncio.sleep(pause_s)
        self._lost = ""
        made(outcome)

    async def _try_to_make(self, generation: int) -> HeldMemory | str:
        """Make memory and start workers; what came of it, or why nothing did."""
        async with self._turn:
            try:
                self.workers = self._new_workers(await self._memory.make(), generation)
                await self.workers.open()
                return self.held()
            except (RequestError, NotEnoughMemory, DeviceError, OSError) as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  whatever it was, the pool must not stay between the two
                _log.exception("internal error while replica %(replica)s wakes", {"replica": self._replica})
                reason = f"{type(error).__name__}: {error}"
            await self._memory.give_back()
            return reason


def _no_memory(replica: str, reason: str) -> RequestError:
    return request_error(
        ErrorCode.ASLEEP,
        f"replica {replica!r} stays asleep: {reason}",
        "correct what is named, then wake it again",
    )


def new_workers(
    config: Config,
    replica: ReplicaConfig,
    host: HostMemory | None,
    news: News,
    epoch: int,
    device: DevicePool | None,
    generation: int,
) -> WorkerPool:
    """The workers of a replica, not started. Those without memory are not to be."""
    pool = ReplicaPool(
        replica.name,
        replica.layout,
        replica.slot_count,
        replica.namespace(FIRST_GENERATION),
        () if device is None else device.shards,
        host,
        pretouch_bytes=PRETOUCH_BYTES_MAX // len(config.replica),
        ready_deadline_s=config.worker_ready_deadline_ms / 1000,
    )
    return WorkerPool(
        pool,
        str(config.run_dir),
        on_lost=partial(_on_worker_lost, news, replica.name),
        on_restored=partial(news.tell, PoolRestored(replica.name)),
        on_memory_gone=partial(news.memory_gone, replica.name),
        epoch=epoch,
        generation=generation,
        verify=verify(config),
    )


def new_replica(
    config: Config, replica: ReplicaConfig, generation: Generation, memory: PoolMemory, holder: Holder
) -> Replica:
    """A replica as the service knows it."""
    held = holder.held()
    return Replica(
        name=replica.name,
        device=replica.device,
        model=replica.model,
        key_algorithm=replica.key_algorithm,
        layout=replica.layout,
        slots=replica.slot_count,
        namespace=generation.namespace,
        generation=generation.number,
        weights_version=generation.weights_version,
        root_of=replica.namespace,
        holder=holder,
        workers=held.workers,
        header_namespace=replica.namespace(FIRST_GENERATION)[:NAMESPACE_BYTES],
        host_geometry=None if config.host is None else _host_geometry(config.host, replica),
        write_policy=WritePolicy(replica.write_policy),
        memory=held.memory,
        cuda_ordinals=replica.cuda_ordinals,
        cuda_devices=memory.devices,
        is_kept=memory.pool is not None and memory.pool.is_kept,
        headers=held.headers,
    )


def _host_geometry(host: HostConfig, replica: ReplicaConfig) -> HostGeometry:
    block_bytes = pool_geometry(replica.layout, replica.slot_count).slot_bytes
    return HostGeometry(
        slabs=host.slabs,
        slab_bytes=host.slab_bytes,
        shards=replica.shards,
        block_bytes=block_bytes,
        replicated=replica.layout.replicated,
    )


def verify(config: Config) -> Verify:
    """Which loaded blocks are compared with their checksums."""
    return Verify.NEVER if config.host is None else Verify(config.host.verify)


def _on_worker_lost(news: News, replica: str, shard: ShardIndex, reason: str) -> None:
    fields = {"replica": replica, "shard": shard, "reason": reason}
    _log.error("replica %(replica)s lost the worker of shard %(shard)d; its cache stays: %(reason)s", fields)
    news.tell(WorkerDied(replica))


class News:
    """Events about workers, which may die while others still start: the service hears of them when it is there."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._missed: list[Callable[[Service], None]] = []

    def tell(self, event: Event) -> None:
        """Something happened."""
        self._tell(lambda service: service.on_event(event))

    def memory_gone(self, replica: str) -> None:
        """A device works again, and has lost the memory of a replica."""
        self._tell(lambda service: service.on_memory_gone(replica))

    def tell_to(self, service: Service) -> None:
        """From now on, and what has happened already."""
        self._service = service
        for tell in self._missed:
            tell(service)
        self._missed.clear()

    def _tell(self, tell: Callable[[Service], None]) -> None:
        if self._service is None:
            self._missed.append(tell)
        else:
            tell(self._service)
