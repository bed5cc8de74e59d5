"""A worker of vLLM with tensors on a CUDA device: ``python -m tests.cuda.vllm_worker RUN_DIR LAYOUT COPIES [CLAIM]``.

It speaks in lines. One process is scheduler and worker. A forward pass is a late host function on vLLM's stream. The
connector's own class needs vLLM; what it does with tensors and orders is here.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process import shards as copy_shards
from kvcached_client.copy_process.client import CopyProcess
from kvcached_client.copy_process.shards import Shards
from kvcached_client.cuda.device import Device, DeviceMemory
from kvcached_client.cuda.driver import CudaFailure, Driver
from kvcached_client.cuda.mapping import CudaArray
from kvcached_client.offload import Hold, OffloadClient, OffloadLayout, new_instance
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.types import TransferId
from kvcached_client.vllm.device_memory import RankMemory
from kvcached_client.vllm.orders import LoadOrder, SessionNote, StepOrders, StoreOrder
from kvcached_client.vllm.settings import Settings
from kvcached_client.vllm.worker import WorkerSide
from tests.client.offload_rig import HostTensor
from tests.cuda.offload_engine import Stream, seen
from tests.daemon.offload_process import keys_of
from tests.line_process import serve
from tests.vllm_connector.test_worker import NotingLock

LAYERS, BLOCKS, TOKENS = 3, 16, 4
PAGE_BYTES: Final = 1024
log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]


class View(NamedTuple):
    """One of vLLM's shapes of a layer, over memory of all layers."""

    layers: Callable[[Bytes], list[Bytes]]
    #: The bytes of a block of a layer.
    block: Callable[[Bytes, int], Bytes]


def by_layer(*shape: int, block: Callable[[Bytes, int], Bytes] = lambda tensor, index: tensor[index]) -> View:
    return View(lambda memory: list(memory.reshape(LAYERS, *shape)), block)


#: K and V apart, K and V of a block side by side, latent attention; and vLLM's names of layouts: L layers, B blocks,
#: N tokens, H heads, C what a head has of a token.
VIEWS: Final = {
    "[2, B, N, H, C]": by_layer(2, BLOCKS, TOKENS, 2, 64, block=lambda tensor, index: tensor[:, index]),
    "[B, 2, N, H, C]": by_layer(BLOCKS, 2, TOKENS, 2, 64),
    "LBNHC": by_layer(BLOCKS, TOKENS, 2, 128),
    "BLNHC": View(
        lambda memory: list(memory.reshape(BLOCKS, LAYERS, TOKENS, 2, 128).swapaxes(0, 1)),
        lambda tensor, index: tensor[index],
    ),
    "MLA": by_layer(BLOCKS, TOKENS, 256),
}


