"""The scan of headers: the blocks that are there, and nothing else, whatever lies in the memory."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcached.memory.host_pool import HostHeaders, create_host_memory
from kvcached.recovery import scan as recovery
from kvcached.recovery.scan import UNKNOWN_OWNER, FoundBlocks, scan
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, HeaderKind
from tests.project.source_tree import ROOT
from tests.recovery.pools import GEOMETRY, KIND, BlockNames, chain, first, header_bytes, store

PER_SLAB = GEOMETRY.slots_per_slab
ALL = range(GEOMETRY.slabs)


class Pool:
    """A host pool and its headers."""

    def __init__(self) -> None:
        self.memory = create_host_memory(GEOMETRY.slabs, GEOMETRY.slab_bytes)
        self.headers = HostHeaders(self.memory)

    def scan(self, slabs: list[int] | range = ALL, kind: HeaderKind = KIND) -> FoundBlocks:
        return scan(self.headers.table, GEOMETRY, kind, slabs)

    def patch(self, slot: int, shard: int, at: int, data: bytes, *, seal: bool = False) -> None:
        """Change bytes of a header, and make a new seal if asked for."""
        header = bytearray(header_bytes(self.memory, GEOMETRY, slot, shard))
        header[at : at + len(data)] = data
        if seal:
            header[120:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header[:120])))
        os.pwrite(self.memory.descriptor, header, GEOMETRY.header_offset(slot, shard))


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.memory.close()


def test_stored_blocks_are_found() -> None:
    """Keys, parents, depths, slots and which store it was come back for every block that all shards have stored."""
    pool = Pool()
    names, slots = chain(60), np.random.default_rng(1).permutation(GEOMETRY.slots)[:60]
    store(pool.headers, slots, names, epoch=1 << 60, transfer=(1 << 64) - 1)

    found = pool.scan()

    order = np.argsort(slots)
    assert len(found) == 60
    assert found.slots.tolist() == slots[order].tolist()
    assert found.keys.tobytes() == names.keys[order].tobytes()
    assert found.parents.tobytes() == names.parents[order].tobytes()
    assert found.depths.tolist() == names.depths[order].tolist()
    assert (set(found.epochs.tolist()), set(found.transfers.tolist())) == ({1 << 60}, {(1 << 64) - 1})
    assert not len(found.claims.slots)
    pool.memory.close()


def test_only_named_slabs_are_read(pool: Pool) -> None:
    """Blocks of slabs that are somebody else's are not found, in whatever order the slabs are named."""
    store(pool.headers, np.arange(GEOMETRY.slots), chain(GEOMETRY.slots))

    found = pool.scan([4, 1])

    assert found.slots.tolist() == [*range(4 * PER_SLAB, 5 * PER_SLAB), *range(PER_SLAB, 2 * PER_SLAB)]
    assert len(pool.scan([])) == 0


def test_batches_change_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read slab by slab or all at once, the same blocks and claims are found."""
    store(pool.headers, np.arange(GEOMETRY.slots), chain(GEOMETRY.slots))
    pool.headers.claim(np.array([7, 70]), GEOMETRY, 1, 2)
    at_once = pool.scan()

    monkeypatch.setattr(recovery, "_BATCH_HEADERS", 1)
    piecewise = pool.scan()

    for name in ("keys", "parents", "depths", "slots", "epochs", "transfers"):
        assert np.array_equal(getattr(at_once, name), getattr(piecewise, name)), name
    assert [column.tolist() for column in at_once.claims] == [column.tolist() for column in piecewise.claims]


@pytest.mark.parametrize(
    "kind",
    [KIND._replace(namespace=b"n" * 16), KIND._replace(fingerprint=b"f" * 16), KIND._replace(generation=6)],
    ids=["namespace", "fingerprint", "generation"],
)
def test_blocks_of_others_are_not_found(kind: HeaderKind, pool: Pool) -> None:
    """Another namespace, layout or generation has no block here, and neither does one shard of it."""
    names, slots = chain(3), np.arange(3)
    store(pool.headers, slots, names)
    store(pool.headers, slots[1:2], first(names, 1), kind=kind, shards=(1,))

    assert pool.scan(kind=kind).slots.tolist() == []
    assert pool.scan().slots.tolist() == [0, 2]


@pytest.mark.parametrize("shard", [0, 1])
def test_block_that_a_shard_lacks_is_not_found(shard: int, pool: Pool) -> None:
    """A store that was cut between two shards leaves no block."""
    store(pool.headers, np.arange(2), chain(2), shards=(shard,))

    assert pool.scan().slots.tolist() == []


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (48, b"k"),
        (64, b"p"),
        (96, b"\2"),
        (104, b"\2"),
        (112, b"\7"),
        (80, b"c"),
    ],
    ids=["key", "parent", "epoch", "transfer", "depth", "checksum"],
)
def test_shards_have_to_agree(at: int, data: bytes, pool: Pool) -> None:
    """Shards that hold sound headers of different blocks or stores hold no block; checksums are each shard's own."""
    store(pool.headers, np.arange(3), chain(3))
    pool.patch(1, 1, at, data, seal=True)

    assert pool.scan().slots.tolist() == ([0, 1, 2] if at == 80 else [0, 2])


