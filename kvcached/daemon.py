"""The composition root: builds every part, starts them in order, waits for a signal, stops them in reverse.

Start: run directory → pools → workers (all at once) → attach socket → RPC socket → ready. Whatever fails, what was
started before it is ended, and nothing half-started stays.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fnmatch
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import uvloop

from kvcached.build import build_cache
from kvcached.config.machine import LimitTooLow, memory_needed, raise_limits
from kvcached.config.replica import ReplicaConfig
from kvcached.config.schema import Config
from kvcached.config.tables import HostConfig
from kvcached.core.cache import Cache
from kvcached.core.messages import Event, PoolRestored, Ticked, WorkerDied
from kvcached.core.namespaces import Edition, Generations
from kvcached.garbage import only_young
from kvcached.memory.available import NotEnoughMemory, check_available
from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import HostHeaders, HostMemory
from kvcached.process.earlier import end_earlier
from kvcached.recovery.device_pools import DevicePool
from kvcached.recovery.fd_store import STOPPING, notify
from kvcached.recovery.generations import (
    FIRST_GENERATION,
    RANDOM_BITS,
    Generation,
    editions_of,
    first_of,
    generation_of,
    write_policy_of,
)
from kvcached.recovery.run_dir import RunDirUnusable, claim_run_dir
from kvcached.recovery.state_file import boot_id
from kvcached.recovery.takeover import Inheritance, inherit, ledger_file, take_over_timed
from kvcached.recovery.watchdog import Pings
from kvcached.server.attach import AttachServer
from kvcached.server.rpc import RpcServer
from kvcached.service.offload_admission import HostShare
from kvcached.service.replica import Replica
from kvcached.service.service import Service
from kvcached.service.state_writer import StatePlace
from kvcached.stopping import Stop
from kvcached.storage.process import LOCK_NAME as STORAGE_LOCK_NAME
from kvcached.storage.process import MODULE as STORAGE_MODULE
from kvcached.storage_start import EARLIER_STORAGE_DEADLINE_S, recorded, start_storage
from kvcached.worker.client import WorkerPool
from kvcached.worker.group import KILL_DEADLINE_S, LOCK_PATTERN, ReplicaPool
from kvcached.worker.group import MODULE as WORKER_MODULE
from kvcached_client.blocks.header import NAMESPACE_BYTES
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.errors import DeviceError, RequestError
from kvcached_client.transport.run_dir import ATTACH_SOCKET_NAME, RPC_SOCKET_NAME, rpc_endpoint, socket_path
from kvcached_client.types import ShardIndex, Verify, WritePolicy

log = logging.getLogger(__name__)

#: Memory made resident before ready, all replicas together; the rest is touched when it is first used.
PRETOUCH_BYTES_MAX = 1 << 30
_STDERR = 2


class StartError(Exception):
    """The daemon could not start; nothing of it is left."""


class LedgerUnusable(Exception):
    """A start failed with what an earlier daemon left, and may succeed without it."""


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends it at once. Returns the exit status.

    Raises:
        StartError: what failed, in words for the operator.
    """
    faulthandler.enable(_STDERR)  # a manager ends a daemon that hangs by SIGABRT: the log then says where it hung
    try:
        raise_limits(config)  # the event loop itself needs some descriptors
        epoch, held = claim_run_dir(config.run_dir)
    except (LimitTooLow, RunDirUnusable) as error:
        raise StartError(str(error)) from None
    with held:
        return uvloop.run(_serve(config, epoch))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


async def _serve(config: Config, epoch: int) -> int:
    loop = asyncio.get_running_loop()
    stop = Stop(config.shutdown_deadline_ms)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal)
    loop.add_signal_handler(signal.SIGHUP, _on_hangup)
    async with AsyncExitStack() as parts:
        pings = Pings()
        parts.callback(pings.close)
        service = await _started(config, epoch, stop, parts)
        log.info("ready: %s in %s", ", ".join(_pools(config)), config.run_dir)
        pings.ready()
        await stop.asked.wait()
        log.info("stopping: up to %d ms; a second signal ends it at once", config.shutdown_deadline_ms)
        notify(STOPPING)
        await stop.wind_down(service)
    log.info("stopped")
    return 0


def _on_hangup() -> None:
    log.warning(
        "SIGHUP does nothing: the configuration is read at the start only; `systemctl restart`, or SIGHUP to "
        "`kvcached supervise`, starts the daemon again and keeps the host pool"
    )


