"""The memory of device pools: memory that the service manager has kept, or new memory, handed to the manager to keep.

A memfd is identified by its inode. Memory that a CUDA driver exports has no such identity: a pool on CUDA devices is
the one that the ledger names if its headers are, because both are made together, and the manager gets the headers
first.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Final, NamedTuple, TypeAlias

from kvcached.config.replica import ReplicaConfig
from kvcached.core.slots.ranges import no_ranges
from kvcached.memory.available import check_available
from kvcached.memory.device_headers import DeviceHeaders, headers_bytes
from kvcached.memory.device_pool import DevicePool, ShardMemory
from kvcached.memory.host_pool import MemoryIdentity
from kvcached.memory.sealed import memory_fault
from kvcached.recovery.fd_store import remove, store, taken_in
from kvcached.recovery.state_file import Ledger, ReplicaRecord
from kvcached.worker.cuda_maker import AT_ONCE_MAX, MadeMemory, NoCudaMemory, WantedMemory, make_cuda_memory
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.errors import DeviceError

#: Under which name the service manager keeps a shard's memory: this prefix, the replica and the shard.
DEVICE_MEMORY_PREFIX: Final = "device-"
#: Under which name it keeps the headers of a replica's slots: this prefix and the replica.
DEVICE_HEADERS_PREFIX: Final = "headers-"

#: How a replica gets another device where nobody knows whether its own one is lost.
_MOVE: Final = (
    "check nvidia-smi and CUDA_VISIBLE_DEVICES; to use another device, stop the daemon, delete ledger.json in its run "
    "directory, and start it"
)

_log: Final = logging.getLogger(__name__)


class PoolMemory:
    """The memory of a configured replica, which may be given back and made anew.

    Args:
        replica: its configuration.
        pool: the memory of a start.
        devices: UUIDs of the CUDA devices that it had on this boot: new memory is of these again.
        lost: why a start has found no memory that it is to have.

    Attributes:
        pool: the memory; None while there is none.
        devices: UUIDs of the CUDA devices that have it, or had it last.
        has_served: it has had memory of CUDA devices on this boot, so that it may wait for these devices.
        lost: as above; None if the memory is there, or the replica sleeps.
    """

    def __init__(
        self,
        replica: ReplicaConfig,
        pool: DevicePool | None,
        devices: tuple[str, ...] = (),
        lost: NoCudaMemory | None = None,
        *,
        has_served: bool = False,
    ) -> None:
        self.pool = pool
        self.devices = devices if pool is None else pool.cuda_devices
        if lost is not None and not devices:
            self.devices = _numbered(replica, lost.listed)
        self.has_served = has_served
        self.lost = lost
        self._replica = replica

    async def make(self) -> DevicePool:
        """Make new memory where there is none.

        Raises:
            NotEnoughMemory: this machine has not so much left.
            OSError: the kernel refused one of the steps.
            DeviceError: a CUDA device refused, or does not exist.
        """
        replica = self._replica
        if replica.device == "cpu":
            check_available(replica.host_memory_bytes, f"replica {replica.name}")
        found, lost = await device_pools([replica], {replica.name: None}, {replica.name: self.devices})
        if lost:
            raise lost[replica.name]
        self.pool = found[replica.name]
        self.devices = self.pool.cuda_devices
        return self.pool

    async def give_back(self) -> None:
        """Clear the headers, have the service manager forget the memory, and close it. Nobody uses it any more."""
        if self.pool is not None:
            self.pool.headers.keep_only(no_ranges())
        self.close()
        for name in (*_names(self._replica), DEVICE_HEADERS_PREFIX + self._replica.name):
            remove(name)
        await taken_in()

    def close(self) -> None:
        """Close the memory, which the service manager goes on keeping."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None


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
    record = None if ledger is None else next((each for each in ledger.replicas if each.name == replica.name), None)
    if record is None or any(name not in found for name in names) or difference(replica, record):
        return None
    if replica.cuda_ordinals and _is_ambiguous(replica, found):
        return None
    kept = [recorded.among(found[name]) for name, recorded in zip(names, record.memory, strict=True)]
    if not replica.cuda_ordinals and not _is_recorded(replica, kept, record):
        return None
    headers = _kept_headers(replica, found, record)
    if headers is None and replica.cuda_ordinals:
        return None  # without a ledger nobody knows whose memory it is
    for name, descriptor in zip(names, kept, strict=True):
        _take(found, name, descriptor)
    return KeptDevice(kept, record.cuda_devices or ("",) * replica.shards, headers)


