"""The CUDA driver: how it is called, streams and copies. `device` has devices and their memory.

The calls go through NVIDIA's cuda-bindings, except for copies: their arrays of addresses go to the driver's function
directly, which costs a hundredth of what building the bindings' lists does.

A call works in the context that is current to its thread: see `Device.use`.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvcached_client.errors import DeviceError

native_queue_each: Callable[[int, memoryview, int, int], int] | None
try:
    from kvcached_client.blocks._native_copy import queue_each as native_queue_each
except ImportError:  # the extension is built only where a C compiler is installed
    native_queue_each = None

if TYPE_CHECKING:
    from kvcached_client.cuda.rows import Rows

Addresses = npt.NDArray[np.uint64]
#: What cuda-bindings give and take: they have no type stubs.
Opaque = Any

#: Of one call: the device begins when the driver has prepared all of them, about half a microsecond each. Calls with
#: thousands of small pieces also hinder the engine's kernels: decision 0069.
CALL_PIECES_MAX: Final = 128
#: The first version with `cuMemcpyBatchAsync`. Asked for by this number every later driver gives the same function.
_BATCH_VERSION: Final = 12_080
#: Of `cuMemcpyBatchAsync`: destinations, sources, sizes, their number, attributes, the first copy of each attribute,
#: the number of attributes, where the driver writes which copy is wrong, stream.
_BATCH_ARGUMENTS: Final = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p),
)
_COPY_ARGUMENTS: Final = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
_IN_STREAM_ORDER: Final = 1
#: `cuMemcpy3DAsync` of this version and of every later one takes 64-bit sizes.
_ROWS_VERSION: Final = 3020
_ON_HOST: Final = 1
_ON_DEVICE: Final = 2
#: CUDA_MEMCPY3D, the parameters of `cuMemcpy3DAsync`. What is not named below stays zero.
_ROWS_PARAMETERS: Final = np.dtype(
    [
        *(
            (f"{side}_{field}", kind)
            for side in ("source", "destination")
            for field, kind in (
                *(("x", "u8"), ("y", "u8"), ("z", "u8"), ("lod", "u8"), ("type", "u4"), ("padding", "u4")),
                *(("host", "u8"), ("device", "u8"), ("array", "u8"), ("reserved", "u8")),
                *(("pitch", "u8"), ("height", "u8")),
            )
        ),
        *(("width", "u8"), ("height", "u8"), ("depth", "u8")),
    ]
)
#: What calls give for a device that has fallen off the bus, or has failed as a whole.
_LOST_RESULTS: Final = frozenset(
    f"CUDA_ERROR_{each}"
    for each in ("UNKNOWN", "DEVICE_UNAVAILABLE", "ECC_UNCORRECTABLE", "HARDWARE_STACK_ERROR", "SYSTEM_NOT_READY")
)
#: A device that only one process may use, or none. Engine and worker are two, and so are engine and copy process.
UNAVAILABLE: Final = "CUDA_ERROR_DEVICE_UNAVAILABLE"
UNAVAILABLE_FIX: Final = "set the compute mode that lets several processes use the device: nvidia-smi -c DEFAULT"
#: What bindings say that were given a result which they do not know, some of them only the number.
_UNKNOWN_RESULT: Final = re.compile(r"(\d+)(?: is not a valid CUresult)?")
_UNKNOWN_COPY: Final = ctypes.c_size_t(-1).value


class CudaFailure(DeviceError):
    """The driver refused a call. After some results it refuses every later one of this process, too.

    Attributes:
        call: its name.
        result: the name of the driver's answer, as ``CUDA_ERROR_OUT_OF_MEMORY``; its number where it has no name here.
    """

    def __init__(self, call: str, result: str, detail: str = "") -> None:
        fix = f" ({UNAVAILABLE_FIX})" if result == UNAVAILABLE else ""
        super().__init__(f"{call}: {result}{detail}{fix}")
        self.call = call
        self.result = result
        self.is_lost = result in _LOST_RESULTS


class CudaMissing(DeviceError):
    """There is no driver, no device, or no package to call the driver with.

    Attributes:
        fix: what to do.
        may_come: it may be there later without that, as while the machine starts.
    """

    def __init__(self, message: str, fix: str, *, may_come: bool = False) -> None:
        super().__init__(f"{message} ({fix})")
        self.message = message
        self.fix = fix
        self.may_come = may_come


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order in which sources are read; two hints about locations, for managed memory only."""

    _fields_ = (
        *(("order", ctypes.c_uint), ("source", ctypes.c_int * 2)),
        *(("destination", ctypes.c_int * 2), ("flags", ctypes.c_uint)),
    )


