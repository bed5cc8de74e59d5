"""Programs on a CUDA device: ``python -m tests.cuda.programs NAME ARGUMENTS`` calls one and prints its result."""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import queue
import random
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np

from kvcached.worker.executor import Executor, Task
from kvcached.worker.messages import Done, Load, Request, Shutdown, Store
from kvcached_client.blocks import checksums
from kvcached_client.blocks.copy import Batch
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.blocks.pages import BlockPages, EnginePages, LayerPages, pool_geometry
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.cuda import copier
from kvcached_client.cuda.copier import AHEAD_MAX, CudaCopier
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import CudaFailure, CudaMissing, Driver
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.cuda.host import OWN_PART_BYTES_MIN, HostPool, shard_ranges
from kvcached_client.cuda.mapping import CudaBuffer
from kvcached_client.cuda.marks import MarkReader, MarkWriter
from kvcached_client.cuda.streams import StreamFences
from kvcached_client.types import KEY_SIZE_BYTES, TransferId
from tests.cuda.lifetimes import dropped_copies, marks_left

SLOTS: Final = 24
BLOCKS: Final = 10
PATIENCE_S: Final = 20
#: A word of the host pool that no block of these programs is in: headers and blocks take the start of a slab.
FLAG_OFFSET: Final = 1 << 15
GROUP: Final = KvGroup(layers=3, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float16")


def registered_read_only(read_only: bool) -> tuple[int, str]:
    """Register memory that is mapped read-only; returns how many bytes are registered, and the error's first words."""
    with ExitStack() as parts:
        device = Device(Driver())
        parts.callback(device.close)
        file = parts.enter_context(tempfile.TemporaryFile())
        file.truncate(1 << 20)
        memory = parts.enter_context(mmap.mmap(file.fileno(), 1 << 20, prot=mmap.PROT_READ))
        address = np.frombuffer(memory, np.uint8).ctypes.data
        pool = HostPool(device, address, [range(1 << 19), range(1 << 19, 1 << 20)], read_only=read_only)
        parts.callback(pool.close)
        pool.start()
        pool.wait()
        return pool.registered_bytes, pool.error.partition(":")[0]


class Rig:
    """A device pool of some blocks, a host pool, and transfers between them."""

    def __init__(
        self, order: Any, *, part_bytes: int, parts: ExitStack, shards: int = 1, layers: int = 3, apart: bool = False
    ) -> None:
        group = msgspec.structs.replace(GROUP, layers=layers)
        geometry = pool_geometry(Layout(block_size=16, shards=shards, groups=(group,), order=order), SLOTS)
        # With several shards, slabs whose parts are registered by themselves.
        slab_bytes = 1 << 16 if shards == 1 else shards * OWN_PART_BYTES_MIN
        self.host = HostGeometry(slabs=8, slab_bytes=slab_bytes, shards=shards, block_bytes=geometry.slot_bytes)
        self.device = Device(Driver())
        parts.callback(self.device.close)
        self.memory = parts.enter_context(self.device.make_memory(geometry.size_bytes))
        self.host_bytes = mmap.mmap(-1, self.host.size_bytes)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.host_bytes))
        self.pool = HostPool(self.device, address, shard_ranges(self.host, shards - 1, part_bytes))
        parts.callback(self.pool.close)
        self.pool.start()
        self.pool.wait()  # all is registered, or nothing more will be
        self.copier = CudaCopier(self.device, range(address, address + self.host.size_bytes))
        parts.callback(self.copier.close)
        self.pages: BlockPages = geometry.at(self.memory.address)
        if apart:
            self.pages = self._made_one_by_one(self.pages, parts)
        self.transfers = BlockTransfers(
            self.pages, self.host, shards - 1, memoryview(self.host_bytes),
            namespace=bytes(16), fingerprint=bytes(16), copier=self.copier,
        )  # fmt: skip

    def _made_one_by_one(self, pages: BlockPages, parts: ExitStack) -> BlockPages:
        """The same layers, each in an allocation of its own, as torch makes an engine's tensors."""
        layers = []
        for layer in pages.layers:
            address = int(self.device.driver.call("cuMemAlloc", SLOTS * layer.page_bytes))
            parts.callback(self.device.driver.call, "cuMemFree", address)
            layers.append(LayerPages(address, layer.page_bytes, layer.page_bytes))
        return EnginePages(tuple(layers), pages.blocks, bytes(16), (), is_on_cuda=True)

    def fill(self, slot: int, value: int) -> None:
        """As a kernel of the engine would: the fake device's memory is the processor's, too."""
        for layer in self.pages.layers:
            ctypes.memset(layer.address + slot * layer.stride_bytes, value, layer.page_bytes)

    def values(self, slot: int) -> set[int]:
        return set().union(
            *(
                ctypes.string_at(layer.address + slot * layer.stride_bytes, layer.page_bytes)
                for layer in self.pages.layers
            )
        )


