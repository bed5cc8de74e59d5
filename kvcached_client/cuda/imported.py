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

    def __init__(self, uuid: str, descriptor: int, size_bytes: int, handles: Sequence[bytes], marks: int) -> None:
        """Map memory, and the page of marks.

        Args:
            uuid: of the device.
            descriptor: of memory that the engine has exported; negative = none. It is closed.
            size_bytes: of that memory.
            handles: of allocations that the engine shares.
            marks: descriptor of the page of marks; it is closed.

        Raises:
            CudaMissing: this process has no driver, or does not see the device.
            CudaFailure: the driver refused one of the steps.
            ValueError: one of the handles is none.
        """
        self._owner = EngineDevice.of_uuid(uuid)
        device = self._owner.device
        with device.current():
            self._memory: DeviceMemory | None = None
            if descriptor >= 0:
                self._memory = device.open_memory(descriptor, device.whole_granules(size_bytes))
                os.close(descriptor)
            whole = () if self._memory is None else (self._memory.address,)
            self.addresses = (*whole, *map(device.open_allocation, handles))
            self.marks = MarkReader(device, marks)
            os.close(marks)
