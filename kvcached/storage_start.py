"""Storage from its configuration: what the core is told of it, and its process."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from kvcached.config import Config
from kvcached.config_storage import StorageConfig
from kvcached.core.prefetch import PrefetchLimits
from kvcached.core.storage import StorageSpec
from kvcached.core.storage_state import BackupPolicy
from kvcached.service import Service
from kvcached.storage.link import StorageLink
from kvcached.storage.messages import StorageConfig as ProcessConfig
from kvcached.storage.process import LOCK_NAME, LOG_NAME
from kvcached.storage_verbs import STOP_DEADLINE_S, StorageService
from kvcached.worker.host_memory import HostMemory
from kvcached_client.errors import ErrorCode, request_error

#: The storage process of a daemon that died waits for its device at most.
EARLIER_STORAGE_DEADLINE_S: Final = 30.0


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


async def start_storage(
    config: Config, host: HostMemory | None, service: Service, epoch: int, parts: AsyncExitStack
) -> None:
    """Start the storage process, if one is configured, and wait until it works.

    Raises:
        DaemonFailure: it does not, for a reason that its configuration has to be changed for.
    """
    storage = config.storage
    if storage is None or host is None:
        return
    link = StorageLink(
        _process_config(config.run_dir, storage),
        host.descriptor,
        str(config.run_dir / LOG_NAME),
        epoch,
        service.storage.kind_of,
        service.on_event,
    )
    parts.push_async_callback(link.detach, STOP_DEADLINE_S)
    service.storage.storage = StorageService(
        link, storage.backend, storage.backup, storage.prefetch_timeout_ms, storage.prefetch_timeout_us_per_token
    )
    link.attach()
    if not await link.started(config.worker_ready_deadline_ms / 1000):
        raise request_error(
            ErrorCode.INTERNAL, f"storage {storage.backend!r}: {link.why}", "correct [storage], or remove it"
        )


def _process_config(run_dir: Path, storage: StorageConfig) -> ProcessConfig:
    return ProcessConfig(
        backend=storage.backend,
        settings=storage.settings,
        faults=storage.faults,
        key_file="" if storage.key_file is None else str(storage.key_file),
        lock_path=str(run_dir / LOCK_NAME),
        timeout_s=storage.timeout_ms / 1000,
    )
