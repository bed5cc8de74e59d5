from __future__ import annotations

import random
import struct
from array import array
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, BlockNames, HeaderKind

KIND = HeaderKind(namespace=b"N" * 16, fingerprint=b"F" * 16, generation=7)
NAME = BlockName(key=b"K" * 16, parent=b"P" * 16, depth=9)
CHECKSUM = b"C" * 16
HEADER = host_header.pack(KIND, NAME, CHECKSUM, 11, 13)


def checksum_in(header: bytes | bytearray, kind: HeaderKind = KIND, name: BlockName = NAME) -> bytes | None:
    return host_header.stored_checksum(memoryview(header), kind, name)


def test_header_is_as_described() -> None:
    """Every field is where the module's description says, in 128 bytes."""
    body = struct.pack(
        "<4sHHQ16s16s16s16s16sQQII",
        b"KVCH",
        1,
        1,
        7,
        b"N" * 16,
        b"F" * 16,
        b"K" * 16,
        b"P" * 16,
        CHECKSUM,
        11,
        13,
        9,
        0,
    )

    assert body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) == HEADER
    assert len(HEADER) == 128


def test_header_gives_its_checksum_for_its_block_only() -> None:
    """The checksum comes back for exactly the block that was stored, whatever else differs."""
    assert checksum_in(HEADER) == CHECKSUM
    for kind in [
        KIND._replace(namespace=b"n" * 16),
        KIND._replace(fingerprint=b"f" * 16),
        KIND._replace(generation=6),
    ]:
        assert checksum_in(HEADER, kind) is None
    for name in [NAME._replace(key=b"k" * 16), NAME._replace(parent=b"p" * 16), NAME._replace(depth=8)]:
        assert checksum_in(HEADER, name=name) is None


def test_first_block_has_no_parent() -> None:
    """The first block of a chain is stored and found without a parent, and is not found with one."""
    name = BlockName(key=b"K" * 16, parent=b"", depth=0)
    header = host_header.pack(KIND, name, CHECKSUM, 1, 1)

    assert checksum_in(header, name=name) == CHECKSUM
    assert checksum_in(header, name=name._replace(parent=b"P" * 16)) is None


def test_any_flipped_bit_makes_a_header_invalid() -> None:
    """Whichever bit of a header flips, the slot holds no block any more."""
    for bit in range(len(HEADER) * 8):
        flipped = bytearray(HEADER)
        flipped[bit // 8] ^= 1 << bit % 8
        assert checksum_in(flipped) is None, bit


def test_invalidated_header_is_zero() -> None:
    """Invalidating overwrites the whole header, and nothing of it is found."""
    place = bytearray(HEADER)

    host_header.invalidate(memoryview(place))

    assert place == bytes(128)
    assert checksum_in(place) is None


def test_claim_is_as_described() -> None:
    """A claim names epoch and session where the module's description says, has a seal, and is zero elsewhere."""
    body = struct.pack("<4sHH88xQQ8x", b"KVCH", 1, 2, 11, 13)

    assert host_header.pack_claim(11, 13) == body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_claim_is_no_block() -> None:
    """Not even a claim that has all of a block's fields, and a good seal, gives a checksum."""
    body = bytearray(HEADER[:120])
    body[6] = 2

    assert checksum_in(host_header.pack_claim(11, 13)) is None
    assert checksum_in(bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))) is None


def test_claim_outlasts_invalidation() -> None:
    """A writer that begins leaves the claim in place, for it is as good as zeros and says who is writing."""
    place = bytearray(host_header.pack_claim(11, 13))

    host_header.invalidate(memoryview(place))

    assert place == host_header.pack_claim(11, 13)
    host_header.write(memoryview(place), HEADER)
    assert checksum_in(place) == CHECKSUM


class Recorder:
    """A header's place that keeps what it looked like after each write."""

    def __init__(self) -> None:
        self.content = bytearray(128)
        self.after: list[bytes] = []

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.content[where] = data
        self.after.append(bytes(self.content))


