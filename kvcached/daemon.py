"""The composition root: builds every part, starts them in order, waits for a signal, stops them in reverse.

Start: run directory → host pool → workers (all at once) → attach socket → RPC socket → ready. Whatever fails, what was
started before it is ended, and nothing half-started stays.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import uvloop

from kvcached.attach.server import AttachServer
from kvcached.attached_admission import HostShare
from kvcached.books import Shelf
from kvcached.config import Config, ReplicaConfig
from kvcached.config_host import HostConfig
from kvcached.core.answers import PoolSpec
from kvcached.core.cache import Cache
from kvcached.core.events import Event, PoolRestored, Ticked, WorkerDied
from kvcached.generations import FIRST_GENERATION, Generation, generation_of, write_policy_of
from kvcached.inheritance import Inheritance, inherit, ledger_file, take_over_timed
from kvcached.ledger import boot_id
from kvcached.notify import READY, STOPPING, notify
from kvcached.replica import Replica
from kvcached.rpc.server import RpcServer
from kvcached.service import Service
from kvcached.stopping import Stop
from kvcached.storage.process import end_earlier
from kvcached.storage_start import EARLIER_STORAGE_DEADLINE_S, start_storage, storage_spec
from kvcached.takeover import Takeover
from kvcached.worker.adoption import end_workers
from kvcached.worker.available import NotEnoughMemory, check_available
from kvcached.worker.geometry import pool_geometry
from kvcached.worker.host_memory import HostHeaders, HostMemory
from kvcached.worker.orders import ReplicaWorkers
from kvcached.worker.restart import ReplicaGroups
from kvcached.worker.supervisor import ReplicaPool
from kvcached_client.errors import RequestError
from kvcached_client.host_geometry import HostGeometry
from kvcached_client.host_header import NAMESPACE_BYTES
from kvcached_client.rundir import ATTACH_SOCKET_NAME, RPC_SOCKET_NAME, rpc_endpoint, socket_path
from kvcached_client.types import ShardIndex, WritePolicy

log = logging.getLogger(__name__)

#: Memory made resident before ready, all replicas together; the rest is touched when it is first used.
PRETOUCH_BYTES_MAX = 1 << 30


class StartError(Exception):
    """The daemon could not start; nothing of it is left."""


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends it at once. Returns the exit status.

    Raises:
        StartError: what failed, in words for the operator.
    """
    return uvloop.run(_serve(config))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


async def _serve(config: Config) -> int:
    loop = asyncio.get_running_loop()
    stop = Stop(config.shutdown_deadline_ms)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal)
    async with AsyncExitStack() as parts:
        epoch = _claim_run_dir(config.run_dir, parts)
        _raise_descriptor_limit()
        service = await _start(config, epoch, stop, parts)
        log.info("ready: %s in %s", ", ".join(_pools(config)), config.run_dir)
        notify(READY)
        await stop.asked.wait()
        log.info("stopping: up to %d ms; a second signal ends it at once", config.shutdown_deadline_ms)
        notify(STOPPING)
        await stop.wind_down(service)
    log.info("stopped")
    return 0


