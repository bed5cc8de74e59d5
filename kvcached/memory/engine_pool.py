"""An engine pool: device memory of an engine in offload mode that belongs to the daemon, and the table of its blocks.

The daemon makes it, holds it, and hands it to the engine's processes; it maps the table, and never a block. A page of
its own (`kvcached.memory.engine_record`) describes the pool, so the next daemon needs only the descriptors.

Memory of CUDA devices is made elsewhere, and put into the pool rank by rank. Nothing tells its descriptors apart but
the names under which they are kept, which contain the pool's random id.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, Self

from kvcached.memory.engine_record import POOL_ID_BYTES, RECORD_BYTES, EngineRecord, PoolHead, claim_digest
from kvcached.memory.host_pool import MemoryIdentity
from kvcached.memory.sealed import memory_fault, sealed_memfd
from kvcached_client.blocks.engine_table import RANKS_MAX, EngineTable, table_bytes
from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.blocks.memory_locks import is_locked
from kvcached_client.errors import RequestError

#: The record's number among the parts, behind those of all ranks there may be.
RECORD_PART: Final = 1 + RANKS_MAX

_SHOWN_BYTES: Final = 8


class EnginePool:
    """One such pool.

    Attributes:
        table: its table, mapped so that no forked child has it.
        record: what the daemon knows of it; so is this.
        head: what the pool is.
        claim: a digest, of the start of the engine that has asked for it last; empty if nobody knows it.
    """

    def __init__(self, descriptors: Mapping[int, int], head: PoolHead) -> None:
        """Take over the descriptors of the table, of each rank's memory, and of the record; map table and record.

        Raises:
            DaemonFailure: the kernel refused to map them; the descriptors are still the caller's.
        """
        self.head = head
        self.claim = b""
        record = map_sealed(descriptors[RECORD_PART], RECORD_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)
        self.record = EngineRecord(memoryview(record))
        mapped = map_sealed(descriptors[0], table_bytes(head.blocks), mmap.PROT_READ | mmap.PROT_WRITE)
        self.table = EngineTable(memoryview(mapped), head.blocks)
        self._parts = dict(descriptors)

    @classmethod
    def make(cls, name: str, ranks: int, rank_bytes: int, blocks: int) -> Self:
        """A new pool on the CPU, all zero. It takes up memory only where it is written.

        Raises:
            OSError, DaemonFailure: the kernel refused one of the steps.
        """
        with ExitStack() as made:
            descriptors = _made(blocks, made)
            descriptors |= {1 + rank: _memfd(rank_bytes, made) for rank in range(ranks)}
            memories = tuple(MemoryIdentity.of(descriptors[1 + rank]) for rank in range(ranks))
            head = PoolHead(secrets.token_bytes(POOL_ID_BYTES), name, blocks, rank_bytes, memories)
            return cls._begun(descriptors, head, made)

    @classmethod
    def make_on_devices(cls, name: str, ranks: int, rank_bytes: int, blocks: int) -> Self:
        """A new pool for memory of CUDA devices, which is not made yet: `put` it into the pool.

        Raises:
            OSError, DaemonFailure: the kernel refused one of the steps.
        """
        with ExitStack() as made:
            descriptors = _made(blocks, made)
            head = PoolHead(secrets.token_bytes(POOL_ID_BYTES), name, blocks, rank_bytes, devices=("",) * ranks)
            return cls._begun(descriptors, head, made)

    @classmethod
    def _begun(cls, descriptors: dict[int, int], head: PoolHead, made: ExitStack) -> Self:
        pool = cls(descriptors, head)
        pool.table.new_epoch()
        pool.record.write_head(head)
        made.pop_all()
        return pool

    @classmethod
    def adopt(cls, kept: Mapping[int, Sequence[int]]) -> Self | None:
        """The pool behind descriptors that were kept, or None if they are not all of one pool, which is undamaged.

        The descriptors belong to what is returned; where that is None, they stay the caller's to close. A part that was
        kept twice is a rank's new memory beside the old one, which the manager was not reached to remove: nothing tells
        memories of CUDA devices apart, and rows are about one of them.
        """
        parts = {part: descriptor for part, (descriptor, *others) in kept.items() if not others}
        try:
            head = PoolHead.unpack(os.pread(parts[RECORD_PART], RECORD_BYTES, 0)) if RECORD_PART in parts else None
        except OSError:
            return None
        is_whole = RECORD_PART in parts and 0 in parts and len(parts) == len(kept)
        if head is None or not is_whole or memory_fault(parts[0], table_bytes(head.blocks)) is not None:
            return None
        made = [rank for rank in range(head.ranks) if not head.devices or head.devices[rank]]
        if set(parts) != {0, RECORD_PART, *(1 + rank for rank in made)}:
            return None
        for rank, memory in enumerate(head.memories):
            descriptor = parts[1 + rank]
            if memory_fault(descriptor, head.rank_bytes) or MemoryIdentity.of(descriptor) != memory:
                return None
        try:
            return cls(parts, head)
        except RequestError:
            return None

    @property
    def shown(self) -> str:
        """Its id for people, and in the names of its descriptors at the service manager."""
        return self.head.pool_id[:_SHOWN_BYTES].hex()

    @property
    def size_bytes(self) -> int:
        """All its memory."""
        return table_bytes(self.head.blocks) + self.head.ranks * self.head.rank_bytes

    @property
    def is_locked(self) -> bool:
        """Whether a process of an engine has locked a part of it; then it must stay."""
        return any(is_locked(self._parts[part]) for part in ([0] if self.is_on_cuda else self._parts))

    @property
    def is_on_cuda(self) -> bool:
        """Whether its memory is on CUDA devices."""
        return bool(self.head.devices)

    def note_claim(self, claim: str, now_s: int) -> None:
        """A start of an engine asks for it, in seconds since the machine's start."""
        self.claim = claim_digest(claim)
        self.record.note_use(now_s, self.claim)

    def is_claimed_by(self, claim: str) -> bool:
        """Whether this start of an engine has asked for it last."""
        return self.claim == claim_digest(claim)

    def fits(self, name: str, ranks: int, rank_bytes: int, blocks: int) -> bool:
        """Whether it is what an engine of this name and these sizes has left."""
        head = self.head
        return (head.name, head.ranks, head.rank_bytes, head.blocks) == (name, ranks, rank_bytes, blocks)

    def descriptors(self, rank: int | None) -> tuple[int, ...]:
        """The table's, and that of a rank's memory; they stay this object's."""
        return (self._parts[0],) if rank is None else (self._parts[0], self._parts[1 + rank])

    @property
    def parts(self) -> Mapping[int, int]:
        """All descriptors: the table's is part 0, that of a rank's memory part 1 + rank, and the record's is last."""
        return self._parts

    def put(self, rank: int, descriptor: int, device: str) -> None:
        """Take over new memory of a CUDA device, in place of none. Rows were dropped before, by `drop`."""
        self._parts[1 + rank] = descriptor
        self._name_device(rank, device)

    def drop(self, rank: int) -> None:
        """Close a rank's memory on a CUDA device, which no process uses, and drop all rows. Rows need all ranks."""
        self.table.forget()
        self._name_device(rank, "")
        descriptor = self._parts.pop(1 + rank, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close its descriptors. The memory is freed when nobody else has it. Does nothing the second time."""
        for descriptor in self._parts.values():
            os.close(descriptor)
        self._parts = {}

    def _name_device(self, rank: int, device: str) -> None:
        devices = (*self.head.devices[:rank], device, *self.head.devices[rank + 1 :])
        self.head = replace(self.head, devices=devices)
        self.record.write_head(self.head)


def _made(blocks: int, made: ExitStack) -> dict[int, int]:
    """The descriptors of a new table and of a new record."""
    return {0: _memfd(table_bytes(blocks), made), RECORD_PART: _memfd(RECORD_BYTES, made)}


def _memfd(size_bytes: int, made: ExitStack) -> int:
    descriptor = sealed_memfd("kvcached-engine", size_bytes)
    made.callback(os.close, descriptor)
    return descriptor
