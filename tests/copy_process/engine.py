"""An engine in offload mode whose KV memory is the daemon's, and whose copies a process of its own makes.

Its argument is the daemon's run directory. It serves `Engine` in lines.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.client import CopyProcess, EngineMemory, Outcome
from kvcached_client.offload import new_instance
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.transport.attach import claim_pool, close_all
from tests.client.offload_rig import HostTensor
from tests.daemon.offload_process import BLOCKS, DEADLINE_MS, LAYERS, Order, Scheduler, content, job_of
from tests.line_process import serve

PAGE_BYTES = 4096
RANK_BYTES = LAYERS * BLOCKS * PAGE_BYTES
SLABS, SLAB_BYTES = 4, 9 * LAYERS * PAGE_BYTES
CONFIG = f"""
heartbeat_interval_ms = 100
session_ttl_ms = 20_000
[host]
size_bytes = {SLABS * SLAB_BYTES}
slab_bytes = {SLAB_BYTES}
verify = "always"
[offload]
device_memory_bytes = "2MiB"
"""
#: Longer than a process takes to start, and a busy machine to go on; shorter than a test may take.
PATIENCE_S = 30


class Engine:
    """One shard. Its methods wait for the ends of their copies. A context manager."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._instance = new_instance()
        self._parts = ExitStack()
        question = ClaimPool(name="model", claim="1", ranks=1, rank=0, rank_bytes=RANK_BYTES, blocks=BLOCKS)
        found = claim_pool(run_dir, question, deadline_ms=DEADLINE_MS)
        assert found.memory is not None
        lock = lock_memory(found.memory, PATIENCE_S)
        assert lock is not None
        buffer = map_sealed(found.memory, RANK_BYTES, 3)
        close_all([found.table, found.memory])
        self._parts.callback(close_all, [lock])
        arrays = np.frombuffer(memoryview(buffer), np.uint8).reshape(LAYERS, BLOCKS, PAGE_BYTES)
        self.tensors = [HostTensor(array) for array in arrays]
        self.pages = EnginePages.of_tensors({f"layer {number}": each for number, each in enumerate(self.tensors)})
        self.memory = EngineMemory(lock, ctypes.addressof(buffer), RANK_BYTES)
        self.scheduler, self.copies = self._joined()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.copies.close()
        self.scheduler.client.close()
        self._parts.close()

    def _joined(self) -> tuple[Scheduler, CopyProcess]:
        scheduler = Scheduler(self.run_dir, self._instance, 1, PAGE_BYTES)
        copies = CopyProcess.start(
            scheduler.client.session, 0, self.pages, self.memory, deadline_ms=DEADLINE_MS, start_ms=PATIENCE_S * 1000
        )
        return scheduler, copies

    def reconnect(self) -> None:
        """A new session of the same engine, after the end of the last one."""
        self.copies.close()
        self.scheduler.client.close()
        self.scheduler, self.copies = self._joined()

    def compute(self, order: Order) -> None:
        """Write what the blocks of a store must hold."""
        for depth in range(order.start, order.start + len(order.slots)):
            for number, tensor in enumerate(self.tensors):
                tensor.array[depth] = content(tensor, order.name, depth, number, 0)

    def is_right(self, order: Order, bad: tuple[int, ...]) -> bool:
        """Whether the blocks of a load that are not bad hold what they must."""
        depths = [order.start + place for place in range(len(order.slots)) if place not in bad]
        return all(
            (tensor.array[depth] == content(tensor, order.name, depth, number, 0)).all()
            for depth in depths
            for number, tensor in enumerate(self.tensors)
        )

    def begin_store(self, name: str, blocks: int) -> int:
        """Compute a prompt and order its store; the order's number."""
        _, order = self.scheduler.prepare_store(name, blocks)
        self.compute(order)
        return self.copies.store([job_of(order)])

    def store(self, name: str, blocks: int) -> str:
        """As `begin_store`; why it failed, if it did."""
        return self.outcome(self.begin_store(name, blocks)).error

    def load(self, name: str, blocks: int) -> str:
        """Load what is hit of a prompt over wrong bytes: how many blocks, and whether they are right; or the error."""
        order = self.scheduler.prepare_load(name, blocks)
        for tensor in self.tensors:
            tensor.array[:] = 0xEE
        outcome = self.outcome(self.copies.load(job_of(order)))
        return outcome.error or f"{len(order.slots) - len(outcome.bad)} {self.is_right(order, outcome.bad)}"

    def outcome(self, number: int) -> Outcome:
        """The end of an order, the only one under way."""
        while not (found := self.copies.outcomes()):
            assert select.select([self.copies.fileno()], [], [], PATIENCE_S)[0]
        (outcome,) = found
        assert outcome.number == number
        return outcome

    def prepare(self) -> int:
        """Start a process that joins nothing yet; its id."""
        self.prepared = CopyProcess.prepare(0, self.pages, self.memory)
        return self.prepared.pid

    def fork(self) -> int:
        """A forked child, which has this process's descriptors and does nothing; the test ends it."""
        if child := os.fork():
            return child
        signal.pause()
        os._exit(0)

    def pid(self) -> int:
        """Of the copy process."""
        return self.copies.pid


if __name__ == "__main__":
    with Engine(Path(sys.argv[1])) as engine:
        serve(engine)