def served_devices(replicas: Sequence[ReplicaConfig], ledger: Ledger | None) -> dict[str, tuple[str, ...]]:
    """Which replicas have been configured on the same CUDA devices on this boot, and the UUIDs of those, if known."""
    records = {} if ledger is None else {record.name: record for record in ledger.replicas}
    return {
        each.name: records[each.name].cuda_devices
        for each in replicas
        if each.cuda_ordinals and each.name in records and records[each.name].cuda_ordinals == each.cuda_ordinals
    }


class OpenedPools(NamedTuple):
    """The memory of replicas.

    Attributes:
        pools: by the replica's name.
        lost: why a replica has none, by its name: one of its CUDA devices cannot be used.
    """

    pools: dict[str, DevicePool]
    lost: dict[str, NoCudaMemory]


async def device_pools(
    replicas: Sequence[ReplicaConfig],
    kept: Mapping[str, KeptDevice | None],
    served: Mapping[str, tuple[str, ...]],
    numbers: Mapping[str, int] | None = None,
) -> OpenedPools:
    """The memory of each replica, which is the caller's: the kept memory, or new memory, which is stored.

    First the manager gives back all that it was told to remove, so that there is room. New memory of all CUDA devices
    is made at the same time. A replica that has served before may have none, and so may one whose device is lost and
    has a UUID by which it will be known again. That a device which was never used is missing is an error.

    Args:
        replicas: those that are to have memory.
        kept: their kept memory, if any.
        served: as `served_devices`.
        numbers: of the last daemon's CUDA devices, by UUID, if a replica may have moved to others since.

    Raises:
        OSError: the kernel refused one of the steps.
        DeviceError: a CUDA device that was not used before refused, or does not exist.
    """
    new = [replica for replica in replicas if kept[replica.name] is None]
    for replica in new:
        for name in _names(replica):
            remove(name)
    await taken_in()
    with ExitStack() as parts:
        on_cuda, lost = await _all_on_cuda([each for each in new if each.cuda_ordinals], served, numbers, parts)
        pools = {
            each.name: _device_pool(each, kept[each.name], on_cuda.get(each.name), parts)
            for each in replicas
            if each.name not in lost
        }
        parts.pop_all()
    return OpenedPools(pools, lost)


_Shards: TypeAlias = dict[str, tuple[ShardMemory, ...]]


