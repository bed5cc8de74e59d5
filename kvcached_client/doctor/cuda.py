"""What the CUDA driver, the devices and the kernel of this machine can do for kvcached: each tried, not asked for."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from typing import Final

import numpy as np

from kvcached_client.blocks.copy import CopyPlan
from kvcached_client.blocks.mapping import huge_pages
from kvcached_client.blocks.pages import LayerPages
from kvcached_client.cuda.copier import CudaCopier
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import UNAVAILABLE, UNAVAILABLE_FIX, CudaFailure, CudaMissing, Driver
from kvcached_client.cuda.engine_pool import EnginePoolMemory
from kvcached_client.cuda.rows import ROWS_MIN
from kvcached_client.doctor.checks import Finding

_MIB: Final = 1 << 20
_REGISTERED_BYTES: Final = 64 * _MIB
_PATTERN: Final = b"kvcached" * 512
_COPY_ENGINES_MIN: Final = 2
#: Of pages that are copied. The layers are enough for rows, where they are in one memory.
_PAGES_BYTES: Final = (4 << 10, 16 << 10, 32 << 10)
_LAYERS: Final = ROWS_MIN
_BLOCKS: Final = 64
#: What compute modes of a device let processes do, but the default one.
_COMPUTE_MODES: Final = {
    1: "exclusive thread: only one thread of one process may use the device",
    2: "prohibited: no process may use the device",
    3: "exclusive process: only one process at a time may use the device, and engine and copies are several",
}
#: So that there is more than one piece of scratch memory.
_REPLACED_GRANULES: Final = 3


def cuda_findings() -> Iterator[Finding]:
    """The driver first, then each device."""
    try:
        driver = Driver()
        count = driver.devices()
    except (CudaMissing, CudaFailure) as error:
        yield _missing(error)
        return
    version = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}, {count} devices"
    if not count:
        yield Finding("cuda driver", "fail", version, "in a container, start it with --gpus all")
        return
    if driver.batches:
        yield Finding("cuda driver", "ok", version)
    else:
        fix = "install a driver for CUDA 12.8 or newer"
        yield Finding(
            "cuda driver", "warn", f"{version}; each piece of a copy is a call of its own, which is slow", fix
        )
    for ordinal in range(count):
        yield from _device(driver, ordinal)


def _missing(error: CudaMissing | CudaFailure) -> Finding:
    if isinstance(error, CudaMissing):
        return Finding("cuda driver", "fail", error.message, error.fix)
    return Finding("cuda driver", "fail", str(error), "check nvidia-smi")


def _device(driver: Driver, ordinal: int) -> Iterator[Finding]:
    try:
        yield _compute_mode(driver, ordinal)
        with ExitStack() as parts:
            device = Device(driver, ordinal)
            parts.callback(device.close)
            free_mib = device.free_bytes() // _MIB
            yield Finding(f"device {ordinal}", "ok", f"{device.name}, {device.uuid}, {free_mib} MiB free")
            for check, fix in _CHECKS:
                try:
                    yield check(device, parts)
                except CudaFailure as error:
                    yield Finding(_name(device, check), "fail", str(error), fix)
    except (CudaMissing, CudaFailure) as error:  # also where what the checks made cannot be given back
        is_unavailable = isinstance(error, CudaFailure) and error.result == UNAVAILABLE
        fix = UNAVAILABLE_FIX if is_unavailable else "check nvidia-smi: the device may be lost"
        yield Finding(f"device {ordinal}", "fail", str(error), fix)


def _compute_mode(driver: Driver, ordinal: int) -> Finding:
    """How many processes may use the device; asked before this one does."""
    attribute = driver.names.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    mode = int(driver.call("cuDeviceGetAttribute", attribute, driver.call("cuDeviceGet", ordinal)))
    name = f"device {ordinal}: compute mode"
    if not mode:
        return Finding(name, "ok", "default: several processes may use the device")
    return Finding(name, "fail", _COMPUTE_MODES.get(mode, str(mode)), UNAVAILABLE_FIX)


def _name(device: Device, check: Callable[..., object]) -> str:
    return f"device {device.ordinal}: {check.__name__.strip('_').replace('_', ' ')}"


def _shared_memory(device: Device, parts: ExitStack) -> Finding:
    """Memory of the device by a descriptor, and the bytes that were written by another mapping of it."""
    host = _Pinned(device, parts, 2 * len(_PATTERN)).address
    ctypes.memmove(host, _PATTERN, len(_PATTERN))
    made = parts.enter_context(device.make_memory(len(_PATTERN)))
    _copy(device, parts, made.address, host, len(_PATTERN))
    descriptor = made.export()
    try:
        opened = parts.enter_context(device.open_memory(descriptor, made.size_bytes))
    finally:
        os.close(descriptor)
    made.close()
    _copy(device, parts, host + len(_PATTERN), opened.address, len(_PATTERN))
    if ctypes.string_at(host + len(_PATTERN), len(_PATTERN)) != _PATTERN:
        return Finding(
            _name(device, _shared_memory), "fail", "other bytes came back", "report it with the driver's version"
        )
    text = f"made, exported, opened and copied, in granules of {device.granularity_bytes // _MIB} MiB"
    return Finding(_name(device, _shared_memory), "ok", text)


def _replaced_memory(device: Device, parts: ExitStack) -> Finding:
    """Memory in place of scratch memory, as vLLM's KV cache has it when it has warmed up, at the same address."""
    host = _Pinned(device, parts, 2 * len(_PATTERN)).address
    ctypes.memmove(host, _PATTERN, len(_PATTERN))
    made = parts.enter_context(device.make_memory(_REPLACED_GRANULES * device.granularity_bytes))
    _copy(device, parts, made.address, host, len(_PATTERN))
    descriptor = made.export()
    try:
        memory = EnginePoolMemory(descriptor, made.size_bytes, device.uuid)
    finally:
        os.close(descriptor)
    _copy(device, parts, memory.address, host + len(_PATTERN), len(_PATTERN))
    memory.open(is_new=False)
    _copy(device, parts, host + len(_PATTERN), memory.address, len(_PATTERN))
    if ctypes.string_at(host + len(_PATTERN), len(_PATTERN)) != _PATTERN:
        return Finding(
            _name(device, _replaced_memory), "fail", "other bytes came back", "report it with the driver's version"
        )
    return Finding(_name(device, _replaced_memory), "ok", "mapped where scratch memory was, with the bytes it had")


