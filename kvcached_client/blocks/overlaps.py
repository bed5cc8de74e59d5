"""Layers of an engine that share memory: pages that are parts of others, and pages that must not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvcached_client.errors import bad_value

if TYPE_CHECKING:
    from kvcached_client.blocks.pages import LayerPages


def without_contained(layers: Sequence[LayerPages]) -> dict[LayerPages, LayerPages]:
    """The largest pages of which each layer's pages are a part; mostly its own."""
    largest = sorted(set(layers), key=lambda layer: (layer.address, -layer.page_bytes))
    whole: dict[LayerPages, LayerPages] = {}
    around: dict[int, LayerPages] = {}  #: the last one that is not contained, by stride
    for layer in largest:
        last = around.get(layer.stride_bytes)
        if last is None or layer.address + layer.page_bytes > last.address + last.page_bytes:
            last = around[layer.stride_bytes] = layer
        whole[layer] = last
    return whole


def check_apart(layers: Sequence[LayerPages], blocks: int) -> None:
    """Check that no block's pages are in another block's: a load of one would overwrite the other.

    Raises:
        BadRequest: some are.
    """
    in_order = sorted(layers)
    for index, first in enumerate(in_order):
        end = first.address + (blocks - 1) * first.stride_bytes + first.page_bytes
        for second in islice(in_order, index + 1, None):
            if second.address >= end:
                break
            if second.stride_bytes != first.stride_bytes or _shares_other_blocks(first, second, blocks):
                raise bad_value(
                    "KV tensors: pages of different blocks overlap: "
                    f"{first.page_bytes} bytes, every {first.stride_bytes}, and "
                    f"{second.page_bytes} bytes, every {second.stride_bytes}, {second.address - first.address} behind",
                    "let layers that share memory have each block at the same place",
                )


def _shares_other_blocks(first: LayerPages, second: LayerPages, blocks: int) -> bool:
    """Whether a page of the second layer is partly in a page of another block of the first, which begins before it."""
    later, offset = divmod(second.address - first.address, first.stride_bytes)
    is_in_same = offset < first.page_bytes and later > 0
    is_in_next = offset + second.page_bytes > first.stride_bytes and later + 1 < blocks
    return is_in_same or is_in_next