def test_flipped_bit_loses_its_block_only(pool: Pool) -> None:
    """Whichever bit of a header changes, that block is not found, and the others are."""
    store(pool.headers, np.arange(3), chain(3))
    for bit in range(1024):
        whole = header_bytes(pool.memory, GEOMETRY, 1, bit % 2)
        pool.patch(1, bit % 2, bit // 8, bytes([whole[bit // 8] ^ 1 << bit % 8]))

        found = pool.scan([0])

        assert (found.slots.tolist(), found.claims.slots.tolist()) == ([0, 2], []), bit
        pool.patch(1, bit % 2, 0, whole)


@pytest.mark.parametrize("cut", range(0, 128, 8))
def test_torn_header_is_no_block(cut: int, pool: Pool) -> None:
    """A header of which a writer has written any part over an older one is no block, unless it is whole."""
    names = chain(2)
    store(pool.headers, np.array([0]), first(names, 1))
    older = header_bytes(pool.memory, GEOMETRY, 0, 0)
    store(pool.headers, np.array([0]), BlockNames(names.keys[1:], names.parents[1:], names.depths[1:]))
    newer = header_bytes(pool.memory, GEOMETRY, 0, 0)
    pool.patch(0, 0, 0, older[:8] + newer[8 : 8 + cut] + older[8 + cut :])

    found = pool.scan()

    assert found.slots.tolist() == ([0] if cut == 120 else [])


@pytest.mark.parametrize(("parent", "depth"), [(b"p" * 16, 0), (bytes(16), 3)])
def test_headers_that_contradict_themselves_are_no_blocks(parent: bytes, depth: int, pool: Pool) -> None:
    """A first block with a parent, and a later one without, are of no writer of ours, seal or not."""
    store(pool.headers, np.arange(1), chain(1))
    for shard in range(2):
        header = host_header.pack(KIND, BlockName(b"k" * 16, parent, depth), bytes(16), 1, 1)
        pool.patch(0, shard, 0, header)

    assert pool.scan().slots.tolist() == []


def test_block_that_was_stored_twice_is_found_twice(pool: Pool) -> None:
    """Two good copies of one key are both there, and say which store each is of."""
    names = chain(1)
    for slot, epoch, transfer in ((3, 2, 1), (1, 1, 9), (2, 1, 8)):
        store(pool.headers, np.array([slot]), names, epoch=epoch, transfer=transfer)

    found = pool.scan()

    assert found.slots.tolist() == [1, 2, 3]
    assert list(zip(found.epochs.tolist(), found.transfers.tolist(), strict=True)) == [(1, 9), (1, 8), (2, 1)]


def test_claims_are_found_and_are_no_blocks(pool: Pool) -> None:
    """A slot that any shard says may be written is told with epoch and session, once, and holds no block."""
    store(pool.headers, np.arange(4), chain(4))
    pool.headers.claim(np.array([1, 2]), GEOMETRY, 11, 13)
    store(pool.headers, np.array([2]), first(chain(1), 1), shards=(0,))  # one shard is through with it
    pool.patch(3, 1, 0, host_header.pack_claim((1 << 64) - 1, 17))

    found = pool.scan()

    assert found.slots.tolist() == [0]
    claims = zip(*(column.tolist() for column in found.claims), strict=True)
    assert list(claims) == [(1, 11, 13), (2, 11, 13), (3, (1 << 64) - 1, 17)]


def test_shards_that_name_two_sessions_are_both_heard(pool: Pool) -> None:
    """A slot with claims of two sessions may be written by either."""
    pool.headers.claim(np.array([5]), GEOMETRY, 11, 13)
    pool.patch(5, 1, 0, host_header.pack_claim(12, 1))

    claims = pool.scan().claims

    assert list(zip(*(column.tolist() for column in claims), strict=True)) == [(5, 11, 13), (5, 12, 1)]


def test_damaged_claim_is_of_an_unknown_owner(pool: Pool) -> None:
    """A writer that stops while a header takes the place of a claim leaves a slot of nobody knows whom."""
    whole = host_header.pack_claim(11, 13)
    for bit in range(1024):
        pool.headers.claim(np.array([0, 1]), GEOMETRY, 11, 13)
        for shard in range(2):
            pool.patch(0, shard, bit // 8, bytes([whole[bit // 8] ^ 1 << bit % 8]))

        claims = pool.scan([0]).claims
        assert claims.slots.tolist() == ([1] if bit < 64 else [0, 1]), bit
        assert bit < 64 or (claims.epochs[0], claims.sessions[0]) == UNKNOWN_OWNER, bit


def test_slabs_too_small_for_a_block_hold_none(pool: Pool) -> None:
    """A namespace whose blocks are larger than a slab has no blocks to find."""
    geometry = type(GEOMETRY)(slabs=6, slab_bytes=1 << 20, shards=2, block_bytes=1 << 20)

    assert len(scan(pool.headers.table, geometry, KIND, ALL)) == 0


def test_unknown_slab_is_refused(pool: Pool) -> None:
    """A slab that the pool does not have is the caller's mistake."""
    with pytest.raises(ValueError, match="slots"):
        pool.scan([GEOMETRY.slabs])


damage = st.one_of(
    st.tuples(st.just("bytes"), st.integers(0, 127), st.binary(min_size=1, max_size=128)),
    st.tuples(st.just("sealed"), st.integers(0, 119), st.binary(min_size=1, max_size=24)),
    st.tuples(st.just("copy"), st.integers(0, GEOMETRY.slots - 1), st.integers(0, 128)),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 32),
    hits=st.lists(st.tuples(st.integers(0, GEOMETRY.slots - 1), st.integers(0, 1), damage), max_size=12),
)
def test_damaged_memory_gives_what_is_sound(seed: int, hits: list[tuple[int, int, tuple]], pool: Pool) -> None:  # type: ignore[type-arg]
    """After any damage the scan raises nothing, and finds exactly what one header after the other says."""
    generator = random.Random(seed)
    for slab in ALL:
        for shard in range(2):
            place = GEOMETRY.header_offset(slab * PER_SLAB, shard)
            os.pwrite(pool.memory.descriptor, generator.randbytes(4096), place)
    slots = np.array(generator.sample(range(GEOMETRY.slots), 40))
    store(pool.headers, slots, chain(40, seed))
    pool.headers.claim(slots[:5], GEOMETRY, 3, seed)
    for slot, shard, (kind, at, data) in hits:
        if kind == "copy":  # a part of another header
            pool.patch(slot, shard, 0, header_bytes(pool.memory, GEOMETRY, at, shard)[:data])
        else:
            pool.patch(slot, shard, at, data[: 128 - at], seal=kind == "sealed")

    found = pool.scan()

    assert dict(zip(found.slots.tolist(), rows_of(found), strict=True)) == one_by_one(pool)


def rows_of(found: FoundBlocks) -> list[tuple[object, ...]]:
    return list(
        zip(
            map(bytes, found.keys),
            map(bytes, found.parents),
            found.depths.tolist(),
            found.epochs.tolist(),
            found.transfers.tolist(),
            strict=True,
        )
    )


def one_by_one(pool: Pool) -> dict[int, tuple[object, ...]]:
    """The same by the description in `host_header`, a header at a time."""
    blocks = {}
    for slot in range(GEOMETRY.slots):
        told = {told_by(header_bytes(pool.memory, GEOMETRY, slot, shard)) for shard in range(2)}
        if len(told) == 1 and (block := told.pop()) is not None:
            blocks[slot] = block
    return blocks


def told_by(header: bytes) -> tuple[object, ...] | None:
    magic, form, valid, generation, namespace, fingerprint, key, parent, _, epoch, transfer, depth, zero = (
        struct.unpack("<4sHHQ16s16s16s16s16sQQII", header[:120])
    )
    if header[120:] != struct.pack("<Q", xxhash.xxh3_64_intdigest(header[:120])):
        return None
    if (magic, form, valid, zero) != (b"KVCH", 1, 1, 0) or (namespace, fingerprint, generation) != KIND:
        return None
    if (depth == 0) != (parent == bytes(16)):
        return None
    return key, parent, depth, epoch, transfer


WRITER = """
import sys
import numpy as np
from kvcached.memory.host_pool import HostHeaders, HostMemory
from tests.recovery.pools import GEOMETRY, chain, invalidate, store
headers = HostHeaders(HostMemory(int(sys.argv[1]), GEOMETRY.slabs, GEOMETRY.slab_bytes))
slots = np.arange(GEOMETRY.slots_per_slab)
names = chain(len(slots))
for transfer in range(10**9):
    for shard in range(2):
        invalidate(headers, slots, shard)
    store(headers, slots, names, transfer=transfer)
    if not transfer:
        print("going", flush=True)
"""


def test_writers_at_work_leave_no_half_block(pool: Pool) -> None:
    """While another process writes and invalidates headers, a scan finds only blocks that were whole at a time."""
    names = chain(PER_SLAB)
    known = {(key.tobytes(), parent.tobytes(), int(depth)) for key, parent, depth in zip(*names, strict=True)}
    descriptor = pool.memory.descriptor
    command = [sys.executable, "-c", WRITER, str(descriptor)]
    seen = 0
    with subprocess.Popen(command, cwd=ROOT, pass_fds=[descriptor], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"going\n"
        try:
            for _ in range(300):
                found = {row[:3] for row in rows_of(pool.scan([0]))}
                seen += len(found)
                assert found <= known
        finally:
            writer.kill()
    assert seen