def _scattered_copies(device: Device, parts: ExitStack) -> Finding:
    """Blocks go to scattered slots and back: of memory that came by a descriptor, and of layers made one by one."""
    for page_bytes, (kind, pages_of) in product(_PAGES_BYTES, _MEMORIES.items()):
        if not _come_back(device, parts, pages_of(device, parts, page_bytes)):
            text = f"pages of {page_bytes >> 10} KiB, {kind}, come back with other bytes"
            fix = "do not serve this device, and report it with the driver's version"
            return Finding(_name(device, _scattered_copies), "fail", text, fix)
    sizes = ", ".join(str(each >> 10) for each in _PAGES_BYTES)
    text = f"{_BLOCKS} blocks of {_LAYERS} layers with pages of {sizes} KiB came back as they were"
    return Finding(_name(device, _scattered_copies), "ok", text)


def _of_one_memory(device: Device, parts: ExitStack, page_bytes: int) -> list[LayerPages]:
    """Layers as a worker has them."""
    strip_bytes = 2 * _BLOCKS * page_bytes
    made = parts.enter_context(device.make_memory(_LAYERS * strip_bytes))
    descriptor = made.export()
    try:
        opened = parts.enter_context(device.open_memory(descriptor, made.size_bytes))
    finally:
        os.close(descriptor)
    return [LayerPages(opened.address + layer * strip_bytes, page_bytes, page_bytes) for layer in range(_LAYERS)]


def _of_allocations(device: Device, parts: ExitStack, page_bytes: int) -> list[LayerPages]:
    """Layers as torch makes them for an engine: each has an allocation of its own."""
    layers = []
    for _ in range(_LAYERS):
        address = int(device.driver.call("cuMemAlloc", 2 * _BLOCKS * page_bytes))
        parts.callback(device.driver.call, "cuMemFree", address)
        layers.append(LayerPages(address, page_bytes, page_bytes))
    return layers


_MEMORIES: Final = {"in one memory": _of_one_memory, "in an allocation for each layer": _of_allocations}