async def _all_on_cuda(
    replicas: Sequence[ReplicaConfig],
    served: Mapping[str, tuple[str, ...]],
    numbers: Mapping[str, int] | None,
    parts: ExitStack,
) -> tuple[_Shards, dict[str, NoCudaMemory]]:
    """New memory of replicas on CUDA devices, and why some have none."""
    turns = asyncio.Semaphore(AT_ONCE_MAX)
    outcomes = await asyncio.gather(
        *(_on_cuda(each, served.get(each.name, ()), numbers, turns, parts) for each in replicas),
        return_exceptions=True,
    )
    found: _Shards = {}
    lost: dict[str, NoCudaMemory] = {}
    for replica, outcome in zip(replicas, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            found[replica.name] = outcome
        elif not isinstance(outcome, NoCudaMemory):
            raise outcome
        elif replica.name in served or (outcome.is_lost and _numbered(replica, outcome.listed)):
            lost[replica.name] = outcome
        else:  # also a lost device of which only the number is known, which may be a neighbour's by the next try
            raise outcome
    return found, lost


async def _on_cuda(
    replica: ReplicaConfig,
    devices: tuple[str, ...],
    numbers: Mapping[str, int] | None,
    turns: asyncio.Semaphore,
    parts: ExitStack,
) -> tuple[ShardMemory, ...]:
    """New memory of a replica on CUDA devices: of these, if they are known, and the replica has not moved."""
    size_bytes = _shard_bytes(replica)
    uuids = devices or ("",) * replica.shards
    try:
        made = await _made(replica, uuids, turns)
    except NoCudaMemory as error:
        if not error.listed or set(devices) <= set(error.listed):
            raise
        uuids = _moved(replica, devices, error, numbers)
        try:
            made = await _made(replica, uuids, turns)
        except NoCudaMemory as refused:
            raise DeviceError(str(refused)) from refused  # as of any device that was not used before
    shards = []
    for index, name in enumerate(_names(replica)):
        try:
            shards.append(ShardMemory(_called(name), made[index].descriptor, size_bytes, made[index].device))
        except OSError:
            for memory in made[index:]:
                os.close(memory.descriptor)
            raise
        parts.callback(shards[-1].close)
    return tuple(shards)


async def _made(replica: ReplicaConfig, uuids: tuple[str, ...], turns: asyncio.Semaphore) -> list[MadeMemory]:
    wanted = zip(replica.cuda_ordinals, repeat(_shard_bytes(replica)), uuids, strict=False)
    return await make_cuda_memory([WantedMemory(*each) for each in wanted], turns)


def _moved(
    replica: ReplicaConfig, devices: tuple[str, ...], error: NoCudaMemory, numbers: Mapping[str, int] | None
) -> tuple[str, ...]:
    """The devices that have a replica's numbers now, in place of devices that the driver does not list.

    Raises:
        NoCudaMemory: these may be its neighbours' devices: it waits for its own.
    """
    missing = ", ".join(each for each in devices if each not in error.listed)
    counted = enumerate(error.listed)
    may_be_lost = numbers is None or any(numbers.get(each, number) != number for number, each in counted)
    found = _numbered(replica, error.listed)
    if may_be_lost or not found:
        reason = f"the driver does not list {missing}, which the pool had and waits for ({_MOVE})"
        raise NoCudaMemory(", ".join(map(str, replica.cuda_ordinals)), reason, listed=error.listed) from error
    words = "replica %(replica)s moves to %(found)s, by number: the driver does not list %(missing)s any more"
    _log.warning(words, {"replica": replica.name, "found": ", ".join(found), "missing": missing})
    return found


def _numbered(replica: ReplicaConfig, listed: Sequence[str]) -> tuple[str, ...]:
    """The UUIDs of the devices that have a replica's numbers; none if one is not known."""
    found = tuple(listed[number] for number in replica.cuda_ordinals if number < len(listed))
    return found if len(found) == len(replica.cuda_ordinals) and all(found) else ()


def _device_pool(
    replica: ReplicaConfig, kept: KeptDevice | None, on_cuda: tuple[ShardMemory, ...] | None, parts: ExitStack
) -> DevicePool:
    headers = _headers(replica, None if kept is None else kept.headers)
    parts.callback(headers.close)
    if kept is not None:
        return DevicePool(_kept_shards(replica, kept, parts), headers, is_kept=True)
    shards = on_cuda or _on_cpu(replica, parts)
    for name, shard in zip(_names(replica), shards, strict=True):
        store(name, shard.descriptor)
    return DevicePool(shards, headers, is_kept=False)


def _on_cpu(replica: ReplicaConfig, parts: ExitStack) -> tuple[ShardMemory, ...]:
    shards = []
    for name in _names(replica):
        shards.append(ShardMemory.make(_called(name), _shard_bytes(replica)))
        parts.callback(shards[-1].close)
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
    descriptor = record.headers.among(found[name])
    is_recorded = MemoryIdentity.of(descriptor) == record.headers
    if not is_recorded or memory_fault(descriptor, headers_bytes(replica.slot_count)):
        words = "the headers of replica %(replica)s that were kept are not the ledger's: no block is found"
        _log.warning(words, {"replica": replica.name})
        return None
    _take(found, name, descriptor)
    return descriptor


def _take(found: dict[str, list[int]], name: str, descriptor: int) -> None:
    """Take one descriptor of a name; any others are not needed."""
    for other in found.pop(name):
        if other != descriptor:
            os.close(other)


def _names(replica: ReplicaConfig) -> list[str]:
    """The name under which the service manager keeps each shard's memory."""
    return [f"{DEVICE_MEMORY_PREFIX}{replica.name}-{shard}" for shard in range(replica.shards)]


def _called(name: str) -> str:
    """The name of a shard's memory in the list of a process's mappings."""
    return f"kvcached-{name.removeprefix(DEVICE_MEMORY_PREFIX)}"


def _shard_bytes(replica: ReplicaConfig) -> int:
    return pool_geometry(replica.layout, replica.slot_count).size_bytes


def difference(replica: ReplicaConfig, record: ReplicaRecord) -> str:
    """How the memory that a record names differs from the present configuration; "" where it does not."""
    return record.difference(replica.layout.fingerprint(), replica.slot_count, replica.shards, replica.cuda_ordinals)


def _is_ambiguous(replica: ReplicaConfig, found: dict[str, list[int]]) -> bool:
    """Whether the manager has kept several memories of a CUDA device under one name: nothing tells them apart.

    It has when it was not reached to remove one of them.
    """
    names = (*_names(replica), DEVICE_HEADERS_PREFIX + replica.name)
    doubled = [name for name in names if len(found.get(name, ())) > 1]
    if doubled:
        words = "the device pool of replica %(replica)s is not used: %(name)s was kept more than once"
        _log.warning(words, {"replica": replica.name, "name": doubled[0]})
    return bool(doubled)


def _is_recorded(replica: ReplicaConfig, kept: list[int], record: ReplicaRecord) -> bool:
    """Whether these descriptors are the memory that a record names."""
    is_sound = not any(memory_fault(each, _shard_bytes(replica)) for each in kept)
    if is_sound and list(record.memory) == [MemoryIdentity.of(each) for each in kept]:
        return True
    words = "the device pool of replica %(replica)s that was kept is not the ledger's, and is not used"
    _log.warning(words, {"replica": replica.name})
    return False
