"""An engine on a device whose copies a process of its own makes: ``python -m tests.cuda.copying_engine RUN_DIR KIND``.

It speaks in lines. KIND says how it shares its memory: by a "descriptor", or by "handles". Its kernels run late.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.client import CopyProcess, EngineMemory, Outcome
from kvcached_client.cuda.device import Device, DeviceMemory
from kvcached_client.cuda.driver import Driver
from kvcached_client.cuda.marks import MarkWriter
from kvcached_client.errors import BadRequest
from kvcached_client.offload import new_instance
from tests.client.offload_rig import HostTensor
from tests.cuda.offload_engine import BEFORE, PAGE_BYTES, SLOW_S, Stream, seen
from tests.daemon.offload_process import BLOCKS, DEADLINE_MS, LAYERS, Order, Scheduler, content, job_of
from tests.line_process import serve

PATIENCE_S = 30
#: More than a page of marks has room for.
MARKS_TRIED = 2000
LAYER_BYTES = BLOCKS * PAGE_BYTES


class Memory:
    """Tensors of the engine.

    Attributes:
        layers: what each layer holds, as the processor reaches it on the fake driver.
        shared: None where it is shared by handles.
    """

    def __init__(self, device: Device, kind: str) -> None:
        self._device = device
        self._exported: DeviceMemory | None = None
        self._allocated: list[int] = []
        self.shared: EngineMemory | None = None
        if kind == "descriptor":
            self._exported = memory = device.make_memory(LAYERS * LAYER_BYTES)
            self.shared = EngineMemory(memory.export(), memory.address, memory.size_bytes)
            self.layers = [_layer(memory.address + number * LAYER_BYTES) for number in range(LAYERS)]
        else:  # the last layer comes first, and none begins where its allocation does
            for _ in range(LAYERS):
                self._allocated.append(int(device.driver.call("cuMemAlloc", PAGE_BYTES + LAYER_BYTES)))
            self.layers = [_layer(address + PAGE_BYTES) for address in sorted(self._allocated, reverse=True)]

    def close(self) -> None:
        if self._exported is not None and self.shared is not None:
            os.close(self.shared.descriptor)
            self._exported.close()
        for address in self._allocated:
            self._device.driver.call("cuMemFree", address)


def _layer(address: int) -> npt.NDArray[np.uint8]:
    return seen(address, LAYER_BYTES).reshape(BLOCKS, PAGE_BYTES)


class Engine:
    """The engine; its commands are methods."""

    def __init__(self, run_dir: str, kind: str) -> None:
        self._run_dir = run_dir
        self._instance = new_instance()
        self.device = Device(Driver())
        self.memory = Memory(self.device, kind)
        self.tensors = [HostTensor(layer, "cuda") for layer in self.memory.layers]
        self.pages = EnginePages.of_tensors({f"layer {number}": each for number, each in enumerate(self.tensors)})
        self.stream = Stream(self.device)
        self._gate = threading.Event()
        self._read: list[bool] = []
        self._loading: Order | None = None
        self.scheduler: Scheduler | None = None
        self.copies: CopyProcess | None = None

    def connect(self) -> None:
        """Open a session, and have a process join it."""
        self.scheduler = Scheduler(self._run_dir, self._instance, 1, PAGE_BYTES)
        try:
            self.copies = CopyProcess.start(
                self.scheduler.client.session, 0, self.pages, self.memory.shared,
                deadline_ms=DEADLINE_MS, start_ms=PATIENCE_S * 1000,
            )  # fmt: skip
        except BaseException:
            self.scheduler.client.close()
            raise

    def leave(self) -> None:
        """Leave the session."""
        assert self.copies is not None
        assert self.scheduler is not None
        self.copies.close()
        self.scheduler.client.close()

    def free(self) -> None:
        """Free the device's memory."""
        self.stream.finish()
        self.memory.close()

    def let(self, variable: str, value: str) -> None:
        """Set a variable for the next copy process; this one has read its own."""
        os.environ[variable] = value

    def hold(self) -> None:
        """Launch a kernel that ends when it is told to."""
        self._gate.clear()

        def wait() -> None:
            self._gate.wait(PATIENCE_S)

        self.stream.launch(wait)

    def compute_slowly(self) -> None:
        """Launch a kernel that takes a while."""
        self.stream.launch(lambda: time.sleep(SLOW_S))

    def release(self) -> None:
        """Let that kernel end."""
        self._gate.set()

    def begin_store(self, name: str, blocks: int) -> int:
        """Launch the kernels that compute a prompt, and order its store at once."""
        copies, scheduler = self._parts()
        order = scheduler.prepare_store(name, blocks)[1]
        self._poison(order)

        def compute() -> None:
            for depth, number, tensor in self._pages_of(order):
                tensor.array[depth] = content(tensor, order.name, depth, number, 0)

        self.stream.launch(compute)
        return copies.store([job_of(order)], after=copies.mark(self.stream.handle))

    def begin_load(self, name: str, blocks: int) -> int:
        """Order a load over blocks that a kernel still reads."""
        copies, scheduler = self._parts()
        order = self._loading = scheduler.prepare_load(name, blocks)
        self._poison(order)
        self._read.clear()

        def read() -> None:
            self._read.append(all((tensor.array[at] == BEFORE).all() for at, _, tensor in self._pages_of(order)))

        self.stream.launch(read)
        return copies.load(job_of(order), after=copies.mark(self.stream.handle))

    def store(self, name: str, blocks: int) -> str:
        """A store: why it failed, or "stored"."""
        self.begin_store(name, blocks)
        return self.outcome().error or "stored"

    def load(self, name: str, blocks: int) -> str:
        """A load of what is hit: how many blocks, and whether kernel and caller see what they must; or the error."""
        if not self._parts()[1].hit(name, blocks):
            return "0"
        self.begin_load(name, blocks)
        return self.loaded()

    def serve(self, name: str, blocks: int) -> str:
        """Load what is hit of a prompt, or store it where nothing is."""
        found = self.load(name, blocks)
        return self.store(name, blocks) if found == "0" else found

    def loaded(self) -> str:
        """The end of a load, as `load` tells it."""
        outcome, order = self.outcome(), self._loading
        if outcome.error:
            return outcome.error
        assert order is not None
        is_right = all(
            (tensor.array[depth] == content(tensor, order.name, depth, number, 0)).all()
            for depth, number, tensor in self._pages_of(order)
            if depth - order.start not in outcome.bad
        )
        self.stream.finish()
        return f"{len(order.slots) - len(outcome.bad)} {is_right and self._read == [True]}"

    def outcome(self) -> Outcome:
        """The end of the only order under way."""
        copies, _ = self._parts()
        while not (found := copies.outcomes()):
            assert select.select([copies.fileno()], [], [], PATIENCE_S)[0]
        (outcome,) = found
        return outcome

    def ended(self) -> list[Outcome]:
        """What has ended, without waiting."""
        return self._parts()[0].outcomes()

    def store_without_mark(self, name: str) -> None:
        """As somebody does who has not read the guide."""
        copies, scheduler = self._parts()
        copies.store([job_of(scheduler.prepare_store(name, 2)[1])])

    def store_behind_others(self, name: str) -> str:
        """Stores behind what is no mark, and behind one that another copy process was given: which were accepted."""
        copies, scheduler = self._parts()
        job = job_of(scheduler.prepare_store(name, 2)[1])
        own = copies.mark(self.stream.handle)
        other = MarkWriter(self.pages.device)
        marks = {"zero": 0, "minus one": -1, "next": own + 1, "low": 1, "other": other.mark(self.stream.handle)}
        accepted = [name for name, mark in marks.items() if self._is_accepted([job], mark)]
        other.close()
        return f"{accepted}"

    def _is_accepted(self, jobs: list[BlockJob], mark: int) -> bool:
        try:
            self._parts()[0].store(jobs, after=mark)
        except BadRequest as error:
            return "no mark of this copy process" not in error.message
        return True

    def mark_too_often(self) -> str:
        """Marks behind a kernel that does not end: how many there can be, and what the next one raises."""
        copies, made, refusal = self._parts()[0], 0, "none was refused"
        self.hold()
        try:
            for made in range(MARKS_TRIED):  # noqa: B007 - how many were made before the refusal
                copies.mark(self.stream.handle)
        except BadRequest as error:
            refusal = error.message
        self.release()
        self.stream.finish()
        return f"{made} {refusal}"

    def mark(self) -> str:
        """Make a mark."""
        try:
            return str(self._parts()[0].mark(self.stream.handle) % (1 << 32))  # the rest says whose it is
        except BadRequest as error:
            return error.message

    def mark_again(self, times: int) -> None:
        """Marks that the device reaches one after the other."""
        for _ in range(times):
            self._parts()[0].mark(self.stream.handle)
            self.stream.finish()

    def pid(self) -> int:
        """Of the copy process."""
        return self._parts()[0].pid

    def kernels(self) -> str:
        """Whether this process's own device still works."""
        done: list[int] = []
        self.stream.launch(lambda: done.append(1))
        self.stream.finish()
        return f"{done}"

    def _parts(self) -> tuple[CopyProcess, Scheduler]:
        assert self.copies is not None
        assert self.scheduler is not None
        return self.copies, self.scheduler

    def _poison(self, order: Order) -> None:
        for depth, _, tensor in self._pages_of(order):
            tensor.array[depth] = BEFORE

    def _pages_of(self, order: Order) -> Iterator[tuple[int, int, HostTensor]]:
        for depth in range(order.start, order.start + len(order.slots)):
            for number, tensor in enumerate(self.tensors):
                yield depth, number, tensor


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    serve(Engine(sys.argv[1], sys.argv[2]))
