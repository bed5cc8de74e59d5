"""How many blocks a slab of the host pool holds.

A slab is cut into one part per shard. A part is the headers of its blocks, then the blocks::

    │ headers: n x 128 B, padded to a page │ blocks: n x bytes per block │ rest │

Configuration, core and workers must agree on n, so it is computed here and nowhere else.
"""

from __future__ import annotations

from typing import Final

#: Of one block on one shard.
HEADER_BYTES: Final = 128
#: Parts and the blocks in them begin at pages.
PAGE_BYTES: Final = 4096


def part_bytes(slab_bytes: int, shards: int) -> int:
    """Bytes of a slab that belong to one shard: an equal part, in whole pages."""
    return slab_bytes // shards // PAGE_BYTES * PAGE_BYTES


def header_area_bytes(blocks: int) -> int:
    """Bytes of the headers of so many blocks on one shard, in whole pages."""
    return -(-blocks * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES


def slots_per_slab(slab_bytes: int, block_bytes: int, shards: int) -> int:
    """Blocks that fit into a slab; 0 where not one does. `block_bytes` is what one takes on one shard, header apart."""
    part = part_bytes(slab_bytes, shards)
    blocks = part // (block_bytes + HEADER_BYTES)
    while blocks and header_area_bytes(blocks) + blocks * block_bytes > part:  # the padding takes the place of a few
        blocks -= 1
    return blocks


def smallest_slab(block_bytes: int, shards: int) -> int:
    """Bytes of the smallest slab that holds a block."""
    part = header_area_bytes(1) + block_bytes
    return shards * -(-part // PAGE_BYTES) * PAGE_BYTES
