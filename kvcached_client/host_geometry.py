"""Where a host slot's bytes are: arithmetic only. `kvcached_client.slabs` has the part that configurations need, too.

The host pool is `slabs` slabs of `slab_bytes`. A slab belongs to one namespace at a time, which cuts it into slots of
its own size: slot ``s`` is slot ``s % slots_per_slab`` of slab ``s // slots_per_slab``. Every shard has one part of
each slab, so that all shards use the same slot numbers::

    slab  = part of shard 0 | part of shard 1 | …          parts of slab_bytes // shards, in whole pages
    part  = headers of all its slots, in whole pages | blocks of all its slots, back to back

Where every shard holds the same bytes (latent attention), a slab is one part: a block is there once. All shards read
it; of a store, each shard writes a share of the blocks.

A block's bytes are contiguous: its pages strip after strip, in the order of `PoolGeometry`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec

from kvcached_client.slabs import HEADER_BYTES, PAGE_BYTES, header_area_bytes, host_parts, part_bytes, slots_per_slab

_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 46)]


class HostSpan(NamedTuple):
    """Consecutive slots whose blocks lie back to back."""

    slot: int  #: first of them
    slots: int
    offset_bytes: int  #: of the first block, from the start of the host pool


class HostGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The host pool as one namespace sees it.

    Attributes:
        slabs: slabs of the whole pool, whoever has them.
        slab_bytes: size of one, in whole pages.
        shards: shards of the namespace's layout.
        block_bytes: size of one of its blocks on one shard.
        replicated: every shard holds the same bytes, and the host pool holds them once.
    """

    slabs: _Size
    slab_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 46, multiple_of=PAGE_BYTES)]
    shards: _Size
    block_bytes: _Size
    replicated: bool = False

    @property
    def parts(self) -> int:
        """Parts of a slab, each with a header and a block for every slot of it."""
        return host_parts(self.shards, replicated=self.replicated)

    @cached_property
    def slots_per_slab(self) -> int:
        """Blocks that one slab holds; 0 where a slab is too small for one."""
        return slots_per_slab(self.slab_bytes, self.block_bytes, self.parts)

    @cached_property
    def slots(self) -> int:
        """Slots of the namespace if it had every slab: slot numbers are below this."""
        return self.slabs * self.slots_per_slab

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole host pool."""
        return self.slabs * self.slab_bytes

    @cached_property
    def gap_bytes(self) -> int:
        """Bytes from the end of a slab's last block to the next slab's first one of the same shard.

        So that slot s is at ``block_offset(0) + s * block_bytes + s // slots_per_slab * gap_bytes``.
        """
        return self.slab_bytes - self.slots_per_slab * self.block_bytes

    def share(self, blocks: int, shard: int) -> slice:
        """Which of the blocks of one store a shard writes: all of its own part, or an equal share of a common one."""
        if not self.replicated:
            return slice(blocks)
        return slice(blocks * shard // self.shards, blocks * (shard + 1) // self.shards)

    def header_offset(self, slot: int, shard: int) -> int:
        """Where the header of a slot is, in bytes from the start of the host pool.

        Raises:
            ValueError: there is no such slot or shard.
        """
        slab, index = self._place(slot, shard)
        return self._part_offset(slab, shard) + index * HEADER_BYTES

    def block_offset(self, slot: int, shard: int) -> int:
        """Where the block of a slot is, in bytes from the start of the host pool.

        Raises:
            ValueError: there is no such slot or shard.
        """
        slab, index = self._place(slot, shard)
        return self._part_offset(slab, shard) + self._headers_bytes + index * self.block_bytes

    def contiguous(self, first: int, count: int, shard: int) -> Iterator[HostSpan]:
        """Cut a range of slots where a slab ends.

        Raises:
            ValueError: one of the slots does not exist.
        """
        slab, index = self._place(first, shard)
        if first + count > self.slots:
            self._place(first + count - 1, shard)
        while count > 0:
            piece = min(count, self.slots_per_slab - index)
            offset = self._part_offset(slab, shard) + self._headers_bytes + index * self.block_bytes
            yield HostSpan(first, piece, offset)
            first, count, slab, index = first + piece, count - piece, slab + 1, 0

    @cached_property
    def _part_bytes(self) -> int:
        return part_bytes(self.slab_bytes, self.parts)

    @cached_property
    def _headers_bytes(self) -> int:
        return header_area_bytes(self.slots_per_slab)

    def _part_offset(self, slab: int, shard: int) -> int:
        return slab * self.slab_bytes + (0 if self.replicated else shard * self._part_bytes)

    def _place(self, slot: int, shard: int) -> tuple[int, int]:
        if not (0 <= slot < self.slots and 0 <= shard < self.shards):
            raise ValueError(
                f"slot {slot}, shard {shard}: the host pool has {self.slots} slots on {self.shards} shards"
            )
        return divmod(slot, self.slots_per_slab)
