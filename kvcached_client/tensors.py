"""Torch views of a mapped pool, and torch's streams. The only module of the client that imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from kvcached_client.blocks.mapping import Buffer
from kvcached_client.pool import MappedPool

if TYPE_CHECKING:
    from kvcached_client.cuda.mapping import CudaArray


def layer_tensors(pool: MappedPool, layer: int, group: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of one layer as tensors, on the CPU or on the CUDA device of the pool, that share the pool's memory.

    Shapes are those of `MappedPool.keys_values`, the dtype is the layout's; V is None in a group without V (MLA).

    Raises:
        IndexError: there is no such layer or group.
        ValueError: the pool is closed, or scales put pages at offsets that are no multiple of the element size.
    """
    dtype = pool.layout.groups[group].dtype if 0 <= group < len(pool.layout.groups) else ""
    if pool.device:
        on_device, others = pool.cuda_keys_values(layer, group)
        return _typed(cuda_tensor(on_device), dtype), None if others is None else _typed(cuda_tensor(others), dtype)
    keys, values = pool.keys_values(layer, group)
    return _tensor(keys, dtype), None if values is None else _tensor(values, dtype)


def cuda_tensor(array: CudaArray) -> torch.Tensor:
    """A tensor that shares an array's memory, and keeps it mapped."""
    return torch.as_tensor(array, device=torch.device("cuda", array.ordinal))


class OtherMemory(TorchFunctionMode):
    """While it is entered, tensors of bytes on a kind of device are made over other memory.

    Args:
        allocate: returns memory, all of which is zero or holds what it should, for a number of bytes; None where torch
            allocates it. It is on the thread's current device, if that is a CUDA device.
        kind: of the device, "cpu" or "cuda".
    """

    def __init__(self, allocate: Callable[[int], Buffer | CudaArray | None], kind: str = "cpu") -> None:
        super().__init__()
        self._allocate = allocate
        self._kind = kind

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call a function of torch; `torch.zeros` of bytes is answered with a tensor over other memory."""
        del types
        options = kwargs or {}
        if func is torch.zeros and _is_bytes(args, options) and self._is_for(options.get("device")):
            memory = self._allocate(args[0])
            if memory is not None:
                return _tensor_over(memory)
        return func(*args, **options)

    def _is_for(self, device: Any) -> bool:  # noqa: ANN401 - as torch.zeros takes it
        return torch.device(device or "cpu").type == self._kind


def _is_bytes(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return options.get("dtype") is torch.int8 and len(args) == 1 and isinstance(args[0], int)


def _tensor_over(memory: Buffer | CudaArray) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.int8) if isinstance(memory, ctypes.Array) else cuda_tensor(memory)


def current_device() -> int:
    """The number of the calling thread's current CUDA device."""
    return int(torch.cuda.current_device())


def current_stream(ordinal: int) -> int:
    """The handle of the calling thread's current stream on a CUDA device, for `OffloadShard.mark`."""
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def _tensor(view: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    return _typed(torch.from_numpy(view.view("<i2") if dtype == "bfloat16" else view), dtype)


def _typed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)
