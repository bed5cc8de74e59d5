"""The canonical layout of an engine's blocks, in which storage holds them for any number of shards.

Shards divide a model's KV heads, and nothing else. So the bytes of one head mean the same on every shard, however many
there are.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from math import prod
from typing import Final, NamedTuple

import msgspec

from kvcached_client.blocks.host_layout import CANONICAL_PARTS_MAX, CanonicalLayout
from kvcached_client.blocks.pages import EnginePages, PageTensor

_PERSON: Final = b"kvcached heads 1"


class _Order(NamedTuple):
    """The order of the bytes of a page: ``[runs, heads, bytes of a head in a run]``.

    Attributes:
        runs, heads, head_bytes: see above.
        dimensions: from outer to inner, counted from the last one of the tensor, with their sizes; that of the heads
            has the size 0, because it differs between numbers of shards.
    """

    runs: int
    heads: int
    head_bytes: int
    dimensions: tuple[tuple[int, int], ...]


def canonical_layout(pages: EnginePages, shards: int, heads: int, head_dimension: int) -> CanonicalLayout | None:
    """The canonical layout of a shard's blocks; None if they have none.

    Blocks have none where not every tensor has this shard's heads, all of one size, where shards repeat heads (but a
    single one, which each of them has), or where heads cannot be joined to at most 64 parts without dividing a part
    between shards.

    Args:
        pages: the shard's, of tensors.
        shards: how many there are.
        heads: KV heads of the model, on all shards together.
        head_dimension: the dimension of the heads in each tensor, counted from the last one: -1 is the last.
    """
    orders = [_order(tensor, head_dimension) for tensor in pages.tensors]
    found = [order for order in orders if order is not None]
    here = {(order.heads, order.head_bytes) for order in found}
    if not found or len(found) < len(orders) or len(here) > 1:
        return None
    ((local, head_bytes),) = here
    by_layer: dict[int, set[_Order]] = defaultdict(set)
    for tensor, order in zip(pages.tensors, found, strict=True):
        by_layer[tensor.layer].add(order)
    if local * (1 if heads == 1 else shards) != heads or any(len(some) > 1 for some in by_layer.values()):
        return None
    runs = sum(order.runs for some in by_layer.values() for order in some)
    parts = max(each for each in range(1, min(heads, CANONICAL_PARTS_MAX) + 1) if heads % each == 0)
    joined = heads // parts
    if local % joined or runs * local * head_bytes != pages.block_bytes:
        return None
    told = [
        (each.layer, each.name, order.dimensions, each.dtype) for each, order in zip(pages.tensors, found, strict=True)
    ]
    text = msgspec.json.encode((joined, head_bytes, told))
    return CanonicalLayout(
        fingerprint=hashlib.blake2b(text, digest_size=16, person=_PERSON).digest(), parts=parts, runs=runs
    )


def _order(tensor: PageTensor, head_dimension: int) -> _Order | None:
    """The order of a page's bytes; None if its bytes are not of heads alone."""
    at = len(tensor.shape) + head_dimension
    if at < 0 or tensor.offset_bytes:
        return None
    heads, stride = tensor.shape[at], tensor.strides[at]
    others = [
        (step, dimension - len(tensor.shape), size)
        for dimension, (size, step) in enumerate(zip(tensor.shape, tensor.strides, strict=True))
        if dimension != at and size > 1
    ]
    others.sort(reverse=True)
    outer = [(dimension, size) for step, dimension, size in others if step >= stride]
    inner = [(dimension, size) for step, dimension, size in others if step < stride]
    elements = prod(size for _, size in inner)
    if elements != stride:  # a single head has any stride: then its place is unknown
        return None
    runs = prod(size for _, size in outer)
    return _Order(runs, heads, elements * tensor.element_bytes, (*outer, (head_dimension, 0), *inner))
