"""A shard's device pool as its worker maps it, in CPU memory or on a CUDA device, and the copier for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcached.memory.sealed import SharedMemory
from kvcached.worker.messages import HostRegistered, WorkerConfig
from kvcached_client.blocks.copy import Batch, Copier, MemoryCopier, copy_all
from kvcached_client.errors import DeviceError


class MemoryGone(DeviceError):
    """A device works, and does not know memory that it had: it was reset."""


class PoolMemory(Protocol):
    """The device pool. It stays mapped until the process ends."""

    @property
    def address(self) -> int:
        """The pool's address."""

    @property
    def copier(self) -> Copier:
        """Copies between the device pool and the host pool."""

    def begin(self, tell: Callable[[HostRegistered], None]) -> None:
        """Requests may come. What takes time and nobody waits for begins now.

        Args:
            tell: called in any thread with how much of the host pool a device reaches.
        """

    def use(self) -> None:
        """Prepare the calling thread for copies."""

    def works(self) -> bool:
        """Whether the device does anything for this process yet. Never waits."""

    def move(self, batch: Batch) -> None:
        """Copy pieces within the pool, or between the pool and this process's memory; returns when they are copied."""


class CpuMemory:
    """A device pool in shared memory: `PoolMemory`."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.address = memory.address
        self.copier = MemoryCopier()

    def begin(self, _: Callable[[HostRegistered], None]) -> None:
        """The processor reaches all memory."""

    def use(self) -> None:
        """Do nothing: every thread can copy CPU memory."""

    def works(self) -> bool:
        """See `PoolMemory.works`."""
        return True

    def move(self, batch: Batch) -> None:
        """See `PoolMemory.move`."""
        copy_all(batch.pieces, batch.destination, batch.source)


def open_memory(config: WorkerConfig, descriptor: int, host: SharedMemory | None) -> PoolMemory:
    """Map the device pool.

    Args:
        config: the worker's.
        descriptor: the pool's memory; the caller still owns it.
        host: the host pool; None without one.

    Raises:
        ValueError: the memory is not what the configuration says.
        OSError: the kernel refused to map it.
        CudaMissing, MemoryGone, CudaFailure: as `CudaMemory`.
    """
    if not config.device:
        memory = SharedMemory(descriptor, config.geometry.size_bytes)
        memory.pretouch(config.pretouch_bytes)
        return CpuMemory(memory)
    from kvcached.worker.cuda_memory import CudaMemory  # noqa: PLC0415 - only workers of such pools need what it needs

    return CudaMemory(config, descriptor, host)