def _claim_run_dir(run_dir: Path, parts: AsyncExitStack) -> int:
    """Make the run directory this daemon's own; returns the epoch of this start, larger than any before it here."""
    try:
        run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        status = run_dir.stat()
        if status.st_uid != os.getuid():
            raise StartError(f"{run_dir} belongs to another user; choose another run_dir")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StartError(f"others may write into {run_dir}, and so replace its sockets; chmod go-w it")
        lock = os.open(run_dir / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        parts.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another daemon runs in {run_dir}; stop it, or choose another run_dir") from None
        before = os.pread(lock, 20, 0).strip()
        epoch = max(int(before) + 1 if before.isdigit() else 0, time.time_ns() // 1_000_000)
        os.pwrite(lock, f"{epoch:<20}".encode(), 0)
    except OSError as error:
        raise StartError(f"run directory {run_dir}: {error.strerror}; choose another run_dir") from None
    return epoch


def _raise_descriptor_limit() -> None:
    """A worker costs the daemon three dozen descriptors: with many shards more than the usual soft limit of 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _start(config: Config, epoch: int, stop: Stop, parts: AsyncExitStack) -> Service:
    news = _News()
    try:
        inherited = parts.enter_context(ExitStack())
        await end_earlier(config.run_dir, EARLIER_STORAGE_DEADLINE_S)
        inheritance = inherit(config.run_dir, config.host, inherited)
        host = inheritance.host
        _check_memory(config, inheritance)
        groups = {replica.name: _groups(config, replica, host, news) for replica in config.replica}
        for each in groups.values():
            parts.push_async_callback(stop.end_workers, each)
            stop.at_once.append(each.kill)
        for name in inheritance.replicas - groups.keys():  # not configured any more: nobody may write for them
            await end_workers(str(config.run_dir), name, inheritance.workers_of(name))
        starts = (each.start(inheritance.workers_of(name)) for name, each in groups.items())
        started = await asyncio.gather(*starts, return_exceptions=True)
        for error in started:
            if isinstance(error, BaseException):
                raise error
        # What an earlier daemon has stored is verified whenever it is read: it may not have ended in order.
        verify_loads = config.host is not None and (config.host.verify_loads or inheritance.is_kept)
        generations = {each.name: generation_of(each, inheritance.ledger) for each in config.replica}
        replicas = [
            _replica(config, each, generations[each.name], groups[each.name], epoch, verify_loads=verify_loads)
            for each in config.replica
        ]
        policies = {
            each.name: write_policy_of(each, generations[each.name], inheritance.ledger) for each in config.replica
        }
        cache = _cache(config, generations, policies, epoch)
        headers = None if host is None else HostHeaders(host)
        taken = take_over_timed(inheritance, cache, replicas, headers)
        share = None if host is None or config.attached is None else _share(host, verify_loads=verify_loads)
        shelf = Shelf(ledger_file(config.run_dir), boot_id(), inheritance.host_record())
        service = _service(config, cache, replicas, share, shelf, headers)
        news.tell_to(service)
        await start_storage(config, host, service, epoch, parts)
        _open_sockets(config, service, taken, parts)
    except (RequestError, NotEnoughMemory, OSError) as error:
        raise StartError(str(error)) from error
    _start_clock(service, config.heartbeat_interval_ms / 1000, parts)
    return service


def _pools(config: Config) -> list[str]:
    """What the daemon serves, in words."""
    names = [replica.name for replica in config.replica]
    if config.host is not None:
        names.append(f"host pool of {config.host.slabs} x {config.host.slab_bytes} bytes")
    if config.attached is not None:
        names.append("engines in attached mode")
    return names


def _check_memory(config: Config, inheritance: Inheritance) -> None:
    """Is there room for what is new? Memory that outlived an earlier daemon is taken already."""
    new = [replica for replica in config.replica if not inheritance.workers_of(replica.name)]
    needed = sum(replica.layout.pool_bytes(replica.slot_count) * replica.shards for replica in new)
    if config.host is None or inheritance.is_kept:
        check_available(needed, f"all {len(config.replica)} replicas")
    else:
        needed += config.host.slabs * config.host.slab_bytes
        check_available(needed, f"all {len(config.replica)} replicas and the host pool")


def _groups(config: Config, replica: ReplicaConfig, host: HostMemory | None, news: _News) -> ReplicaGroups:
    pool = ReplicaPool(
        replica.name,
        replica.layout,
        replica.slot_count,
        replica.namespace(FIRST_GENERATION),
        host,
        pretouch_bytes=PRETOUCH_BYTES_MAX // len(config.replica),
        ready_deadline_s=config.worker_ready_deadline_ms / 1000,
        grace_ms=config.worker_grace_ms,
    )
    return ReplicaGroups(
        pool,
        str(config.run_dir),
        on_lost=partial(_on_worker_lost, news, replica.name),
        on_restored=partial(news.tell, PoolRestored(replica.name)),
    )


def _replica(
    config: Config,
    replica: ReplicaConfig,
    generation: Generation,
    groups: ReplicaGroups,
    epoch: int,
    *,
    verify_loads: bool,
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
        workers=ReplicaWorkers(
            groups,
            shards=replica.shards,
            epoch=epoch,
            generation=generation.number,
            verify_loads=verify_loads,
        ),
        header_namespace=replica.namespace(FIRST_GENERATION)[:NAMESPACE_BYTES],
        host_geometry=None if config.host is None else _host_geometry(config.host, replica),
        write_policy=WritePolicy(replica.write_policy),
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


def _cache(
    config: Config, generations: Mapping[str, Generation], policies: Mapping[str, WritePolicy], epoch: int
) -> Cache:
    cache = Cache(
        [_pool_spec(config, each, generations[each.name], policies[each.name]) for each in config.replica],
        epoch=epoch,
        session_ttl_ms=config.session_ttl_ms,
        host_slabs=0 if config.host is None else config.host.slabs,
        spaces_max=0 if config.attached is None else config.attached.namespaces_max,
        pin_quota_percent=config.pin_quota_percent,
        host_eviction_policy="lru" if config.host is None else config.host.eviction_policy,
        storage=storage_spec(config),
    )
    if config.attached is not None:
        cache.attached.spaces.write_policy = WritePolicy(config.attached.write_policy)
    return cache


def _service(
    config: Config,
    cache: Cache,
    replicas: list[Replica],
    share: HostShare | None,
    shelf: Shelf,
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
        shelf=shelf,
    )


def _share(host: HostMemory, *, verify_loads: bool) -> HostShare:
    return HostShare(host.descriptor, host.slabs, host.slab_bytes, verify_loads=verify_loads)


def _pool_spec(config: Config, replica: ReplicaConfig, generation: Generation, write_policy: WritePolicy) -> PoolSpec:
    host = config.host
    return PoolSpec(
        replica.name,
        generation.namespace,
        replica.block_size,
        replica.slot_count,
        shards=replica.shards,
        host_slots_per_slab=0 if host is None else host.slots_per_slab(replica.layout),
        # What is demoted needs a place to go to.
        watermark=0 if host is None else replica.watermark_slots,
        load_threshold=replica.load_threshold_blocks,
        load_quota=replica.load_quota_blocks,
        write_policy=write_policy,
        eviction_policy=replica.eviction_policy,
    )


def _open_sockets(config: Config, service: Service, taken: Takeover, parts: AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    attach = AttachServer(socket_path(config.run_dir, ATTACH_SOCKET_NAME), service)
    attach.start()
    parts.callback(attach.close)
    service.watch = attach
    service.take_in(taken.shapes, taken.sessions)
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
    log.error("replica %s lost the worker of shard %d, and its cache with it: %s", replica, shard, reason)
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
