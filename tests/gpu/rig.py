"""A device with memory, and memory of this machine that it reaches, for the checks; and how they take times."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver, Stream

RUNS: Final = 5

Figures = dict[str, Any]
Sizes = npt.NDArray[np.uint64]


class Rig:
    """A device with memory, and as much memory of this machine that it reaches.

    Args:
        size_bytes: of each.
        parts: takes what has to be closed.
    """

    def __init__(self, size_bytes: int, parts: ExitStack) -> None:
        self.driver = Driver()
        self.device = Device(self.driver)
        parts.callback(self.device.close)
        self.memory = parts.enter_context(self.device.make_memory(size_bytes))
        self.size_bytes = size_bytes
        self.host = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.host))
        start = time.perf_counter()
        registered = self.device.register(self.address, size_bytes)
        self.registration_s = time.perf_counter() - start
        self.device_address = registered.device_address
        parts.callback(registered.close)

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """A stream of its own."""
        made = self.device.make_stream()
        try:
            yield made
        finally:
            made.synchronize()
            made.close()

    def pieces(self, piece_bytes: int) -> tuple[Sizes, Sizes, Sizes]:
        """All memory in pieces: where they are on the device, where in this process (in another order), and sizes."""
        count = self.size_bytes // piece_bytes
        starts = np.arange(count, dtype=np.uint64) * np.uint64(piece_bytes)
        scattered = np.random.default_rng(0).permutation(starts)
        sizes = np.full(count, piece_bytes, np.uint64)
        return starts + np.uint64(self.memory.address), scattered + np.uint64(self.address), sizes


def best(queue: Callable[[], object], *streams: Stream) -> float:
    """Seconds until what is queued is done: the best of a few runs, after one that does not count."""

    def run() -> None:
        queue()
        for stream in streams:
            stream.synchronize()

    run()
    return min(timed(run) for _ in range(RUNS))


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def one_piece(destination: int, source: int, size_bytes: int) -> tuple[Sizes, Sizes, Sizes]:
    destinations, sources, sizes = (np.array([each], np.uint64) for each in (destination, source, size_bytes))
    return destinations, sources, sizes
