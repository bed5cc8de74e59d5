"""A device pool on a CUDA device, mapped into an engine's process, and arrays in it that torch, CuPy and numba take."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

from kvcached_client.cuda.device import Device, own_context
from kvcached_client.cuda.driver import CudaFailure, Driver

_log: Final = logging.getLogger(__name__)


class CudaBuffer:
    """Memory of a device that the daemon holds. It is mapped as long as something refers to this object.

    The device that is current to the calling thread stays the same.

    Attributes:
        address: where it is mapped.
        ordinal: of the device, in this process.

    Raises:
        CudaMissing: this process has no driver, or does not see the device.
        CudaFailure: the driver refused one of the steps.
    """

    def __init__(self, descriptor: int, size_bytes: int, device: str) -> None:
        """Map memory of the device with a UUID; the descriptor stays the caller's."""
        driver = Driver()
        with own_context(driver):
            owner = Device.of_uuid(driver, device)
            try:
                memory = owner.open_memory(descriptor, owner.whole_granules(size_bytes))
            except BaseException:
                owner.close()
                raise
        self.address = memory.address
        self.ordinal = owner.ordinal
        self._device = owner
        # At exit other threads may still use it, and the driver unmaps anyway.
        weakref.finalize(self, unmap_when_idle, owner, memory).atexit = False

    def when_unused(self, tell: Callable[[], None]) -> None:
        """Call this when nobody refers to the memory and nothing queued uses it: before it is unmapped, or at exit.

        It is not called where the device has failed: what it still does is known when the process has ended.
        """
        weakref.finalize(self, _when_idle, self._device, tell)  # runs before those that were made earlier


class MappedMemory(Protocol):
    """Mapped memory of a device: a `CudaBuffer`, or memory of an engine pool."""

    @property
    def address(self) -> int:
        """Where it is mapped."""

    @property
    def ordinal(self) -> int:
        """Of the device, in this process."""


class CudaArray:
    """An array in mapped memory, by the CUDA array interface: ``torch.as_tensor(array, device="cuda")``.

    Attributes:
        shape: elements in each dimension.
        ordinal: of the device, in this process.
    """

    def __init__(
        self, buffer: MappedMemory, dtype: str, shape: tuple[int, ...], offset_bytes: int, strides: tuple[int, ...]
    ) -> None:
        self.shape = shape
        self.ordinal = buffer.ordinal
        self._buffer = buffer
        self._interface = {
            "shape": shape,
            "typestr": dtype,
            "data": (buffer.address + offset_bytes, False),
            "strides": strides,
            "version": 3,
            "stream": None,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
        return self._interface


def _when_idle(device: Device, tell: Callable[[], None]) -> None:
    """Wait until nothing is queued on the device, then call."""
    try:
        with device.current():
            device.driver.call("cuCtxSynchronize")
    except CudaFailure as error:
        _log.warning("the daemon learns by the end of this process that its pool is not used: %s", error)
    else:
        tell()


class Closable(Protocol):
    """What unmaps memory of a device."""

    def close(self) -> None:
        """Unmap it; called with the device's context."""


def unmap_when_idle(device: Device, memory: Closable) -> None:
    """Unmap memory when nothing is queued any more that may use it, and give the device back."""
    try:
        with device.current():
            try:
                device.driver.call("cuCtxSynchronize")
                memory.close()
            finally:
                device.close()
    except CudaFailure as error:
        _log.warning("a pool stays mapped until this process ends: %s", error)
