"""A device pool on a CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kvcached.memory.sealed import SharedMemory
from kvcached.worker.messages import ERROR_SIZE_CHARS_MAX, HostRegistered, WorkerConfig
from kvcached.worker.numa import stay_on_node
from kvcached.worker.pool_memory import MemoryGone
from kvcached_client.blocks.copy import Batch
from kvcached_client.blocks.mapping import huge_pages
from kvcached_client.cuda.copier import CudaCopier
from kvcached_client.cuda.device import Device, DeviceMemory
from kvcached_client.cuda.driver import CudaFailure, Driver
from kvcached_client.cuda.host import HostPool, shard_ranges

#: What says nothing about the memory that was to be opened.
_MAY_PASS: Final = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM"})

_log: Final = logging.getLogger(__name__)


class CudaMemory:
    """A device pool in memory of a CUDA device: `PoolMemory`.

    Args:
        config: of the worker.
        descriptor: of the memory, as `DeviceMemory.export` gave it; it stays the caller's.
        host: the host pool; None where there is none.

    Raises:
        CudaMissing: there is no driver, or no such device.
        MemoryGone: the device works, and does not know the memory.
        CudaFailure: the driver refused one of the steps.
    """

    def __init__(self, config: WorkerConfig, descriptor: int, host: SharedMemory | None) -> None:
        self._device = Device.of_uuid(Driver(), config.device)
        stay_on_node(self._device.host_node())  # before memory is touched, and before threads are started
        size_bytes = self._device.whole_granules(config.geometry.size_bytes)
        self._memory = _opened(self._device, descriptor, size_bytes)
        self.address = self._memory.address
        self._host: HostPool | None = None
        _log.info("%s", _mechanisms(self._device))
        if host is None or config.host is None:
            self.copier = CudaCopier(self._device, range(0))
            return
        self._host = HostPool(self._device, host.address, shard_ranges(config.host, config.shard))
        self.copier = CudaCopier(self._device, range(host.address, host.address + host.size_bytes))

    def begin(self, tell: Callable[[HostRegistered], None]) -> None:
        """See `PoolMemory.begin`: the host pool is registered."""
        if self._host is not None:
            self._host.start(lambda host: tell(_report(host)))

    def use(self) -> None:
        """Make the device current to the calling thread."""
        self._device.use()

    def works(self) -> bool:
        """See `PoolMemory.works`."""
        return self._device.works()

    def move(self, batch: Batch) -> None:
        """See `PoolMemory.move`."""
        self.copier.move(batch)


def _mechanisms(device: Device) -> str:
    """What this driver, device and kernel give, for the log; `kvcached doctor --cuda` tries more."""
    pieces = "copies in batches" if device.driver.batches else "a call for each piece of a copy"
    return (
        f"device {device.uuid}, {device.name}, driver {device.driver.version}: {pieces}, "
        f"{device.attribute('ASYNC_ENGINE_COUNT')} copy engines, memory node {device.host_node()}, "
        f"huge pages of shared memory: {huge_pages()}"
    )


def _opened(device: Device, descriptor: int, size_bytes: int) -> DeviceMemory:
    try:
        return device.open_memory(descriptor, size_bytes)
    except CudaFailure as error:
        if error.result in _MAY_PASS:
            raise
        device.make_memory(1).close()  # raises where it is the device that does not work
        raise MemoryGone(f"the memory that was kept is not known to device {device.uuid}: {error}") from None


def _report(host: HostPool) -> HostRegistered:
    return HostRegistered(
        registered_bytes=host.registered_bytes,
        size_bytes=host.size_bytes,
        error=host.error[:ERROR_SIZE_CHARS_MAX],
    )
