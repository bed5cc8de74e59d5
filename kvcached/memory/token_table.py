"""The tokens of blocks in memory that outlives the daemon: a row for each block, of one size of blocks.

A row names its block and says last that it is whole: a row in which a daemon died is no row.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvcached.memory.sealed import SharedMemory, memory_fault, sealed_memfd
from kvcached_client.types import KEY_SIZE_BYTES

#: The name of a table for the service manager; the number of tokens in its blocks follows.
TABLE_PREFIX: Final = "tokens-"
#: A namespace in a row: the first bytes of its root.
NAMESPACE_BYTES: Final = 16
#: Rows of a table, and its size at most. Memory is taken up as rows are written.
_ROWS_MAX: Final = 1 << 22
_ROWS_BYTES_MAX: Final = 1 << 32
_TOKEN_BYTES: Final = 4
_MARK_BYTES: Final = 8
_HEAD: Final = struct.Struct("<8sQQ")  #: of the table: what it is, tokens in a row, rows that were ever written
_HEAD_BYTES: Final = 64
_MAGIC: Final = b"kvctok01"
_USED_AT: Final = 16


class KeptRows(NamedTuple):
    """The whole rows of a table: their numbers, and of each its namespace and key, back to back."""

    rows: list[int]
    namespaces: bytes
    keys: bytes


class TokenTable:
    """Rows of the tokens of one block each.

    Attributes:
        descriptor: of the memory, which the table closes.
        count: rows that are taken.
    """

    def __init__(self, descriptor: int, block_size: int) -> None:
        """Use `create` or `adopt`."""
        self.descriptor = descriptor
        self.count = 0
        self._rows_max = _rows_max(block_size)
        self._memory: SharedMemory | None = SharedMemory(descriptor, table_bytes(block_size))
        self._view = self._memory.view
        self._rows: npt.NDArray[Any] = np.frombuffer(self._view, _row(block_size), self._rows_max, _HEAD_BYTES)
        self._used: int = _HEAD.unpack_from(self._view)[2]
        self._free: list[int] = []

    @classmethod
    def create(cls, block_size: int) -> Self:
        """A table without rows.

        Raises:
            OSError: the kernel refused the memory.
        """
        descriptor = sealed_memfd("kvcached tokens", table_bytes(block_size))
        try:
            table = cls(descriptor, block_size)
        except OSError:
            os.close(descriptor)
            raise
        _HEAD.pack_into(table._view, 0, _MAGIC, block_size, 0)
        return table

    @classmethod
    def adopt(cls, descriptor: int, block_size: int) -> Self | None:
        """The table that an earlier daemon has left; None if the memory, which stays the caller's, holds none."""
        if memory_fault(descriptor, table_bytes(block_size)) is not None:
            return None
        try:
            table = cls(descriptor, block_size)
        except OSError:  # there is no room to map it
            return None
        magic, size, used = _HEAD.unpack_from(table._view)
        if (magic, size) == (_MAGIC, block_size) and used <= table._rows_max:
            return table
        table._unmap()
        return None

    def close(self) -> None:
        """Unmap the memory, and close its descriptor. Does nothing the second time."""
        if self._memory is not None:
            self._unmap()
            os.close(self.descriptor)

    def put(self, namespace: bytes, keys: bytes, tokens: bytes) -> list[int]:
        """Write rows; their numbers, in the order of the keys, of as many as there is room for.

        Args:
            namespace: `NAMESPACE_BYTES` of its root.
            keys: of the blocks.
            tokens: of all of them, little-endian int32.
        """
        rows = self._new_rows(len(keys) // KEY_SIZE_BYTES)
        self._rows["namespace"][rows] = np.frombuffer(namespace, f"V{NAMESPACE_BYTES}")
        self._rows["key"][rows] = np.frombuffer(keys, f"V{KEY_SIZE_BYTES}")[: len(rows)]
        self._rows["tokens"][rows] = np.frombuffer(tokens, self._rows.dtype["tokens"])[: len(rows)]
        self._rows["mark"][rows] = 1
        return rows

    def write(self, row: int, tokens: bytes) -> None:
        """Put other tokens into a row that was put."""
        self._rows["mark"][row] = 0
        self._rows["tokens"][row] = np.frombuffer(tokens, self._rows.dtype["tokens"])[0]
        self._rows["mark"][row] = 1

    def tokens(self, rows: Sequence[int]) -> bytes:
        """The tokens of rows that were put, back to back."""
        return self._rows["tokens"][rows].tobytes()

    def drop(self, rows: Sequence[int]) -> None:
        """Erase rows: what they said is nowhere any more."""
        self._rows["mark"][rows] = 0
        self._rows[rows] = np.zeros((), self._rows.dtype)
        self._free += rows
        self.count -= len(rows)

    def take_over(self) -> KeptRows:
        """The whole rows of an adopted table. The others are free from now on."""
        used = self._rows[: self._used]
        is_whole = used["mark"] == 1
        whole, broken = np.flatnonzero(is_whole), np.flatnonzero(~is_whole).tolist()
        self.count = self._used
        self.drop(broken)
        return KeptRows(whole.tolist(), used["namespace"][whole].tobytes(), used["key"][whole].tobytes())

    def _new_rows(self, count: int) -> list[int]:
        split = len(self._free) - min(count, len(self._free))
        rows = self._free[split:]
        del self._free[split:]
        first = self._used
        self._used = min(first + count - len(rows), self._rows_max)
        rows += range(first, self._used)
        struct.pack_into("<Q", self._view, _USED_AT, self._used)
        self.count += len(rows)
        return rows

    def _unmap(self) -> None:
        assert self._memory is not None  # noqa: S101 - for the type alone
        self._rows = np.zeros(0, self._rows.dtype)
        self._view = memoryview(b"")
        self._memory.close()
        self._memory = None


def table_bytes(block_size: int) -> int:
    """Size of a table for blocks of so many tokens."""
    return _HEAD_BYTES + _rows_max(block_size) * _row(block_size).itemsize


def row_bytes(block_size: int) -> int:
    """Size of a row."""
    return _row(block_size).itemsize


def _row(block_size: int) -> np.dtype[Any]:
    return np.dtype([
        ("mark", f"<u{_MARK_BYTES}"),
        ("namespace", f"V{NAMESPACE_BYTES}"),
        ("key", f"V{KEY_SIZE_BYTES}"),
        ("tokens", f"V{block_size * _TOKEN_BYTES}"),
    ])  # fmt: skip


def _rows_max(block_size: int) -> int:
    return min(_ROWS_MAX, _ROWS_BYTES_MAX // _row(block_size).itemsize)
