"""The host pool over the death of its daemon, and its headers."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcached.memory.host_pool import HostHeaders, HostMemory, adopt_host_memory, create_host_memory
from kvcached.memory.sealed import sealed_memfd
from kvcached_client.blocks import header as host_header
from tests.recovery.pools import GEOMETRY, chain, first, header_bytes, store

SIZE = GEOMETRY.size_bytes


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = create_host_memory(GEOMETRY.slabs, GEOMETRY.slab_bytes)
    yield memory
    memory.close()


def test_kept_pool_is_adopted(memory: HostMemory) -> None:
    """The memory behind a kept descriptor is the host pool that it was, with its bytes, and no child inherits it."""
    os.pwrite(memory.descriptor, b"block", 5000)
    kept = os.dup(memory.descriptor)
    os.set_inheritable(kept, True)

    adopted = adopt_host_memory(kept, GEOMETRY.slabs, GEOMETRY.slab_bytes)

    assert adopted is not None
    assert (adopted.slabs, adopted.slab_bytes, adopted.identity) == (6, 1 << 20, memory.identity)
    assert os.pread(adopted.descriptor, 5, 5000) == b"block"
    assert not os.get_inheritable(adopted.descriptor)
    adopted.close()


@pytest.mark.parametrize("slabs", [3, 60])
def test_kept_pool_has_as_many_slabs_as_are_asked_for(memory: HostMemory, slabs: int) -> None:
    """Fewer or more than before, in the same memory; what lies behind the last one is given back, and no byte else."""
    content = os.urandom(SIZE)
    os.pwrite(memory.descriptor, content, 0)
    adopted = adopt_host_memory(os.dup(memory.descriptor), slabs, GEOMETRY.slab_bytes)
    assert adopted is not None
    end = slabs * GEOMETRY.slab_bytes
    os.pwrite(adopted.descriptor, b"stray", end + (1 << 40))

    adopted.trim()

    assert os.pread(adopted.descriptor, SIZE, 0) == content[:end] + bytes(max(0, SIZE - end))
    assert os.pread(adopted.descriptor, 5, end + (1 << 40)) == bytes(5)
    assert os.fstat(adopted.descriptor).st_blocks * 512 == min(end, SIZE)
    adopted.close()


def test_pool_is_made_where_files_may_not_be_long() -> None:
    """Under `ulimit -f`, a pool has the size that was asked for, and cannot grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, limits[1]))
    try:
        made = create_host_memory(GEOMETRY.slabs, GEOMETRY.slab_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert os.fstat(made.descriptor).st_size == SIZE
    made.close()


def test_two_pools_have_two_identities(memory: HostMemory) -> None:
    """Two memories of the same size are told apart."""
    other = create_host_memory(GEOMETRY.slabs, GEOMETRY.slab_bytes)

    assert other.identity != memory.identity
    other.close()


def test_headers_of_blocks_are_found_and_cleared_by_keys(memory: HostMemory) -> None:
    """In the slabs that are asked about, also a key that stands twice; a slot that is cleared has none on any shard."""
    headers = HostHeaders(memory)
    names = chain(3)
    slots = np.array([3, 30, 50, 5, 31], np.int64)  # of slabs 0, 1 and 2
    for pair in (slots[:3], slots[3:]):
        store(headers, pair, first(names, len(pair)))
    keys = names.keys[:2].tobytes()

    assert sorted(headers.find(keys, GEOMETRY, [0, 1, 2, 5]).tolist()) == [3, 5, 30, 31]
    assert headers.find(keys, GEOMETRY, [0]).tolist() == [3, 5]
    assert headers.find(b"x" * 16, GEOMETRY, [0, 1]).tolist() == []
    headers.forget(np.array([5, 31], np.int64), GEOMETRY)
    assert sorted(headers.find(keys, GEOMETRY, [0, 1]).tolist()) == [3, 5, 30, 31]  # the rest of a header stays
    marks = {slot: {header_bytes(memory, GEOMETRY, slot, shard)[:8] for shard in (0, 1)} for slot in (3, 5, 30, 31)}
    assert {slot for slot, mark in marks.items() if mark == {bytes(8)}} == {5, 31}
    headers.forget(np.zeros(0, np.int64), GEOMETRY)


def odd_descriptor(kind: str) -> int:
    """Something that is no host pool of this configuration."""
    if kind == "no memfd":
        return os.eventfd(0)
    if kind == "unsealed":
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SIZE)
        return descriptor
    if kind == "half sealed":
        descriptor = odd_descriptor("unsealed")
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return descriptor
    if kind == "read-only":
        descriptor = sealed_memfd("x", SIZE)
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        os.close(descriptor)
        return again
    if kind == "sealed against writing":
        descriptor = odd_descriptor("unsealed")
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
        )
        return descriptor
    return sealed_memfd("x", SIZE - 4096)


