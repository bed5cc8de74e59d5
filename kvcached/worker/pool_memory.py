"""A shard's device pool as its worker maps it, and what copies it: memory of this machine, or of a CUDA device."""

from __future__ import annotations

from typing import Protocol

from kvcached.memory.sealed import SharedMemory
from kvcached.worker.messages import WorkerConfig
from kvcached_client.blocks.copy import Batch, Copier, MemoryCopier, copy_all


class PoolMemory(Protocol):
    """Mapped until the process ends."""

    @property
    def address(self) -> int:
        """Where the pool is."""

    @property
    def copier(self) -> Copier:
        """Copies between the device pool and the host pool."""

    def use(self) -> None:
        """Called in a thread before it copies."""

    def move(self, batch: Batch) -> None:
        """Copy pieces within the pool, or between the pool and memory of this process; return when they are there."""


class CpuMemory:
    """A device pool in shared memory: `PoolMemory`."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.address = memory.address
        self.copier = MemoryCopier()

    def use(self) -> None:
        """Nothing is to be done."""

    def move(self, batch: Batch) -> None:
        """See `PoolMemory.move`."""
        copy_all(*batch)


def open_memory(config: WorkerConfig, descriptor: int, host: SharedMemory | None) -> PoolMemory:
    """Map the device pool.

    Args:
        config: of the worker.
        descriptor: of the pool's memory; it stays the caller's.
        host: the host pool; None where there is none.

    Raises:
        ValueError: the memory is not what the configuration says.
        OSError: the kernel refused to map it.
        CudaMissing, CudaFailure: as `CudaMemory`.
    """
    if not config.device:
        memory = SharedMemory(descriptor, config.geometry.size_bytes)
        memory.pretouch(config.pretouch_bytes)
        return CpuMemory(memory)
    from kvcached.worker.cuda_memory import CudaMemory  # noqa: PLC0415 - only workers of such pools need what it needs

    return CudaMemory(config, descriptor, host)
