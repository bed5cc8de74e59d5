"""The tokens of blocks in memory that outlives the daemon: a row for each block, of one size of blocks.

A row names its block and says last that it is whole: a row in which a daemon died is no row.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Final, Self

import numpy as np

from kvcached.memory.sealed import SharedMemory, memory_fault, sealed_memfd
from kvcached_client.types import KEY_SIZE_BYTES

#: Rows of a table, and its size at most. Memory is taken up as rows are written.
_ROWS_MAX: Final = 1 << 22
_ROWS_BYTES_MAX: Final = 1 << 32
#: The name of a table for the service manager; the number of tokens in its blocks follows.
TABLE_PREFIX: Final = "tokens-"
#: A namespace in a row: the first bytes of its root.
NAMESPACE_BYTES: Final = 16
_TOKEN_BYTES: Final = 4
_HEAD: Final = struct.Struct("<8sQQ")  #: of the table: what it is, tokens in a row, rows that were ever written
_HEAD_BYTES: Final = 64
_MAGIC: Final = b"kvctok01"
_USED_AT: Final = 16
_MARK_BYTES: Final = 8
_WHOLE: Final = (1).to_bytes(_MARK_BYTES, "little")
_NOT_WHOLE: Final = bytes(_MARK_BYTES)


class TokenTable:
    """Rows of the tokens of one block each.

    Attributes:
        descriptor: of the memory, which the table closes.
    """

    def __init__(self, descriptor: int, block_size: int) -> None:
        """Use `create` or `adopt`."""
        self.descriptor = descriptor
        self._tokens_bytes = block_size * _TOKEN_BYTES
        self._row_bytes, self._rows_max = _row_bytes(block_size), _rows_max(block_size)
        self._memory = SharedMemory(descriptor, table_bytes(block_size))
        self._view = self._memory.view
        self._used: int = _HEAD.unpack_from(self._view)[2]
        self._free: list[int] = []

    @classmethod
    def create(cls, block_size: int) -> Self:
        """A table without rows.

        Raises:
            OSError: the kernel refused the memory.
        """
        table = cls(sealed_memfd("kvcached tokens", table_bytes(block_size)), block_size)
        _HEAD.pack_into(table._view, 0, _MAGIC, block_size, 0)
        return table

    @classmethod
    def adopt(cls, descriptor: int, block_size: int) -> Self | None:
        """The table that an earlier daemon has left; None if the memory, which stays the caller's, holds none."""
        if memory_fault(descriptor, table_bytes(block_size)) is not None:
            return None
        table = cls(descriptor, block_size)
        magic, size, used = _HEAD.unpack_from(table._view)
        if (magic, size) == (_MAGIC, block_size) and used <= table._rows_max:
            return table
        table._memory.close()
        return None

    def close(self) -> None:
        """Unmap the memory, and close its descriptor."""
        self._view = memoryview(b"")
        self._memory.close()
        os.close(self.descriptor)

    def put(self, namespace: bytes, key: bytes, tokens: bytes) -> int | None:
        """Write a row; its number, or None where there is no room.

        Args:
            namespace: `NAMESPACE_BYTES` of its root.
            key: of the block.
            tokens: of the block, little-endian int32.
        """
        row = self._new_row()
        if row is not None:
            place = self._place(row)
            self._view[place + _MARK_BYTES : place + self._row_bytes] = namespace + key + tokens
            self._view[place : place + _MARK_BYTES] = _WHOLE
        return row

    def tokens(self, row: int) -> memoryview:
        """The tokens of a row that was put."""
        end = self._place(row) + self._row_bytes
        return self._view[end - self._tokens_bytes : end]

    def drop(self, row: int) -> None:
        """Erase a row: what it said is nowhere any more."""
        place = self._place(row)
        self._view[place : place + _MARK_BYTES] = _NOT_WHOLE
        self._view[place + _MARK_BYTES : place + self._row_bytes] = bytes(self._row_bytes - _MARK_BYTES)
        self._free.append(row)

    def take_over(self) -> Iterator[tuple[int, bytes, bytes]]:
        """The whole rows of an adopted table: number, namespace, key. The others are free from now on."""
        fields = [("mark", "<u8"), ("namespace", f"V{NAMESPACE_BYTES}"), ("key", f"V{KEY_SIZE_BYTES}"),
                  ("tokens", f"V{self._tokens_bytes}")]  # fmt: skip
        rows = np.frombuffer(self._view, np.dtype(fields), self._used, _HEAD_BYTES)
        is_whole = rows["mark"] == 1
        for row in np.flatnonzero(~is_whole).tolist():
            self.drop(row)
        whole = np.flatnonzero(is_whole)
        names, keys = rows["namespace"][whole].tobytes(), rows["key"][whole].tobytes()
        for at, row in enumerate(whole.tolist()):
            namespace = names[at * NAMESPACE_BYTES : (at + 1) * NAMESPACE_BYTES]
            yield row, namespace, keys[at * KEY_SIZE_BYTES : (at + 1) * KEY_SIZE_BYTES]

    def _new_row(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._used == self._rows_max:
            return None
        row, self._used = self._used, self._used + 1
        struct.pack_into("<Q", self._view, _USED_AT, self._used)
        return row

    def _place(self, row: int) -> int:
        return _HEAD_BYTES + row * self._row_bytes


def table_bytes(block_size: int) -> int:
    """Size of a table for blocks of so many tokens."""
    return _HEAD_BYTES + _rows_max(block_size) * _row_bytes(block_size)


def _row_bytes(block_size: int) -> int:
    return _MARK_BYTES + NAMESPACE_BYTES + KEY_SIZE_BYTES + block_size * _TOKEN_BYTES


def _rows_max(block_size: int) -> int:
    return min(_ROWS_MAX, _ROWS_BYTES_MAX // _row_bytes(block_size))
