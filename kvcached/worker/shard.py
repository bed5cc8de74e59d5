"""What one worker maps, and the commands that touch it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvcached.memory.progress import ProgressPage
from kvcached.memory.sealed import SharedMemory
from kvcached.worker.device_pool import DevicePool
from kvcached.worker.messages import DESCRIPTORS_MAX, Load, Probe, Store, WorkerConfig
from kvcached.worker.probe import probe
from kvcached.worker.transfers import WorkerTransfers
from kvcached_client.blocks.copy import MemoryCopier
from kvcached_client.blocks.transfers import BlockTransfers


class Shard:
    """A device pool, its progress page, and its part of the host pool, all mapped until the process ends.

    Args:
        config: what to map.
        descriptors: what came with the configuration. Those that are not needed once mapped are closed here.

    Attributes:
        progress: how far loads are.

    Raises:
        ValueError: memory is missing, or not what the configuration says.
        OSError: the kernel refused one of the steps.
    """

    def __init__(self, config: WorkerConfig, descriptors: Sequence[int]) -> None:
        if len(descriptors) != DESCRIPTORS_MAX - (config.host is None):
            raise ValueError(f"{len(descriptors)} descriptors, and {'a' if config.host else 'no'} host pool")
        pool, *page = descriptors[: DESCRIPTORS_MAX - 1]
        self._memory = _mapped(pool, config.geometry.size_bytes)
        self._memory.pretouch(config.pretouch_bytes)
        self.progress = ProgressPage.of(page)
        host = None if config.host is None else _mapped(descriptors[-1], config.host.size_bytes)
        self._pool = DevicePool(config.geometry, self._memory.address)
        self._transfers: WorkerTransfers | None = None
        if host is not None and config.host is not None:
            transfers = BlockTransfers(
                config.geometry.at(self._memory.address),
                config.host,
                config.shard,
                host.view,
                namespace=config.namespace,
                fingerprint=config.fingerprint,
                copier=MemoryCopier(),
            )
            self._transfers = WorkerTransfers(transfers, self.progress)

    def carry_out(self, task: Store | Load | Probe) -> tuple[int, ...]:
        """Carry out one command. Called from one thread.

        Returns:
            The corrupt blocks of a load.

        Raises:
            ValueError, BadRequest: it names what this worker does not have.
            CorruptCopy: a probe read back other bytes than it wrote.
        """
        match task:
            case Probe():
                probe(self._pool, task)
            case Store():
                self._host_transfers().store(task)
            case Load():
                if self._transfers is None:
                    self.progress.fail(task.progress, task.transfer)
                return self._host_transfers().load(task)
        return ()

    def _host_transfers(self) -> WorkerTransfers:
        if self._transfers is None:
            raise ValueError("this worker has no host pool")
        return self._transfers


def _mapped(descriptor: int, size_bytes: int) -> SharedMemory:
    memory = SharedMemory(descriptor, size_bytes)
    os.close(descriptor)
    return memory
