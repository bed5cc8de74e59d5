"""What the KV of a model is: its shape."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

#: transformers is untyped here.
Model: TypeAlias = Any


class KvTensor(NamedTuple):
    """Keys or values of one layer, as a cache holds them: [1, heads, tokens, numbers].

    Attributes:
        heads: heads.
        numbers: of one head and token.
        dtype: of each.
        device: where they are.
    """

    heads: int
    numbers: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.numbers * self.dtype.itemsize


def kv_tensors(model: Model) -> list[KvTensor]:
    """Keys and values of each layer, by turns: seen where the model computes one token.

    Raises:
        ValueError: the model cannot be served, and why.
    """
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(token, use_cache=True, **{_cache_argument(model): cache})
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {number} of {type(model).__name__} keeps a {type(layer).__name__}: "
                "only models whose layers all have full attention can be served"
            )
    tensors = [KvTensor(each.shape[1], each.shape[3], each.dtype, each.device) for each in tensors_of(cache)]
    if not tensors:
        raise ValueError(f"{type(model).__name__} leaves a cache empty: only models that keep KV there can be served")
    return tensors


def _cache_argument(model: Model) -> str:
    """Which argument takes a cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def tensors_of(cache: DynamicCache) -> list[torch.Tensor]:
    """Keys and values of each layer of a cache, by turns; none of layers that hold nothing yet."""
    layers: list[Any] = cache.layers
    return [each for layer in layers if layer.is_initialized for each in (layer.keys, layer.values)]
