"""Torch views of a mapped pool. The only module of the client that imports torch."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from kvcached_client.pool import MappedPool


def layer_tensors(pool: MappedPool, layer: int, group: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of one layer as CPU tensors that share the pool's memory.

    Shapes are those of `MappedPool.keys_values`, the dtype is the layout's; V is None in a group without V (MLA).

    Raises:
        IndexError: there is no such layer or group.
        ValueError: the pool is closed, or scales put pages at offsets that are no multiple of the element size.
    """
    dtype = pool.layout.groups[group].dtype if 0 <= group < len(pool.layout.groups) else ""
    keys, values = pool.keys_values(layer, group)
    return _tensor(keys, dtype), None if values is None else _tensor(values, dtype)


def _tensor(view: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    if dtype == "bfloat16":
        view = view.view("<i2")
    tensor = torch.from_numpy(view)
    wanted: torch.dtype = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)
