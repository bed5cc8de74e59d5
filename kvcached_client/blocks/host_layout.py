"""Where a host slot's bytes are: arithmetic only, the same for configuration, daemon, workers and engines.

The host pool is `slabs` slabs of `slab_bytes`. A slab belongs to one namespace at a time, which cuts it into slots of
its own size: slot ``s`` is slot ``s % slots_per_slab`` of slab ``s // slots_per_slab``. Every shard has one part of
each slab, so that all shards use the same slot numbers::

    slab  = part of shard 0 | part of shard 1 | …          parts of slab_bytes // shards, in whole pages
    part  = headers of all its slots, in whole pages | blocks of all its slots, back to back

If every shard holds the same bytes (latent attention), a slab is one part, which holds each block once. All shards read
the part; of each store, every shard writes a share of the blocks.

A block's bytes are contiguous: its pages back to back, in the order of the layers (`blocks.pages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final

import msgspec

#: Size of the header of one block in one part.
HEADER_BYTES: Final = 128
#: Parts and the blocks in them begin at pages.
PAGE_BYTES: Final = 4096


def host_parts(shards: int, *, replicated: bool) -> int:
    """Number of parts of a slab: one per shard, or one if every shard holds the same bytes."""
    return 1 if replicated else shards


def part_bytes(slab_bytes: int, parts: int) -> int:
    """Bytes of one of a slab's equal parts, in whole pages."""
    return slab_bytes // parts // PAGE_BYTES * PAGE_BYTES


def header_area_bytes(blocks: int) -> int:
    """Bytes that the headers of `blocks` blocks take in one part, rounded up to whole pages."""
    return -(-blocks * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES


def slots_per_slab(slab_bytes: int, block_bytes: int, parts: int) -> int:
    """Number of blocks that fit into a slab; may be 0. `block_bytes` is their size in one part, without headers."""
    part = part_bytes(slab_bytes, parts)
    blocks = part // (block_bytes + HEADER_BYTES)
    # The padding of the headers may take the space of a few blocks.
    while blocks and header_area_bytes(blocks) + blocks * block_bytes > part:
        blocks -= 1
    return blocks


def smallest_slab(block_bytes: int, parts: int) -> int:
    """Size of the smallest slab that holds a block."""
    part = header_area_bytes(1) + block_bytes
    return parts * -(-part // PAGE_BYTES) * PAGE_BYTES


_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 46)]


class HostGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The host pool as one namespace sees it.

    Attributes:
        slabs: number of slabs in the whole pool.
        slab_bytes: size of a slab, in whole pages.
        shards: number of shards in the namespace's layout.
        block_bytes: size of one of the namespace's blocks on one shard.
        replicated: every shard holds the same bytes, and the host pool holds them once.
    """

    slabs: _Size
    slab_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 46, multiple_of=PAGE_BYTES)]
    shards: _Size
    block_bytes: _Size
    replicated: bool = False

    @property
    def parts(self) -> int:
        """Number of parts of a slab; each has a header and a block for every slot of the slab."""
        return host_parts(self.shards, replicated=self.replicated)

    @cached_property
    def slots_per_slab(self) -> int:
        """Number of blocks that one slab holds; 0 if a slab is too small for one block."""
        return slots_per_slab(self.slab_bytes, self.block_bytes, self.parts)

    @cached_property
    def slots(self) -> int:
        """Number of slots that the namespace would have with every slab; slot numbers are lower."""
        return self.slabs * self.slots_per_slab

    @property
    def size_bytes(self) -> int:
        """Size of the whole host pool."""
        return self.slabs * self.slab_bytes

    @property
    def rest_bytes(self) -> int:
        """Unused bytes at the end of a slab."""
        part = part_bytes(self.slab_bytes, self.parts)
        blocks = self.slots_per_slab
        return self.slab_bytes - (self.parts - 1) * part - header_area_bytes(blocks) - blocks * self.block_bytes

    def share(self, blocks: int, shard: int) -> slice:
        """The blocks of a store that a shard writes: all into its own part, or a share of them into the common part."""
        if not self.replicated:
            return slice(blocks)
        return slice(blocks * shard // self.shards, blocks * (shard + 1) // self.shards)

    def header_offset(self, slot: int, shard: int) -> int:
        """Offset of a slot's header from the start of the host pool.

        Raises:
            ValueError: there is no such slot or shard.
        """
        slab, index = self._place(slot, shard)
        return self._part_offset(slab, shard) + index * HEADER_BYTES

    def block_offset(self, slot: int, shard: int) -> int:
        """Offset of a slot's block from the start of the host pool.

        Raises:
            ValueError: there is no such slot or shard.
        """
        slab, index = self._place(slot, shard)
        return self._part_offset(slab, shard) + self._headers_bytes + index * self.block_bytes

    def places(self, slots: Sequence[int], shard: int) -> tuple[list[int], list[int]]:
        """Offsets of the headers and of the blocks of slots from the start of the host pool. All slots must exist."""
        header, block = self.header_offset(0, shard), self.block_offset(0, shard)
        per_slab, slab_bytes, block_bytes = self.slots_per_slab, self.slab_bytes, self.block_bytes
        headers = [header + slot // per_slab * slab_bytes + slot % per_slab * HEADER_BYTES for slot in slots]
        blocks = [block + slot // per_slab * slab_bytes + slot % per_slab * block_bytes for slot in slots]
        return headers, blocks

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


#: A part of a run is no smaller: a head of one token has 16 dimensions at least.
PIECE_BYTES_MIN: Final = 16
#: Most parts of a block in storage: so many checksums has the frame before it.
CANONICAL_PARTS_MAX: Final = 64


class CanonicalLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How storage may hold an engine's blocks so that an engine with another number of shards can read them.

    On a shard, a block's bytes are ``[runs, parts of the shard, bytes]``: runs of bytes, in each of which the shard's
    parts follow one another. In storage they are ``[parts, runs, bytes]``: the parts of all shards in their order, so
    that each shard's are together, however many shards there are. A part is a KV head, or some neighbouring heads.

    Attributes:
        fingerprint: 16 bytes that two engines share only if the bytes of a part mean the same to both.
        parts: parts of a block on all shards together.
        runs: runs of bytes in a block.
    """

    fingerprint: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=CANONICAL_PARTS_MAX)]
    runs: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]

    def divides(self, block_bytes: int, host_parts: int) -> bool:
        """Whether blocks of this size on each of so many host parts can be cut so, and into no tiny pieces."""
        pieces = self.runs * (self.parts // host_parts)
        return self.parts % host_parts == 0 and block_bytes % pieces == 0 and block_bytes // pieces >= PIECE_BYTES_MIN


@dataclass(frozen=True, slots=True)
class OffloadLayout:
    """The shape of an engine's blocks, as far as the daemon must know it.

    Attributes:
        block_size: tokens in a block.
        shards: number of processes; each holds a part of every block.
        block_bytes: bytes of one block on one shard, all layers.
        fingerprint: 16 bytes that two engines share only if the bytes of a block mean the same to both.
        replicated: every shard holds the same bytes (latent attention), so the daemon keeps them only once.
        canonical: how storage may hold the blocks so that engines with another number of shards read them; None = only
            engines with this layout can.
    """

    block_size: int
    shards: int
    block_bytes: int
    fingerprint: bytes
    replicated: bool = False
    canonical: CanonicalLayout | None = None