class Driver:
    """The driver of this process, initialised.

    Attributes:
        version: as 13000 for 13.0.
        batches: whether one call copies many pieces.
    """

    def __init__(self) -> None:
        """Load and initialise the driver.

        Raises:
            CudaMissing: the package, the library or a device is missing.
        """
        self._bindings = _bindings()
        try:
            self.call("cuInit", 0)
        except CudaFailure as error:
            fix = "check nvidia-smi; in a container, start it with --gpus all"
            raise CudaMissing(str(error), fix, may_come=True) from None
        self.version: int = self.call("cuDriverGetVersion")
        self.batches = True
        try:
            self._copy_batch = self._function("cuMemcpyBatchAsync", _BATCH_VERSION, _BATCH_ARGUMENTS)
        except CudaFailure:
            self.batches = False
        self._copy_one = self._function("cuMemcpyAsync", 4000, _COPY_ARGUMENTS)
        self._copy_rows = self._address("cuMemcpy3DAsync", _ROWS_VERSION)

    @property
    def names(self) -> Opaque:
        """The bindings' module: the driver's constants and structures."""
        return self._bindings

    def call(self, name: str, *arguments: object) -> Opaque:
        """Call the driver; returns what the call gives, None, a value or a tuple.

        Raises:
            CudaFailure: the driver refused the call.
        """
        try:
            result, *values = getattr(self._bindings, name)(*arguments)
        except RuntimeError as error:  # the driver is too old for the call, or its library is not there
            raise CudaFailure(name, "CUDA_ERROR_NOT_FOUND", f": {error}") from None
        except (ValueError, KeyError) as error:
            if (unknown := _UNKNOWN_RESULT.fullmatch(str(error))) is None:
                raise
            raise CudaFailure(name, self._result_name(int(unknown[1]))) from None
        if result != self._bindings.CUresult.CUDA_SUCCESS:
            raise CudaFailure(name, result.name)
        return values[0] if len(values) == 1 else (tuple(values) or None)

    def devices(self) -> int:
        """How many devices this process sees."""
        return int(self.call("cuDeviceGetCount"))

    def copy(self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> int:
        """Queue copies on a stream, in any order among themselves; returns how many calls of the driver it took.

        It is one for `CALL_PIECES_MAX` of them, unless the driver has no batches. The arrays must stay alive until the
        copies are over. Sources are read in the stream's order.

        Args:
            destinations: addresses on the device or on the host, contiguous uint64; ranges must not overlap.
            sources: the same.
            sizes: in bytes, none is 0.
            stream: its handle, not that of a default stream.

        Raises:
            CudaFailure: the driver refused; some of them may be queued.
        """
        if not self.batches:
            for piece in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self._check("cuMemcpyAsync", self._copy_one(*piece, stream))
            return len(sizes)
        attributes, first, wrong = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(-1)
        told = ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(wrong), stream
        columns = [each.__array_interface__["data"][0] for each in (destinations, sources, sizes)]
        calls = range(0, len(sizes), CALL_PIECES_MAX)
        for at in calls:
            count = min(CALL_PIECES_MAX, len(sizes) - at)
            result = self._copy_batch(*(column + at * sizes.itemsize for column in columns), count, *told)
            detail = "" if wrong.value == _UNKNOWN_COPY else f", copy {at + wrong.value} of {len(sizes)}"
            self._check("cuMemcpyBatchAsync", result, detail)
        return len(calls)

    def copy_rows(self, rows: Rows, stream: int, *, to_host: bool) -> int:
        """Queue copies of rows between the device and the host; returns how many calls of the driver it took.

        Args:
            rows: what to copy. The memory must stay alive until the copies are over, the arrays only for the call.
            stream: as in `copy`.
            to_host: the destinations are memory of the host, otherwise the sources are.

        Raises:
            CudaFailure: the driver refused; some of them may be queued.
        """
        parameters = np.zeros(len(rows.widths), _ROWS_PARAMETERS)
        for side, addresses, pitches, parts, is_host in (
            ("source", rows.sources, rows.source_pitches, rows.source_parts, not to_host),
            ("destination", rows.destinations, rows.destination_pitches, rows.destination_parts, to_host),
        ):
            parameters[f"{side}_type"] = _ON_HOST if is_host else _ON_DEVICE
            parameters[f"{side}_{'host' if is_host else 'device'}"] = addresses
            parameters[f"{side}_pitch"], parameters[f"{side}_height"] = pitches, parts
        parameters["width"], parameters["height"], parameters["depth"] = rows.widths, 1, rows.heights
        calls = parameters.view(np.uint8).data, _ROWS_PARAMETERS.itemsize, stream
        self._check("cuMemcpy3DAsync", (native_queue_each or _queue_each)(self._copy_rows, *calls))
        return len(parameters)

    def _check(self, call: str, result: int, detail: str = "") -> None:
        if result:
            raise CudaFailure(call, self._result_name(result), detail)

    def _result_name(self, result: int) -> str:
        """By its number, where the driver is newer than the bindings and gives what they do not know."""
        try:
            return str(self._bindings.CUresult(result).name)
        except ValueError:
            return f"CUDA_ERROR_{result}"

    def _function(self, name: str, version: int, arguments: tuple[Any, ...]) -> Callable[..., int]:
        """A function of the driver itself. While it runs, other threads of the interpreter go on."""
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._address(name, version))

    def _address(self, name: str, version: int) -> int:
        address, *_ = self.call("cuGetProcAddress", name.encode(), version, 0)
        if not int(address):
            raise CudaFailure("cuGetProcAddress", "CUDA_ERROR_NOT_FOUND", f": {name}")
        return int(address)


