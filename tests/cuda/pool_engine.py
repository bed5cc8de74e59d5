"""An engine whose pool is on a CUDA device: ``python -m tests.cuda.pool_engine RUN_DIR``; it speaks in lines.

It writes each block's key into all of its K and V, each layer's in an order of its own, as a kernel would: the
processor reaches the fake device's memory.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcached_client import Client, KeyChain, Lease, MappedPool, map_pool
from kvcached_client.cuda.mapping import CudaArray
from kvcached_client.transport.misses import Failures
from kvcached_client.types import KEY_SIZE_BYTES
from tests.line_process import serve

BLOCKS = 3


def seen(array: CudaArray) -> npt.NDArray[np.uint8]:
    """The bytes of an array ``[slots, …]``, a row for each slot."""
    interface = array.__cuda_array_interface__
    slots, rest = array.shape[0], array.shape[1:]
    row_bytes = int(np.prod(rest)) * np.dtype(interface["typestr"]).itemsize
    stride = interface["strides"][0]
    size_bytes = (slots - 1) * stride + row_bytes
    memory = (ctypes.c_ubyte * size_bytes).from_address(interface["data"][0])
    return np.ndarray((slots, row_bytes), np.uint8, memory, 0, (stride, 1))


def parts(pool: MappedPool) -> list[npt.NDArray[np.uint8]]:
    """K and V of every layer."""
    layers = range(sum(group.layers for group in pool.layout.groups))
    return [seen(part) for layer in layers for part in pool.cuda_keys_values(layer) if part is not None]


class Engine:
    """One client, and all of its pool.

    Attributes:
        failures: see `Client.connect`.
        deadline_ms: of each call.
    """

    failures: Failures = "miss"
    deadline_ms = 20_000

    def __init__(self, run_dir: str) -> None:
        self.client = Client.connect(run_dir, deadline_ms=self.deadline_ms, failures=self.failures)
        self.pool = map_pool(self.client.session, 0, deadline_ms=self.deadline_ms)
        self.parts = parts(self.pool)
        self._places = {part.ctypes.data: place for place, part in enumerate(self.parts)}
        self._requests = 0

    def chain(self, number: int) -> KeyChain:
        size = self.pool.layout.block_size
        return self.client.chain(range(number * 100, number * 100 + BLOCKS * size))

    def acquire(self, number: int) -> tuple[Lease, int]:
        """A lease whose hit is loaded, and how much of it was on the device before."""
        self._requests += 1
        lease = self.client.acquire(f"{id(self)}-{self._requests}", self.chain(number), full=True)
        ready = lease.ready_blocks
        if lease.is_loading:
            lease.wait_loaded()
        return lease, ready

    def compute(self, number: int) -> str:
        """Serve a prompt: what was not hit is written and committed."""
        (lease, _), chain = self.acquire(number), self.chain(number)
        hit = lease.hit_blocks
        for depth in range(hit, BLOCKS):
            for part in self.parts:
                part[lease.block_table[depth]] = self._pattern(chain, depth, part)
        lease.commit(chain.token_count)
        lease.release()
        return f"hit {hit}"

    def look(self, number: int) -> str:
        """How much of a prompt is hit, how much of that was on the device already, and how many blocks are wrong."""
        (lease, ready), chain = self.acquire(number), self.chain(number)
        wrong = sum(
            any((part[lease.block_table[depth]] != self._pattern(chain, depth, part)).any() for part in self.parts)
            for depth in range(lease.hit_blocks)
        )
        said = f"hit {lease.hit_blocks} ready {ready} wrong {wrong}"
        lease.release()
        return said

    def rejoin(self, number: int) -> str:
        """Go on with the next daemon."""
        self.client.match(self.chain(number))
        self.client.rejoin()
        return "rejoined"

    def addresses(self, _: int) -> str:
        """Where the parts are: what a recorded graph of kernels holds."""
        return " ".join(str(part.ctypes.data) for part in self.parts)

    def others(self, _: int) -> str:
        """Of another mapping of the pool in the present session: how many parts are elsewhere, and how many differ."""
        with map_pool(self.client.session, 0, deadline_ms=20_000) as pool:
            pairs = list(zip(self.parts, parts(pool), strict=True))
            elsewhere = sum(mine.ctypes.data != other.ctypes.data for mine, other in pairs)
            return f"elsewhere {elsewhere} different {sum((mine != other).any() for mine, other in pairs)}"

    def _pattern(self, chain: KeyChain, depth: int, part: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        key = np.frombuffer(bytes(chain.key_range(depth, depth + 1)), np.uint8)
        assert len(key) == KEY_SIZE_BYTES
        return np.resize(np.roll(key, self._places[part.ctypes.data]), part.shape[1])


if __name__ == "__main__":
    serve(Engine(sys.argv[1]))
