from __future__ import annotations

import struct
from typing import Any

import xxhash

from kvcached_client import host_header
from kvcached_client.host_header import BlockName, HeaderKind

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
