"""An engine in offload mode with tensors on a CUDA device: ``python -m tests.cuda.offload_engine RUN_DIR ORDINAL``.

It speaks in lines. Its kernels are host functions on its stream, which run late. A thread without a CUDA context
copies.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks import copy
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import CudaFailure, Driver
from kvcached_client.cuda.engine import Mark
from kvcached_client.offload_shard import OffloadShard
from tests.client.offload_rig import HostTensor
from tests.daemon.offload_process import BLOCKS, LAYERS, Order, Scheduler, ShardMemory, content, job_of
from tests.line_process import outcome, serve

PAGE_BYTES = 32 << 10  # smaller ones are not copied in batches
#: A kernel that takes much longer than a copy.
SLOW_S = 0.4
#: What blocks hold that nobody has computed.
BEFORE = 0xEE
Kernel = Callable[[], None]
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Stream:
    """The engine's stream, and kernels on it.

    Attributes:
        handle: of the stream; 0 for the default stream.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._driver = device.driver
        self._stream = device.make_stream()
        self.handle = self._stream.handle
        self._kernels: list[Any] = []  # as long as the driver may call them

    def launch(self, kernel: Kernel) -> None:
        """Queue a kernel; it runs some time later."""
        self._kernels.append(HostFunction(lambda _: kernel()))
        address = ctypes.cast(self._kernels[-1], ctypes.c_void_p).value
        names = self._driver.names
        with self._device.current():
            self._driver.call("cuLaunchHostFunc", names.CUstream(self.handle), names.CUhostFn(address), 0)

    def finish(self) -> None:
        """Wait for all kernels."""
        with self._device.current():
            self._driver.call("cuCtxSynchronize")


class DeviceShard(ShardMemory):
    """The engine's one shard: tensors on a device, written and read by kernels."""

    def __init__(self, ordinal: int) -> None:
        self.shard = 0
        self.device = Device(Driver(), ordinal)
        self._memory = self.device.make_memory(LAYERS * BLOCKS * PAGE_BYTES)
        memory = seen(self._memory.address, LAYERS * BLOCKS * PAGE_BYTES)
        self.tensors = [HostTensor(layer, "cuda") for layer in memory.reshape(LAYERS, BLOCKS, PAGE_BYTES)]
        self.pages = EnginePages.of_tensors({f"layer {number}": each for number, each in enumerate(self.tensors)})
        self.link: OffloadShard | None = None
        self.stream = Stream(self.device)
        Device(self.device.driver).use()  # the thread's device may be another one

    def store(self, order: Order) -> None:
        """Launch the kernels that compute the blocks, and store the blocks at once."""

        def compute() -> None:
            for depth, number, tensor in self._pages_of(order):
                tensor.array[depth] = content(tensor, order.name, depth, number, 0)

        self._poison(order)
        self.stream.launch(compute)
        mark = self.mark()
        on_copying_thread(lambda: self._joined.store(job_of(order), after=mark))
        self.stream.finish()

    def load(self, order: Order) -> tuple[list[int], bool]:
        """Load over blocks that a kernel still reads. Which are bad; whether kernel and caller see what they must."""
        found: list[bool] = []
        self._poison(order)

        def read() -> None:
            found.extend((tensor.array[depth] == BEFORE).all() for depth, _, tensor in self._pages_of(order))

        self.stream.launch(read)
        mark = self.mark()
        bad: list[int] = on_copying_thread(lambda: self._joined.load(job_of(order), after=mark))
        found.extend(
            (tensor.array[depth] == content(tensor, order.name, depth, number, 0)).all()
            for depth, number, tensor in self._pages_of(order)
            if depth - order.start not in bad
        )
        self.stream.finish()
        return bad, all(found)

    def mark(self) -> Mark:
        """Behind the kernels so far."""
        before = self.device.driver.call("cuCtxGetCurrent")
        mark = self._joined.mark(self.stream.handle)
        assert int(self.device.driver.call("cuCtxGetCurrent")) == int(before)
        return mark

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self._memory.close()

    def _poison(self, order: Order) -> None:
        for depth, _, tensor in self._pages_of(order):
            tensor.array[depth] = BEFORE

    def _pages_of(self, order: Order) -> Iterator[tuple[int, int, HostTensor]]:
        for depth in range(order.start, order.start + len(order.slots)):
            for number, tensor in enumerate(self.tensors):
                yield depth, number, tensor


