"""The memory and the ledger that a start finds: pools that the service manager has kept, or new ones in their place.

The memory of a pool is kept if the configuration and the ledger describe the same one; a host pool also if it is to
have more or fewer slabs. A host pool that an engine may still write, whose slots this daemon could not set aside, is
dropped: the engine then writes to memory of nobody.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from kvcached.config.replica import ReplicaConfig
from kvcached.config.tables import HostConfig
from kvcached.core.cache import Cache
from kvcached.memory.dropped import DroppedMemory
from kvcached.memory.host_pool import (
    HostHeaders,
    HostMemory,
    MemoryIdentity,
    adopt_host_memory,
    create_host_memory,
)
from kvcached.memory.token_table import TABLE_PREFIX, TokenTable
from kvcached.recovery.device_pools import (
    DEVICE_MEMORY_PREFIX,
    PoolMemory,
    device_pools,
    difference,
    kept_device,
    served_devices,
)
from kvcached.recovery.engine_pools import EnginePools
from kvcached.recovery.fd_store import KEPT_MAX, remove, store, take_stored
from kvcached.recovery.state_file import (
    LEDGER_NAME,
    HostPoolRecord,
    Ledger,
    LedgerFile,
    ReplicaRecord,
    has_stopped,
    read_ledger,
)
from kvcached.recovery.takeover import Takeover, is_writer_left_out, is_written_behind, take_over
from kvcached.service.replica import Replica

#: The name under which the service manager keeps the host pool's memory.
HOST_MEMORY_NAME: Final = "host"

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The memory and the ledger at a start.

    Attributes:
        ledger: that of the daemon before; None if there was none on this boot.
        host: the host pool, new or kept; None without one.
        is_kept: the host pool is the one that the ledger names.
        grown_bytes: how much larger than before a host pool that was kept is now.
        devices: the device pools, by replica; without memory where they sleep, or a device that they need is lost.
        tokens: the tokens of blocks, by the size of their blocks.
    """

    ledger: Ledger | None
    host: HostMemory | None
    is_kept: bool
    grown_bytes: int
    devices: Mapping[str, PoolMemory]
    tokens: Mapping[int, TokenTable]

    def drop_host(self, dropped: DroppedMemory) -> None:
        """The start fails with the host pool that was kept, and is tried once more without."""
        if self.host is not None and self.is_kept:
            dropped.hold(os.dup(self.host.descriptor))

    def host_record(self) -> HostPoolRecord | None:
        """The host pool as the next ledger names it."""
        return None if self.host is None else _record_of(self.host)


async def inherit(
    run_dir: Path,
    host: HostConfig | None,
    replicas: Sequence[ReplicaConfig],
    engine_pools: EnginePools,
    dropped: DroppedMemory,
    parts: ExitStack,
    *,
    has_offload: bool,
) -> Inheritance:
    """Read the ledger and open the pools: kept ones if they match the configuration, else new ones.

    The caller ensures that all workers and storage processes of earlier daemons are dead: they could write here.

    Args:
        run_dir: the directory of the ledger.
        host: the configured host pool; None without one.
        replicas: the configured replicas.
        engine_pools: gets those that were kept. They need no ledger, and stay the caller's to close.
        dropped: gets host pools that are dropped and that engines give back when they have connected again.
        parts: closes the other descriptors.
        has_offload: whether engines in offload mode are served.

    Raises:
        OSError, DeviceError: a new pool cannot be made.
    """
    found, ledger = take_stored(), read_ledger(run_dir / LEDGER_NAME)
    if ledger is not None and (missing := _missing(found, ledger)):
        _tell_of_loss(" and ".join(missing), found, ledger, is_stopped=has_stopped(run_dir, ledger))
    memory = _kept_host(found, host, ledger, dropped, has_offload=has_offload)
    is_kept, grown_bytes = memory is not None, 0
    if memory is not None and ledger is not None and ledger.host is not None:
        grown_bytes = max(0, memory.slabs - ledger.host.slabs) * memory.slab_bytes
        ledger = msgspec.structs.replace(ledger, host=_resized(ledger.host, memory))
    if memory is None:
        remove(HOST_MEMORY_NAME)
    if memory is None and host is not None:
        memory = create_host_memory(host.slabs, host.slab_bytes)
        if store(HOST_MEMORY_NAME, memory.descriptor):
            _log.info("the service manager keeps the new host pool: it outlives the daemon")
    if memory is not None:
        parts.callback(memory.close)
    asleep = {each.name for each in ledger.replicas if each.asleep} if ledger is not None else set()
    awake = [each for each in replicas if each.name not in asleep]
    _warn_of_unused(found, ledger, replicas)
    kept_devices = {each.name: kept_device(each, found, ledger) for each in awake}
    engine_pools.take_over(found)
    tokens = _kept_tokens(found, parts)
    _drop(found)  # pools that sleep, are no longer configured, or not in the same way
    served = served_devices(replicas, ledger)
    numbers = ledger.cuda_numbers if ledger is not None and has_stopped(run_dir, ledger) else None
    pools, lost = await device_pools(awake, kept_devices, served, numbers)
    devices = {
        each.name: PoolMemory(
            each, pools.get(each.name), served.get(each.name, ()), lost.get(each.name),
            has_served=each.name in served or each.name in lost,
        )
        for each in replicas
    }  # fmt: skip
    for device in devices.values():
        parts.callback(device.close)
    return Inheritance(ledger, memory, is_kept, grown_bytes, devices, tokens)


