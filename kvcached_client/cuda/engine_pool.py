"""Memory of an engine pool on a CUDA device, at the addresses of an engine's KV cache.

An engine writes its KV cache before it serves: it tries kernels, and captures graphs. None of that may reach blocks
that the engine before has left. So the addresses have scratch memory first, a small piece of it many times, and the
pool's memory from `open` on. Addresses stay the same, and with them tensors and graphs.
"""

from __future__ import annotations

import weakref
from typing import Final

from kvcached_client.cuda.device import Device, own_context
from kvcached_client.cuda.driver import CudaFailure, Driver, Opaque
from kvcached_client.cuda.mapping import unmap_when_idle

#: How often the scratch memory is mapped, at most: it takes so much of the pool's size, and each time takes a call.
PIECES_MAX: Final = 256
#: What says nothing about the memory that was to be opened.
_MAY_PASS: Final = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM"})
#: A device that refuses memory so often has lost it; one refusal may pass. Workers of the daemon try as often.
_TRIES: Final = 3


class MemoryUnknown(CudaFailure):
    """The device makes and maps memory, and does not know the memory that was kept."""


class EnginePoolMemory:
    """One rank's memory. It is mapped as long as something refers to this object.

    Attributes:
        address: where it is mapped; scratch memory until `open`.
        ordinal: of the device, in this process.
        size_bytes: how much the engine uses.
    """

    def __init__(self, descriptor: int, size_bytes: int, device: str) -> None:
        """Take memory of the device with a UUID, and map scratch memory. The descriptor stays the caller's.

        Raises:
            CudaMissing: this process has no driver, or does not see the device.
            MemoryUnknown: the device works, and does not know the memory.
            CudaFailure: the driver refused one of the steps.
        """
        driver = Driver()
        with own_context(driver):
            owner = Device.of_uuid(driver, device)
            try:
                place = _Place(owner, owner.whole_granules(size_bytes))
            except BaseException:
                owner.close()
                raise
            try:
                place.map_scratch()  # first: it shows that the device works
                place.take(descriptor)
            except BaseException:
                place.close()
                owner.close()
                raise
        self.address = place.address
        self.ordinal = owner.ordinal
        self.size_bytes = size_bytes
        self._device = owner
        self._place = place
        # At exit other threads may still use it, and the driver unmaps anyway.
        weakref.finalize(self, unmap_when_idle, owner, place).atexit = False

    def open(self, *, is_new: bool) -> None:
        """Map the pool's memory in place of the scratch memory, once the device has nothing to do.

        Args:
            is_new: what is in it counts for nothing: it is zeroed.

        Raises:
            CudaFailure: the driver refused. Nothing is mapped then, and the engine cannot go on.
        """
        with self._device.current():
            self._device.driver.call("cuCtxSynchronize")
            self._place.map_memory()
            if is_new:
                self._device.zero(self.address, self._place.size_bytes)


class _Place:
    """Addresses of this process, and what is mapped there. Called with the device's context."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self._driver = device.driver
        self.size_bytes = size_bytes
        self._piece_bytes = device.whole_granules(-(-size_bytes // PIECES_MAX))
        self._reserved_bytes = -(-size_bytes // self._piece_bytes) * self._piece_bytes
        self._memory: Opaque = None
        self._mapped: list[range] = []
        self.address = int(self._driver.call("cuMemAddressReserve", self._reserved_bytes, 0, 0, 0))

    def take(self, descriptor: int) -> None:
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                self._memory = self._device.import_handle(descriptor)
            except CudaFailure as error:
                if error.is_lost or error.result in _MAY_PASS:
                    raise
                if last:
                    raise MemoryUnknown(error.call, error.result) from None
            else:
                return

    def map_scratch(self) -> None:
        scratch = self._device.make_handle(self._piece_bytes)
        try:
            for offset in range(0, self._reserved_bytes, self._piece_bytes):
                self._map(scratch, offset, self._piece_bytes)
        finally:
            self._driver.call("cuMemRelease", scratch)
        self._device.allow_access(self.address, self._reserved_bytes)
        self._device.zero(self.address, self._piece_bytes)

    def map_memory(self) -> None:
        self._unmap()
        self._map(self._memory, 0, self.size_bytes)
        self._device.allow_access(self.address, self.size_bytes)

    def close(self) -> None:
        """Unmap, and give the addresses back."""
        self._unmap()
        self._driver.call("cuMemAddressFree", self.address, self._reserved_bytes)
        memory, self._memory = self._memory, None
        if memory is not None:
            self._driver.call("cuMemRelease", memory)

    def _map(self, handle: Opaque, offset: int, size_bytes: int) -> None:
        self._driver.call("cuMemMap", self.address + offset, size_bytes, 0, handle, 0)
        self._mapped.append(range(self.address + offset, self.address + offset + size_bytes))

    def _unmap(self) -> None:
        while self._mapped:
            part = self._mapped.pop()
            self._driver.call("cuMemUnmap", part.start, len(part))
