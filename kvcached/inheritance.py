"""What a daemon finds at its start: the host pool that the service manager has kept, and the ledger of who had it."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvcached.config_host import HostConfig
from kvcached.core.cache import Cache
from kvcached.descriptor_store import remove, store, take_stored
from kvcached.ledger import HostPoolRecord, Ledger, LedgerFile, ProcessIdentity, read_ledger
from kvcached.replica import Replica
from kvcached.takeover import Takeover, take_over
from kvcached.worker.host_memory import HostHeaders, HostMemory, adopt_host_memory, create_host_memory
from kvcached_client.types import ShardIndex

_log: Final = logging.getLogger(__name__)

#: What the service manager calls the host pool's memory.
HOST_MEMORY_NAME: Final = "host"
#: In the run directory.
LEDGER_NAME: Final = "ledger.json"


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What there is at the start.

    Attributes:
        ledger: of the daemon before; None where there was none on this boot.
        host: the host pool, new or kept; None without a host tier.
        is_kept: the host pool is the one that the ledger is about.
    """

    ledger: Ledger | None
    host: HostMemory | None
    is_kept: bool

    @property
    def replicas(self) -> set[str]:
        """Those that had workers."""
        return set() if self.ledger is None else {each.replica for each in self.ledger.workers}

    def workers_of(self, replica: str) -> dict[ShardIndex, ProcessIdentity]:
        """The workers that a replica had, which may live on."""
        recorded = () if self.ledger is None else self.ledger.workers
        return {ShardIndex(each.shard): each.process for each in recorded if each.replica == replica}

    def host_record(self) -> HostPoolRecord | None:
        """The host pool as the next ledger names it."""
        if self.host is None:
            return None
        device, inode = self.host.identity
        return HostPoolRecord(
            device=device, inode=inode, slabs=self.host.slabs, slab_bytes=self.host.slab_bytes, lent={}
        )


def inherit(run_dir: Path, host: HostConfig | None, parts: ExitStack) -> Inheritance:
    """The ledger, and a host pool: the one that was kept where it is what is configured, else a new one to be kept.

    Args:
        run_dir: where the ledger is.
        host: what is configured; None without a host tier.
        parts: closes the host pool's descriptor.

    Raises:
        OSError: a new pool cannot be made.
    """
    kept = take_stored().get(HOST_MEMORY_NAME, [])
    ledger = read_ledger(run_dir / LEDGER_NAME)
    memory = None if host is None or ledger is None else _kept(kept, host, ledger)
    for descriptor in kept:
        if memory is None or descriptor != memory.descriptor:
            os.close(descriptor)
    is_kept = memory is not None
    if memory is None and host is not None:
        memory = create_host_memory(host.slabs, host.slab_bytes)
        remove(HOST_MEMORY_NAME)
        if store(HOST_MEMORY_NAME, memory.descriptor):
            _log.info("the service manager keeps the host pool: it outlives the daemon")
    if memory is not None:
        parts.callback(memory.close)
    return Inheritance(ledger, memory, is_kept)


def ledger_file(run_dir: Path) -> LedgerFile:
    """Where this daemon's ledger goes."""
    return LedgerFile(run_dir / LEDGER_NAME)


def take_over_timed(
    inheritance: Inheritance, cache: Cache, replicas: Sequence[Replica], headers: HostHeaders | None
) -> Takeover:
    """`take_over`, and a log line. Collecting garbage meanwhile would cost as much again, and find none."""
    if inheritance.ledger is None:
        return Takeover()
    start_ns = time.monotonic_ns()
    gc.disable()
    try:
        taken = take_over(inheritance.ledger, cache, replicas, headers if inheritance.is_kept else None)
    finally:
        gc.enable()
    gc.freeze()  # the index is there to stay
    _log.info(
        "taken over in %d ms: %d blocks of the host pool, %d engines that live",
        (time.monotonic_ns() - start_ns) // 1_000_000,
        taken.blocks,
        len(taken.sessions),
    )
    return taken


def _kept(kept: list[int], host: HostConfig, ledger: Ledger) -> HostMemory | None:
    if not kept or ledger.host is None:
        return None
    memory = adopt_host_memory(kept[0], host.slabs, host.slab_bytes)
    if memory is not None and memory.identity != (ledger.host.device, ledger.host.inode):
        _log.warning("the ledger is of another host pool than the one that was kept, and its blocks are lost")
        return None
    return memory
