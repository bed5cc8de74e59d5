"""Paged attention over the daemon's memory: K and V are written to, and read from, the slots of each block table.

Plain gather and softmax: correctness first. A real engine hands the same block tables to its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

#: (index of the request, layer): returns when that layer of the request's cached blocks may be read.
AwaitLayer = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows [first, first + len(positions)) of a step, which belong to one request."""

    first: int
    positions: Tensor  # int64, consecutive
    block_table: Tensor  # int64: block i of the request lies in slot block_table[i]; covers all positions


class PagedAttention:
    """Attention of one step's rows, each to its own request's context.

    Args:
        pool: per layer (K, V), each [slots, block_size, kv_heads, head_dim], views of the mapped pool.
        requests: the step's rows by request.
        await_layer: called before a request's context is read.
    """

    def __init__(
        self, pool: Sequence[tuple[Tensor, Tensor]], requests: Sequence[PagedRows], await_layer: AwaitLayer
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._await_layer = await_layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend. Shapes as in `model.Attend`."""
        keys, values = self._pool[layer]
        outputs = []
        for index, request in enumerate(self._requests):
            rows = slice(request.first, request.first + len(request.positions))
            _store(keys, request, k[rows])
            _store(values, request, v[rows])
            self._await_layer(index, layer)
            outputs.append(_attend(q[rows], _load(keys, request), _load(values, request), request.positions))
        return torch.cat(outputs)


class DecodeAttention:
    """Attention of a step with one row of each request. No shape depends on a value, so a graph can have it.

    Args:
        pool: as of `PagedAttention`.
        positions: int64 [rows].
        tables: int64 [rows, blocks]: block i of a row's request lies in slot tables[row, i], up to the row's position.
        await_layer: called before contexts are read.
    """

    def __init__(
        self,
        pool: Sequence[tuple[Tensor, Tensor]],
        positions: Tensor,
        tables: Tensor,
        await_layer: Callable[[int], None],
    ) -> None:
        self._pool = pool
        self._await_layer = await_layer
        self._tables = tables
        block_size = pool[0][0].shape[1]
        self._slots = tables.gather(1, (positions // block_size)[:, None])[:, 0]
        self._offsets = positions % block_size
        self._visible = torch.arange(tables.shape[1] * block_size, device=tables.device) <= positions[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend. Shapes as in `model.Attend`."""
        keys, values = self._pool[layer]
        for pages, rows in ((keys, k), (values, v)):
            write_rows(pages, (self._slots, self._offsets), rows)
        self._await_layer(layer)
        mask = self._visible[:, None, None]
        out = functional.scaled_dot_product_attention(
            q[:, :, None], self._contexts(keys), self._contexts(values), attn_mask=mask, enable_gqa=True
        )
        return out[:, :, 0]

    def _contexts(self, pages: Tensor) -> Tensor:
        """[rows, kv_heads, tokens, head_dim] float32. What a row does not see may be of others, or never written."""
        contexts = pages[self._tables].flatten(1, 2).float()
        return torch.where(self._visible[:, :, None, None], contexts, 0.0).transpose(1, 2)


def _store(pages: Tensor, request: PagedRows, rows: Tensor) -> None:
    block_size = pages.shape[1]
    slots = request.block_table[request.positions // block_size]
    write_rows(pages, (slots, request.positions % block_size), rows)


def write_rows(pages: Tensor, places: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Write rows to their places, all of them different, and touch nothing else of the pool.

    In torch's deterministic mode, `index_put_` on a CUDA device writes into a copy of a tensor that is not contiguous,
    as pages of K alone are not, and then copies all of it back. What others have loaded into their slots meanwhile
    would be lost. Where all places are different, no order of the writes can change what comes out.
    """
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=False)
    try:
        pages.index_put_(places, rows.to(pages.dtype))
    finally:
        torch.use_deterministic_algorithms(mode=is_deterministic)


def _load(pages: Tensor, request: PagedRows) -> Tensor:
    """The request's context up to its last row: [context, kv_heads, head_dim] float32."""
    context = int(request.positions[-1]) + 1
    blocks = -(-context // pages.shape[1])
    return pages[request.block_table[:blocks]].flatten(0, 1)[:context].float()


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Causal attention; query heads share the KV heads in equal groups."""
    visible = torch.arange(len(k), device=k.device) <= positions[:, None]
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
