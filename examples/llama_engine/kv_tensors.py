"""The memory of one shard: K and V of every layer, as views of the daemon's pool or of tensors of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from examples.llama_engine.config import ModelError
from examples.llama_engine.layer_waits import WaitLayer
from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import LoadFailed
from kvcached_client.pool import MappedPool
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.tensors import layer_tensors

#: A load that takes longer has hung; the scheduler's own wait is next.
_LAYER_DEADLINE_MS = 5000


def nothing_to_close() -> None:
    """For memory that nobody else has."""


class KvMemory(NamedTuple):
    """Where a shard has its K and V, and how it waits for a layer that is still loading."""

    layers: Sequence[tuple[Tensor, Tensor]]  #: K and V, each [blocks, block_size, kv_heads, head_dim]
    wait_layer: WaitLayer
    close: Callable[[], None] = nothing_to_close  #: says that the memory is not used any more


def mapped_memory(pool: MappedPool, device: str) -> KvMemory:
    """The daemon's pool.

    Raises:
        ModelError: the pool has no V, or is not where the engine computes.
    """
    if (found := "cuda" if pool.device else "cpu") != device:
        raise ModelError(f"the daemon's pool is on {found}; start the engine with --device {found}")
    layers: list[tuple[Tensor, Tensor]] = []
    for layer in range(pool.layout.groups[0].layers):
        keys, values = layer_tensors(pool, layer)
        if values is None:
            raise ModelError("the pool was made for latent attention; Llama has K and V")
        layers.append((keys, values))
    return KvMemory(layers, partial(pool.wait_layer, deadline_ms=_LAYER_DEADLINE_MS), pool.close)


def devices() -> int:
    """How many devices of CUDA this process sees."""
    return torch.cuda.device_count()


def own_device(kind: str, shard: int) -> torch.device:
    """Where a shard with memory of its own computes: shards take the devices by turns.

    Raises:
        ModelError: there is none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not (count := devices()):
        raise ModelError("torch finds no CUDA device; start the engine without --device cuda")
    return torch.device("cuda", shard % count)


def own_memory(layout: Layout, blocks: int, device: torch.device) -> tuple[KvMemory, EnginePages]:
    """Tensors of the engine's own, and where their blocks are for the copies.

    Blocks come first and K lies beside V, so that what one layer holds of a block is one run of bytes.
    """
    group = layout.groups[0]
    shape = (blocks, 2, layout.block_size, group.kv_heads, group.head_dim)
    dtype: torch.dtype = getattr(torch, group.dtype)
    tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(group.layers)]
    pages = EnginePages.of_tensors({f"layers.{layer}": tensor for layer, tensor in enumerate(tensors)})
    return KvMemory([(tensor[:, 0], tensor[:, 1]) for tensor in tensors], _nothing_is_loading), pages


def _nothing_is_loading(_: Sequence[LoadTicket], layer: int) -> None:
    raise LoadFailed(f"layer {layer}: blocks of the engine's own are loaded between steps")
