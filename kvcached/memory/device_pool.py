"""The memory of a device pool: the daemon makes it, holds it, and hands it to workers and engines.

It belongs to no worker, so that no worker's death loses it. Its descriptors are kept by the service manager
(`kvcached.recovery.fd_store`), so that the daemon's own death does not either. The daemon never maps it.

`ShardMemory` is all that the daemon knows of a device: what makes a shard's memory, and what it is passed on as. On a
CPU it is a sealed memfd; on a CUDA device it is what the driver exports (`kvcached.worker.cuda_maker`).
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import NamedTuple, Self

from kvcached.memory.device_headers import DeviceHeaders
from kvcached.memory.host_pool import MemoryIdentity
from kvcached.memory.progress import ProgressPage
from kvcached.memory.sealed import sealed_memfd


class ShardMemory:
    """One shard's part of a device pool, and the page that tells how far loads into it are.

    Attributes:
        descriptor: the memory's, close-on-exec. This is what outlives the daemon; the page does not.
        size_bytes: of the pool. Memory of a CUDA device is larger, in whole granules.
        device: UUID of the CUDA device; empty on a CPU.
        progress: the page. While a worker lives, it writes the page; the daemon does when the worker is dead.
    """

    def __init__(self, name: str, descriptor: int, size_bytes: int, device: str = "") -> None:
        """Take over the descriptor, and make a page.

        Raises:
            OSError: the kernel refused one of the steps; the descriptor is still the caller's.
        """
        self.progress = ProgressPage.make(f"{name}-progress")
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.device = device

    @classmethod
    def make(cls, name: str, size_bytes: int) -> Self:
        """New memory, all zero. It takes up memory only where it is written.

        Raises:
            OSError: the kernel refused one of the steps.
        """
        with ExitStack() as made:
            descriptor = sealed_memfd(name, size_bytes)
            made.callback(os.close, descriptor)
            memory = cls(name, descriptor, size_bytes)
            made.pop_all()
        return memory

    @property
    def for_worker(self) -> tuple[int, ...]:
        """What a worker maps: memory, page, and the eventfd of each entry of the page. They stay this object's."""
        return (self.descriptor, *self.progress.writable)

    @property
    def for_engine(self) -> tuple[int, ...]:
        """What a shard process of an engine maps: the same, but for the page, which it can only read."""
        return (self.descriptor, *self.progress.descriptors)

    def close(self) -> None:
        """Give it back. The memory is freed when nobody else has it. Does nothing the second time."""
        self.progress.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class DevicePool(NamedTuple):
    """The memory of a replica.

    Attributes:
        shards: the memory of each shard.
        headers: those of its slots; they name blocks only if they are the ones that the ledger names.
        is_kept: the shards are the ones that the ledger names, and hold what engines have written.
    """

    shards: tuple[ShardMemory, ...]
    headers: DeviceHeaders
    is_kept: bool

    @property
    def identities(self) -> tuple[MemoryIdentity, ...]:
        """The memory of each shard as the next ledger names it."""
        return tuple(
            self.headers.identity if shard.device else MemoryIdentity.of(shard.descriptor) for shard in self.shards
        )

    @property
    def cuda_devices(self) -> tuple[str, ...]:
        """UUIDs of the CUDA devices that have the shards; none on a CPU."""
        return tuple(shard.device for shard in self.shards if shard.device)

    def close(self) -> None:
        """Close its descriptors. Does nothing the second time."""
        for shard in self.shards:
            shard.close()
        self.headers.close()
