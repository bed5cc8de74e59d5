"""The headers of a device pool: which block each of its slots holds, in sealed memory of their own.

They have the format of the host pool's headers (`kvcached_client.blocks.header`), one for each slot and all its shards,
without a checksum of the block's bytes. Only the daemon maps them, and it alone writes them: a header appears when all
bytes of its block are in the slot, and is gone before anybody may write the slot. So a daemon that starts finds in them
which blocks the pool holds. The service manager keeps their descriptor beside those of the pool.
"""

from __future__ import annotations

import mmap
import os
from array import array
from contextlib import ExitStack
from typing import Final, Self

import numpy as np

from kvcached.memory.header_table import HeaderTable
from kvcached.memory.host_pool import MemoryIdentity
from kvcached.memory.sealed import sealed_memfd
from kvcached_client.blocks import header
from kvcached_client.blocks.header import BlockName, BlockNames, HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES
from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.types import KEY_SIZE_BYTES

_NO_CHECKSUM: Final = bytes(header.CHECKSUM_BYTES)
_NO_PARENT: Final = bytes(KEY_SIZE_BYTES)


def headers_bytes(slots: int) -> int:
    """The memory that the headers of so many slots take."""
    return slots * HEADER_BYTES


class DeviceHeaders:
    """The headers of one device pool, mapped so that no forked child has them.

    Attributes:
        descriptor: of their memory, close-on-exec.
        table: the headers, for who reads many of them.
    """

    def __init__(self, descriptor: int, slots: int) -> None:
        """Take over the descriptor, and map the memory.

        Raises:
            DaemonFailure: the kernel refused to map it; the descriptor is still the caller's.
        """
        mapped = map_sealed(descriptor, headers_bytes(slots), mmap.PROT_READ | mmap.PROT_WRITE)
        self.descriptor = descriptor
        self.table = HeaderTable(memoryview(mapped))
        self._number = 0  #: of the last blocks that were written: of two with one key, the later ones count

    @classmethod
    def make(cls, name: str, slots: int) -> Self:
        """New headers, which name no block.

        Raises:
            OSError: the kernel refused one of the steps.
        """
        with ExitStack() as made:
            descriptor = sealed_memfd(name, headers_bytes(slots))
            made.callback(os.close, descriptor)
            headers = cls(descriptor, slots)
            made.pop_all()
        return headers

    @property
    def identity(self) -> MemoryIdentity:
        """Which memory it is, as long as somebody holds it."""
        return MemoryIdentity.of(self.descriptor)

    def write(self, kind: HeaderKind, depth: int, parent: bytes, keys: bytes, slots: array[int], epoch: int) -> None:
        """Say that slots hold consecutive blocks of a chain.

        Args:
            kind: what the headers of the namespace's present generation have in common.
            depth: of the first block.
            parent: key of the block before it; empty for the first of a chain.
            keys: of the blocks.
            slots: as ranges, in the order of the blocks.
            epoch: of this daemon.
        """
        self._number += 1
        count = len(keys) // KEY_SIZE_BYTES
        if count == 1:  # as most are while an engine decodes
            packed = header.pack(kind, BlockName(keys, parent, depth), _NO_CHECKSUM, epoch, self._number)
        else:
            parents = (parent or _NO_PARENT) + keys[:-KEY_SIZE_BYTES]
            names = BlockNames(keys, parents, array("Q", range(depth, depth + count)))
            packed = header.pack_all(kind, names, _NO_CHECKSUM * count, epoch, self._number)
        self.table.write(slots, packed)

    def clear(self, slots: array[int]) -> None:
        """Say that slots, as ranges, hold no block."""
        self.table.clear_rows(slots)

    def keep_only(self, slots: array[int]) -> None:
        """Say that no slots but these, as ranges, hold a block."""
        others = np.ones(self.table.rows, np.bool_)
        for first, count in zip(slots[::2], slots[1::2], strict=True):
            others[first : first + count] = False
        self.table.clear_chosen(others)

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last reference to `table`. Does nothing the second time."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