@contextmanager
def rig(
    order: str = "layer_first", *, part_bytes: int = 1 << 17, shards: int = 1, layers: int = 3, apart: bool = False
) -> Iterator[Rig]:
    with ExitStack() as parts:
        yield Rig(order, part_bytes=part_bytes, parts=parts, shards=shards, layers=layers, apart=apart)


def job(number: int, blocks: list[int], slots: list[int]) -> BlockJob:
    keys = b"".join(bytes([number, index]) * (KEY_SIZE_BYTES // 2) for index in range(len(blocks)))
    return BlockJob(TransferId(number), 0, (JobSpan(0, b"", keys, array("q", blocks), array("q", slots)),))


def round_trip(order: str, verify: bool, rounds: int = 4, shards: int = 1, layers: int = 3, apart: bool = False) -> int:
    """Store blocks, poison them, load them into others; returns how many blocks were not as they were stored."""
    chance, wrong = random.Random(order), 0
    with rig(order, shards=shards, layers=layers, apart=apart) as made:
        for number in range(1, rounds + 1):
            blocks = chance.sample(range(SLOTS), 2 * BLOCKS)
            slots = chance.sample(range(made.host.slots), BLOCKS)
            for index, block in enumerate(blocks[:BLOCKS]):
                made.fill(block, 16 * number + index)
            made.transfers.store(job(number, blocks[:BLOCKS], slots), epoch=1)
            for block in blocks:
                made.fill(block, 0xEE)
            load = job(number, blocks[BLOCKS:], slots)
            if number % 2:
                bad = made.transfers.load(load, verify=verify)
            else:
                told: list[None] = []
                bad = list(
                    made.transfers.load_by_layer(load, verify=verify, bad_max=9, layer_done=lambda: told.append(None))  # noqa: B023
                )
                wrong += len(told) != len(made.pages.layers)
            wrong += len(bad) + sum(
                made.values(block) != {16 * number + index} for index, block in enumerate(blocks[BLOCKS:])
            )
    return wrong


def closed_in_a_copy() -> int:
    """Close copier and host pool when the first of some batches is taken; returns how many batches were queued."""
    with rig() as made:
        base = made.pages.layers[0].address
        page_bytes = made.pages.layers[0].page_bytes
        target = made.copier._host.start + 4096
        batches = [Batch(array("q", [0, 0, page_bytes]), target + 4096 * each, base) for each in range(4)]
        copying = made.copier.copy(batches)
        next(copying)
        made.copier.close()
        made.pool.close()
        del copying
    return AHEAD_MAX + 1


def layer_by_layer() -> list[list[int]]:
    """What of a block has arrived each time when a layer is said to be there: the values of the layers so far."""
    with rig() as made:
        made.fill(0, 0x11)
        made.transfers.store(job(1, [0], [0]), epoch=1)
        made.fill(1, 0xEE)
        seen: list[list[int]] = []

        def layer_done() -> None:
            arrived = made.pages.layers[: len(seen) + 1]
            seen.append([ctypes.string_at(each.address + each.stride_bytes, 1)[0] for each in arrived])

        made.transfers.load_by_layer(job(1, [1], [0]), verify=True, bad_max=1, layer_done=layer_done)
        return seen


def corrupt() -> list[list[int]]:
    """Load blocks whose bytes in the host pool have changed: all of them, the second one; by layers, and whole."""
    found: list[list[int]] = []
    with rig() as made:
        made.transfers.store(job(1, [0, 1], [0, 1]), epoch=1)
        _, (first, second) = made.host.places([0, 1], 0)
        made.host_bytes[second] ^= 1
        for spoilt in ([], [first]):
            for place in spoilt:
                made.host_bytes[place] ^= 1
            load = job(1, [2, 3], [0, 1])
            found.append(made.transfers.load(load, verify=True))
            found.append(
                list(made.transfers.load_by_layer(load, verify=True, bad_max=9, layer_done=lambda: found.append([-1])))
            )
    return found


def neighbours(part_bytes: int) -> int:
    """Store all blocks of a block-first pool to slots that follow each other; returns slots of a slab."""
    with rig("block_first", part_bytes=part_bytes) as made:
        made.transfers.store(job(1, list(range(SLOTS)), list(range(SLOTS))), epoch=1)
        return made.host.slots_per_slab


def failing() -> list[str]:
    """What stores and loads raise until one goes well."""
    raised = []
    with suppress(CudaFailure), rig() as made:
        made.fill(0, 0x11)
        for number in range(1, 4):
            try:
                made.transfers.store(job(number, [0], [number]), epoch=1)
            except CudaFailure as error:
                raised.append(error.result)
    return raised


def abandoned() -> int:
    """Leave the copies of a batch alone, and close everything; returns how many batches were given back."""
    with rig() as made:
        address = made.memory.address
        base = ctypes.addressof(ctypes.c_ubyte.from_buffer(made.host_bytes))
        batches = [Batch(array("q", [number * 64, number * 64, 64]), base, address) for number in range(5)]
        copies = made.copier.copy(batches)
        next(copies)
        copies.close()  # type: ignore[attr-defined]
        return 1


def shared(size_bytes: int) -> list[Any]:
    """Export memory, close it, open it again, and say what it holds, where it is, and its size."""
    with closing(Device(Driver())) as device:
        made = device.make_memory(size_bytes)
        ctypes.memset(made.address, 0x5A, 16)
        descriptor, address = made.export(), made.address
        made.close()
        with device.open_memory(descriptor, made.size_bytes, address=address) as opened:
            os.close(descriptor)
            return [ctypes.string_at(opened.address, 16).hex(), opened.address == address, opened.size_bytes]


def refused_export() -> str:
    """What exporting memory raises."""
    with closing(Device(Driver())) as device, device.make_memory(1) as memory:
        try:
            memory.export()
        except CudaFailure as error:
            return str(error)
        return ""


def too_much(size_bytes: int) -> str:
    """What making so much memory raises."""
    with closing(Device(Driver())) as device:
        try:
            device.make_memory(size_bytes).close()
        except CudaFailure as error:
            return error.result
        return ""


def missing(ordinal: int) -> str:
    """What opening a device raises."""
    try:
        Device(Driver(), ordinal).close()
    except (CudaFailure, CudaMissing) as error:
        return str(error)
    return ""


def elsewhere() -> str:
    """What mapping memory raises in a process that does not see its device."""
    with closing(Device(Driver())) as device, device.make_memory(1) as memory:
        descriptor = memory.export()
        try:
            CudaBuffer(descriptor, 1, "GPU-00000000-0000-0000-0000-000000000000")
        except CudaMissing as error:
            return str(error)
        finally:
            os.close(descriptor)
        return ""


def stream_values() -> int:
    """A stream writes a value, another one waits for it before it copies; returns the value."""
    with rig() as made:
        part = made.pool._registered[0]
        one, other = made.device.make_stream(), made.device.make_stream()
        other.wait_value(part.device_address + 64, 7)
        event = other.record()
        one.write(part.device_address + 64, 7)
        event.synchronize()
        for each in (event, one, other):
            each.close()
        return made.host_bytes[64]


def both_directions() -> list[Any]:
    """A worker loads while the device holds its store back; returns the requests as they are reported, and a block."""
    reported: queue.Queue[Done] = queue.Queue()
    with rig() as made, closing(made.device.make_stream()) as gate, closing(made.device.make_stream()) as key:

        def carry_out(task: Task) -> tuple[int, ...]:
            made.device.use()
            if isinstance(task, Store):
                made.transfers.store(job(2, [1], [1]), epoch=1)
                return ()
            return made.transfers.load_by_layer(job(1, [2], [0]), verify=False, bad_max=1, layer_done=lambda: None)

        made.fill(0, 0x11)
        made.transfers.store(job(1, [0], [0]), epoch=1)
        flag = made.pool._registered[0].device_address + FLAG_OFFSET
        gate.wait_value(flag, 1)
        with closing(gate.record()) as opened:
            made.copier._to_host.wait(opened)
            executor = Executor(carry_out, reported.put, lambda: None, made.device.works)
            executor.start()
            executor.submit(Request(sequence=1, work=Store(transfer=2, epoch=1, generation=0, spans=(), urgent=False)))
            executor.submit(
                Request(sequence=2, work=Load(transfer=1, generation=0, spans=(), progress=0, verify=False))
            )
            try:
                first = reported.get(timeout=PATIENCE_S)
            finally:
                key.write(flag, 1)
            second = reported.get(timeout=PATIENCE_S)
            executor.submit(Request(sequence=3, work=Shutdown()))
            reported.get(timeout=PATIENCE_S)
        return [first.sequence, second.sequence, *made.values(2)]


def beside_a_capture() -> list[Any]:
    """Capture a graph while other threads register host memory, mark a stream, copy, and ask for fences.

    Returns whether the driver gave a graph, and the values of a block that was stored and loaded meanwhile.
    """
    with rig() as made, closing(made.device.make_stream()) as capturing, closing(made.device.make_stream()) as stream:
        driver = made.device.driver
        made.fill(0, 0x11)
        mode = driver.names.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        driver.call("cuStreamBeginCapture", capturing.handle, mode)

        def work() -> None:
            owner = EngineDevice.of_layers(made.pages.layers)
            spare = mmap.mmap(-1, made.host.size_bytes)
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(spare))
            copies = owner.open_host(address, made.host, 0)
            pages = (made.pages, made.host, 0, memoryview(spare))
            transfers = BlockTransfers(*pages, namespace=bytes(16), fingerprint=bytes(16), copier=copies.copier)
            with copies.after(owner.mark(stream.handle)):
                transfers.store(job(1, [0], [0]), epoch=1)
                transfers.load(job(1, [1], [0]), verify=True)
            fences = StreamFences(owner.device.uuid)
            fences.next(stream.handle)
            fences.wait()
            copies.close()

        with ThreadPoolExecutor(1) as other:
            other.submit(work).result()
        graph = driver.call("cuStreamEndCapture", capturing.handle)
        driver.call("cuGraphDestroy", graph)
        return [int(graph) != 0, *made.values(1)]


def small_round_trip(order: str, verify: bool, layers: int, apart: bool = False) -> int:
    """As `round_trip`, with pages that are loaded some layers at once."""
    copier._SMALL_PAGE_BYTES = 32 << 10  # type: ignore[misc]
    return round_trip(order, verify, 2, 1, layers, apart)


def short_round_trip(layers: int) -> int:
    """As `round_trip`, with loads that are so short that their layers are loaded some at once."""
    copier._LAYERS_BYTES_MIN = 8 * BLOCKS * 2 * 2 * 8 * 2 * 16  # type: ignore[misc]
    return round_trip("layer_first", True, 2, 1, layers)


def old_marks() -> int:
    """A process joins an engine that has made so many marks that their numbers begin to look negative."""
    with closing(Device(Driver())) as device:
        owner = EngineDevice(device)
        writer = MarkWriter(owner)
        writer._page.words[0] = (1 << 31) + 1
        with device.current():
            mark = MarkReader(device, writer.descriptor).mark((1 << 31) + 1)
            stream = device.make_stream()
            mark.hold(stream)
            stream.finish()
        writer.close()
        return 1


def summed_by_threads(verify: bool) -> int:
    """As `round_trip`, where the machine has processors to spare."""
    checksums.PART_BYTES = 1 << 10  # type: ignore[misc]  # a block or two
    checksums.HANDED_BYTES_MIN = 0  # type: ignore[misc]
    with mock.patch.object(copier, "spare_threads", return_value=3):
        return round_trip("layer_first", verify, 4, 1, 9)


PROGRAMS: Final[dict[str, Callable[..., object]]] = {
    each.__name__: each
    for each in (
        *(round_trip, layer_by_layer, corrupt, neighbours, failing, abandoned, shared, refused_export, elsewhere),
        *(too_much, missing, stream_values, both_directions, beside_a_capture, closed_in_a_copy, registered_read_only),
        *(small_round_trip, short_round_trip, summed_by_threads, old_marks, marks_left, dropped_copies),
    )
}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    copier._SMALL_PAGE_BYTES = copier._LAYERS_BYTES_MIN = 0  # type: ignore[misc]  # what is tried are single layers
    sys.stdout.write(json.dumps(PROGRAMS[sys.argv[1]](*json.loads(sys.argv[2]))))
