"""Blocks in their canonical layout: what engines with a number of shards store, those with another number read."""

from __future__ import annotations

import mmap
from array import array

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcached.core.messages import Span
from kvcached.storage import executor
from kvcached.storage.canonical import Rearrangement
from kvcached.storage.executor import HostCopies
from kvcached.storage.messages import Backup, BlockFormat, Fetch, Query
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES, PAGE_BYTES, CanonicalLayout, HostGeometry
from tests.storage.test_copies import Shelf

HEADS, RUNS, HEAD_BYTES = 4, 6, 10
KEYS = [bytes([number]) * 16 for number in range(1, 6)]
CANONICAL = CanonicalLayout(fingerprint=b"c" * 16, parts=HEADS, runs=RUNS)


def whole(depth: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """All bytes of a block: ``[runs, heads, bytes of a head]``."""
    draw = np.random.default_rng(depth)
    return draw.integers(0, 256, (RUNS, HEADS, HEAD_BYTES), np.uint8)


def on_shard(depth: int, shard: int, shards: int) -> bytes:
    """The bytes that one of so many shards has of it."""
    here = HEADS // shards
    return whole(depth)[:, shard * here : (shard + 1) * here].tobytes()


class Node:
    """The host pool of engines with so many shards, beside a shelf that others have, too."""

    def __init__(self, shards: int, shelf: Shelf, canonical: CanonicalLayout | None = CANONICAL) -> None:
        self.shards = shards
        size = RUNS * HEADS * HEAD_BYTES // shards
        self.geometry = HostGeometry(slabs=2, slab_bytes=shards * 4 * PAGE_BYTES, shards=shards, block_bytes=size)
        self.format = BlockFormat(
            namespace=b"n" * 16,
            header_namespace=bytes([shards]) * 16,
            header_generation=2,
            fingerprint=bytes([shards, 1]) * 8,
            generation=2,
            geometry=self.geometry,
            canonical=canonical,
        )
        self.headers = HeaderKind(self.format.header_namespace, self.format.fingerprint, 2)
        self.memory = memoryview(mmap.mmap(-1, self.geometry.size_bytes))
        self.copies = HostCopies(self.memory, shelf, timeout_s=1.0)

    def part(self, slot: int, shard: int) -> memoryview:
        at = self.geometry.block_offset(slot, shard)
        return self.memory[at : at + self.geometry.block_bytes]

    def header(self, slot: int, shard: int) -> memoryview:
        at = self.geometry.header_offset(slot, shard)
        return self.memory[at : at + HEADER_BYTES]

    def fill(self, slots: list[int]) -> None:
        """The chain of KEYS lies in these slots, as an engine has stored it."""
        for depth, slot in enumerate(slots):
            for shard in range(self.shards):
                self.part(slot, shard)[:] = on_shard(depth, shard, self.shards)
                checksum = xxhash.xxh3_128_digest(self.part(slot, shard))
                packed = host_header.pack(self.headers, block_name(depth), checksum, 1, 1)
                host_header.write(self.header(slot, shard), packed)

    def holds(self, slot: int, depth: int) -> bool:
        """Whether a slot has a block of the chain, by its headers and its bytes."""
        return all(
            host_header.stored_checksum(self.header(slot, shard), self.headers, block_name(depth))
            == xxhash.xxh3_128_digest(self.part(slot, shard))
            and self.part(slot, shard) == on_shard(depth, shard, self.shards)
            for shard in range(self.shards)
        )

    def back_up(self, slots: list[int]) -> tuple[int, int]:
        done = self.copies.carry_out(Backup(sequence=1, format=self.format, spans=(span(slots),)))
        assert not done.error
        return done.count, done.written

    def fetch(self, slots: list[int]) -> tuple[int, int]:
        done = self.copies.carry_out(Fetch(sequence=2, format=self.format, span=span(slots), epoch=9, transfer=8))
        assert not done.error
        return done.count, done.wrong

    def find(self) -> int:
        return self.copies.carry_out(Query(sequence=3, format=self.format, keys=b"".join(KEYS))).count


def block_name(depth: int) -> BlockName:
    return BlockName(KEYS[depth], KEYS[depth - 1] if depth else b"", depth)


def span(slots: list[int]) -> Span:
    pairs = array("i", [number for slot in slots for number in (slot, 1)])
    return Span(0, b"", b"".join(KEYS[: len(slots)]), pairs, array("i"))


@given(
    runs=st.integers(1, 5),
    heads=st.sampled_from([1, 2, 4, 6, 12]),
    head_bytes=st.integers(1, 9),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_any_number_of_shards_gets_its_heads(
    runs: int, heads: int, head_bytes: int, seed: int, data: st.DataObject
) -> None:
    """A block that some shards had is, on any other number of them, the heads that each of these would have had."""
    numbers = st.sampled_from([each for each in range(1, heads + 1) if heads % each == 0])
    before, after = data.draw(numbers), data.draw(numbers)
    block = np.random.default_rng(seed).integers(0, 256, (runs, heads, head_bytes), np.uint8)
    value = memoryview(bytearray(block.nbytes))
    parts = np.split(block, before, axis=1)

    Rearrangement(runs, heads, runs * head_bytes, before).to_canonical(
        [memoryview(each.tobytes()) for each in parts], value
    )

    assert bytes(value) == block.transpose(1, 0, 2).tobytes()
    got = [memoryview(bytearray(block.nbytes // after)) for _ in range(after)]
    Rearrangement(runs, heads, runs * head_bytes, after).to_host(value, got)
    assert [bytes(each) for each in got] == [each.tobytes() for each in np.split(block, after, axis=1)]


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("at_once", [1, 32 << 20], ids=["one by one", "together"])
def test_blocks_come_to_engines_with_other_shards(
    before: int, after: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What engines on some shards have stored is read on others, with headers that a load accepts, byte for byte."""
    monkeypatch.setattr(executor, "STAGED_BYTES_MAX", at_once)
    shelf = Shelf()
    writer, reader = Node(before, shelf), Node(after, shelf)
    writer.fill([4, 0, 1, 3, 2])

    assert writer.back_up([4, 0, 1, 3, 2]) == (5, 5)
    assert reader.find() == 5
    assert reader.fetch([0, 1, 2, 3, 4]) == (5, 0)
    assert [reader.holds(slot, slot) for slot in range(5)] == [True] * 5


def test_block_that_others_have_stored_is_not_written_again() -> None:
    """Storage has a block once, whatever shards have stored it."""
    shelf = Shelf()
    for shards, written in ((2, 3), (4, 0)):
        node = Node(shards, shelf)
        node.fill([0, 1, 2])
        assert node.back_up([0, 1, 2]) == (3, written)
    assert len(shelf.values) == 3


def test_blocks_as_they_are_and_rearranged_are_others() -> None:
    """A block in its canonical layout is not found by who wants it as it is, nor the other way round."""
    shelf = Shelf()
    for canonical, other in ((CANONICAL, None), (None, CANONICAL)):
        writer, reader = Node(2, shelf, canonical), Node(2, shelf, other)
        writer.fill([0, 1])
        assert writer.back_up([0, 1]) == (2, 2)
        assert reader.find() == 0
        shelf.values.clear()


def test_changed_byte_in_the_host_pool_does_not_reach_storage() -> None:
    """A block whose bytes are no longer those of its checksum is not given another one."""
    shelf = Shelf()
    node = Node(2, shelf)
    node.fill([0, 1, 2])
    node.part(1, 1)[7] ^= 1

    assert node.back_up([0, 1, 2]) == (3, 2)
    assert [key[16:] for key in shelf.values] == [KEYS[0], KEYS[2]]


@pytest.mark.parametrize("at", [0, 40, 4096, 4096 + RUNS * HEADS * HEAD_BYTES - 1], ids=str)
def test_changed_byte_in_storage_is_a_miss(at: int) -> None:
    """A value that is not what was stored is deleted, and neither it nor what is behind it arrives."""
    shelf = Shelf()
    writer, reader = Node(4, shelf), Node(2, shelf)
    writer.fill([0, 1, 2])
    writer.back_up([0, 1, 2])
    wrong = next(key for key in shelf.values if key.endswith(KEYS[1]))
    shelf.values[wrong][at] ^= 1

    assert reader.fetch([0, 1, 2]) == (1, 1)
    assert (reader.holds(0, 0), reader.holds(1, 1), reader.holds(2, 2)) == (True, False, False)
    assert wrong not in shelf.values