class Worker:
    """vLLM; its commands are methods."""

    def __init__(self, run_dir: str, layout: str, copies: str, claim: str = "") -> None:
        self.view = VIEWS[layout]
        self.device = Device(Driver())
        self._memory: DeviceMemory | None = None
        self._of_daemon: RankMemory | None = None
        if claim:
            self._of_daemon, address = self._claimed(run_dir, claim)
        elif copies == "process":  # as torch allocates; else as vLLM's allocator does, for what can sleep
            address = int(self.device.driver.call("cuMemAlloc", LAYERS * BLOCKS * PAGE_BYTES))
        else:
            self._memory = self.device.make_memory(LAYERS * BLOCKS * PAGE_BYTES)
            address = self._memory.address
        self._address = address
        memory = seen(address, LAYERS * BLOCKS * PAGE_BYTES)
        self.tensors = self.view.layers(memory)
        self.stream = Stream(self.device)
        pages = EnginePages.of_tensors(
            {f"layers.{number}": HostTensor(each, "cuda") for number, each in enumerate(self.tensors)}
        )
        assert (pages.blocks, pages.block_bytes) == (BLOCKS, LAYERS * PAGE_BYTES)
        self._run_dir, self._layout = run_dir, layout
        self._layout_of_blocks = OffloadLayout(TOKENS, 1, pages.block_bytes, pages.fingerprint)
        self._session = 0
        self.client = self._connected()
        self._shards = Shards(
            pages,
            0,
            lambda ordinal: self.stream.handle if ordinal == self.device.ordinal else -1,
            deadline_ms=10_000,
            in_process=copies != "thread",
            log=log,
            memory=None
            if self._of_daemon is None
            else self._of_daemon.of_copies([each.address for each in pages.layers]),
        )
        self.side = WorkerSide(self._shards)
        lock = NotingLock()
        self._changed, self.side._lock = lock.changed, lock  # type: ignore[assignment]

    def _claimed(self, run_dir: str, claim: str) -> tuple[RankMemory, int]:
        """Memory of the daemon, and where it is; vLLM has warmed up."""
        size_bytes = LAYERS * BLOCKS * PAGE_BYTES
        question = ClaimPool(
            name="worker", claim=claim, ranks=1, rank=0, rank_bytes=size_bytes, blocks=BLOCKS, device=self.device.uuid
        )
        memory = RankMemory(question, Settings(run_dir=run_dir, device_memory="daemon"))
        self._array = memory.allocate(size_bytes)
        assert isinstance(self._array, CudaArray)
        address = int(self._array.__cuda_array_interface__["data"][0])
        self._pool = memory.pool_id([address]).hex()
        return memory, address

    def pool(self) -> str:
        """Which memory of the daemon it has."""
        return self._pool

    def name_a_stranger_s_pool(self) -> None:
        """The daemon refuses memory to the process that is to copy next, as one does that does not know of such."""
        shards = self._shards
        memory = shards._memory
        assert memory is not None
        assert memory.claim is not None
        question = msgspec.structs.replace(memory.claim.question, pool=bytes(16))
        shards._memory = memory._replace(claim=msgspec.structs.replace(memory.claim, question=question))
        assert shards._prepared is not None
        shards._prepared.abort()
        shards._prepared.close()
        shards._prepared = None
        shards.prepare()

    def copier(self) -> str:
        """The id of the process that copies."""
        shard: Any = self.side._shard
        return str(shard._copies.pid)

    def connect(self) -> None:
        """Open another session, as the scheduler's side does when it has lost the last one."""
        self.client.close()
        self.client = self._connected()

    def _connected(self) -> OffloadClient:
        self._session += 1
        return OffloadClient.connect(
            self._run_dir,
            engine="vllm",
            instance=new_instance(),
            keyspace=self._layout.ljust(32).encode(),
            label=self._layout,
            layout=self._layout_of_blocks,
            deadline_ms=10_000,
        )

    def store_and_kill(self, name: str, blocks: int) -> str:
        """SIGKILL of the process that copies, soon after a store was ordered; what became of the store."""
        _, wanted, order = self._prepared_store(name, blocks)
        self._forward(lambda: self._fill(name, wanted))
        self._step(StepOrders(self._note, (), (order,)))
        self._wait(lambda: self.side._session == self._session)
        shard: Any = self.side._shard
        os.kill(shard._copies.pid, signal.SIGKILL)
        return self._stored(order)

    def let_hang(self, name: str, blocks: int) -> str:
        """SIGSTOP of the process that copies, before a load; what has become of the load."""
        os.kill(int(self.copier()), signal.SIGSTOP)
        return self.load(name, blocks)

    def be_strict(self) -> None:
        """Processes that do nothing for a moment are late, in sessions that are joined from now on."""
        copy_shards.PROGRESS_DEADLINE_S = 0.05  # type: ignore[misc] # as a test's monkeypatch
        self._shards._deadline_ms = 10

    def store_behind_kernel(self, name: str, blocks: int, deadlines: int) -> str:
        """A store behind a kernel that runs until so many deadlines have passed; what has become of the store."""
        passed, gate = threading.Semaphore(0), threading.Event()
        reached = CopyProcess.has_reached

        def asked(copies: CopyProcess, mark: int | None) -> bool:
            passed.release()
            return reached(copies, mark)

        _, wanted, order = self._prepared_store(name, blocks)
        self._forward(lambda: self._fill(name, wanted))
        self._forward(lambda: None if gate.wait(20) else log.error("nobody has opened the gate"))
        with mock.patch.object(CopyProcess, "has_reached", asked):
            self._step(StepOrders(self._note, (), (order,)))
            for _ in range(deadlines):
                assert passed.acquire(timeout=20)
            gate.set()
            return self._stored(order)

    def let(self, faults: str) -> None:
        """Faults of the device for processes that are started from now on, with another one for the next session."""
        os.environ["FAKE_CUDA_FAULTS"] = faults
        copies, self._shards._prepared = self._shards._prepared, None
        if copies is not None:
            copies.abort()
            copies.close()

    def fail_process(self) -> None:
        """The process that is to copy cannot use the device, and has ended."""
        copies, self._shards._prepared = self._shards._prepared, None
        assert copies is not None
        assert self._shards._marks is not None
        copies.abort()
        copies.close()
        with mock.patch.dict(os.environ, {"FAKE_CUDA_FAULTS": "refused_registration=@1"}):
            self._shards._prepared = self._shards._started(self._shards._marks)
        dead = os.pidfd_open(self._shards._prepared.pid)
        select.select([dead], [], [], 20)
        os.close(dead)

    def kill_prepared(self) -> None:
        """SIGKILL of the process that has no session yet; it is dead when this returns."""
        copies = self._shards._prepared
        assert copies is not None
        copies.abort()
        copies._process.wait()

    def kill_joining(self, times: int) -> None:
        """SIGKILL of each of the next processes that join a session."""
        waiting = iter(range(times))

        def join(copies: CopyProcess, grant: SessionGrant, *, start_ms: int) -> None:
            if next(waiting, None) is not None:
                copies.abort()
            plain(copies, grant, start_ms=start_ms)

        plain, CopyProcess.join = CopyProcess.join, join  # type: ignore[method-assign, assignment]

    def be_patient(self) -> None:
        """Some seconds later."""
        self.side._quiet = (0, 0.0)
        self._shards._pauses._until_s = 0.0

    def kind(self) -> str:
        """What the worker has joined the session with."""
        return type(self.side._shard).__name__

    def store(self, name: str, blocks: int) -> str:
        """A step computes blocks, the next one orders their store; whether that went well."""
        _, wanted, order = self._prepared_store(name, blocks)
        self._forward(lambda: self._fill(name, wanted))
        self._step(StepOrders(self._note, (), (order,)))
        return self._stored(order)

    def load(self, name: str, blocks: int) -> str:
        """Blocks of a request that was preempted, whose step still writes them, are loaded into: what is there then."""
        lease, hit, _, _ = self._acquire(name, blocks)
        if not hit:
            return "no hit"
        plan = self.client.prepare_load(lease, 0, hit)
        self.client.release(lease)
        self._forward(lambda: self._fill("the preempted request", range(hit)))
        self._step(StepOrders(self._note, (LoadOrder(self._session, name, self._job(plan, name, range(hit))),), ()))
        self._wait(lambda: self.side._loaded)
        assert self.side.take_loaded() == {name}
        bad = self.side.take_bad_blocks()
        wrong = [block for block in range(hit) if block not in bad and not self._holds(name, block)]
        return f"{hit} bad {sorted(bad)} wrong {wrong}"

    def sleep_in_store(self, name: str, blocks: int, when: str) -> str:
        """VLLM sleeps while blocks are being stored, or are about to be, and wakes up; what became of the store."""
        transfer, wanted, order = self._prepared_store(name, blocks)
        self._forward(lambda: self._fill(name, wanted))
        self.stream.finish()
        self._step(StepOrders(self._note, (), (order,)))
        if when == "begun":
            self._wait(lambda: not self.side._stores)
        self._sleep()
        stored = self._stored(order)
        if stored == "failed":
            self.client.cancel_store(transfer, "asleep")  # as the scheduler's side does
        return stored

    def sleep_in_load(self, name: str, blocks: int, when: str) -> str:
        """VLLM sleeps while blocks are being loaded, or are about to be, and wakes up; how many of them were bad."""
        lease, hit, _, _ = self._acquire(name, blocks)
        plan = self.client.prepare_load(lease, 0, hit)
        self.client.release(lease)
        self._step(StepOrders(self._note, (LoadOrder(self._session, name, self._job(plan, name, range(hit))),), ()))
        if when == "begun":
            self._wait(lambda: not self.side._loads)
        self._sleep()
        self._wait(lambda: self.side._loaded)
        assert self.side.take_loaded() == {name}
        bad = self.side.take_bad_blocks()
        if bad:
            self.client.cancel_load(TransferId(plan.transfer))
        return str(len(bad))

    def _sleep(self) -> None:
        """As vLLM's allocator: the memory is given back, and new memory comes to the same place."""
        assert self._memory is not None
        self.side.fall_asleep()
        address = self._memory.address
        self._memory.close()
        with self.device.make_memory(LAYERS * BLOCKS * PAGE_BYTES) as fresh:
            descriptor = fresh.export()
            size_bytes = self.device.whole_granules(LAYERS * BLOCKS * PAGE_BYTES)
            self._memory = self.device.open_memory(descriptor, size_bytes, address=address)
            os.close(descriptor)
        assert self._memory.address == address
        self.side.wake_up()

    def leave(self) -> None:
        """As vLLM ends."""
        self.side.close()
        self.client.close()
        self.stream.finish()
        if self._of_daemon is not None:
            del self._of_daemon, self._array
        elif self._memory is None:
            self.device.driver.call("cuMemFree", self._address)
        else:
            self._memory.close()

    @property
    def _note(self) -> SessionNote:
        return SessionNote(self._session, self.client.session.to_bytes())

    def _forward(self, kernel: Callable[[], None]) -> None:
        try:
            self.stream.launch(kernel)
        except CudaFailure as error:
            log.warning("vLLM would end: %s", error)

    def _step(self, orders: StepOrders) -> None:
        """Give the orders as vLLM does, behind the launch of the step's own kernels."""
        self._forward(lambda: None)
        self.side.begin(orders)

    def _wait(self, what: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(what, 20)

    def _prepared_store(self, name: str, blocks: int) -> tuple[TransferId, range, StoreOrder]:
        """The transfer, the blocks and the order to store what is not cached of a prompt."""
        lease, hit, _, _ = self._acquire(name, blocks)
        plan = self.client.prepare_store(lease, hit, keys_of(name, blocks)[16 * hit :])
        self.client.release(lease)
        wanted = range(plan.pieces[0].start, plan.pieces[0].start + plan.pieces[0].blocks)
        return TransferId(plan.transfer), wanted, StoreOrder(self._session, self._job(plan, name, wanted))

    def _stored(self, order: StoreOrder) -> str:
        """What has become of a store, the only one."""
        self._wait(lambda: self.side._report.done)
        report = self.side.take_stored()
        assert report is not None
        assert report.done == {order.id: 1}
        return "failed" if report.failed else "stored"

    def _acquire(self, name: str, blocks: int) -> Hold:
        return self.client.acquire(os.urandom(8).hex(), keys_of(name, blocks), blocks * TOKENS, full=True)

    def _job(self, plan: Any, name: str, blocks: range) -> BlockJob:
        keys = keys_of(name, blocks.stop)
        parent = keys[16 * (blocks.start - 1) : 16 * blocks.start] if blocks.start else b""
        span = JobSpan(blocks.start, parent, keys[16 * blocks.start :], np.array(blocks), plan.slots)
        return BlockJob(TransferId(plan.transfer), plan.generation, (span,))

    def _fill(self, name: str, blocks: range) -> None:
        for block in blocks:
            for number, tensor in enumerate(self.tensors):
                part = self.view.block(tensor, block)
                part[...] = pattern(name, block, number, part)

    def _holds(self, name: str, block: int) -> bool:
        parts = [self.view.block(tensor, block) for tensor in self.tensors]
        return all((part == pattern(name, block, number, part)).all() for number, part in enumerate(parts))


def pattern(name: str, block: int, layer: int, like: Bytes) -> Bytes:
    """What a layer of a block holds."""
    generator = np.random.default_rng([*name.encode(), block, layer])
    return generator.integers(0, 256, like.shape, np.uint8)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    serve(Worker(*sys.argv[1:]))
