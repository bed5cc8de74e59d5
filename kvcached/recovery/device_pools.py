"""The memory of device pools: what the service manager has kept of it, or new memory, given to the manager to keep."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Final, NamedTuple

from kvcached.config.replica import ReplicaConfig
from kvcached.memory.device_headers import DeviceHeaders, headers_bytes
from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import MemoryIdentity
from kvcached.memory.sealed import memory_fault
from kvcached.recovery.fd_store import remove, store
from kvcached.recovery.state_file import Ledger, ReplicaRecord
from kvcached_client.blocks.pages import pool_geometry

#: What the service manager calls a shard's memory: this, the names of its replica and its shard.
DEVICE_MEMORY_PREFIX: Final = "device-"
#: And that of the headers of a replica's slots: this and its name.
DEVICE_HEADERS_PREFIX: Final = "headers-"

_log: Final = logging.getLogger(__name__)


class DevicePool(NamedTuple):
    """The memory of a replica.

    Attributes:
        shards: in their order.
        headers: of its slots; they name blocks only where they are those that the ledger is about.
        is_kept: the shards are those that the ledger is about, with what engines had written.
    """

    shards: tuple[ShardMemory, ...]
    headers: DeviceHeaders
    is_kept: bool


class KeptDevice(NamedTuple):
    """Descriptors of a replica's memory that the service manager has kept.

    Attributes:
        shards: in their order.
        headers: None where they were not kept.
    """

    shards: list[int]
    headers: int | None


def kept_device(replica: ReplicaConfig, found: dict[str, list[int]], ledger: Ledger | None) -> KeptDevice | None:
    """The descriptors of a replica's memory, taken out of `found`; None where it gets new memory."""
    names = _names(replica)
    kept = [found[name][0] for name in names if name in found]
    record = None if ledger is None else next((each for each in ledger.replicas if each.name == replica.name), None)
    if record is None or len(kept) < len(names) or not _is_recorded(replica, kept, record):
        return None
    for name in names:
        _take(found, name)
    return KeptDevice(kept, _kept_headers(replica, found, record))


def device_pool(replica: ReplicaConfig, kept: KeptDevice | None, parts: ExitStack) -> DevicePool:
    """A replica's memory, which `parts` closes: what was kept, or where that is None new memory, to be kept.

    Raises:
        OSError: the kernel refused one of the steps.
    """
    shards = []
    for shard, name in enumerate(_names(replica)):
        called, size_bytes = f"kvcached-{replica.name}-{shard}", _shard_bytes(replica)
        if kept is None:
            memory = ShardMemory.make(called, size_bytes)
            remove(name)
            store(name, memory.descriptor)
        else:
            memory = ShardMemory(called, kept.shards[shard], size_bytes)
        parts.callback(memory.close)
        shards.append(memory)
    headers = _headers(replica, None if kept is None else kept.headers)
    parts.callback(headers.close)
    return DevicePool(tuple(shards), headers, kept is not None)


def _headers(replica: ReplicaConfig, kept: int | None) -> DeviceHeaders:
    if kept is not None:
        return DeviceHeaders(kept, replica.slot_count)
    headers = DeviceHeaders.make(f"kvcached-{replica.name}-headers", replica.slot_count)
    remove(DEVICE_HEADERS_PREFIX + replica.name)
    store(DEVICE_HEADERS_PREFIX + replica.name, headers.descriptor)
    return headers


def _kept_headers(replica: ReplicaConfig, found: dict[str, list[int]], record: ReplicaRecord) -> int | None:
    """The descriptor of the headers that belong to kept memory, taken out of `found`; None where there is none."""
    name = DEVICE_HEADERS_PREFIX + replica.name
    if name not in found or record.headers is None:
        return None
    descriptor, recorded = found[name][0], record.headers
    if memory_fault(descriptor, headers_bytes(replica.slot_count)) or MemoryIdentity.of(descriptor) != recorded:
        _log.warning("the headers of replica %s that were kept are not the ledger's: no block is found", replica.name)
        return None
    _take(found, name)
    return descriptor


def _take(found: dict[str, list[int]], name: str) -> None:
    """The first descriptor of a name is used; others are not needed."""
    for other in found.pop(name)[1:]:
        os.close(other)


def _names(replica: ReplicaConfig) -> list[str]:
    """What the service manager calls the memory of each shard."""
    return [f"{DEVICE_MEMORY_PREFIX}{replica.name}-{shard}" for shard in range(replica.shards)]


def _shard_bytes(replica: ReplicaConfig) -> int:
    return pool_geometry(replica.layout, replica.slot_count).size_bytes


def _is_recorded(replica: ReplicaConfig, kept: list[int], record: ReplicaRecord) -> bool:
    """Whether these descriptors are the memory that a record is about, and what is configured now."""
    if (record.fingerprint, record.slots) != (replica.layout.fingerprint(), replica.slot_count):
        return False
    recorded = list(record.memory)
    if any(memory_fault(each, _shard_bytes(replica)) for each in kept) or recorded != [
        MemoryIdentity.of(each) for each in kept
    ]:
        _log.warning("the device pool of replica %s that was kept is not the ledger's, and is not used", replica.name)
        return False
    return True