def seen(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Device memory, as the processor reaches it on the fake driver."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * size_bytes).from_address(address)), np.uint8)


def on_copying_thread(work: Callable[[], Any]) -> Any:
    """What the work returns or raises. The thread has no context before it, nor afterwards."""
    with ThreadPoolExecutor(1) as copying:
        driver, done = Driver(), copying.submit(work)
        done.exception()
        assert int(copying.submit(driver.call, "cuCtxGetCurrent").result()) == 0
        return done.result()


class Engine:
    """The engine; its commands are methods."""

    def __init__(self, run_dir: str, ordinal: int) -> None:
        self._run_dir = run_dir
        self._instance = os.urandom(16)
        self.memory = DeviceShard(ordinal)
        self.connect()

    def connect(self) -> None:
        """Open a session, be it with the next daemon, and join it."""
        self.scheduler = Scheduler(self._run_dir, self._instance, 1, PAGE_BYTES)
        self.memory.join(self.scheduler.client.session)

    def store(self, name: str, blocks: int) -> None:
        """Compute what a prompt lacks, and store it."""
        plan, order = self.scheduler.prepare_store(name, blocks)
        if plan.transfer:
            self.memory.store(order)

    def load(self, name: str, blocks: int) -> str:
        """Load all that is hit of a prompt: ``HIT [BAD] RIGHT``."""
        if not self.scheduler.hit(name, blocks):
            return "0"
        order = self.scheduler.prepare_load(name, blocks)
        bad, right = self.memory.load(order)
        return f"{len(order.slots)} {bad} {right}"

    def store_without_mark(self, name: str) -> None:
        """As somebody does who has not read the guide."""
        order = self.scheduler.prepare_store(name, 2)[1]
        assert self.memory.link is not None
        self.memory.link.store(job_of(order))

    def compute_on_default_stream(self) -> None:
        """As engines do that make no stream."""
        self.memory.stream.handle = 0

    def split(self, pieces: int) -> None:
        """Cut copies into batches of so many pieces."""
        copy.PIECES_MAX = pieces  # type: ignore[misc]

    def close_under_store(self, name: str, blocks: int) -> str:
        """Close the shard while another thread's store waits for a slow kernel."""
        order = self.scheduler.prepare_store(name, blocks)[1]

        def store() -> bool:
            self.memory.store(order)
            return True

        return self._close_under(store)

    def close_under_load(self, name: str, blocks: int) -> str:
        """Close the shard while another thread's load waits for a slow kernel."""
        assert self.scheduler.hit(name, blocks)
        order = self.scheduler.prepare_load(name, blocks)
        return self._close_under(lambda: self.memory.load(order) == ([], True))

    def _close_under(self, copy: Callable[[], bool]) -> str:
        assert self.memory.link is not None
        self.memory.stream.launch(lambda: time.sleep(SLOW_S))
        with ThreadPoolExecutor(1) as copying:
            copied = copying.submit(copy)
            time.sleep(SLOW_S / 2)
            self.memory.link.close()
            whole = copied.result()
        self.scheduler.client.close()
        return f"whole {whole}"

    def leave(self) -> None:
        """Leave the session, and free the device's memory."""
        self.memory.close()
        self.scheduler.client.close()


def several_devices() -> str:
    """What registering layers of two devices raises."""
    layers = {}
    for ordinal in range(2):
        memory = Device(Driver(), ordinal).make_memory(4096)
        layers[str(ordinal)] = HostTensor(seen(memory.address, 4096).reshape(4, 1024), "cuda")
    return outcome(lambda: EnginePages.of_tensors(layers).device)


def no_device_memory() -> str:
    """What a tensor raises that says it is on a device, and is not."""
    Device(Driver())
    tensor = HostTensor(np.zeros((BLOCKS, PAGE_BYTES), np.uint8), "cuda")
    try:
        EnginePages.of_tensors({"layer": tensor}).device  # noqa: B018
    except CudaFailure as error:
        return error.result
    return ""


if __name__ == "__main__":
    if sys.argv[1] in {"several_devices", "no_device_memory"}:
        sys.stdout.write(json.dumps(globals()[sys.argv[1]]()))
    else:
        logging.basicConfig(level=logging.WARNING)
        serve(Engine(sys.argv[1], int(sys.argv[2])))
