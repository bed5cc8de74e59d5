"""Programs on a CUDA device (`programs`) about memory that it reaches, and that nobody else holds any more."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from unittest import mock

from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.cuda.host import HostPool
from kvcached_client.cuda.marks import MarkWriter
from tests.cuda.offload_engine import Stream

PATIENCE_S: Final = 20
HOST: Final = HostGeometry(slabs=8, slab_bytes=1 << 16, shards=1, block_bytes=4096)


def marks_left() -> list[int]:
    """How many pages of marks are mapped: after one was given up that a stream is to write, and with it once closed."""
    owner = EngineDevice(Device(Driver()))
    stream, gate = Stream(owner.device), threading.Event()

    def wait() -> None:
        gate.wait(PATIENCE_S)

    stream.launch(wait)
    writer = MarkWriter(owner)
    writer.mark(stream.handle)
    writer.close(waits=False)
    del writer
    gc.collect()
    left = mappings("kvcached-marks")
    gate.set()
    stream.finish()
    other = MarkWriter(owner)
    other.close()
    del other
    gc.collect()
    return [left, mappings("kvcached-marks") - left]


def mappings(name: str) -> int:
    """How often this process maps the memory of that name."""
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def dropped_copies(by_own_thread: bool) -> list[bool]:
    """Drop copies of an engine: whether their host pool was held while it was registered, and whether it is gone."""
    with ExitStack() as patches:
        owner = EngineDevice(Device(Driver()))
        spare = Held(HOST.size_bytes)
        kept: list[object] = []
        if by_own_thread:
            has_all, register_all = threading.Event(), HostPool._register_all

            def drop(pool: HostPool, on_progress: Callable[[HostPool], None]) -> None:
                register_all(pool, on_progress)
                has_all.wait(PATIENCE_S)
                kept.clear()

            patches.enter_context(mock.patch.object(HostPool, "_register_all", drop))
        kept.append(owner.open_host(spare.address, HOST, 0, memory=spare))
        gone, pool = threading.Event(), kept[0]._pool  # type: ignore[attr-defined]
        weakref.finalize(spare, gone.set)
        del spare
        gc.collect()
        was_held = not gone.is_set()
        if by_own_thread:
            has_all.set()
        else:
            pool.wait()
            kept.clear()
        return [was_held, gone.wait(PATIENCE_S), not pool._registered]


class Held:
    """Memory that may be watched."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
