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
from typing import NamedTuple

import uvloop

from kvcached import is_core_compiled
from kvcached.build import build_cache
from kvcached.config.machine import LimitTooLow, raise_limits
from kvcached.config.schema import Config
from kvcached.core.cache import Cache
from kvcached.core.generations import RANDOM_BITS, Edition, Generations
from kvcached.core.messages import Ticked
from kvcached.doors import open_events, open_http, open_tcp
from kvcached.events.token_book import TokenBook
from kvcached.events_start import open_book
from kvcached.garbage import only_young
from kvcached.memory.available import NotEnoughMemory
from kvcached.memory.dropped import DroppedMemory
from kvcached.memory.host_pool import HostHeaders, HostMemory
from kvcached.memory_start import check_memory
from kvcached.process.access import Access
from kvcached.process.earlier import end_earlier
from kvcached.process.file_access import PASS, let_in
from kvcached.process.notify import STOPPING, notify
from kvcached.process.seqpacket import SocketFile
from kvcached.recovery.engine_pools import EnginePools
from kvcached.recovery.fd_store import is_anything_stored
from kvcached.recovery.generations import (
    editions_of,
    first_of,
    generation_of,
    provisional_roots,
    write_policy_of,
)
from kvcached.recovery.inheritance import inherit, ledger_file, take_over_timed
from kvcached.recovery.run_dir import RunDirUnusable, claim_run_dir
from kvcached.recovery.state_file import boot_id
from kvcached.recovery.watchdog import Pings
from kvcached.replica_start import Holder, News, new_replica, new_workers, verify
from kvcached.server.attach import AttachServer
from kvcached.server.local import LocalDoor
from kvcached.server.rpc import RpcServer
from kvcached.service.offload.admission import HostShare
from kvcached.service.replica import Replica
from kvcached.service.service import Service
from kvcached.service.state_writer import StatePlace
from kvcached.start_errors import LedgerUnusable, StartError, start_error
from kvcached.stopping import Stop
from kvcached.storage import process as storage_process
from kvcached.storage_start import recorded, start_storage
from kvcached.worker.cuda_maker import AT_ONCE_MAX, make_on_device
from kvcached.worker.group import LOCK_PATTERN
from kvcached.worker.group import MODULE as WORKER_MODULE
from kvcached_client.errors import DeviceError, RequestError
from kvcached_client.transport.run_dir import ATTACH_SOCKET_NAME, RPC_SOCKET_NAME, rpc_endpoint, socket_path

log = logging.getLogger(__name__)

_STDERR = 2


class _Earlier(NamedTuple):
    """What earlier daemons have left, and a start that fails leaves to the second one.

    Attributes:
        engine_pools: those that were kept, once the first start has taken them over.
        dropped: host pools that this start has dropped.
        is_anything: whether the service manager has kept any memory.
    """

    engine_pools: EnginePools
    dropped: DroppedMemory
    is_anything: bool


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
    # Until it serves, it ends at a signal as by SIGKILL: nobody waits for it, and what it holds outlives any death.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loop.add_signal_handler(signal.SIGHUP, _on_hangup)
    async with AsyncExitStack() as parts:
        pings = Pings()
        parts.callback(pings.close)
        service = await _started(config, epoch, stop, parts)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.on_signal)
        if is_core_compiled():
            log.info("the core is compiled")
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
    """Start; once more without what an earlier daemon left where that makes the first start fail.

    Engine pools stay for the second start: they need no ledger, and a pool of which this daemon did not know would
    come back to the next one with blocks that were cleared meanwhile.
    """
    limit_bytes = 0 if config.offload is None else config.offload.device_memory_bytes
    turns = asyncio.Semaphore(AT_ONCE_MAX)
    engine_pools = EnginePools(limit_bytes, make_on_device=partial(make_on_device, turns))
    earlier = _Earlier(engine_pools, DroppedMemory(), is_anything_stored())
    parts.callback(earlier.engine_pools.close)
    parts.callback(earlier.dropped.close)
    try:
        return await _start_whole(config, epoch, stop, earlier, parts)
    except LedgerUnusable as error:
        log.error("the memory of the previous daemon cannot be taken over, and is dropped: %s", error)  # noqa: TRY400
        log.debug("the reason", exc_info=error)
    stop.at_once.clear()
    ledger_file(config.run_dir).remove()
    return await _start_whole(config, epoch, stop, earlier, parts)


async def _start_whole(config: Config, epoch: int, stop: Stop, earlier: _Earlier, parts: AsyncExitStack) -> Service:
    """Start everything, or nothing."""
    async with AsyncExitStack() as attempt:
        service = await _start(config, epoch, stop, earlier, attempt)
        parts.push_async_callback(attempt.pop_all().aclose)
    return service


