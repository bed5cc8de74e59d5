"""An engine that queues all its work on streams: ``python -m tests.cuda.stream_engine RUN_DIR [MISTAKE]``.

It never waits for a kernel before it commits or releases; fences do. Kernels check the bytes of every hit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from kvcached_client import Lease
from kvcached_client.cuda.driver import CudaFailure
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.cuda.streams import StreamFences
from kvcached_client.types import FenceSequence
from tests.cuda.offload_engine import Stream
from tests.cuda.pool_engine import BLOCKS, Engine

#: Prompts between two waits: their slots are fewer than those of the pool.
QUEUED_MAX: Final = 8


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

    def serve(self, count: int) -> str:
        """Serve so many prompts, and each again some prompts later; how many blocks of hits kernels saw wrong."""
        try:
            for number in range(count):
                self.step(number)
                self.step(max(0, number - 3))
                self.client.signal_fence(self.fences.signalled())
                if number % (QUEUED_MAX // 2) == 0:
                    self.client.signal_fence(self.fences.wait())
            self.client.signal_fence(self.fences.wait())
        except CudaFailure as error:
            return f"failed {error.result} {self.fences_are_over()}"
        for stream in self.streams:
            stream.finish()
        return f"wrong {self.wrong}"

    def step(self, number: int) -> None:
        """Queue one prompt's kernels, commit and release under their fence."""
        (lease, _), chain = self.acquire(number), self.chain(number)
        stream = self.streams[number % 2]
        fence = self.launch(stream, self.kernel(lease, number))
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


class EarlyEvents(StreamEngine):
    """A mistake: the event is recorded before the kernel is queued."""

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> FenceSequence:
        fence = self.fences.next(stream.handle)
        stream.launch(kernel)
        return fence


class Unfenced(StreamEngine):
    """A mistake: fences are not waited for."""

    fences_type = NotWaiting


ENGINES: Final = {each.__name__: each for each in (StreamEngine, EarlyEvents, Unfenced)}


def main(run_dir: str, name: str = "StreamEngine") -> None:
    engine = ENGINES[name](run_dir)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        what, number = line.split()
        sys.stdout.write(getattr(engine, what)(int(number)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
