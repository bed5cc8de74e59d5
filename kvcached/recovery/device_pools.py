"""The memory of device pools: memory that the service manager has kept, or new memory, handed to the manager to keep.

A memfd is identified by its inode. Memory that a CUDA driver exports has no such identity: a pool on CUDA devices is
the one that the ledger names if its headers are, because both are made together, and the manager gets the headers
first.
"""

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
from kvcached.worker.cuda_maker import make_cuda_memory
from kvcached_client.blocks.pages import pool_geometry

#: Under which name the service manager keeps a shard's memory: this prefix, the replica and the shard.
DEVICE_MEMORY_PREFIX: Final = "device-"
#: Under which name it keeps the headers of a replica's slots: this prefix and the replica.
DEVICE_HEADERS_PREFIX: Final = "headers-"

_log: Final = logging.getLogger(__name__)


class DevicePool(NamedTuple):
    """The memory of a replica.

    Attributes:
        shards: the memory of each shard.
        headers: those of its slots; they name blocks only if they are the ones that the ledger names.
        is_kept: the shards are the ones that the ledger names, and hold what engines have written.
    """

    shards: tuple[ShardMemory, ...]
    headers: DeviceHeaders
    is_kept: bool

    @property
    def identities(self) -> tuple[MemoryIdentity, ...]:
        """The memory of each shard as the next ledger names it."""
        return tuple(
            self.headers.identity if shard.device else MemoryIdentity.of(shard.descriptor) for shard in self.shards
        )

    @property
    def cuda_devices(self) -> tuple[str, ...]:
        """UUIDs of the CUDA devices that have the shards; none on a CPU."""
        return tuple(shard.device for shard in self.shards if shard.device)


class KeptDevice(NamedTuple):
    """Descriptors of a replica's memory that the service manager has kept.

    Attributes:
        shards: the memory of each shard.
        devices: the UUID of each shard's CUDA device; empty on a CPU.
        headers: those of its slots; None if they were not kept.
    """

    shards: list[int]
    devices: tuple[str, ...]
    headers: int | None


def kept_device(replica: ReplicaConfig, found: dict[str, list[int]], ledger: Ledger | None) -> KeptDevice | None:
    """The descriptors of a replica's memory, removed from `found`; None if the replica gets new memory."""
    names = _names(replica)
    kept = [found[name][0] for name in names if name in found]
    record = None if ledger is None else next((each for each in ledger.replicas if each.name == replica.name), None)
    if record is None or len(kept) < len(names) or not _is_recorded(replica, kept, record):
        return None
    headers = _kept_headers(replica, found, record)
    if headers is None and replica.cuda_ordinals:
        return None  # without a ledger nobody knows whose memory it is
    for name in names:
        _take(found, name)
    return KeptDevice(kept, record.cuda_devices or ("",) * replica.shards, headers)


def device_pool(replica: ReplicaConfig, kept: KeptDevice | None, parts: ExitStack) -> DevicePool:
    """A replica's memory, which `parts` closes: the kept memory, or if that is None, new memory, which is stored.

    Raises:
        OSError: the kernel refused one of the steps.
        DeviceError: a CUDA device refused, or does not exist.
    """
    if kept is None:
        for name in _names(replica):
            remove(name)
    headers = _headers(replica, None if kept is None else kept.headers)
    parts.callback(headers.close)
    shards = _new_shards(replica, parts) if kept is None else _kept_shards(replica, kept, parts)
    return DevicePool(shards, headers, kept is not None)


def _new_shards(replica: ReplicaConfig, parts: ExitStack) -> tuple[ShardMemory, ...]:
    size_bytes, shards = _shard_bytes(replica), []
    if replica.cuda_ordinals:
        for name, made in zip(_names(replica), make_cuda_memory(replica.cuda_ordinals, size_bytes), strict=True):
            shards.append(ShardMemory(_called(name), made.descriptor, size_bytes, made.device))
    else:
        shards = [ShardMemory.make(_called(name), size_bytes) for name in _names(replica)]
    for name, shard in zip(_names(replica), shards, strict=True):
        parts.callback(shard.close)
        store(name, shard.descriptor)
    return tuple(shards)


def _kept_shards(replica: ReplicaConfig, kept: KeptDevice, parts: ExitStack) -> tuple[ShardMemory, ...]:
    shards = []
    for name, descriptor, device in zip(_names(replica), kept.shards, kept.devices, strict=True):
        shards.append(ShardMemory(_called(name), descriptor, _shard_bytes(replica), device))
        parts.callback(shards[-1].close)
    return tuple(shards)


def _headers(replica: ReplicaConfig, kept: int | None) -> DeviceHeaders:
    if kept is not None:
        return DeviceHeaders(kept, replica.slot_count)
    headers = DeviceHeaders.make(f"kvcached-{replica.name}-headers", replica.slot_count)
    remove(DEVICE_HEADERS_PREFIX + replica.name)
    store(DEVICE_HEADERS_PREFIX + replica.name, headers.descriptor)
    return headers


def _kept_headers(replica: ReplicaConfig, found: dict[str, list[int]], record: ReplicaRecord) -> int | None:
    """The descriptor of the headers that belong to kept memory, removed from `found`; None if there is none."""
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
    """Take the first descriptor of each name; any others are not needed."""
    for other in found.pop(name)[1:]:
        os.close(other)


def _names(replica: ReplicaConfig) -> list[str]:
    """The name under which the service manager keeps each shard's memory."""
    return [f"{DEVICE_MEMORY_PREFIX}{replica.name}-{shard}" for shard in range(replica.shards)]


def _called(name: str) -> str:
    """The name of a shard's memory in the list of a process's mappings."""
    return f"kvcached-{name.removeprefix(DEVICE_MEMORY_PREFIX)}"


def _shard_bytes(replica: ReplicaConfig) -> int:
    return pool_geometry(replica.layout, replica.slot_count).size_bytes


def _is_recorded(replica: ReplicaConfig, kept: list[int], record: ReplicaRecord) -> bool:
    """Whether these descriptors are the memory that a record names, and match the present configuration."""
    configured = (replica.layout.fingerprint(), replica.slot_count, replica.cuda_ordinals)
    if (record.fingerprint, record.slots, record.cuda_ordinals) != configured or len(record.memory) != replica.shards:
        return False
    if replica.cuda_ordinals:
        return True
    recorded = list(record.memory)
    if any(memory_fault(each, _shard_bytes(replica)) for each in kept) or recorded != [
        MemoryIdentity.of(each) for each in kept
    ]:
        _log.warning("the device pool of replica %s that was kept is not the ledger's, and is not used", replica.name)
        return False
    return True
