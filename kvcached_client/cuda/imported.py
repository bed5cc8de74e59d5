"""An engine's memory and marks in another process, which copies for the engine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvcached_client.cuda.device import DeviceMemory
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.cuda.marks import MarkReader


class ImportedMemory:
    """Memory of an engine's device, mapped into this process until it ends.

    Attributes:
        addresses: where each part is mapped.
        marks: those of the engine.
    """

    def __init__(self, uuid: str, handles: Sequence[bytes], marks: int) -> None:
        """Map allocations, and the page of marks.

        Args:
            uuid: of the device.
            handles: of allocations that the engine shares.
            marks: descriptor of the page of marks; it is closed.

        Raises:
            CudaMissing: this process has no driver, or does not see the device.
            CudaFailure: the driver refused one of the steps.
            ValueError: one of the handles is none.
        """
        self._owner = EngineDevice.of_uuid(uuid)
        self._memories: list[DeviceMemory] = []
        device = self._owner.device
        with device.current():
            self.addresses = tuple(map(device.open_allocation, handles))
            self.marks = MarkReader(device, marks)
            os.close(marks)

    def open(self, descriptor: int, size_bytes: int) -> None:
        """Map memory that was exported as a whole; it is the next part. The descriptor is closed.

        Raises:
            CudaFailure: as above.
        """
        device = self._owner.device
        with device.current():
            memory = device.open_memory(descriptor, device.whole_granules(size_bytes))
        os.close(descriptor)
        self._memories.append(memory)
        self.addresses += (memory.address,)