async def _start(config: Config, epoch: int, stop: Stop, earlier: _Earlier, parts: AsyncExitStack) -> Service:
    news, inheritance = News(), None
    try:
        inherited = parts.enter_context(ExitStack())
        await end_earlier(config.run_dir / storage_process.LOCK_NAME, storage_process.MODULE)
        await _end_earlier_workers(config.run_dir)
        inheritance = await inherit(
            config.run_dir, config.host, config.replica, earlier.engine_pools, earlier.dropped, inherited,
            has_offload=config.offload is not None,
        )  # fmt: skip
        host, devices = inheritance.host, inheritance.devices
        await check_memory(config, inheritance, earlier.dropped, is_anything=earlier.is_anything)
        record, first = await recorded(config), first_of(epoch, secrets.randbits(RANDOM_BITS))
        editions = editions_of(record, inheritance.ledger, canonical=config.has_canonical_storage)
        generations = {each.name: generation_of(each, editions, first) for each in config.replica}
        editions |= {each.namespace: Edition(each.number, each.weights_version) for each in generations.values()}
        is_shared = config.storage is not None and config.storage.is_shared
        provisional = provisional_roots(generations.values(), first, editions, inheritance.ledger, is_shared=is_shared)
        holders = {
            each.name: Holder(
                each.name, devices[each.name], partial(new_workers, config, each, host, news, epoch),
                stop.end_workers, generations[each.name].number,
            )
            for each in config.replica
        }  # fmt: skip
        for holder in holders.values():
            parts.push_async_callback(holder.close)
            stop.at_once.append(holder.kill)
        await _start_workers(holders.values())
        replicas = [
            new_replica(config, each, generations[each.name], devices[each.name], holders[each.name])
            for each in config.replica
        ]
        policies = {
            each.name: write_policy_of(each, generations[each.name], inheritance.ledger) for each in config.replica
        }
        cache = build_cache(config, generations, policies, epoch, Generations(first + 1, editions, provisional))
        headers = None if host is None else HostHeaders(host)
        taken = take_over_timed(inheritance, cache, replicas, headers, canonical=config.has_canonical_storage)
        share = None if host is None or config.offload is None else _share(config, host, parts)
        layout = "engine" if config.storage is None else config.storage.layout
        state_place = StatePlace(ledger_file(config.run_dir), boot_id(), inheritance.host_record(), layout, is_shared)
        book = open_book(config, cache, inheritance.tokens, inherited)
        service = _service(config, cache, replicas, share, state_place, headers, earlier.engine_pools, book)
        attach = AttachServer(socket_path(config.run_dir, ATTACH_SOCKET_NAME), service, _access(config))
        service.watch = attach
        # Before any event: an event writes the ledger, and a ledger without these would leave their slots to anybody.
        service.take_in(taken.shapes, taken.sessions)
        for name in (name for name, memory in devices.items() if memory.lost is not None):
            service.wait_for_device(name)
        news.tell_to(service)
        # Memory alone is none: a start that failed may have left it new and empty.
        is_takeover = taken.is_any or bool(earlier.engine_pools.stats())
        await open_events(config, cache, service, book, parts, is_takeover=is_takeover)
        await start_storage(config, host, service, epoch, record, parts, is_takeover=is_takeover)
        open_tcp(config, service, parts, is_takeover=is_takeover)  # first: at the end it sends the last replies
        _open_sockets(config, service, attach, parts)
        open_http(config, service, attach, parts, is_takeover=is_takeover)
    except (RequestError, NotEnoughMemory, DeviceError, OSError) as error:
        raise start_error(error) from error
    except Exception as error:
        if inheritance is None or inheritance.ledger is None:
            raise
        inheritance.drop_host(earlier.dropped)
        raise LedgerUnusable(f"{type(error).__name__}: {error}") from error
    parts.push_async_callback(stop.note, state_place.file, epoch, replicas, service.health)
    parts.enter_context(only_young())
    _start_clock(service, config.heartbeat_interval_ms / 1000, parts)
    return service


async def _end_earlier_workers(run_dir: Path) -> None:
    """Confirm the deaths of an earlier daemon's workers: until then they may write into the pools that it has left."""
    locks = fnmatch.filter(os.listdir(run_dir), LOCK_PATTERN)  # noqa: PTH208
    await asyncio.gather(*(end_earlier(run_dir / lock, WORKER_MODULE) for lock in locks))


async def _start_workers(workers: Iterable[Holder]) -> None:
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


def _service(
    config: Config,
    cache: Cache,
    replicas: list[Replica],
    share: HostShare | None,
    state_place: StatePlace,
    headers: HostHeaders | None,
    engine_pools: EnginePools,
    book: TokenBook | None,
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
        engine_pools=engine_pools,
        book=book,
    )


def _share(config: Config, host: HostMemory, parts: AsyncExitStack) -> HostShare:
    read_only = host.open_read_only()
    parts.callback(os.close, read_only)
    return HostShare(
        host.descriptor,
        read_only,
        host.slabs,
        host.slab_bytes,
        verify(config),
        has_canonical_storage=config.has_canonical_storage,
    )


def _access(config: Config) -> Access:
    access = Access.of(config.access, (each.name for each in config.replica))
    for name, reason in access.unknown.items():
        log.warning("[access]: %r %s, and gets no access", name, reason)
    return access


def _open_sockets(config: Config, service: Service, attach: AttachServer, parts: AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    let_in(config.run_dir, attach.access.others(), PASS)
    parts.callback(attach.close)
    attach.start()
    rpc = RpcServer(LocalDoor(Path(socket_path(config.run_dir, RPC_SOCKET_NAME)), attach.access), service)
    parts.callback(rpc.close)
    parts.callback(service.close)
    parts.callback(rpc.serve_rest)
    rpc.start(loop)
    paths = [socket_path(config.run_dir, name) for name in (ATTACH_SOCKET_NAME, RPC_SOCKET_NAME)]
    service.health.sockets += [SocketFile.at(path) for path in paths]


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
