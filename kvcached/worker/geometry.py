"""Where a slot's bytes are in a pool: all that a worker knows of a layout.

A *strip* is an array of equal pages, one per slot. A block-first pool is one strip of whole rows; a layer-first pool
has a strip per layer. A block's bytes are its pages, strip after strip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from kvcached_client.layout import Layout

_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 46)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]


class Strip(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages of one size, back to back: that of slot s is at ``offset_bytes + s * page_bytes``."""

    offset_bytes: _Offset
    page_bytes: _Size


class PoolGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pool of `slots` slots on one shard. The strips lie back to back and fill it."""

    slots: _Size
    strips: tuple[Strip, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""
        return sum(strip.page_bytes for strip in self.strips)

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.slots * self.slot_bytes


def pool_geometry(layout: Layout, slots: int) -> PoolGeometry:
    """The strips of a pool of `slots` slots."""
    if layout.order == "block_first":
        return PoolGeometry(slots=slots, strips=(Strip(0, layout.bytes_per_block()),))
    strips = [
        Strip(layout.page_offset(slots, index, layer), group.page_bytes(layout.block_size))
        for index, group in enumerate(layout.groups)
        for layer in range(group.layers)
    ]
    return PoolGeometry(slots=slots, strips=tuple(strips))
