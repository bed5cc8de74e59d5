"""An engine that queues all its work on streams: ``python -m tests.cuda.stream_engine RUN_DIR ENGINE``.

It never waits for a kernel before it commits or releases; fences do. Kernels check the bytes of every hit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client import KeyChain, Lease, LoadFailed, TransportError
from kvcached_client.cuda.driver import CudaFailure
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.cuda.gates import GatedStep, LayerGates
from kvcached_client.cuda.streams import StreamFences
from kvcached_client.types import FenceSequence
from tests.cuda.offload_engine import Stream
from tests.cuda.pool_engine import BLOCKS, Engine
from tests.line_process import say, serve

#: Prompts between two waits: their slots are fewer than those of the pool.
QUEUED_MAX: Final = 8
GATE_DEADLINE_MS: Final = 20_000


class NotWaiting(StreamFences):
    """A mistake: a fence has signalled once it is given."""

    def signalled(self) -> FenceSequence:
        return self._last

    wait = signalled


class StreamEngine(Engine):
    """An engine with two streams. A prompt is always computed on the same one."""

    fences_type: type[StreamFences] = StreamFences

    def __init__(self, run_dir: str) -> None:
        super().__init__(run_dir)
        self.owner = EngineDevice.of_uuid(self.pool.device)
        with self.owner.device.current():
            self.streams = [Stream(self.owner.device) for _ in range(2)]
        self.fences = self.fences_type(self.pool.device)
        self.wrong = 0
        self._kernels: list[tuple[FenceSequence, threading.Event]] = []

    def serve(self, count: int) -> str:
        """Serve so many prompts, and each again some prompts later; how many blocks of hits kernels saw wrong."""
        try:
            for number in range(count):
                self.step(number)
                self.step(max(0, number - 3))
                self.signal(self.fences.signalled())
                if number % (QUEUED_MAX // 2) == 0:
                    self.signal(self.fences.wait())
            self.signal(self.fences.wait())
        except CudaFailure as error:
            return f"failed {error.result} {self.fences_are_over()}"
        for stream in self.streams:
            stream.finish()
        return f"wrong {self.wrong}"

    def signal(self, fence: FenceSequence) -> None:
        """Tell the daemon of a fence. A kernel under it that has not run counts as wrong: its slots are others' now."""
        self.wrong += sum(named <= fence and not over.is_set() for named, over in self._kernels)
        self._kernels = [(named, over) for named, over in self._kernels if named > fence]
        self.client.signal_fence(fence)

    def step(self, number: int) -> None:
        """Queue one prompt's kernels, commit and release under their fence."""
        (lease, _), chain = self.acquire(number), self.chain(number)
        stream, kernel, over = self.streams[number % 2], self.kernel(lease, number), threading.Event()

        def run() -> None:
            kernel()
            over.set()

        fence = self.launch(stream, run)
        self._kernels.append((fence, over))
        lease.commit(chain.token_count, fence=fence)
        lease.release(fence=fence)

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> FenceSequence:
        """Queue a kernel; returns the fence behind it."""
        stream.launch(kernel)
        return self.fences.next(stream.handle)

    def kernel(self, lease: Lease, number: int) -> Callable[[], None]:
        """It reads the blocks of the hit, and writes all others."""
        chain, hit, table = self.chain(number), lease.hit_blocks, lease.block_table

        def run() -> None:
            for depth in range(BLOCKS):
                for part in self.parts:
                    pattern = self._pattern(chain, depth, part)
                    if depth >= hit:
                        part[table[depth]] = pattern
                    elif (part[table[depth]] != pattern).any():
                        self.wrong += 1

        return run

    def fences_are_over(self) -> str:
        """What the fences say once the device has failed."""
        try:
            return f"signalled {self.fences.signalled()}"
        except CudaFailure as error:
            return f"again {error.result}"


