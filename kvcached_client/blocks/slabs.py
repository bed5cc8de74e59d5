"""How many blocks a slab of the host pool holds.

A slab is cut into one part per shard, or is one part where all shards hold the same bytes. A part is the headers of
its blocks, then the blocks::

    │ headers: n x 128 B, padded to a page │ blocks: n x bytes per block │ rest │

Configuration, core and workers must agree on n, so it is computed here and nowhere else.
"""

from __future__ import annotations

from typing import Final

#: Of one block in one part.
HEADER_BYTES: Final = 128
#: Parts and the blocks in them begin at pages.
PAGE_BYTES: Final = 4096


def host_parts(shards: int, *, replicated: bool) -> int:
    """Into how many parts a slab is cut; one where every shard holds the same bytes."""
    return 1 if replicated else shards


def part_bytes(slab_bytes: int, parts: int) -> int:
    """Bytes of one of a slab's equal parts, in whole pages."""
    return slab_bytes // parts // PAGE_BYTES * PAGE_BYTES


def header_area_bytes(blocks: int) -> int:
    """Bytes of the headers of so many blocks in one part, in whole pages."""
    return -(-blocks * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES


def slots_per_slab(slab_bytes: int, block_bytes: int, parts: int) -> int:
    """Blocks that fit into a slab; 0 where not one does. `block_bytes` is what one takes in one part, header apart."""
    part = part_bytes(slab_bytes, parts)
    blocks = part // (block_bytes + HEADER_BYTES)
    while blocks and header_area_bytes(blocks) + blocks * block_bytes > part:  # the padding takes the place of a few
        blocks -= 1
    return blocks


def smallest_slab(block_bytes: int, parts: int) -> int:
    """Bytes of the smallest slab that holds a block."""
    part = header_area_bytes(1) + block_bytes
    return parts * -(-part // PAGE_BYTES) * PAGE_BYTES