async def _started(config: Config, epoch: int, stop: Stop, parts: AsyncExitStack) -> Service:
    """Start; once more without what an earlier daemon left where that makes the first start fail."""
    try:
        return await _start_whole(config, epoch, stop, parts)
    except LedgerUnusable as error:
        log.error("the memory of the previous daemon cannot be taken over, and is dropped: %s", error)  # noqa: TRY400
        log.debug("the reason", exc_info=error)
    stop.at_once.clear()
    ledger_file(config.run_dir).remove()
    return await _start_whole(config, epoch, stop, parts)


async def _start_whole(config: Config, epoch: int, stop: Stop, parts: AsyncExitStack) -> Service:
    """Start everything, or nothing."""
    async with AsyncExitStack() as attempt:
        service = await _start(config, epoch, stop, attempt)
        parts.push_async_callback(attempt.pop_all().aclose)
    return service


async def _start(config: Config, epoch: int, stop: Stop, parts: AsyncExitStack) -> Service:
    news, inheritance = _News(), None
    try:
        inherited = parts.enter_context(ExitStack())
        await end_earlier(config.run_dir / STORAGE_LOCK_NAME, STORAGE_MODULE, EARLIER_STORAGE_DEADLINE_S)
        await _end_earlier_workers(config.run_dir)
        inheritance = inherit(config.run_dir, config.host, config.replica, inherited)
        host, devices = inheritance.host, inheritance.devices
        _check_memory(config, inheritance)
        record, first = await recorded(config), first_of(epoch, secrets.randbits(RANDOM_BITS))
        editions = editions_of(record, inheritance.ledger)
        generations = {each.name: generation_of(each, editions, first) for each in config.replica}
        editions |= {each.namespace: Edition(each.number, each.weights_version) for each in generations.values()}
        workers = {
            each.name: _workers(
                config, each, devices[each.name].shards, host, news,
                epoch=epoch, generation=generations[each.name].number,
            )
            for each in config.replica
        }  # fmt: skip
        for each in workers.values():
            parts.push_async_callback(stop.end_workers, each)
            stop.at_once.append(each.kill)
        await _start_workers(workers.values())
        replicas = [
            _replica(config, each, generations[each.name], devices[each.name], workers[each.name])
            for each in config.replica
        ]
        policies = {
            each.name: write_policy_of(each, generations[each.name], inheritance.ledger) for each in config.replica
        }
        cache = build_cache(config, generations, policies, epoch, Generations(first + 1, editions))
        headers = None if host is None else HostHeaders(host)
        taken = take_over_timed(inheritance, cache, replicas, headers)
        share = None if host is None or config.offload is None else _share(config, host)
        state_place = StatePlace(ledger_file(config.run_dir), boot_id(), inheritance.host_record())
        service = _service(config, cache, replicas, share, state_place, headers)
        attach = AttachServer(socket_path(config.run_dir, ATTACH_SOCKET_NAME), service)
        service.watch = attach
        # Before any event: an event writes the ledger, and a ledger without these would leave their slots to anybody.
        service.take_in(taken.shapes, taken.sessions)
        news.tell_to(service)
        is_takeover = inheritance.is_kept or any(each.is_kept for each in replicas)
        await start_storage(config, host, service, epoch, record, parts, is_takeover=is_takeover)
        _open_sockets(config, service, attach, parts)
    except (RequestError, NotEnoughMemory, DeviceError, OSError) as error:
        raise StartError(str(error)) from error
    except Exception as error:
        if inheritance is None or inheritance.ledger is None:
            raise
        raise LedgerUnusable(f"{type(error).__name__}: {error}") from error
    parts.enter_context(only_young())
    _start_clock(service, config.heartbeat_interval_ms / 1000, parts)
    return service


async def _end_earlier_workers(run_dir: Path) -> None:
    """Confirm the deaths of an earlier daemon's workers: until then they may write into the pools that it has left."""
    locks = fnmatch.filter(os.listdir(run_dir), LOCK_PATTERN)  # noqa: PTH208
    await asyncio.gather(*(end_earlier(run_dir / lock, WORKER_MODULE, KILL_DEADLINE_S) for lock in locks))


async def _start_workers(workers: Iterable[WorkerPool]) -> None:
    """Start all workers at once. The first error is raised when every start is over."""
    for error in await asyncio.gather(*(each.open() for each in workers), return_exceptions=True):
        if isinstance(error, BaseException):
            raise error