class GatedEngine(StreamEngine):
    """It reads hits layer by layer, on a stream that waits for each layer."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(run_dir)
        self.gates = LayerGates(self.pool)
        self.deadline_of_gates_ms = GATE_DEADLINE_MS

    def fetch(self, number: int) -> str:
        """Read a hit that may be loading: how it went, blocks of the hit, and the layers that kernels saw wrong."""
        self._requests += 1
        chain = self.chain(number)
        lease = self.client.acquire(f"gated-{self._requests}", chain, full=True)
        promised, was_loading = lease.hit_blocks, lease.is_loading
        self.wrong, said = 0, "read"
        try:
            self.read_layers(lease, chain)
        except (TransportError, LoadFailed) as error:
            said = type(error).__name__
        self.streams[0].finish()
        whole = lease.wait_loaded() == promised * self.pool.layout.block_size
        lease.release()
        return f"{said} loading {was_loading} whole {whole} wrong {self.wrong}"

    def read_until(self, number: int, deadline_ms: int) -> str:
        """Read a hit in a step with a deadline, and keep its lease: how it went, and for how long the stream waited."""
        self._requests += 1
        chain = self.chain(number)
        self._kept = lease = self.client.acquire(f"kept-{self._requests}", chain, full=True)
        self.deadline_of_gates_ms, self.wrong, said = deadline_ms, 0, "read"
        begin_s = time.monotonic()
        try:
            self.read_layers(lease, chain)
        except (TransportError, LoadFailed) as error:
            said = type(error).__name__
        self.streams[0].finish()
        waited_s = time.monotonic() - begin_s
        return f"{said} loading {lease.is_loading} waited {waited_s:.3f} wrong {self.wrong}"

    def read_until_loudly(self, number: int, deadline_ms: int) -> str:
        """As `read_until`, with a line of its own once all is queued."""
        return self._loudly(lambda: self.read_until(number, deadline_ms))

    def kept(self, _: int) -> str:
        """What is told of the loads of the lease that was kept, and how many blocks of its hit are wrong now."""
        lease, chain = self._kept, self.chain(0)
        promised = lease.hit_blocks * self.pool.layout.block_size
        try:
            whole = str(lease.wait_loaded() == promised)
        except LoadFailed as error:
            whole = type(error).__name__
        wrong = sum(
            (part[lease.block_table[depth]] != self._pattern(chain, depth, part)).any()
            for depth in range(lease.ready_blocks)
            for part in self.parts
        )
        lease.release()
        return f"whole {whole} wrong {wrong}"

    def read_layers(self, lease: Lease, chain: KeyChain) -> None:
        """Queue a wait and a kernel for each layer; the host waits for none of them."""
        stream, parts = self.streams[0], len(self.parts) // self.pool.layout.groups[0].layers
        with self.gates.begin(lease.loads, deadline_ms=self.deadline_of_gates_ms) as step:
            for layer in range(self.pool.layout.groups[0].layers):
                self.queue_wait(step, stream.handle, layer)
                stream.launch(self.reader(lease, chain, self.parts[layer * parts : (layer + 1) * parts]))

            self.launched()

    def launched(self) -> None:
        """All kernels of the step are queued."""

    def fetch_loudly(self, number: int) -> str:
        """As `fetch`, with a line of its own once all is queued."""
        return self._loudly(lambda: self.fetch(number))

    def _loudly(self, fetch: Callable[[], str]) -> str:
        launched = self.launched

        def tell() -> None:
            launched()
            say("launched")

        self.launched = tell  # type: ignore[method-assign]
        return fetch()

    def queue_wait(self, step: GatedStep, stream: int, layer: int) -> None:
        step.wait(stream, layer)

    def reader(self, lease: Lease, chain: KeyChain, parts: list[npt.NDArray[np.uint8]]) -> Callable[[], None]:
        """A kernel that checks one layer of the hit."""
        table, hit = lease.block_table, lease.hit_blocks

        def run() -> None:
            self.wrong += sum(
                (part[table[depth]] != self._pattern(chain, depth, part)).any()
                for depth in range(hit)
                for part in parts
            )

        return run


class NoGates(GatedEngine):
    """A mistake: the stream waits for nothing."""

    def queue_wait(self, step: GatedStep, stream: int, layer: int) -> None:
        pass

    def launched(self) -> None:
        self.streams[0].finish()  # the kernels have run before anything is told, or arrives


class EarlyEvents(StreamEngine):
    """A mistake: the event is recorded before the kernel is queued."""

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> FenceSequence:
        fence = self.fences.next(stream.handle)
        stream.launch(kernel)
        return fence


class Unfenced(StreamEngine):
    """A mistake: fences are not waited for."""

    fences_type = NotWaiting


ENGINES: Final = {each.__name__: each for each in (StreamEngine, GatedEngine, EarlyEvents, Unfenced, NoGates)}


if __name__ == "__main__":
    serve(ENGINES[sys.argv[2]](sys.argv[1]))
