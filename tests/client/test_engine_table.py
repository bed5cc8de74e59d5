"""The table of an engine pool: what it says after each of its writes, and of which writes nothing is believed."""

from __future__ import annotations

import pytest

from kvcached_client.blocks.engine_table import (
    HEAD_BYTES,
    NO_PARENT,
    ROW_BYTES,
    EngineTable,
    Row,
    table_bytes,
)

BLOCKS = 20


@pytest.fixture
def memory() -> bytearray:
    return bytearray(table_bytes(BLOCKS))


@pytest.fixture
def table(memory: bytearray) -> EngineTable:
    table = EngineTable(memoryview(memory), BLOCKS)
    table.new_epoch()
    return table


def row(table: EngineTable, block: int, *, stamp: int = 5) -> Row:
    return Row(block, stamp, table.epoch, NO_PARENT, 0, bytes([block]) * 36)


def test_rows_are_those_that_were_written(table: EngineTable) -> None:
    """A row is there when it is written, with its last use, and gone when it is cleared."""
    table.write(row(table, 3))
    table.write(row(table, 19))
    table.stamp([3, 4], 9)
    assert table.rows() == [row(table, 3, stamp=9), row(table, 19)]
    assert table.all_of(table.epoch, [3, 19])
    assert not table.all_of(table.epoch, [3, 4])
    assert not table.all_of(table.epoch + 1, [3, 19])
    assert table.all_of(table.epoch, [])
    table.clear(3)
    assert table.rows() == [row(table, 19)]
    assert table.named == 1


def test_rows_of_another_epoch_count_for_nothing(table: EngineTable) -> None:
    """A new epoch drops all rows at once; what is written for the old one afterwards is dropped as well."""
    stale = row(table, 3)
    table.write(row(table, 2))
    table.new_epoch()
    table.write(stale)
    assert table.rows() == []
    assert table.named == 0


def test_row_that_is_damaged_or_elsewhere_is_not_believed(table: EngineTable, memory: bytearray) -> None:
    """A row whose bytes have changed is left out, and so is one that belongs to another block."""
    table.write(row(table, 3))
    place = HEAD_BYTES + 3 * ROW_BYTES
    memory[place + ROW_BYTES : place + 2 * ROW_BYTES] = memory[place : place + ROW_BYTES]
    assert table.rows() == [row(table, 3)]
    memory[place + 40] ^= 1
    assert table.rows() == []


def test_identity_is_known_once_it_is_written(table: EngineTable) -> None:
    """A new table has none; a forgotten one has neither identity nor rows."""
    assert (table.identity, table.namespace) == (b"", b"")
    table.identify(b"i" * 32, b"n" * 32)
    table.write(row(table, 3))
    assert (table.identity, table.namespace) == (b"i" * 32, b"n" * 32)
    table.forget()
    assert (table.identity, table.namespace, table.rows()) == (b"", b"", [])


def test_name_that_is_too_long_is_refused(table: EngineTable) -> None:
    """A hash of another algorithm does not overwrite its neighbour."""
    with pytest.raises(ValueError, match="41 bytes"):
        table.write(Row(3, 1, table.epoch, NO_PARENT, 0, bytes(41)))
    assert table.rows() == []
