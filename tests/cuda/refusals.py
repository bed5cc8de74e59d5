"""What the SDK makes on a device, with each call of the driver refused in turn: ``python -m tests.cuda.refusals``."""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, c_ubyte
from types import SimpleNamespace
from typing import Any, Final, cast

from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import CudaFailure, Driver
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.cuda.gates import LayerGates
from kvcached_client.cuda.mapping import CudaBuffer
from kvcached_client.cuda.streams import StreamFences
from kvcached_client.errors import DeviceError
from kvcached_client.pool import MappedPool

SIZE_BYTES: Final = 1 << 20
GROUP: Final = KvGroup(layers=3, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float16")
#: Calls that end something, or that are made on the way to it: where one is refused, what it was to end stays.
ENDINGS: Final = (
    *("Release", "Unmap", "Free", "Unregister", "Destroy"),
    *("GetCurrent", "SetCurrent", "CaptureMode", "Synchronize"),
)


class Refusing:
    """Stands for `Driver.call`: refuses one of the calls, and makes the others."""

    def __init__(self) -> None:
        self.refused = 0
        self._calls = 0
        self._call = Driver.call

    def begin(self, refused: int) -> None:
        """Refuse this call, counted from 1 from now on."""
        self.refused, self._calls = refused, 0

    def is_over(self) -> bool:
        """Whether fewer calls were made."""
        return self._calls < self.refused

    def __get__(self, driver: Driver, _: type[Driver]) -> Callable[..., Any]:
        def call(name: str, *arguments: object) -> Any:
            if not name.endswith(ENDINGS):
                self._calls += 1
                if self._calls == self.refused:
                    raise CudaFailure(name, "CUDA_ERROR_INVALID_VALUE")
            return self._call(driver, name, *arguments)

        return call


class Subjects:
    """What is made; each method makes something and gives it up."""

    def __init__(self) -> None:
        self._device = Device(Driver())
        self._memory = self._device.make_memory(SIZE_BYTES)
        self._stream = self._device.make_stream()
        self._descriptor = self._memory.export()
        self._layout = Layout(block_size=16, shards=1, groups=(GROUP,), order="layer_first")
        self._host = HostGeometry(slabs=2, slab_bytes=1 << 16, shards=1, block_bytes=4096)

    def buffer(self) -> None:
        CudaBuffer(self._descriptor, SIZE_BYTES, self._device.uuid)

    def memory(self) -> None:
        device = Device(Driver())
        try:
            with device.make_memory(SIZE_BYTES) as memory:
                os.close(memory.export())
        finally:
            device.close()

    def gates(self) -> None:
        pool = cast("MappedPool", SimpleNamespace(layout=self._layout, device=self._device.uuid))
        LayerGates(pool).close()

    def fences(self) -> None:
        fences = StreamFences(self._device.uuid)
        fences.next(self._stream.handle)
        fences.wait()

    def copies(self) -> None:
        memory = mmap.mmap(-1, self._host.size_bytes)
        address = addressof(c_ubyte.from_buffer(memory))
        layer = SimpleNamespace(address=self._memory.address)
        owner = EngineDevice.of_layers([layer])  # type: ignore[list-item] # its address is all that counts
        owner.open_host(address, self._host, 0).close()


def play() -> dict[str, int]:
    """How many calls each subject makes; each was refused once."""
    subjects, refusing = Subjects(), Refusing()
    setattr(Driver, "call", refusing)  # noqa: B010 - nobody else may replace it
    calls = {}
    for name in ("buffer", "memory", "gates", "fences", "copies"):
        for refused in range(1, 1000):
            refusing.begin(refused)
            with suppress(DeviceError):
                getattr(subjects, name)()
            gc.collect()
            if refusing.is_over():
                calls[name] = refused - 1
                break
    return calls


if __name__ == "__main__":
    sys.stdout.write(json.dumps(play()))
