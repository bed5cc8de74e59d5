"""The buffer in CPU memory through which blocks go between a model's caches and the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.transformers.model import KvTensor, tensors_of

#: Of the buffer, as far as one block is not more.
STAGING_BYTES: Final = 64 << 20
#: So many blocks: `EnginePages` takes two for keys and values.
_PAIR: Final = 2
#: Layers of caches whose tensors hold all tokens from the first on. Others hold some elsewhere, or drop them.
_WHOLE_LAYERS: Final = (DynamicLayer, StaticLayer)


class Staging:
    """Room for some blocks of all layers.

    Args:
        tensors: of the model, see `kv_tensors`.
        block_size: tokens in a block.

    Attributes:
        blocks: how many there is room for.
        pages: the room, as the host pool's copies see it.
    """

    def __init__(self, tensors: Sequence[KvTensor], block_size: int) -> None:
        self._block_size = block_size
        self._devices = [tensor.device for tensor in tensors]
        self.blocks = max(STAGING_BYTES // (block_size * sum(tensor.token_bytes for tensor in tensors)), 1)
        if self.blocks == _PAIR:
            self.blocks += 1
        with torch.inference_mode(mode=False):
            #: As the model's tensors: [blocks, heads, tokens of a block, numbers].
            self._room = [
                torch.zeros((self.blocks, tensor.heads, block_size, tensor.numbers), dtype=tensor.dtype, device="cpu")
                for tensor in tensors
            ]
        self.pages = EnginePages.of_tensors({f"{number:05d}": each for number, each in enumerate(self._room)})

    def fill(self, place: int, cache: DynamicCache, start: int, stop: int) -> None:
        """Blocks ``[start, stop)`` of what a cache holds come to the places from `place` on."""
        first, last = start * self._block_size, stop * self._block_size
        for room, source in zip(self._room, tensors_of(cache), strict=True):
            heads, numbers = source.shape[1], source.shape[3]
            blocks = source.detach()[0, :, first:last].reshape(heads, stop - start, self._block_size, numbers)
            room[place : place + stop - start].copy_(blocks.permute(1, 0, 2, 3))

    def take(self, blocks: int) -> list[torch.Tensor]:
        """Copies of the first `blocks` places where the model computes: [1, heads, tokens, numbers] of each tensor."""
        with torch.inference_mode(mode=False):
            return [
                room[:blocks]
                .permute(1, 0, 2, 3)
                .reshape(1, room.shape[1], blocks * self._block_size, room.shape[3])
                .to(device, copy=True)
                for room, device in zip(self._room, self._devices, strict=True)
            ]

    def fits(self, cache: DynamicCache, tokens: int) -> bool:
        """Whether a cache holds the KV of one sequence, all of `tokens`, of the model that this is for."""
        layers: list[Any] = cache.layers
        if any(type(layer) not in _WHOLE_LAYERS for layer in layers):
            return False
        sources = tensors_of(cache)
        shapes = [(1, room.shape[1], room.shape[3], room.dtype) for room in self._room]
        return shapes == [
            (each.shape[0], each.shape[1], each.shape[3], each.dtype) for each in sources if each.shape[2] >= tokens
        ]
