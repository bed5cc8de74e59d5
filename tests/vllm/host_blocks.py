"""The daemon's host pool as only a test sees it: mapped behind its back, to damage what it holds."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple, Self

from kvcached_client.blocks.header import BLOCK_START
from kvcached_client.blocks.host_layout import HEADER_BYTES, HostGeometry
from tests.host_pool_file import host_pool_file, mapped_bytes
from tests.vllm.cache_daemon import SLAB_BYTES

#: Of the tiny model: layers x K and V x heads x tokens x elements x bytes.
BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 4

_KEY = slice(48, 64)
_DEPTH = struct.Struct("<I")
_DEPTH_OFFSET = 112


class StoredBlock(NamedTuple):
    """A block with a valid header."""

    depth: int
    key: bytes
    slot: int


class HostBlocks:
    """The pool of the daemon with this process id. A context manager."""

    def __init__(self, daemon_pid: int) -> None:
        pool = host_pool_file(daemon_pid)
        descriptor = os.open(pool, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, mapped_bytes(daemon_pid, pool))
        finally:
            os.close(descriptor)
        self._geometry = HostGeometry(
            slabs=len(self._memory) // SLAB_BYTES, slab_bytes=SLAB_BYTES, shards=1, block_bytes=BLOCK_BYTES
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()

    def stored(self) -> list[StoredBlock]:
        """All blocks with a valid header, the first of their prompts first."""
        found = []
        for slot in range(self._geometry.slots):
            start = self._geometry.header_offset(slot, 0)
            header = self._memory[start : start + HEADER_BYTES]
            if header.startswith(BLOCK_START):
                found.append(StoredBlock(_DEPTH.unpack_from(header, _DEPTH_OFFSET)[0], header[_KEY], slot))
        return sorted(found)

    def damage(self, blocks: Iterable[StoredBlock]) -> None:
        """Flip one bit of each."""
        for block in blocks:
            self._memory[self._geometry.block_offset(block.slot, 0) + BLOCK_BYTES // 3] ^= 4
