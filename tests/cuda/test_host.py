"""What of the host pool a shard registers: all that it copies, in ranges that no copy crosses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvcached_client.blocks.host_layout import HEADER_BYTES, HostGeometry
from kvcached_client.cuda.host import OWN_PART_BYTES_MIN, shard_ranges
from tests.cuda.conftest import RunProgram
from tests.cuda_driver.trace import broken_rules, calls


def geometry(shards: int, *, slab_bytes: int, replicated: bool = False) -> HostGeometry:
    return HostGeometry(slabs=5, slab_bytes=slab_bytes, shards=shards, block_bytes=100_000, replicated=replicated)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("slab_bytes", [OWN_PART_BYTES_MIN, 4 * OWN_PART_BYTES_MIN])
def test_every_slot_of_a_shard_is_in_one_range(shards: int, slab_bytes: int, replicated: bool) -> None:
    """Header and block of every slot are in one range, and ranges have no byte in common."""
    host = geometry(shards, slab_bytes=slab_bytes, replicated=replicated)
    for shard in range(shards):
        ranges = shard_ranges(host, shard, 2 * slab_bytes)
        headers, blocks = host.places(range(host.slots), shard)
        for first, size in [
            *((each, HEADER_BYTES) for each in headers),
            *((each, host.block_bytes) for each in blocks),
        ]:
            assert sum(first in each and first + size - 1 in each for each in ranges) == 1
        assert all(one.stop <= other.start for one, other in pairwise(ranges))


def test_shards_share_nothing() -> None:
    """With parts of their own, shards register their parts: together not more than the pool."""
    host = geometry(4, slab_bytes=4 * OWN_PART_BYTES_MIN)
    ranges = [each for shard in range(4) for each in shard_ranges(host, shard)]

    assert sum(map(len, ranges)) == host.size_bytes
    assert len({each.start for each in ranges}) == 4 * host.slabs


@pytest.mark.parametrize(
    ("slab_bytes", "replicated"), [(4 * OWN_PART_BYTES_MIN - 4096, False), (4 * OWN_PART_BYTES_MIN, True)]
)
def test_small_and_common_parts_are_registered_with_the_others(slab_bytes: int, replicated: bool) -> None:
    """Whole slabs are registered, some at once, where parts are small or all shards copy the same bytes."""
    host = geometry(4, slab_bytes=slab_bytes, replicated=replicated)

    assert [len(each) for each in shard_ranges(host, 3, 2 * slab_bytes)] == [2 * slab_bytes, 2 * slab_bytes, slab_bytes]


def test_copies_of_a_shard_among_others(run_program: RunProgram) -> None:
    """The second of two shards stores and loads what it should; it registers its half of each slab, and no more."""
    done = run_program("round_trip", "layer_first", True, 4, 2)

    registered = calls(done.records, "cuMemHostRegister")
    assert done.said == 0
    assert broken_rules(done.records) == []
    assert [each.arguments["size"] for each in registered] == [OWN_PART_BYTES_MIN] * 8


def test_memory_that_an_engine_only_reads_is_registered(run_program: RunProgram) -> None:
    """A host pool that is mapped read-only is registered as such; as any other it would not be, and would be copied."""
    done = run_program("registered_read_only", True)
    assert (done.said, broken_rules(done.records)) == ([1 << 20, ""], [])
    registered, error = run_program("registered_read_only", False).said
    assert (registered, "cuMemHostRegister" in error) == (0, True)


@pytest.mark.parametrize("by_own_thread", [False, True])
def test_dropped_copies_end_their_registration(run_program: RunProgram, by_own_thread: bool) -> None:
    """Copies that nobody closes hold the host pool while the device reaches it; also where its thread drops them."""
    assert run_program("dropped_copies", by_own_thread).said == [True] * 3