def ledger_file(run_dir: Path) -> LedgerFile:
    """The ledger file that this daemon writes."""
    return LedgerFile(run_dir / LEDGER_NAME)


def take_over_timed(
    inheritance: Inheritance,
    cache: Cache,
    replicas: Sequence[Replica],
    headers: HostHeaders | None,
    *,
    canonical: bool,
) -> Takeover:
    """Run `take_over` and log its result. Garbage collection is off: it would double the time and find no garbage."""
    if inheritance.ledger is None:
        return Takeover()
    start_ns = time.monotonic_ns()
    gc.disable()
    try:
        kept = headers if inheritance.is_kept else None
        taken = take_over(inheritance.ledger, cache, replicas, kept, canonical=canonical)
    finally:
        gc.enable()
    _log.info(
        "taken over in %d ms: %d blocks of the host pool, %d blocks of device pools, %d living engines",
        (time.monotonic_ns() - start_ns) // 1_000_000,
        taken.blocks,
        taken.device_blocks,
        len(taken.sessions),
    )
    return taken


def _missing(found: Mapping[str, list[int]], ledger: Ledger) -> list[str]:
    """The memory that the ledger names and nobody has handed to this daemon, in words."""
    names = [] if ledger.host is None or HOST_MEMORY_NAME in found else ["the host pool"]
    lost = [each for each in ledger.replicas if not each.asleep and not _is_given(found, each)]
    return names + [f"the device pool of replica {record.name}" for record in lost]


def _is_given(found: Mapping[str, list[int]], record: ReplicaRecord) -> bool:
    return all(f"{DEVICE_MEMORY_PREFIX}{record.name}-{shard}" in found for shard in range(len(record.memory)))


def _warn_of_unused(found: Mapping[str, list[int]], ledger: Ledger | None, replicas: Sequence[ReplicaConfig]) -> None:
    """Say which device pools are here and not as they are configured now, and how they differ."""
    configured = {each.name: each for each in replicas}
    for record in () if ledger is None else ledger.replicas:
        if record.asleep or not record.memory or not _is_given(found, record):
            continue
        replica = configured.get(record.name)
        why = "no replica of this name is configured" if replica is None else difference(replica, record)
        if why:
            words = (
                "the device pool of replica %(replica)s that was kept cannot be used, and its blocks are lost: %(why)s"
            )
            _log.warning(words, {"replica": record.name, "why": why})


def _kept_tokens(found: dict[str, list[int]], parts: ExitStack) -> dict[int, TokenTable]:
    """The tables of tokens that were kept, by the size of their blocks; their descriptors are removed from `found`.

    Where there are several for one size, as after a start that has failed, the last one is the newest.
    """
    tables: dict[int, TokenTable] = {}
    for name in [name for name in found if name.startswith(TABLE_PREFIX)]:
        descriptors, number = found[name], name.removeprefix(TABLE_PREFIX)
        size = int(number) if number.isdecimal() else 0  # the manager may keep what is not this daemon's
        table = TokenTable.adopt(descriptors[-1], size) if size else None
        if table is None:
            continue
        tables[size] = table
        parts.callback(table.close)
        descriptors.pop()
        if descriptors:
            remove(name)
            store(name, table.descriptor)
        for other in found.pop(name):
            os.close(other)
    return tables


