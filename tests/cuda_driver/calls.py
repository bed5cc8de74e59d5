"""The driver's calls by ctypes, with their exact prototypes."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

from tests.cuda_driver.device import GRANULE_BYTES

HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
POSIX_DESCRIPTOR = 1
NON_BLOCKING = 1
DISABLE_TIMING, INTERPROCESS = 2, 4
READ, READ_WRITE = 1, 3
PORTABLE, DEVICE_MAP = 1, 2
ORDER_STREAM, ORDER_DURING_CALL, ORDER_ANY = 1, 2, 3
GEQ, EQ, AND, NOR = 0, 1, 2, 3
NO_MEMORY_BARRIER = 1
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 0, 1, 2


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("unused", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


class CopyAttributes(ctypes.Structure):
    _fields_ = (("order", c_uint), ("source_hint", Location), ("destination_hint", Location), ("flags", c_uint))


class RowsSide(ctypes.Structure):
    _fields_ = (
        *(("x", c_size_t), ("y", c_size_t), ("z", c_size_t), ("lod", c_size_t), ("type", c_uint)),
        *(("host", c_void_p), ("device", c_ulonglong), ("array", c_void_p), ("reserved", c_void_p)),
        *(("pitch", c_size_t), ("height", c_size_t)),
    )


class Rows(ctypes.Structure):
    """CUDA_MEMCPY3D: planes of lines, from one side to the other."""

    _fields_ = (
        *(("source", RowsSide), ("destination", RowsSide)),
        *(("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)),
    )


def on_host(address: int, pitch: int, lines: int = 1) -> RowsSide:
    """Planes of so many lines."""
    return RowsSide(type=1, host=address, pitch=pitch, height=lines)


def on_device(address: int, pitch: int, lines: int = 1) -> RowsSide:
    """Planes of so many lines."""
    return RowsSide(type=2, device=address, pitch=pitch, height=lines)


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


class Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


_DEVICE, _STREAM, _EVENT, _CONTEXT = c_int, c_void_p, c_void_p, c_void_p
_ADDRESS, _HANDLE, _FLAGS64 = c_ulonglong, c_ulonglong, c_ulonglong
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, _FLAGS64, POINTER(c_int)),
    "cuDeviceGet": (POINTER(_DEVICE), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetName": (c_char_p, c_int, _DEVICE),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), _DEVICE),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), _DEVICE),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _DEVICE),
    "cuDevicePrimaryCtxRetain": (POINTER(_CONTEXT), _DEVICE),
    "cuDevicePrimaryCtxRelease_v2": (_DEVICE,),
    "cuDevicePrimaryCtxReset_v2": (_DEVICE,),
    "cuDevicePrimaryCtxGetState": (_DEVICE, POINTER(c_uint), POINTER(c_int)),
    "cuCtxSetCurrent": (_CONTEXT,),
    "cuCtxGetCurrent": (POINTER(_CONTEXT),),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (POINTER(_CONTEXT),),
    "cuCtxGetDevice": (POINTER(_DEVICE),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuPointerGetAttribute": (c_void_p, c_int, _ADDRESS),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (POINTER(_ADDRESS), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(_HANDLE), c_size_t, POINTER(AllocationProperties), _FLAGS64),
    "cuMemRelease": (_HANDLE,),
    "cuMemRetainAllocationHandle": (POINTER(_HANDLE), c_void_p),
    "cuMemExportToShareableHandle": (POINTER(c_int), _HANDLE, c_int, _FLAGS64),
    "cuMemImportFromShareableHandle": (POINTER(_HANDLE), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(_ADDRESS), c_size_t, c_size_t, _ADDRESS, _FLAGS64),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, _HANDLE, _FLAGS64),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemGetAccess": (POINTER(c_ulonglong), POINTER(Location), _ADDRESS),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(_ADDRESS), c_void_p, c_uint),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuStreamCreate": (POINTER(_STREAM), c_uint),
    "cuStreamDestroy_v2": (_STREAM,),
    "cuStreamSynchronize": (_STREAM,),
    "cuStreamQuery": (_STREAM,),
    "cuStreamWaitEvent": (_STREAM, _EVENT, c_uint),
    "cuStreamWriteValue32_v2": (_STREAM, _ADDRESS, c_uint32, c_uint),
    "cuStreamWriteValue64_v2": (_STREAM, _ADDRESS, c_uint64, c_uint),
    "cuStreamWaitValue32_v2": (_STREAM, _ADDRESS, c_uint32, c_uint),
    "cuStreamWaitValue64_v2": (_STREAM, _ADDRESS, c_uint64, c_uint),
    "cuLaunchHostFunc": (_STREAM, HostFunction, c_void_p),
    "cuEventCreate": (POINTER(_EVENT), c_uint),
    "cuEventDestroy_v2": (_EVENT,),
    "cuEventRecord": (_EVENT, _STREAM),
    "cuEventQuery": (_EVENT,),
    "cuEventSynchronize": (_EVENT,),
    "cuEventElapsedTime": (POINTER(c_float), _EVENT, _EVENT),
    "cuIpcGetEventHandle": (POINTER(IpcHandle), _EVENT),
    "cuIpcOpenEventHandle": (POINTER(_EVENT), IpcHandle),
    "cuMemcpy": (_ADDRESS, _ADDRESS, c_size_t),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, c_size_t, _STREAM),
    "cuMemcpyHtoD_v2": (_ADDRESS, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, _ADDRESS, c_size_t),
    "cuMemcpyDtoD_v2": (_ADDRESS, _ADDRESS, c_size_t),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, _STREAM),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, _STREAM),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, _STREAM),
    "cuMemcpy3DAsync_v2": (POINTER(Rows), _STREAM),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, c_size_t, _STREAM),
    "cuStreamBeginCapture_v2": (_STREAM, c_int),
    "cuStreamEndCapture": (_STREAM, POINTER(c_void_p)),
    "cuStreamIsCapturing": (_STREAM, POINTER(c_int)),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, _FLAGS64),
    "cuGraphLaunch": (c_void_p, _STREAM),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
}
_BATCH = (
    *(c_void_p, c_void_p, c_void_p, c_size_t),
    *(c_void_p, c_void_p, c_size_t),
)
OLD_BATCH = ctypes.CFUNCTYPE(c_int, *_BATCH, POINTER(c_size_t), c_void_p)
NEW_BATCH = ctypes.CFUNCTYPE(c_int, *_BATCH, c_void_p)
Piece = tuple[int, int, int]  # destination, source, bytes


class CudaError(Exception):
    """A call gave something else than CUDA_SUCCESS; `name` says what."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