def test_header_is_whole_or_not_there() -> None:
    """After every write but the last, the place holds no magic and no valid mark; after the last, the whole header."""
    place: Any = Recorder()

    host_header.write(place, HEADER)

    *before, last = place.after
    assert before
    assert all(content[:8] == bytes(8) and checksum_in(content) is None for content in before)
    assert last == HEADER


# --- many at once ---------------------------------------------------------------------------------------------------


def names_of(blocks: list[BlockName]) -> BlockNames:
    keys, parents = (
        b"".join(parts) for parts in zip(*((each.key, each.parent or bytes(16)) for each in blocks), strict=True)
    )
    return BlockNames(keys, parents, array("Q", [block.depth for block in blocks]))


def some_blocks(count: int) -> list[BlockName]:
    generator = random.Random(count)
    return [
        BlockName(generator.randbytes(16), generator.randbytes(16) if depth else b"", depth) for depth in range(count)
    ]


@given(
    blocks=st.lists(
        st.builds(
            BlockName,
            st.binary(min_size=16, max_size=16),
            st.binary(min_size=16, max_size=16),
            st.integers(0, (1 << 32) - 1),
        ),
        min_size=1,
        max_size=5,
    ),
    kind=st.builds(
        HeaderKind,
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=16, max_size=16),
        st.integers(0, (1 << 63) - 1),
    ),
    writer=st.tuples(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1)),
)
def test_headers_together_are_those_of_one_block(
    blocks: list[BlockName], kind: HeaderKind, writer: tuple[int, int]
) -> None:
    """Packed together or one by one, headers are the same bytes, and each way reads what the other wrote."""
    checksums = [bytes([index]) * 16 for index in range(len(blocks))]

    headers = host_header.pack_all(kind, names_of(blocks), b"".join(checksums), *writer)

    assert headers == b"".join(
        host_header.pack(kind, block, checksum, *writer) for block, checksum in zip(blocks, checksums, strict=True)
    )
    assert host_header.stored_checksums(headers, kind, names_of(blocks)) == checksums


def test_any_flipped_bit_spoils_its_header_only() -> None:
    """Whichever bit of a header among others changes, that block is not there any more, and the others are."""
    blocks = some_blocks(3)
    headers = host_header.pack_all(KIND, names_of(blocks), bytes(48), 1, 2)
    for bit in range(1024):
        changed = bytearray(headers)
        changed[128 + bit // 8] ^= 1 << bit % 8

        found = host_header.stored_checksums(bytes(changed), KIND, names_of(blocks))
        assert found == [bytes(16), None, bytes(16)], f"bit {bit}"


@pytest.mark.parametrize("change", [{"key": b"k" * 16}, {"parent": b"p" * 16}, {"depth": 9}])
def test_block_of_another_name_among_others_is_not_there(change: dict[str, Any]) -> None:
    """A sound header that names another key, parent or depth does not count, and neither does a claim."""
    blocks = some_blocks(3)
    headers = host_header.pack_all(KIND, names_of(blocks), bytes(48), 1, 2)[:256] + host_header.pack_claim(11, 13)
    blocks[1] = blocks[1]._replace(**change)

    assert host_header.stored_checksums(headers, KIND, names_of(blocks)) == [bytes(16), None, None]


@pytest.mark.parametrize(
    "kind",
    [KIND._replace(namespace=b"n" * 16), KIND._replace(fingerprint=b"f" * 16), KIND._replace(generation=6)],
    ids=["namespace", "fingerprint", "generation"],
)
def test_foreign_blocks_are_not_there(kind: HeaderKind) -> None:
    """Blocks of another namespace, layout or generation are nobody's hit."""
    blocks = some_blocks(2)
    headers = host_header.pack_all(KIND, names_of(blocks), bytes(32), 1, 2)

    assert host_header.stored_checksums(headers, kind, names_of(blocks)) == [None, None]
