"""CUDA graphs for a CPU build of torch on the fake driver: each operation of torch is a host function of the graph.

While a graph is captured, torch allocates what operations give, and nothing of it is filled in: as on a device, where
nothing runs before the graph is launched. A launch runs the operations in the driver's stream, on the tensors, so at
the addresses, of the capture. An operation that would have to wait for a value ends the capture with an error.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver, Stream

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


@cache
def _stream() -> Stream:
    device = Device(Driver())
    return device.make_stream()


class RecordedKernels:
    """What `examples.llama_engine.graphs.DeviceGraph` is on a device."""

    def __init__(self) -> None:
        self._capture = _Capture(self._add)
        self._kernels: list[Any] = []  # the driver has their addresses
        self._failures: list[str] = []
        self._executable: Any = None

    def begin(self) -> None:
        """See `DeviceGraph.begin`."""
        driver = _stream()._driver
        mode = driver.names.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        driver.call("cuStreamBeginCapture", _stream().handle, mode)
        self._capture.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """See `DeviceGraph.end`."""
        self._capture.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        driver = _stream()._driver
        graph = driver.call("cuStreamEndCapture", _stream().handle)
        self._executable = driver.call("cuGraphInstantiate", graph, 0)
        driver.call("cuGraphDestroy", graph)

    def replay(self) -> None:
        """See `DeviceGraph.replay`. What follows it in the engine is done by the processor: it waits for the stream."""
        _stream()._driver.call("cuGraphLaunch", self._executable, _stream().handle)
        _stream().synchronize()
        if self._failures:
            raise RuntimeError(self._failures[0])

    def _add(self, work: Callable[[], None]) -> None:
        def run(_: object) -> None:
            try:
                with torch.inference_mode():
                    work()
            except Exception:  # noqa: BLE001 - it cannot leave a host function
                self._failures.append(traceback.format_exc())

        kernel = _HostFunction(run)
        self._kernels.append(kernel)
        driver = _stream()._driver
        address = ctypes.cast(kernel, ctypes.c_void_p).value
        driver.call("cuLaunchHostFunc", _stream().handle, driver.names.CUhostFn(address), 0)


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation on as a kernel, with what it reads and where it writes."""

    def __init__(self, add: Callable[[Callable[[], None]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(each in func.__name__ for each in _WAITS):
            message = f"{func}: operation not permitted when stream is capturing"
            raise RuntimeError(message)
        if func._schema.is_mutable:
            self._add(lambda: func(*args, **kwargs))
            return next(iter(args))
        result = func(*args, **kwargs)
        read = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        if any(_memory(tensor) in read for tensor in _tensors(result)):
            return result  # a view: addresses, and no kernel
        for tensor in _tensors(result):
            _forget(tensor)

        def run() -> None:
            again = func(*args, **kwargs)
            for place, value in zip(_tensors(result), _tensors(again), strict=True):
                place.copy_(value)

        self._add(run)
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _forget(tensor: torch.Tensor) -> None:
    """Nothing was computed yet. An index must be one, for what reads it is called for the shape of its result."""
    poison = 0xDB if tensor.is_floating_point() else 0
    ctypes.memset(_memory(tensor), poison, tensor.untyped_storage().nbytes())


def _tensors(result: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