class Driver:
    """One loaded driver. `attempt` gives the name of a call's result, `call` raises what is no success."""

    def __init__(self, library: Path | str) -> None:
        self._library = ctypes.CDLL(str(library))
        self._kept: list[object] = []  # host functions that streams may still call
        for name, types in PROTOTYPES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, c_int

    def attempt(self, name: str, *arguments: object) -> str:
        return self.error_name(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        result = self.attempt(name, *arguments)
        if result != "CUDA_SUCCESS":
            raise CudaError(name, result)

    def error_name(self, result: int) -> str:
        name = c_char_p()
        self._library.cuGetErrorName(result, byref(name))
        return (name.value or b"?").decode()

    def start(self, device: int = 0) -> None:
        """Initialise the driver and make the primary context of the device current to this thread."""
        self.call("cuInit", 0)
        self.call("cuCtxSetCurrent", self.retain(device))

    def retain(self, device: int = 0) -> int | None:
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value

    # --- memory

    def create(self, size: int = GRANULE_BYTES, *, handle_types: int = POSIX_DESCRIPTOR, device: int = 0) -> int:
        handle = c_ulonglong()
        properties = AllocationProperties(1, handle_types, Location(1, device))
        self.call("cuMemCreate", byref(handle), size, byref(properties), 0)
        return handle.value

    def reserve(self, size: int = GRANULE_BYTES, *, hint: int = 0) -> int:
        address = c_ulonglong()
        self.call("cuMemAddressReserve", byref(address), size, 0, hint, 0)
        return address.value

    def allow(self, address: int, size: int = GRANULE_BYTES, *, access: int = READ_WRITE, device: int = 0) -> None:
        description = AccessDescription(Location(1, device), access)
        self.call("cuMemSetAccess", address, size, byref(description), 1)

    def map(self, handle: int, size: int = GRANULE_BYTES, *, at: int | None = None) -> int:
        """Map a handle, with access, and return its address."""
        address = self.reserve(size) if at is None else at
        self.call("cuMemMap", address, size, 0, handle, 0)
        self.allow(address, size)
        return address

    def memory(self, size: int = GRANULE_BYTES) -> int:
        """Device memory that only its mapping holds."""
        handle = self.create(size)
        address = self.map(handle, size)
        self.call("cuMemRelease", handle)
        return address

    def export(self, handle: int) -> int:
        descriptor = c_int(-1)
        self.call("cuMemExportToShareableHandle", byref(descriptor), handle, POSIX_DESCRIPTOR, 0)
        return descriptor.value

    def import_(self, descriptor: int) -> int:
        handle = c_ulonglong()
        self.call("cuMemImportFromShareableHandle", byref(handle), descriptor, POSIX_DESCRIPTOR)
        return handle.value

    def alloc(self, size: int) -> int:
        address = c_ulonglong()
        self.call("cuMemAlloc_v2", byref(address), size)
        return address.value

    def host(self, size: int = 4096) -> int:
        """Pinned host memory, filled with zeros."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), size, 0)
        assert address.value is not None
        return address.value

    def free_bytes(self) -> int:
        left, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(left), byref(total))
        return left.value

    # --- streams

    def stream(self, flags: int = NON_BLOCKING) -> int:
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), flags)
        assert stream.value is not None
        return stream.value

    def event(self, flags: int = DISABLE_TIMING) -> int:
        event = c_void_p()
        self.call("cuEventCreate", byref(event), flags)
        assert event.value is not None
        return event.value

    def finish(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        self.call("cuMemcpyAsync", destination, source, size, stream)

    def copy_rows(
        self, destination: RowsSide, source: RowsSide, width: int, depth: int, stream: int, height: int = 1
    ) -> str:
        """Copy some lines of each plane; returns the name of the call's result."""
        return self.attempt("cuMemcpy3DAsync_v2", Rows(source, destination, width, height, depth), stream)

    def launch(self, stream: int, function: Callable[[], object]) -> None:
        """Queue a "kernel": a Python function that reads and writes memory when the stream reaches it."""

        def call_it(_: object) -> None:
            function()

        called = HostFunction(call_it)
        self._kept.append(called)
        self.call("cuLaunchHostFunc", stream, called, None)

    # --- graphs

    def record(self, stream: int, work: Callable[[], object], *, mode: int = CAPTURE_GLOBAL) -> int:
        """A graph, ready to be launched, of what `work` queues on the stream."""
        graph, executable = c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", stream, mode)
        work()
        self.call("cuStreamEndCapture", stream, byref(graph))
        self.call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        self.call("cuGraphDestroy", graph)
        assert executable.value is not None
        return executable.value

    def batch(self, pieces: Sequence[Piece], stream: int, *, order: int = ORDER_STREAM, version: int = 13000) -> str:
        """Copy the pieces with one call of the ABI that the version gives; returns the name of its result."""
        return self.batch_failed_at(pieces, stream, order=order, version=version)[0]

    def batch_failed_at(
        self, pieces: Sequence[Piece], stream: int, *, order: int = ORDER_STREAM, version: int = 12080
    ) -> tuple[str, int]:
        """As `batch`; also the index of the copy at fault, which only the old ABI tells."""
        destinations = (c_ulonglong * len(pieces))(*(piece[0] for piece in pieces))
        sources = (c_ulonglong * len(pieces))(*(piece[1] for piece in pieces))
        sizes = (c_size_t * len(pieces))(*(piece[2] for piece in pieces))
        attributes, index, failed = CopyAttributes(order), c_size_t(0), c_size_t(errno.ENODATA)
        arguments = (destinations, sources, sizes, len(pieces), byref(attributes), byref(index), 1)
        function = self.symbol("cuMemcpyBatchAsync", version)
        if version < 13000:
            result = OLD_BATCH(function)(*arguments, byref(failed), stream)
        else:
            result = NEW_BATCH(function)(*arguments, stream)
        return self.error_name(result), failed.value

    def symbol(self, name: str, version: int) -> int:
        function, status = c_void_p(), c_int()
        self.call("cuGetProcAddress_v2", name.encode(), byref(function), version, 0, byref(status))
        assert function.value is not None
        return function.value


def peek(address: int, size: int = 1) -> bytes:
    """What memory holds, as the CPU sees it."""
    return ctypes.string_at(address, size)


def poke(address: int, value: bytes) -> None:
    """Write to memory, as the CPU or an engine's kernel does."""
    ctypes.memmove(address, value, len(value))