def _tell_of_loss(missing: str, found: Mapping[str, list[int]], ledger: Ledger, *, is_stopped: bool) -> None:
    """Say why memory of the daemon before is not there. Behind a stop in order, its keeper was stopped, too."""
    part_count = (ledger.host is not None) + sum(
        len(each.memory) + (each.headers is not None) for each in ledger.replicas if not each.asleep
    )
    if part_count > KEPT_MAX:
        why = f"the pools had {part_count} parts, and the supervisor or the keeper usually keeps {KEPT_MAX}"
    elif found:
        why = "the supervisor or the keeper has kept other parts only"
    elif is_stopped:
        _log.info("the daemon before was stopped, and nobody has kept %s since: the cache begins empty", missing)
        return
    else:
        why = "the supervisor or the keeper of the daemon before has ended, or there was none"
    _log.warning("nobody has kept %s for this daemon, and the blocks are lost: %s", missing, why)


def _kept_host(
    found: dict[str, list[int]],
    host: HostConfig | None,
    ledger: Ledger | None,
    dropped: DroppedMemory,
    *,
    has_offload: bool,
) -> HostMemory | None:
    """The host pool that was kept, whose descriptors are removed from `found`; None if there is to be a new one."""
    kept, memory = found.pop(HOST_MEMORY_NAME, []), None
    if kept and host is None:
        _log.warning("the host pool that was kept is dropped, and its blocks are lost: [host] is no longer configured")
    if kept and host is not None and ledger is not None and ledger.host is not None:
        memory = _recorded_host(kept, host, ledger.host)
        if memory is not None and is_writer_left_out(ledger, has_offload=has_offload):
            _log.warning(
                "the host pool that was kept is dropped, and its blocks are lost: engines in offload mode that may be "
                "writing to it cannot come back to this configuration; its memory is free when they have ended"
            )
            memory = None
        if memory is not None and memory.slabs < ledger.host.slabs and _is_smaller_too_soon(memory, ledger):
            memory = None
    for descriptor in kept:
        if memory is None and has_offload:
            dropped.hold(descriptor)
        elif memory is None or descriptor != memory.descriptor:  # without offload mode no engine can connect again
            os.close(descriptor)
    return memory


def _recorded_host(kept: list[int], host: HostConfig, record: HostPoolRecord) -> HostMemory | None:
    """The host pool that the ledger names, if its slabs are as large as configured ones; there may be more or fewer."""
    identity = MemoryIdentity(record.device, record.inode)
    memory = adopt_host_memory(identity.among(kept), host.slabs, host.slab_bytes)
    if memory is not None and (memory.identity, memory.slab_bytes) != (identity, record.slab_bytes):
        _log.warning("the host pool that was kept cannot be used, and its blocks are lost: the ledger has another one")
        return None
    return memory


def _is_smaller_too_soon(memory: HostMemory, ledger: Ledger) -> bool:
    """Whether an engine still writes to slabs that a smaller pool has no more; it is said in the log."""
    before = replace(memory, slabs=ledger.host.slabs if ledger.host is not None else 0)
    is_written = is_written_behind(ledger, HostHeaders(before), memory.slabs)
    if is_written:
        _log.warning(
            "the host pool that was kept is dropped, and its blocks are lost: an engine in offload mode is writing to "
            "slabs that a pool of %d slabs has no more; its memory is free when the engine has connected again",
            memory.slabs,
        )
    return is_written


def _resized(record: HostPoolRecord, memory: HostMemory) -> HostPoolRecord:
    """The record of a host pool that was kept, with the slabs that are configured now.

    Engines map so many when they connect again.

    Raises:
        OSError: the memory of slabs that are no longer used cannot be given back.
    """
    if record.slabs == memory.slabs:
        return record
    kept = {root: tuple(slab for slab in slabs if slab < memory.slabs) for root, slabs in record.allocated.items()}
    lost = sum(map(len, record.allocated.values())) - sum(map(len, kept.values()))
    words = "the host pool has %d slabs now, and had %d"
    if lost:
        _log.warning(f"{words}: %d that held blocks are no longer used", memory.slabs, record.slabs, lost)
    else:
        _log.info(f"{words}: all that it holds is kept", memory.slabs, record.slabs)
    memory.trim()
    return msgspec.structs.replace(record, slabs=memory.slabs, allocated=kept)


def _drop(found: Mapping[str, list[int]]) -> None:
    """Close descriptors, and have the service manager forget them."""
    for name, descriptors in found.items():
        remove(name)
        for descriptor in descriptors:
            os.close(descriptor)


def _record_of(host: HostMemory) -> HostPoolRecord:
    device, inode = host.identity
    return HostPoolRecord(device=device, inode=inode, slabs=host.slabs, slab_bytes=host.slab_bytes, allocated={})
