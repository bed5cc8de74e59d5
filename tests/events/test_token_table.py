"""The memory in which tokens of blocks outlive a daemon."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvcached.memory.sealed import sealed_memfd
from kvcached.memory.token_table import TokenTable, table_bytes

NAMESPACE = bytes(range(16))
SIZE = 4


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def tokens(number: int) -> bytes:
    return struct.pack("<4i", *([number] * SIZE))


@pytest.fixture
def table() -> Iterator[TokenTable]:
    with closing(TokenTable.create(SIZE)) as made:
        yield made


def put(table: TokenTable, number: int) -> int:
    (row,) = table.put(NAMESPACE, key(number), tokens(number))
    return row


def adopted(table: TokenTable) -> TokenTable:
    """The table as the next daemon finds it."""
    found = TokenTable.adopt(os.dup(table.descriptor), SIZE)
    assert found is not None
    return found


def test_next_daemon_finds_the_rows(table: TokenTable) -> None:
    """Rows that were put and not dropped are found again, with namespace, key and tokens; the others are free."""
    rows = [put(table, number) for number in range(5)]
    table.drop([rows[2]])

    with closing(adopted(table)) as found:
        left = [row for row in rows if row != rows[2]]
        kept = found.take_over()
        assert kept == (left, NAMESPACE * len(left), b"".join(map(key, left)))
        assert (found.tokens(left), found.count) == (b"".join(map(tokens, left)), len(left))
        assert found.put(NAMESPACE, key(9), tokens(9)) == [rows[2]]


def test_row_in_which_a_daemon_died_is_none(table: TokenTable) -> None:
    """A row whose mark was not written yet is not taken over, whatever it holds."""
    row = put(table, 7)
    size = 8 + 16 + 16 + 4 * SIZE
    os.pwrite(table.descriptor, bytes(8), 64 + row * size)

    with closing(adopted(table)) as found:
        assert found.take_over() == ([], b"", b"")
        assert found.put(NAMESPACE, key(8), tokens(8)) == [row]


def test_dropped_row_is_erased(table: TokenTable) -> None:
    """Of a dropped row nothing is left in the memory."""
    table.drop([put(table, 0x1234567)])

    assert struct.pack("<i", 0x1234567) not in os.pread(table.descriptor, 4096, 0)


@pytest.mark.parametrize("size_bytes", [4096, table_bytes(SIZE), table_bytes(SIZE + 1)])
def test_other_memory_is_no_table(size_bytes: int) -> None:
    """Memory of another size, or without the head of a table, is not adopted, and stays the caller's."""
    descriptor = sealed_memfd("other", size_bytes)
    try:
        assert TokenTable.adopt(descriptor, SIZE) is None
        os.fstat(descriptor)
    finally:
        os.close(descriptor)


def test_full_table_takes_no_row(table: TokenTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every row is taken there is none for the next block, until one is dropped."""
    monkeypatch.setattr(table, "_rows_max", 2)
    rows = [put(table, 0), put(table, 1)]
    assert table.put(NAMESPACE, key(2), tokens(2)) == []

    table.drop([rows[0]])

    assert table.put(NAMESPACE, key(2) + key(3), tokens(2) + tokens(3)) == rows[:1]
    assert table.tokens(rows[:1]) == tokens(2)
