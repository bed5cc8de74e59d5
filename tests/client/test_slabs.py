from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.blocks.host_layout import PAGE_BYTES, header_area_bytes, part_bytes, slots_per_slab, smallest_slab

SIZES = st.integers(1, 1 << 21)
SHARDS = st.integers(1, 64)


def fits(slab_bytes: int, block_bytes: int, shards: int, blocks: int) -> bool:
    """Whether so many headers, in whole pages, and so many blocks lie in a shard's part."""
    return header_area_bytes(blocks) + blocks * block_bytes <= part_bytes(slab_bytes, shards)


@given(st.integers(1, 1 << 14), SIZES, SHARDS)
def test_slab_holds_as_many_blocks_as_fit(pages: int, block_bytes: int, shards: int) -> None:
    """The blocks of a slab fit with their headers, and one more would not."""
    slab_bytes = pages * PAGE_BYTES

    blocks = slots_per_slab(slab_bytes, block_bytes, shards)

    assert blocks == 0 or fits(slab_bytes, block_bytes, shards, blocks)
    assert not fits(slab_bytes, block_bytes, shards, blocks + 1)


@given(SIZES, SHARDS)
def test_smallest_slab_holds_one_block_and_a_page_less_holds_none(block_bytes: int, shards: int) -> None:
    """The smallest slab is as large as it must be, and no larger."""
    smallest = smallest_slab(block_bytes, shards)

    assert slots_per_slab(smallest, block_bytes, shards) >= 1
    assert slots_per_slab(smallest - PAGE_BYTES, block_bytes, shards) == 0


@pytest.mark.parametrize(
    ("slab_bytes", "block_bytes", "shards", "blocks"),
    [
        (64 << 20, 196_608, 1, 341),  # 44 KiB of headers
        (64 << 20, 98_304, 2, 340),
        (8192, 4096, 1, 1),
        (8191, 4096, 1, 0),
        (12288, 4096, 2, 0),  # 6 KiB a shard are one page
    ],
)
def test_slab_examples(slab_bytes: int, block_bytes: int, shards: int, blocks: int) -> None:
    """Figures worked out by hand."""
    assert slots_per_slab(slab_bytes, block_bytes, shards) == blocks
