"""Lets a CPU build of torch compute in memory of the fake device, which the processor reaches at its device address.

With this folder on PYTHONPATH, Python imports the module at its start. It changes what a few functions give, as soon as
their modules are imported; the example engine, the demo and the SDK run as they are.
"""

# ruff: noqa: PLC0415 - Python imports this at the start of every process: it must cost nothing there
from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import math
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

#: Memory of the process, and what refers to it: until the process ends.
_kept: list[object] = []


def on_cpu(array: Any) -> Any:
    """A CPU tensor over an array of the device."""
    import numpy as np
    import torch

    interface = array.__cuda_array_interface__
    shape, strides, dtype = interface["shape"], interface["strides"], np.dtype(interface["typestr"])
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_ubyte * (last + dtype.itemsize)).from_address(interface["data"][0])
    _kept.append(array)
    return torch.from_numpy(np.ndarray(shape, dtype, memory, 0, strides))


def _patch_tensors(module: ModuleType) -> None:
    module.cuda_tensor = on_cpu  # type: ignore[attr-defined]


def _patch_kv_tensors(module: ModuleType) -> None:
    original = module.own_memory

    def own_memory(layout: Any, blocks: int, device: Any) -> Any:
        if device.type == "cpu":
            return original(layout, blocks, device)
        from kvcached_client.blocks.pages import EnginePages
        from kvcached_client.cuda.device import Device
        from kvcached_client.cuda.driver import Driver
        from kvcached_client.cuda.mapping import CudaArray

        group = layout.groups[0]
        shape = (blocks, 2, layout.block_size, group.kv_heads, group.head_dim)
        strides = tuple(4 * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        owner = Device(Driver())
        _kept.append(owner)
        # torch makes each tensor in an allocation of its own, and these lie side by side
        layers = [int(owner.driver.call("cuMemAlloc", blocks * strides[0])) for _ in range(group.layers)]
        for layer in layers:
            ctypes.memset(layer, 0, blocks * strides[0])
        places = [SimpleNamespace(address=layer, ordinal=0) for layer in layers]
        arrays = [CudaArray(place, "<f4", shape, 0, strides) for place in places]
        pages = EnginePages.of_tensors({f"layers.{layer}": array for layer, array in enumerate(arrays)})
        tensors = [on_cpu(array) for array in arrays]
        views = [(tensor[:, 0], tensor[:, 1]) for tensor in tensors]
        return module.KvMemory(views, module._nothing_is_loading), pages

    module.own_memory = own_memory  # type: ignore[attr-defined]
    module.devices = lambda: 1  # type: ignore[attr-defined]


#: What a device takes to write rows into a copy: long enough for others to load blocks meanwhile.
_WRITE_S = 0.003


def _patch_torch(module: ModuleType) -> None:
    """`index_put_` in deterministic mode, as on a CUDA device: what is not contiguous is copied, and copied back."""
    in_place = module.Tensor.index_put_

    def index_put_(self: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
        if self.is_contiguous() or not module.are_deterministic_algorithms_enabled():
            return in_place(self, indices, values, accumulate)
        whole = self.contiguous()
        in_place(whole, indices, values, accumulate)
        time.sleep(_WRITE_S)
        return self.copy_(whole)

    def set_item(self: Any, indices: Any, values: Any) -> None:
        if isinstance(indices, tuple) and all(isinstance(each, module.Tensor) for each in indices):
            index_put_(self, indices, values)
        else:
            in_place_item(self, indices, values)

    in_place_item = module.Tensor.__setitem__
    module.Tensor.index_put_ = index_put_
    module.Tensor.__setitem__ = set_item


def _patch_copier(module: ModuleType) -> None:
    module.current_stream = lambda: 0  # type: ignore[attr-defined]


def _patch_graphs(module: ModuleType) -> None:
    recorded_kernels = importlib.import_module("recorded_kernels")
    module.DeviceGraph = recorded_kernels.RecordedKernels  # type: ignore[attr-defined]
    module.recording_stream = contextlib.nullcontext  # type: ignore[attr-defined]


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "torch": _patch_torch,
    "kvcached_client.tensors": _patch_tensors,
    "examples.llama_engine.kv_tensors": _patch_kv_tensors,
    "examples.llama_engine.copier": _patch_copier,
    "examples.llama_engine.graphs": _patch_graphs,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules above as Python does, and patches each when it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_patched(module: ModuleType) -> None:
            run(module)
            _PATCHES[name](module)

        spec.loader.exec_module = run_patched  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
