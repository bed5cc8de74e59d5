from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.blocks.host_layout import HostGeometry
from tests.worker.host_rigs import HOST, SHARD, SHARDS, SLOTS_PER_SLAB, block_place, header_place

geometries = st.builds(
    HostGeometry,
    slabs=st.integers(1, 3),
    slab_bytes=st.integers(2, 40).map(lambda pages: pages * 4096),
    shards=st.integers(1, 3),
    block_bytes=st.integers(1, 9000),
    replicated=st.booleans(),
)


@given(geometries)
def test_places_never_overlap(geometry: HostGeometry) -> None:
    """Headers and blocks of all slots and shards lie inside their own slab, and no two of them share a byte."""
    places = sorted(
        (offset, size, slot // geometry.slots_per_slab)
        for slot in range(min(geometry.slots, 2 * geometry.slots_per_slab))
        for shard in range(geometry.parts)
        for offset, size in [
            (geometry.header_offset(slot, shard), 128),
            (geometry.block_offset(slot, shard), geometry.block_bytes),
        ]
    )

    end = 0
    for offset, size, slab in places:
        assert offset >= end
        assert slab * geometry.slab_bytes <= offset
        assert offset + size <= (slab + 1) * geometry.slab_bytes <= geometry.size_bytes
        end = offset + size


@given(geometries.filter(lambda geometry: geometry.slots > 0), st.data())
def test_places_of_many_slots_are_those_of_each(geometry: HostGeometry, data: st.DataObject) -> None:
    """Asked for together or one by one, headers and blocks of slots are at the same places."""
    slots = data.draw(st.lists(st.integers(0, geometry.slots - 1), max_size=20))
    shard = data.draw(st.integers(0, geometry.shards - 1))

    headers, blocks = geometry.places(slots, shard)

    assert headers == [geometry.header_offset(slot, shard) for slot in slots]
    assert blocks == [geometry.block_offset(slot, shard) for slot in slots]


@given(geometries.filter(lambda geometry: geometry.slots > 0), st.integers(0, 50))
def test_shards_write_each_replicated_block_once(geometry: HostGeometry, blocks: int) -> None:
    """Where all shards have a block at one place, one of them writes it, and their shares differ by one at most."""
    shares = [range(blocks)[geometry.share(blocks, shard)] for shard in range(geometry.shards)]

    if geometry.replicated:
        places = {
            (geometry.header_offset(0, shard), geometry.block_offset(0, shard)) for shard in range(geometry.shards)
        }
        assert (len(places), geometry.parts) == (1, 1)
        assert [block for share in shares for block in share] == list(range(blocks))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert geometry.parts == geometry.shards
        assert all(share == range(blocks) for share in shares)


def test_places_are_as_described() -> None:
    """Slots are numbered through the slabs, and a part holds a page of headers before its blocks."""
    assert (HOST.slots_per_slab, HOST.slots) == (SLOTS_PER_SLAB, 3 * SLOTS_PER_SLAB)
    for slot in range(HOST.slots):
        assert HOST.header_offset(slot, SHARD) == header_place(slot)
        assert HOST.block_offset(slot, SHARD) == block_place(slot)


@pytest.mark.parametrize(("slot", "shard"), [(-1, 0), (3 * SLOTS_PER_SLAB, 0), (0, -1), (0, SHARDS)])
def test_places_that_do_not_exist_are_refused(slot: int, shard: int) -> None:
    """A slot or a shard that the pool does not have has no place."""
    with pytest.raises(ValueError, match=f"slot {slot}, shard {shard}: the host pool has 21 slots on 2 shards"):
        HOST.header_offset(slot, shard)
    with pytest.raises(ValueError, match="the host pool has"):
        HOST.block_offset(slot, shard)


def test_pool_without_room_for_a_block_has_no_slots() -> None:
    """Where a slab is too small for one block there is no slot to be named."""
    geometry = HostGeometry(slabs=3, slab_bytes=8192, shards=1, block_bytes=4097)

    assert geometry.slots == 0
    with pytest.raises(ValueError, match="has 0 slots"):
        geometry.block_offset(0, 0)


def test_slabs_of_broken_pages_are_refused_on_the_wire() -> None:
    """A slab size that is no multiple of a page, which would put headers across pages, cannot be decoded."""
    broken = HostGeometry(slabs=1, slab_bytes=8193, shards=1, block_bytes=64)

    with pytest.raises(msgspec.ValidationError, match="multiple of 4096"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=HostGeometry)