class Stream:
    """Work that a device does one after the other.

    Attributes:
        handle: for `Driver.copy`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        non_blocking = self._driver.names.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream: Opaque = self._driver.call("cuStreamCreate", non_blocking)
        self.handle = int(self._stream)

    def copy(self, destinations: Addresses, sources: Addresses, sizes: Addresses) -> int:
        """See `Driver.copy`."""
        return self._driver.copy(destinations, sources, sizes, self.handle)

    def copy_rows(self, rows: Rows, *, to_host: bool) -> int:
        """See `Driver.copy_rows`."""
        return self._driver.copy_rows(rows, self.handle, to_host=to_host)

    def record(self, *, spins: bool = False) -> Event:
        """An event that is over once all work is that was queued here so far. See `Event`."""
        return Event(self._driver, self._stream, spins=spins)

    def wait(self, event: Event) -> None:
        """Work that is queued here from now on begins when the event is over. The caller does not wait."""
        self._driver.call("cuStreamWaitEvent", self._stream, event.handle, 0)

    def zero(self, device_address: int, size_bytes: int) -> None:
        """Zero memory after all work that was queued here so far."""
        self._driver.call("cuMemsetD8Async", device_address, 0, size_bytes, self._stream)

    def write(self, device_address: int, value: int) -> None:
        """Write a uint32 after all work that was queued here so far; who sees the value sees what that work wrote."""
        self._driver.call("cuStreamWriteValue32", self._stream, device_address, value, 0)

    def wait_value(self, device_address: int, value: int) -> None:
        """Work that is queued here from now on begins when a uint32 has reached a value, counted cyclically."""
        reached = self._driver.names.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._driver.call("cuStreamWaitValue32", self._stream, device_address, value, reached)

    def synchronize(self) -> None:
        """Wait for all work that is queued.

        Raises:
            CudaFailure: some of it has failed.
        """
        self._driver.call("cuStreamSynchronize", self._stream)

    def finish(self) -> None:
        """Wait for all work that is queued, and destroy the stream. Does nothing the second time.

        Raises:
            CudaFailure: some of the work has failed; the stream is destroyed.
        """
        try:
            if self._stream is not None:
                self.synchronize()
        finally:
            self.close()

    def close(self) -> None:
        """Destroy the stream; work that is queued is done nevertheless. Does nothing the second time."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._driver.call("cuStreamDestroy", stream)


class Event:
    """A point in a stream's work. Made by `Stream.record`, or in a stream of somebody else by its handle.

    Args:
        stream: whose work it is.
        spins: who waits does so in a loop, which takes a whole core from the engine, and otherwise sleeps, which takes
            some 0.1 ms longer. For what is over in less than that.
    """

    def __init__(self, driver: Driver, stream: Opaque, *, spins: bool = False) -> None:
        self._driver = driver
        flags = driver.names.CUevent_flags
        wanted = flags.CU_EVENT_DISABLE_TIMING | (0 if spins else flags.CU_EVENT_BLOCKING_SYNC)
        self.handle: Opaque = driver.call("cuEventCreate", wanted)
        try:
            self.record(stream)
        except BaseException:
            self.close()
            raise

    def record(self, stream: Opaque) -> None:
        """Stand for the work that a stream has now, and no longer for what it stood for before."""
        self._driver.call("cuEventRecord", self.handle, stream)

    def is_over(self) -> bool:
        """Whether the work before it is done. Never waits.

        Raises:
            CudaFailure: some work of the context has failed.
        """
        try:
            self._driver.call("cuEventQuery", self.handle)
        except CudaFailure as error:
            if error.result != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def synchronize(self) -> None:
        """Wait until the work before it is done. Other threads of the interpreter go on.

        Raises:
            CudaFailure: some of that work has failed.
        """
        self._driver.call("cuEventSynchronize", self.handle)

    def close(self) -> None:
        """Destroy the event. Does nothing the second time."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._driver.call("cuEventDestroy", handle)


def _queue_each(function: int, parameters: memoryview, size: int, stream: int) -> int:
    """Call the driver for every `size` bytes of parameters until it refuses; returns what that call gave, or 0."""
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(function)
    first = ctypes.addressof(ctypes.c_ubyte.from_buffer(parameters))
    return next(filter(None, (call(at, stream) for at in range(first, first + parameters.nbytes, size))), 0)


def _bindings() -> Opaque:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        fix = "install it: pip install cuda-bindings"
        raise CudaMissing(f"cuda-bindings cannot be imported: {error}", fix) from None