def _come_back(device: Device, parts: ExitStack, pages: list[LayerPages]) -> bool:
    half = _BLOCKS * sum(layer.page_bytes for layer in pages)
    host = _Pinned(device, parts, 2 * half)
    copier = CudaCopier(device, range(host.address, host.address + 2 * half))
    parts.callback(copier.close)
    plan = CopyPlan(pages, host.address)
    random = np.random.default_rng(half)
    slots = random.permutation(2 * _BLOCKS)[:_BLOCKS].tolist()
    there, back = (list(range(first, first + half, half // _BLOCKS)) for first in (0, half))
    expected = random.bytes(half)
    ctypes.memmove(host.address, expected, half)
    for batches in (
        plan.by_layer(slots, there, plan.layer_groups(copier, len(slots))),
        plan.by_block(slots, back, to_host=True),
    ):
        for _ in copier.copy(batches):
            pass
    return ctypes.string_at(host.address + half, half) == expected


def _copy_engines(device: Device, _: ExitStack) -> Finding:
    """Whether stores and loads can run at once."""
    engines = device.attribute("ASYNC_ENGINE_COUNT")
    if engines < _COPY_ENGINES_MIN:
        text, fix = f"{engines}: a store and a load wait for each other", "nothing: the device has no more"
        return Finding(_name(device, _copy_engines), "warn", text, fix)
    return Finding(_name(device, _copy_engines), "ok", f"{engines}: stores and loads run at once")


def _host_registration(device: Device, parts: ExitStack) -> Finding:
    """Whether shared memory can be registered, how long that takes, in which pages, and beside which memory node."""
    gib_ms = 1000 * _Pinned(device, parts, _REGISTERED_BYTES).taken_s * (1 << 30) / _REGISTERED_BYTES
    text = (
        f"{_REGISTERED_BYTES // _MIB} MiB of shared memory, at {gib_ms:.0f} ms a GiB; huge pages of shared memory: "
        f"{huge_pages()}; memory node {device.host_node()}"
    )
    return Finding(_name(device, _host_registration), "ok", text)


def _stream_values(device: Device, parts: ExitStack) -> Finding:
    """Whether a stream can write into registered memory what another one waits for."""
    registered = _Pinned(device, parts, mmap.PAGESIZE)
    writer, waiter = device.make_stream(), device.make_stream()
    parts.callback(writer.close)
    parts.callback(waiter.close)
    writer.write(registered.device_address, 1)
    writer.synchronize()
    waiter.wait_value(registered.device_address, 1)
    waiter.synchronize()
    return Finding(_name(device, _stream_values), "ok", "written by one stream, seen by another one and by the host")


#: Each check, and what to do where the driver refuses it.
_CHECKS: Final = (
    (_shared_memory, "the device must not be virtual (vGPU, WSL), and a sandbox must allow /dev/nvidia*"),
    (_replaced_memory, "leave device_memory out of vLLM's kv_connector_extra_config"),
    (_scattered_copies, "report it with the driver's version"),
    (_copy_engines, "report it with the driver's version"),
    (_host_registration, "allow more locked memory (ulimit -l, the container's limits), and have memory free"),
    (_stream_values, "use a newer driver; loads are then waited for as a whole"),
)


class _Pinned:
    """Registered memory as the host pool is.

    Attributes:
        address: where it is mapped.
        device_address: where the device finds it.
        taken_s: what registering took.
    """

    def __init__(self, device: Device, parts: ExitStack, size_bytes: int) -> None:
        """Map and register at least so much; `parts` undoes it."""
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("kvcached-doctor", os.MFD_CLOEXEC)
        parts.callback(os.close, descriptor)
        os.ftruncate(descriptor, size_bytes)
        self._bytes = (ctypes.c_ubyte * size_bytes).from_buffer(mmap.mmap(descriptor, size_bytes))
        self.address = ctypes.addressof(self._bytes)
        ctypes.memset(self.address, 1, size_bytes)
        start_s = time.monotonic()
        self._registered = device.register(self.address, size_bytes)
        self.taken_s = time.monotonic() - start_s
        self.device_address = self._registered.device_address
        parts.callback(self.close)

    def close(self) -> None:
        self._registered.close()


def _copy(device: Device, parts: ExitStack, destination: int, source: int, size_bytes: int) -> None:
    stream = device.make_stream()
    parts.callback(stream.close)
    arrays = [np.array([each], np.uint64) for each in (destination, source, size_bytes)]
    stream.copy(*arrays)
    stream.synchronize()
