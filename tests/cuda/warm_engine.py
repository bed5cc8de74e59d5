"""A vLLM with memory of the daemon on CUDA: ``python -m tests.cuda.warm_engine RUN_DIR CLAIM RANK ORDINAL``.

It speaks in lines. A process is one rank; that of rank 0 is the scheduler as well. Kernels are host functions on the
rank's stream, which run late, or not before the test lets them. The connector's own class needs vLLM; what it does with
memory, table and steps is here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import CudaFailure, Driver
from kvcached_client.cuda.mapping import CudaArray
from kvcached_client.offload import OffloadLayout
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.vllm import device_table
from kvcached_client.vllm.computed_steps import steps_of
from kvcached_client.vllm.device_memory import RankMemory, own_device
from kvcached_client.vllm.device_table import KnownIdentity, open_table
from kvcached_client.vllm.identity import Identity
from kvcached_client.vllm.settings import Settings
from tests.client.offload_rig import HostTensor
from tests.cuda.offload_engine import Stream, seen
from tests.line_process import serve
from tests.vllm_connector.mini_daemon import BLOCK
from tests.vllm_connector.rig import Cached, FakeStep, New
from tests.vllm_connector.warm_world import WatchedPool, manager_of

BLOCKS: Final = 32
BLOCK_BYTES: Final = 256 * 1024
RANK_BYTES: Final = BLOCKS * BLOCK_BYTES
#: What warming up leaves in every block.
WARM: Final = 0x5A
log = logging.getLogger(__name__)


class Engine:
    """One rank; its commands are methods."""

    def __init__(
        self, run_dir: str, claim: str, rank: str, ordinal: str, name: str = "model", ranks: str = "1"
    ) -> None:
        self._settings = Settings(run_dir=run_dir, device_memory="daemon")
        self._device = Device(Driver(), int(ordinal))
        self._stream = Stream(self._device)
        self._question = ClaimPool(
            name=name, claim=claim, ranks=int(ranks), rank=int(rank), rank_bytes=RANK_BYTES, blocks=BLOCKS,
            device=own_device("cuda", lambda: int(ordinal)),
        )  # fmt: skip
        self._memory = RankMemory(self._question, self._settings)
        self._may_run = threading.Event()
        self._failures: list[str] = []
        self._pool = WatchedPool(BLOCKS)
        self._identify = KnownIdentity(lambda: Identity(name.encode().ljust(32), "mini", ()))
        self._table: Any = None

    # --- a rank -----------------------------------------------------------------------------------------------------

    def allocate(self) -> str:
        """Allocate as vLLM does, and register tensors; ``daemon`` or ``own``."""
        array = self._memory.allocate(RANK_BYTES)
        if array is None:
            return "own"
        assert isinstance(array, CudaArray)
        self._array = array  # as vLLM's tensor does
        self._bytes = seen(array.__cuda_array_interface__["data"][0], RANK_BYTES)
        tensor = HostTensor(self._bytes.reshape(BLOCKS, BLOCK_BYTES), "cuda")
        self._pages = EnginePages.of_tensors({"layer": tensor})
        self._steps = steps_of(self._pages, lambda _: self._stream.handle)
        return "daemon"

    def warm_up(self) -> None:
        """Write all blocks, in kernels of which some have not run yet when this returns."""
        for block in range(BLOCKS):
            self._stream.launch(lambda block=block: self._bytes_of(block).fill(WARM))  # type: ignore[misc]

    def pool(self) -> str:
        """The pool of the memory, as the rank describes it."""
        return self._memory.pool_id([self._pages.layers[0].address]).hex() or "none"

    def compute(self, number: int, name: str, *blocks: int) -> None:
        """A step fills blocks, once its kernel runs."""
        self._memory.begin_step(is_tracked=True)
        self._launch(lambda: self._fill(name, blocks))
        self._steps.launched(number)

    def hold(self, number: int, name: str, *blocks: int) -> None:
        """As `compute`; the kernel waits until the test lets it run."""
        self._memory.begin_step(is_tracked=True)
        self._launch(self._may_run.wait)
        self._launch(lambda: self._fill(name, blocks))
        self._steps.launched(number)

    def let_run(self) -> None:
        """Let the kernels run, and wait for them."""
        self._may_run.set()
        self._stream.finish()

    def report(self) -> str:
        """What the rank reports of its steps, without waiting."""
        return str(self._steps.take())

    def finish(self) -> str:
        """Wait for the device, then report."""
        try:
            self._stream.finish()
        except CudaFailure as error:
            log.warning("vLLM would end: %s", error)
        return self.report()

    def holds(self, name: str, *blocks: int) -> str:
        """How many of these blocks hold what the step of that name has written."""
        return str(sum(bool((self._bytes_of(block) == content(name, block)).all()) for block in blocks))

    def filled_with(self) -> str:
        """The bytes that the blocks hold, of which each begins."""
        return " ".join(map(str, sorted({int(self._bytes_of(block)[0]) for block in range(BLOCKS)})))

    def fork(self) -> str:
        """A child that has what forked children inherit, and outlives this process; its id."""
        pid = os.fork()
        if not pid:
            signal.pause()
        return str(pid)

    def free(self) -> None:
        """End as vLLM does: nothing refers to the memory any more."""
        self._stream.finish()
        del self._memory, self._array

    # --- the scheduler ----------------------------------------------------------------------------------------------

    def schedule(self, *pools: str) -> str:
        """Begin to serve with ranks of these pools; how many blocks are found, or ``cold``."""
        layout = OffloadLayout(BLOCK, self._question.ranks, BLOCK_BYTES, bytes(16))
        self._table = open_table(
            ClaimPool(**{**_fields(self._question), "rank": None, "device": ""}),
            self._settings,
            [b"" if each == "none" else bytes.fromhex(each) for each in pools],
            manager_of(self._pool),
            device_table.Engine(layout, self._identify, "0.32", [BLOCK]),
        )
        if self._table is None:
            return "cold"
        self._identify()
        return str(len(self._pool.cached))

    def prefill(self, name: str, blocks: int) -> str:
        """Order a step that fills blocks: its number, and their numbers. The request ends with it."""
        taken = self._pool.take(blocks)
        assert taken is not None
        for depth, block in enumerate(taken):
            self._pool.remember(block, f"{name} {depth}".encode(), (depth + 1) * BLOCK)
        self._pool.tables[name] = [taken]
        step: Any = FakeStep([New(name, (taken,), 0)], Cached(), {name: blocks * BLOCK})
        number = self._table.step(step)
        self._table.finished(name)
        self._pool.give_back(reversed(taken))
        return " ".join(map(str, (number, *taken)))

    def computed(self, *reports: str) -> str:
        """Ranks report, one after the other; how many blocks are named then, and whether more will be."""
        self._table.computed({rank: int(each) for rank, each in enumerate(map(str, reports)) if each != "None"})
        return f"{self._table._table.named} {self._table.is_waiting}"

    def blocks_of(self, name: str, blocks: int) -> str:
        """Which blocks vLLM finds of a prompt."""
        found = [self._pool.cached.get(f"{name} {depth}".encode()) for depth in range(blocks)]
        return " ".join(map(str, found))

    def _launch(self, kernel: Callable[[], Any]) -> None:
        try:
            self._stream.launch(kernel)
        except CudaFailure as error:
            log.warning("vLLM would end: %s", error)

    def _fill(self, name: str, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._bytes_of(block)[:] = content(name, block)

    def _bytes_of(self, block: int) -> Any:
        return self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


def _fields(question: ClaimPool) -> dict[str, Any]:
    return {name: getattr(question, name) for name in question.__struct_fields__}


def content(name: str, block: int) -> Any:
    """What a block holds."""
    return np.random.default_rng([*name.encode(), block]).integers(0, 256, BLOCK_BYTES, np.uint8)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    serve(Engine(*sys.argv[1:]))
