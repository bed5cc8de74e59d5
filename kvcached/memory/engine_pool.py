"""An engine pool: device memory of an engine in offload mode that belongs to the daemon, and the table of its blocks.

The daemon makes it, holds it, and hands it to the engine's processes; it maps the table, and never a block. The head of
the table (`kvcached_client.blocks.engine_table`) describes the pool, so the next daemon needs only the descriptors.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Self

from kvcached.memory.host_pool import MemoryIdentity
from kvcached.memory.sealed import memory_fault, sealed_memfd
from kvcached_client.blocks.engine_table import POOL_ID_BYTES, EngineTable, PoolHead, table_bytes
from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.blocks.memory_locks import is_locked
from kvcached_client.errors import RequestError

_SHOWN_BYTES: Final = 8


class EnginePool:
    """One such pool.

    Attributes:
        table: its table, mapped so that no forked child has it.
        head: what the pool is.
        claim: of the start of the engine that has asked for it last; empty if that was asked of an earlier daemon.
    """

    def __init__(self, descriptors: Sequence[int], head: PoolHead) -> None:
        """Take over the descriptors of the table and of each rank's memory, and map the table.

        Raises:
            DaemonFailure: the kernel refused to map it; the descriptors are still the caller's.
        """
        self.head = head
        self.claim = ""
        mapped = map_sealed(descriptors[0], table_bytes(head.blocks), mmap.PROT_READ | mmap.PROT_WRITE)
        self.table = EngineTable(memoryview(mapped), head.blocks)
        self._descriptors = tuple(descriptors)

    @classmethod
    def make(cls, name: str, ranks: int, rank_bytes: int, blocks: int) -> Self:
        """A new pool, all zero. It takes up memory only where it is written.

        Raises:
            OSError, DaemonFailure: the kernel refused one of the steps.
        """
        with ExitStack() as made:
            descriptors = []
            for size_bytes in (table_bytes(blocks), *[rank_bytes] * ranks):
                descriptors.append(sealed_memfd("kvcached-engine", size_bytes))
                made.callback(os.close, descriptors[-1])
            memories = tuple(MemoryIdentity.of(each) for each in descriptors[1:])
            head = PoolHead(secrets.token_bytes(POOL_ID_BYTES), name, blocks, rank_bytes, memories)
            pool = cls(descriptors, head)
            pool.table.begin(head)
            made.pop_all()
        return pool

    @classmethod
    def adopt(cls, descriptors: Sequence[int]) -> Self | None:
        """The pool behind descriptors that were kept, or None if they are not all of one pool, which is undamaged.

        The descriptors belong to what is returned; where that is None, they stay the caller's to close.
        """
        try:
            head = PoolHead.unpack(os.pread(descriptors[0], 4096, 0))
        except OSError:
            return None
        if head is None or len(descriptors) != 1 + len(head.memories):
            return None
        if memory_fault(descriptors[0], table_bytes(head.blocks)) is not None:
            return None
        for descriptor, memory in zip(descriptors[1:], head.memories, strict=True):
            if memory_fault(descriptor, head.rank_bytes) or MemoryIdentity.of(descriptor) != memory:
                return None
        try:
            return cls(descriptors, head)
        except RequestError:
            return None

    @property
    def shown(self) -> str:
        """Its id for people, and in the names of its descriptors at the service manager."""
        return self.head.pool_id[:_SHOWN_BYTES].hex()

    @property
    def size_bytes(self) -> int:
        """All its memory."""
        return table_bytes(self.head.blocks) + len(self.head.memories) * self.head.rank_bytes

    @property
    def is_used(self) -> bool:
        """Whether a process of an engine has locked a part of it; then it must stay."""
        return any(map(is_locked, self._descriptors))

    def fits(self, name: str, ranks: int, rank_bytes: int, blocks: int) -> bool:
        """Whether it is what an engine of this name and these sizes has left."""
        head = self.head
        return (head.name, len(head.memories), head.rank_bytes, head.blocks) == (name, ranks, rank_bytes, blocks)

    def descriptors(self, rank: int | None) -> tuple[int, ...]:
        """The table's, and that of a rank's memory; they stay this object's."""
        return self._descriptors[:1] if rank is None else (self._descriptors[0], self._descriptors[1 + rank])

    @property
    def all_descriptors(self) -> tuple[int, ...]:
        """The table's, then those of all ranks."""
        return self._descriptors

    def close(self) -> None:
        """Close its descriptors. The memory is freed when nobody else has it. Does nothing the second time."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()