@pytest.mark.parametrize(
    "kind", ["no memfd", "unsealed", "half sealed", "read-only", "sealed against writing", "smaller"]
)
def test_other_descriptors_are_not_adopted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is no sealed, writable memory of the configured size at least is refused with one line, and stays open."""
    descriptor = odd_descriptor(kind)

    with caplog.at_level(logging.WARNING, "kvcached"):
        assert adopt_host_memory(descriptor, GEOMETRY.slabs, GEOMETRY.slab_bytes) is None

    assert len(caplog.messages) == 1
    os.close(descriptor)


def test_closed_descriptor_is_not_adopted(caplog: pytest.LogCaptureFixture) -> None:
    """A descriptor that is not open is refused like any other."""
    descriptor = os.eventfd(0)
    os.close(descriptor)

    assert adopt_host_memory(descriptor, GEOMETRY.slabs, GEOMETRY.slab_bytes) is None


def test_lent_slab_has_no_headers(memory: HostMemory) -> None:
    """Clearing a slab zeroes the headers of all its slots on all shards, and not one byte of blocks or other slabs."""
    content = os.urandom(SIZE)
    os.pwrite(memory.descriptor, content, 0)
    expected = bytearray(content)
    per_slab = GEOMETRY.slots_per_slab
    for shard in range(2):
        start = GEOMETRY.header_offset(2 * per_slab, shard)
        expected[start : GEOMETRY.block_offset(2 * per_slab, shard)] = bytes(4096)

    HostHeaders(memory).clear_slab(2, GEOMETRY)

    assert os.pread(memory.descriptor, SIZE, 0) == expected


def test_claims_are_on_every_shard_of_their_slots(memory: HostMemory) -> None:
    """Claims replace the headers of exactly these slots, across slabs and on all shards."""
    headers = HostHeaders(memory)
    slots = np.array([3, 25, GEOMETRY.slots - 1])
    store(headers, np.arange(GEOMETRY.slots), chain(GEOMETRY.slots))
    before = bytearray(os.pread(memory.descriptor, SIZE, 0))

    headers.claim(slots, GEOMETRY, 11, 13)

    for slot in slots.tolist():
        for shard in range(2):
            place = GEOMETRY.header_offset(slot, shard)
            before[place : place + 128] = host_header.pack_claim(11, 13)
            assert header_bytes(memory, GEOMETRY, slot, shard) == host_header.pack_claim(11, 13)
    assert os.pread(memory.descriptor, SIZE, 0) == before


@pytest.mark.parametrize("slot", [-1, GEOMETRY.slots])
def test_slots_that_do_not_exist_are_not_claimed(slot: int, memory: HostMemory) -> None:
    """One slot outside the pool refuses the claim, and nothing is written; no slots are no work."""
    headers = HostHeaders(memory)

    with pytest.raises(ValueError, match="slots"):
        headers.claim(np.array([0, slot]), GEOMETRY, 1, 1)
    with pytest.raises(ValueError, match="slots"):
        headers.clear_slab(GEOMETRY.slabs, GEOMETRY)
    headers.claim(np.array([], np.int64), GEOMETRY, 1, 1)

    assert not any(os.pread(memory.descriptor, SIZE, 0))


def test_headers_take_no_memory_of_blocks(memory: HostMemory) -> None:
    """Clearing and claiming a whole pool makes the pages of headers resident, and no other."""
    headers = HostHeaders(memory)
    for slab in range(GEOMETRY.slabs):
        headers.clear_slab(slab, GEOMETRY)
    headers.claim(np.arange(GEOMETRY.slots), GEOMETRY, 1, 1)

    assert os.fstat(memory.descriptor).st_blocks * 512 == GEOMETRY.slabs * GEOMETRY.shards * 4096


def test_children_have_no_headers(memory: HostMemory) -> None:
    """The mapping is of this process alone: a forked child does not have it, and no core dump does."""
    headers = HostHeaders(memory)
    headers.clear_slab(0, GEOMETRY)

    text = Path("/proc/self/smaps").read_text("ascii")
    flags = text[text.index("memfd:kvcached-host") :].split("VmFlags:")[1].split("\n")[0].split()
    assert {"dc", "dd"} <= set(flags)