def _pools(config: Config) -> list[str]:
    """What the daemon serves, in words."""
    names = [replica.name for replica in config.replica]
    if config.host is not None:
        names.append(f"host pool of {config.host.slabs} x {config.host.slab_bytes} bytes")
    if config.offload is not None:
        names.append("engines in offload mode")
    return names


def _check_memory(config: Config, inheritance: Inheritance) -> None:
    """Is there room for what is new? Memory that outlived an earlier daemon is taken already."""
    new = [replica for replica in config.replica if not inheritance.devices[replica.name].is_kept]
    is_host_new = config.host is not None and not inheritance.is_kept
    needed = config.model_copy(update={"replica": tuple(new), "host": config.host if is_host_new else None})
    size_bytes, names = memory_needed(needed)
    check_available(size_bytes, f"the configuration ({names})")


def _workers(
    config: Config,
    replica: ReplicaConfig,
    memory: tuple[ShardMemory, ...],
    host: HostMemory | None,
    news: _News,
    *,
    epoch: int,
    generation: int,
) -> WorkerPool:
    pool = ReplicaPool(
        replica.name,
        replica.layout,
        replica.slot_count,
        replica.namespace(FIRST_GENERATION),
        memory,
        host,
        pretouch_bytes=PRETOUCH_BYTES_MAX // len(config.replica),
        ready_deadline_s=config.worker_ready_deadline_ms / 1000,
    )
    return WorkerPool(
        pool,
        str(config.run_dir),
        on_lost=partial(_on_worker_lost, news, replica.name),
        on_restored=partial(news.tell, PoolRestored(replica.name)),
        epoch=epoch,
        generation=generation,
        verify=_verify(config),
    )


def _replica(
    config: Config,
    replica: ReplicaConfig,
    generation: Generation,
    device: DevicePool,
    workers: WorkerPool,
) -> Replica:
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
        workers=workers,
        header_namespace=replica.namespace(FIRST_GENERATION)[:NAMESPACE_BYTES],
        host_geometry=None if config.host is None else _host_geometry(config.host, replica),
        write_policy=WritePolicy(replica.write_policy),
        memory=device.identities,
        cuda_ordinals=replica.cuda_ordinals,
        cuda_devices=device.cuda_devices,
        is_kept=device.is_kept,
        headers=device.headers,
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


def _service(
    config: Config,
    cache: Cache,
    replicas: list[Replica],
    share: HostShare | None,
    state_place: StatePlace,
    headers: HostHeaders | None,
) -> Service:
    return Service(
        cache,
        replicas,
        now_ms=_now_ms,
        endpoint=rpc_endpoint(config.run_dir),
        heartbeat_interval_ms=config.heartbeat_interval_ms,
        answers_kept_per_session=config.replies_kept_per_session,
        share=share,
        headers=headers,
        state_place=state_place,
    )


def _share(config: Config, host: HostMemory) -> HostShare:
    return HostShare(host.descriptor, host.slabs, host.slab_bytes, _verify(config))


def _verify(config: Config) -> Verify:
    return Verify.NEVER if config.host is None else Verify(config.host.verify)


def _open_sockets(config: Config, service: Service, attach: AttachServer, parts: AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    parts.callback(attach.close)
    attach.start()
    rpc = RpcServer(Path(socket_path(config.run_dir, RPC_SOCKET_NAME)), service)
    parts.callback(rpc.close)
    parts.callback(service.close)
    parts.callback(rpc.serve_rest)
    rpc.start(loop)


def _start_clock(service: Service, interval_s: float, parts: AsyncExitStack) -> None:
    """Tell the core the time, often enough to expire a session soon after its TTL."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(0, lambda: None)

    def tick() -> None:
        nonlocal timer
        timer = loop.call_later(interval_s, tick)
        service.on_event(Ticked(_now_ms()))

    def stop() -> None:
        timer.cancel()

    tick()
    parts.callback(stop)


def _on_worker_lost(news: _News, replica: str, shard: ShardIndex, reason: str) -> None:
    log.error("replica %s lost the worker of shard %d; its cache stays: %s", replica, shard, reason)
    news.tell(WorkerDied(replica))


class _News:
    """Events about workers, which may die while others still start: the service hears of them when it is there."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._missed: list[Event] = []

    def tell(self, event: Event) -> None:
        """Something happened."""
        if self._service is None:
            self._missed.append(event)
        else:
            self._service.on_event(event)

    def tell_to(self, service: Service) -> None:
        """From now on, and what has happened already."""
        self._service = service
        for event in self._missed:
            service.on_event(event)
        self._missed.clear()
