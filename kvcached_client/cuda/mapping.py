"""A device pool on a CUDA device, mapped into an engine's process, and arrays in it that torch, CuPy and numba take."""

from __future__ import annotations

import weakref
from typing import Any

from kvcached_client.cuda.device import Device, DeviceMemory, own_context
from kvcached_client.cuda.driver import Driver


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
            memory = owner.open_memory(descriptor, owner.whole_granules(size_bytes))
        self.address = memory.address
        self.ordinal = owner.ordinal
        # At exit other threads may still use it, and the driver unmaps anyway.
        weakref.finalize(self, _unmap, owner, memory).atexit = False


class CudaArray:
    """An array in a `CudaBuffer`, by the CUDA array interface: ``torch.as_tensor(array, device="cuda")``.

    Attributes:
        shape: elements in each dimension.
        ordinal: of the device, in this process.
    """

    def __init__(
        self, buffer: CudaBuffer, dtype: str, shape: tuple[int, ...], offset_bytes: int, strides: tuple[int, ...]
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


def _unmap(device: Device, memory: DeviceMemory) -> None:
    """Nothing that is queued may use the memory any more."""
    with own_context(device.driver):
        device.use()
        try:
            device.driver.call("cuCtxSynchronize")
            memory.close()
        finally:
            device.close()
