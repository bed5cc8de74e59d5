"""The memory of device pools: what the service manager has kept of it, or new memory, given to the manager to keep."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Final, NamedTuple

from kvcached.config.replica import ReplicaConfig
from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.host_pool import MemoryIdentity
from kvcached.memory.sealed import memory_fault
from kvcached.recovery.fd_store import remove, store
from kvcached.recovery.state_file import Ledger
from kvcached_client.blocks.pages import pool_geometry

#: What the service manager calls a shard's memory: this, the names of its replica and its shard.
DEVICE_MEMORY_PREFIX: Final = "device-"

_log: Final = logging.getLogger(__name__)


class DevicePool(NamedTuple):
    """The memory of a replica.

    Attributes:
        shards: in their order.
        is_kept: it is the one that the ledger is about, with what engines had written.
    """

    shards: tuple[ShardMemory, ...]
    is_kept: bool


def kept_device(replica: ReplicaConfig, found: dict[str, list[int]], ledger: Ledger | None) -> list[int] | None:
    """The descriptors of a replica's shards, taken out of `found`; None where it gets new memory."""
    names = _names(replica)
    kept = [found[name][0] for name in names if name in found]
    if len(kept) < len(names) or not _is_recorded(replica, kept, ledger):
        return None
    for name in names:
        for other in found.pop(name)[1:]:
            os.close(other)
    return kept


def device_pool(replica: ReplicaConfig, kept: list[int] | None, parts: ExitStack) -> DevicePool:
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
            memory = ShardMemory(called, kept[shard], size_bytes)
        parts.callback(memory.close)
        shards.append(memory)
    return DevicePool(tuple(shards), kept is not None)


def _names(replica: ReplicaConfig) -> list[str]:
    """What the service manager calls the memory of each shard."""
    return [f"{DEVICE_MEMORY_PREFIX}{replica.name}-{shard}" for shard in range(replica.shards)]


def _shard_bytes(replica: ReplicaConfig) -> int:
    return pool_geometry(replica.layout, replica.slot_count).size_bytes


def _is_recorded(replica: ReplicaConfig, kept: list[int], ledger: Ledger | None) -> bool:
    """Whether these descriptors are the memory that the ledger is about, and what is configured now."""
    record = None if ledger is None else next((each for each in ledger.replicas if each.name == replica.name), None)
    if record is None or (record.fingerprint, record.slots) != (replica.layout.fingerprint(), replica.slot_count):
        return False
    recorded = [(each.device, each.inode) for each in record.memory]
    if any(memory_fault(each, _shard_bytes(replica)) for each in kept) or recorded != [
        MemoryIdentity.of(each) for each in kept
    ]:
        _log.warning("the device pool of replica %s that was kept is not the ledger's, and is not used", replica.name)
        return False
    return True
