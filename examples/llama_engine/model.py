"""Llama in plain torch, one shard of it. It knows nothing of blocks, leases or processes: attention is handed in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from examples.llama_engine.config import LlamaConfig
from examples.llama_engine.weights import LayerWeights, Weights

#: (layer, q [rows, heads, head_dim], k, v [rows, kv_heads, head_dim]) → [rows, heads, head_dim]. Stores k and v, too.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: Sums a tensor over all shards, in place.
AllReduce = Callable[[Tensor], None]


class Llama:
    """One shard's part of the model. With one shard, `all_reduce` does nothing."""

    def __init__(self, config: LlamaConfig, weights: Weights, all_reduce: AllReduce) -> None:
        self._config = config
        self._weights = weights
        self._all_reduce = all_reduce
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        self._frequencies = (1.0 / config.rope_theta ** (even / config.head_dim)).to(weights.norm.device)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, [rows, hidden]; rows may belong to several requests.

        Args:
            tokens: int64 [rows].
            positions: int64 [rows], each row's place in its own request.
            attend: stores the rows' K and V and attends to each request's context.
        """
        angles = positions[:, None].float() * self._frequencies
        rotation = (angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None])
        x = self._weights.embedding[tokens]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(index, layer, self._norm(x, layer.attention_norm), rotation, attend)
            x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
        return self._norm(x, self._weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab]. The head is on every shard, so any one of them can answer."""
        return functional.linear(hidden, self._weights.head)

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        q, k, v = (
            functional.linear(x, weight).view(len(x), -1, self._config.head_dim)
            for weight in (layer.q, layer.k, layer.v)
        )
        mixed = attend(index, _rotate(q, rotation), _rotate(k, rotation), v)
        out = functional.linear(mixed.flatten(1), layer.o)
        self._all_reduce(out)
        return out

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gated = functional.silu(functional.linear(x, layer.gate)) * functional.linear(x, layer.up)
        out = functional.linear(gated, layer.down)
        self._all_reduce(out)
        return out

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps))


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, the two halves of a head forming the pairs (the order of Hugging Face checkpoints)."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
