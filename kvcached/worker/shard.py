"""What one worker holds, and the commands that touch it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvcached.worker.copier_host import HostCopier
from kvcached.worker.memory import PoolMemory, SharedMemory
from kvcached.worker.messages import Load, Probe, Store, WorkerConfig
from kvcached.worker.probe import probe
from kvcached.worker.progress import ProgressPage
from kvcached.worker.transfers import HostTransfers
from kvcached_client.host_geometry import HostGeometry


class Shard:
    """A device pool, its progress page, and its part of the host pool. Held until the process ends.

    Args:
        config: what to hold.
        descriptors: what came with the configuration: the host pool's memfd, if there is one. Closed here.

    Attributes:
        progress: how far loads are.
        host_identity: what tells the host pool's memory from all others: device and inode of its memfd; None without.

    Raises:
        NotEnoughMemory: the pool is larger than what is left.
        ValueError: the host pool's memory is not there, or not what the configuration says.
        OSError: the kernel refused one of the steps.
    """

    def __init__(self, config: WorkerConfig, descriptors: Sequence[int]) -> None:
        name = f"kvcached-{config.replica}-{config.shard}"
        self._geometry = config.geometry
        self._memory = PoolMemory(name, config.geometry.size_bytes, config.pretouch_bytes)
        self.progress = ProgressPage(f"{name}-progress")
        try:
            host = _map_host(config.host, descriptors)
            self.host_identity = memory_identity(descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._copier = HostCopier(config.geometry, self._memory.address, host.address if host else 0)
        self._transfers: HostTransfers | None = None
        if host is not None and config.host is not None:
            self._transfers = HostTransfers(
                config.geometry,
                config.host,
                config.shard,
                self._copier,
                host.view,
                self.progress,
                namespace=config.namespace,
                fingerprint=config.fingerprint,
            )

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a shard process maps: sealed pool memory, sealed progress page, the eventfds of its entries."""
        return (self._memory.descriptor, *self.progress.descriptors)

    def carry_out(self, task: Store | Load | Probe) -> tuple[int, ...]:
        """Carry out one command. Called from one thread.

        Returns:
            The corrupt blocks of a load.

        Raises:
            ValueError: it names what this worker does not have.
            CorruptCopy: a probe read back other bytes than it wrote.
        """
        match task:
            case Probe():
                probe(self._copier, self._geometry.slot_bytes, task)
            case Store():
                self._host_transfers().store(task)
            case Load():
                if self._transfers is None:
                    self.progress.fail(task.progress, task.transfer)
                return self._host_transfers().load(task)
        return ()

    def _host_transfers(self) -> HostTransfers:
        if self._transfers is None:
            raise ValueError("this worker has no host pool")
        return self._transfers


def memory_identity(descriptors: Sequence[int]) -> tuple[int, int] | None:
    """Device and inode of the first of them; None where there is none.

    Raises:
        OSError: it is no open descriptor.
    """
    if not descriptors:
        return None
    status = os.fstat(descriptors[0])
    return status.st_dev, status.st_ino


def _map_host(geometry: HostGeometry | None, descriptors: Sequence[int]) -> SharedMemory | None:
    if len(descriptors) != (geometry is not None):
        raise ValueError(f"{len(descriptors)} descriptors for {'a' if geometry else 'no'} host pool")
    if geometry is None:
        return None
    return SharedMemory(descriptors[0], geometry.size_bytes)
