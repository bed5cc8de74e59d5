"""Many headers at once: the same bytes and the same judgement as of one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client import header_table, host_header
from kvcached_client.header_table import BlockNames, HeaderTable
from kvcached_client.host_header import BlockName, HeaderKind

KIND = HeaderKind(b"namespace-namesp", b"fingerprint-fing", 5)


def names_of(blocks: list[BlockName]) -> BlockNames:
    def rows(parts: list[bytes]) -> header_table.Rows:
        return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, 16)

    return BlockNames(
        rows([block.key for block in blocks]),
        rows([block.parent or bytes(16) for block in blocks]),
        np.array([block.depth for block in blocks], np.int64),
    )


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
def test_headers_are_those_of_one_block(blocks: list[BlockName], kind: HeaderKind, writer: tuple[int, int]) -> None:
    """Packed together or one by one, headers are the same bytes, and each way reads what the other wrote."""
    checksums = [bytes([index]) * 16 for index in range(len(blocks))]

    table = header_table.pack(kind, names_of(blocks), b"".join(checksums), *writer)

    single = [
        host_header.pack(kind, block, checksum, *writer) for block, checksum in zip(blocks, checksums, strict=True)
    ]
    assert table.tobytes() == b"".join(single)
    held, found = header_table.stored_checksums(table, kind, names_of(blocks))
    assert held.all()
    assert found.tobytes() == b"".join(checksums)


@pytest.mark.parametrize("bit", range(1024))
def test_any_flipped_bit_spoils_its_header_only(bit: int) -> None:
    """Whichever bit of a header changes, that block is not held any more, and the others are."""
    blocks = some_blocks(3)
    table = header_table.pack(KIND, names_of(blocks), bytes(48), 1, 2)
    table[1, bit // 8] ^= 1 << bit % 8

    held, _ = header_table.stored_checksums(table, KIND, names_of(blocks))

    assert held.tolist() == [True, False, True]


@pytest.mark.parametrize(
    "kind",
    [
        HeaderKind(b"n" * 16, KIND.fingerprint, 5),
        HeaderKind(KIND.namespace, b"f" * 16, 5),
        HeaderKind(KIND.namespace, KIND.fingerprint, 6),
    ],
    ids=["namespace", "fingerprint", "generation"],
)
def test_foreign_blocks_are_not_held(kind: HeaderKind) -> None:
    """Blocks of another namespace, layout or generation are nobody's hit."""
    blocks = some_blocks(2)
    table = header_table.pack(KIND, names_of(blocks), bytes(32), 1, 2)

    assert not header_table.stored_checksums(table, kind, names_of(blocks))[0].any()


@pytest.mark.parametrize("change", [{"key": b"k" * 16}, {"parent": b"p" * 16}, {"depth": 9}])
def test_block_of_another_name_is_not_held(change: dict[str, Any]) -> None:
    """A sound header that names another key, parent or depth does not count."""
    blocks = some_blocks(3)
    table = header_table.pack(KIND, names_of(blocks), bytes(48), 1, 2)
    blocks[1] = blocks[1]._replace(**change)

    held, _ = header_table.stored_checksums(table, KIND, names_of(blocks))

    assert held.tolist() == [True, False, True]


def test_table_touches_only_its_headers() -> None:
    """Writing and invalidating change the named headers, and no byte beside them."""
    before = random.Random(1).randbytes(1280)
    memory = bytearray(before)
    table, places = HeaderTable(memoryview(memory)), np.array([256, 1152, 0])
    headers = header_table.pack(KIND, names_of(some_blocks(3)), bytes(48), 1, 2)

    table.write(places, headers)

    expected = bytearray(before)
    for place, header in zip(places, headers, strict=True):
        expected[place : place + 128] = header.tobytes()
    assert memory == expected
    assert table.read(places).tobytes() == headers.tobytes()

    table.invalidate(places[:2])

    for place in places[:2]:
        expected[place : place + 128] = bytes(128)
    assert memory == expected


def test_claims_are_those_of_one_slot() -> None:
    """Claimed together, headers are the bytes of one claim each, and nothing beside them changes."""
    before = random.Random(1).randbytes(1280)
    memory = bytearray(before)

    HeaderTable(memoryview(memory)).claim(np.array([256, 0]), 11, 13)

    expected = bytearray(before)
    for place in (256, 0):
        expected[place : place + 128] = host_header.pack_claim(11, 13)
    assert memory == expected


def test_claims_are_no_blocks_and_outlast_invalidation() -> None:
    """A claim among headers is not held, stays while its slot is written, and gives way to the new header."""
    blocks, places = some_blocks(3), np.array([0, 128, 256])
    headers = header_table.pack(KIND, names_of(blocks), bytes(48), 1, 2)
    memory = bytearray(headers.tobytes())
    table = HeaderTable(memoryview(memory))
    table.claim(places[1:2], 11, 13)

    assert header_table.stored_checksums(table.read(places), KIND, names_of(blocks))[0].tolist() == [True, False, True]

    table.invalidate(places)

    assert memory == bytes(128) + host_header.pack_claim(11, 13) + bytes(128)

    table.write(places, headers)

    assert memory == headers.tobytes()


def test_copied_headers_do_not_change() -> None:
    """A copy of headers is what they were, whatever is written later; cleared ones are zero, others are not touched."""
    before = random.Random(2).randbytes(1280)
    memory = bytearray(before)
    table = HeaderTable(memoryview(memory))

    copied = table.copy(256, 3)
    table.clear(128, 512)

    assert copied.tobytes() == before[256:640]
    assert memory == before[:128] + bytes(512) + before[640:]


class Watched:
    """Words of memory that keep the order in which columns are assigned."""

    def __init__(self) -> None:
        self.assigned: list[object] = []

    def __setitem__(self, place: object, value: object) -> None:
        self.assigned.append(place)


def test_first_word_of_a_header_is_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Header by header, be it a block's or a claim, whoever looks in between sees none, or a whole one."""
    table, watched = HeaderTable(memoryview(bytearray(256))), Watched()
    monkeypatch.setattr(table, "_words", watched)

    table.write(np.array([128]), header_table.pack(KIND, names_of(some_blocks(1)), bytes(16), 1, 2))

    table.claim(np.array([128]), 11, 13)

    columns = [place[1] for place in watched.assigned if isinstance(place, tuple)]
    assert columns == [slice(1, None), 0] * 2
