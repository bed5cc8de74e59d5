"""Storage from its configuration: what the core is told of it, and its process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from kvcached.config.schema import Config
from kvcached.config.tables import StorageConfig, StorageLayout
from kvcached.core.transfers.prefetch import PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from kvcached.memory.host_pool import HostMemory
from kvcached.process.child import KILL_DEADLINE_S
from kvcached.recovery.generations import READ_DEADLINE_S, Record, RecordFile, RecordWriter, in_layout, read_record
from kvcached.service.service import Service
from kvcached.service.storage_verbs import STOP_DEADLINE_S, StorageService, note_forgotten
from kvcached.shared_record import SharedRecord
from kvcached.storage.backend import DISK
from kvcached.storage.client import StorageLink
from kvcached.storage.messages import StorageConfig as ProcessConfig
from kvcached.storage.record_exchange import RecordExchange
from kvcached_client.errors import ErrorCode, request_error

#: Engines that wait for the next daemon have their hits in memory without storage.
TAKEOVER_PATIENCE_S: Final = 2.0

_log: Final = logging.getLogger(__name__)


def storage_spec(config: Config) -> StorageSpec:
    """What the core does about storage."""
    storage, host = config.storage, config.host
    if storage is None or host is None:
        return StorageSpec()
    return StorageSpec(
        BackupPolicy(storage.backup),
        storage.watermark_percent,
        PrefetchLimits(storage.prefetch_threshold_blocks, storage.prefetch_bytes_per_s, host.slab_bytes),
    )


async def recorded(config: Config, deadline_s: float | None = READ_DEADLINE_S) -> Record | None:
    """What is written down beside storage of the generations of namespaces; None where nothing is, or can be read.

    Args:
        config: of the daemon.
        deadline_s: how long its device is waited for; None = for ever.
    """
    storage = config.storage
    path = None if storage is None or config.host is None else storage.record_path
    record = None if path is None else await read_record(path, deadline_s)
    return record if record is None or storage is None else in_layout(record, storage.layout, config.replica)


async def start_storage(
    config: Config,
    host: HostMemory | None,
    service: Service,
    epoch: int,
    record: Record | None,
    parts: AsyncExitStack,
    *,
    is_takeover: bool,
) -> None:
    """Start the storage process, if one is configured, and wait a while until it works.

    The daemon starts without it where it does not work yet: that goes on being tried, and a start that fails could
    cost the blocks that are kept in memory.

    `record` is that of generations as it was found: it tells what storage has still to forget.

    Raises:
        DaemonFailure: it never will work with these settings, and nothing is kept that an end would lose.
    """
    storage = config.storage
    if storage is None or host is None:
        return
    exchange = RecordExchange()
    parts.callback(exchange.close)
    link = StorageLink(
        _process_config(storage, host),
        (host.descriptor, exchange.memory),
        config.run_dir,
        epoch,
        service.storage.format_of,
        service.on_event,
    )
    # The daemon ends, whatever hangs: the next one waits for whoever may still write here.
    parts.push_async_callback(link.detach, STOP_DEADLINE_S, KILL_DEADLINE_S)
    known = StorageService(
        link, storage.backend, storage.backup, storage.prefetch_timeout_ms, storage.prefetch_timeout_us_per_token
    )
    service.storage.storage = known
    exchange.use(link)
    if storage.backend == DISK:
        writer = None if storage.record_path is None else RecordFile(storage.record_path)
        keep_record(service, link, record, writer, storage.layout)
        link.before_ready = RecordReader(config, service, link).begin
    else:
        shared = SharedRecord(service, link, exchange, storage.layout, partial(_take_in, service, link))
        parts.callback(shared.close)
        keep_record(service, link, record, None, storage.layout)
        service.storage.storage = replace(known, record_age_ms=shared.age_ms, begin_anew=shared.begin_anew)
        shared.expect()
        link.before_ready = shared.begin
    link.attach()
    if await link.started(TAKEOVER_PATIENCE_S if is_takeover else config.worker_ready_deadline_ms / 1000):
        return
    if link.is_misconfigured and not is_takeover:  # else what a service refuses meanwhile would cost the memory
        raise request_error(
            ErrorCode.INTERNAL, f"storage {storage.backend!r}: {link.why}", "correct [storage], or remove it"
        )
    _log.error("storage %r does not work yet; the daemon starts without it: %s", storage.backend, link.why)


def keep_record(
    service: Service, link: StorageLink, record: Record | None, writer: RecordWriter | None, layout: StorageLayout
) -> None:
    """Go on where the record of generations ends: forget what is due, and have the record kept."""
    service.state_writer.recorder.forgets = lambda: link.due
    if writer is not None:
        service.state_writer.recorder.use(writer, layout)
    if record is not None:
        _take_in(service, link, record)


def follow_record(service: Service, link: StorageLink, record: Record) -> None:
    """Another daemon may have had storage since the record was read: clear and forget what it has."""
    service.clears.follow(record.by_root())
    _take_in(service, link, record)


def _take_in(service: Service, link: StorageLink, record: Record) -> None:
    service.state_writer.recorder.found(record)
    for prefix in record.forgets:
        link.forget(bytes.fromhex(prefix), note_forgotten)


class RecordReader:
    """Reads the record again whenever storage is locked for this daemon, and then lets it be used.

    Until then another daemon could have storage, and could write the record. A device that hangs is waited for: storage
    on it would not work, either. If the record is lost, and storage is not known to be empty, the namespaces are
    cleared: storage may have blocks that another daemon has cleared.
    """

    def __init__(self, config: Config, service: Service, link: StorageLink) -> None:
        self._config = config
        self._has_record = config.storage is not None and config.storage.record_path is not None
        self._service = service
        self._link = link
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, go_on: Callable[[], None]) -> None:
        """Begin to read, and call `go_on` afterwards."""
        task = asyncio.get_running_loop().create_task(self._read(go_on))
        self._tasks.add(task)
        task.add_done_callback(self._over)

    async def _read(self, go_on: Callable[[], None]) -> None:
        record = await recorded(self._config, None)
        if record is not None:
            follow_record(self._service, self._link, record)
        elif self._has_record and self._link.usage.blocks:
            self._service.clears.lose_record()
        go_on()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("internal error; storage is not used: its record cannot be followed", exc_info=error)


def _process_config(storage: StorageConfig, host: HostMemory) -> ProcessConfig:
    return ProcessConfig(
        backend=storage.backend,
        settings=storage.settings,
        local_disk=storage.local_disk,
        key_file="" if storage.key_file is None else str(storage.key_file),
        timeout_s=storage.timeout_ms / 1000,
        host_bytes=host.slabs * host.slab_bytes,
    )
